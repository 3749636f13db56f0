"""Commands that answer questions about a model and memory: compare, pareto, smallest."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress as Bar

from .compiler import Prepared, plan_for, prepare
from .errors import MonetError, UsageError
from .files import check_writable
from .plan import STRATEGIES
from .plan.questions import Point, pareto, seconds_per_gigabyte, smallest_budget
from .plan.strategies import check_strategy
from .problem import Problem, read_problem
from .show import aligned_table, draw, write_table
from .solve import profile_path, read_profile
from .units import format_bytes, format_seconds, parse_bytes


def _prepared(profile_file: Path | None, options: dict[str, Any]) -> tuple[Problem, Prepared]:
    """Read the arguments, capture and profile."""
    problem = read_problem(budget="1", **options)
    store = profile_file or profile_path(problem)
    profile = read_profile(store)
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("profile")
        return problem, prepare(
            problem.request,
            problem.device,
            profile=profile,
            save_profile=lambda found: found.save(store),
            progress=lambda what, done, total: bar.update(
                task, description=f"profile {what[:40]}", completed=done, total=total
            ),
        )


def read_budgets(text: str, plain_peak_bytes: int) -> list[int]:
    """``10,8,6.5`` in GB, or ``80%,50%`` of plain PyTorch's peak.

    Raises:
        UsageError: not such a list.
    """
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part.endswith("%"):
            try:
                share = float(part[:-1])
            except ValueError:
                raise UsageError(f"budget {part!r} is no percentage; give such as 50%") from None
            if not 0 < share <= 1000:
                raise UsageError(f"budget {part!r} must be more than 0 %")
            found.append(int(plain_peak_bytes * share / 100))
        else:
            found.append(parse_bytes(part))
    if not found:
        raise UsageError(f"budgets {text!r} must be a list such as 10,8,6 or 80%,50%")
    return found


def compare(
    *,
    budgets: str,
    strategies: str,
    profile_file: Path | None,
    csv_file: Path | None,
    plot: Path | None,
    **options: Any,
) -> None:
    """Every strategy at every budget, by one simulator."""
    names = [name.strip() for name in strategies.split(",") if name.strip()] if strategies else list(STRATEGIES)
    for name in names:
        check_strategy(name)
    for path in (csv_file, plot):
        if path is not None:
            check_writable(path)
    problem, ready = _prepared(profile_file, options)
    limits = sorted(read_budgets(budgets, ready.plain.peak_bytes), reverse=True)
    console, request = Console(highlight=False), problem.request
    console.print(_title(problem, ready))
    table = aligned_table("strategy", *(format_bytes(limit) for limit in limits))
    rows: list[list[Any]] = []
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("plan", total=len(names) * len(limits))
        for name in names:
            cells = []
            for limit in limits:
                bar.update(task, description=f"{name} at {format_bytes(limit)}")
                started = time.monotonic()
                try:
                    found = plan_for(ready, request, limit, strategy=name)
                except MonetError:
                    cells.append("-")
                    rows.append([name, limit, "", "", f"{time.monotonic() - started:.2f}"])
                else:
                    report = found.report
                    cells.append(f"{100 * (report.seconds / ready.plain.seconds - 1):+.1f} %")
                    seconds = f"{time.monotonic() - started:.2f}"
                    rows.append([name, limit, report.peak_bytes, repr(report.seconds), seconds])
                bar.advance(task)
            table.add_row(name, *cells)
    console.print(table)
    console.print("step time against plain PyTorch; -: no schedule that fits", soft_wrap=True)
    write_table(console, csv_file, ["strategy", "budget_bytes", "peak_bytes", "seconds", "planning_seconds"], rows)
    fronts = {name: [(row[1] / 2**30, float(row[3])) for row in rows if row[0] == name and row[3]] for name in names}
    _draw(console, plot, fronts, problem, ready)


def front(
    *, points: int, budgets: str, profile_file: Path | None, csv_file: Path | None, plot: Path | None, **options: Any
) -> None:
    """The time-memory front, and what each further GB buys."""
    if points < 2:
        raise UsageError(f"--points {points} must be at least 2")
    for path in (csv_file, plot):
        if path is not None:
            check_writable(path)
    problem, ready = _prepared(profile_file, options)
    program, costs, request = ready.captured.program, ready.costs, problem.request
    console = Console(highlight=False)
    if budgets:
        limits = read_budgets(budgets, ready.plain.peak_bytes)
    else:
        least = smallest_budget(
            program, costs, extra_bytes=ready.extra_bytes, solver=request.solver, time_limit_seconds=5.0
        ).report.peak_bytes
        most = ready.plain.peak_bytes
        limits = [least + (most - least) * k // (points - 1) for k in range(points)]
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("plan", total=len(limits))
        found = pareto(
            program,
            costs,
            limits,
            extra_bytes=ready.extra_bytes,
            solver=request.solver,
            time_limit_seconds=request.time_limit_seconds,
            gap=request.gap,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    console.print(_title(problem, ready))
    table = aligned_table("budget", "peak", "step", "overhead", "gap", "1 GB more saves")
    rows: list[list[Any]] = []
    for point, saved in zip(found, seconds_per_gigabyte(found), strict=True):
        if point.plan is None:
            table.add_row(format_bytes(point.budget_bytes), "-", "-", "-", "-", "-")
            continue
        report = point.plan.report
        table.add_row(
            format_bytes(point.budget_bytes),
            format_bytes(report.peak_bytes),
            format_seconds(report.seconds),
            f"{100 * (report.seconds / ready.plain.seconds - 1):+.1f} %",
            _gap(point),
            "" if saved is None else format_seconds(saved),
        )
        rows.append([point.budget_bytes, report.peak_bytes, repr(report.seconds), repr(point.plan.bound_seconds)])
    console.print(table)
    write_table(console, csv_file, ["budget_bytes", "peak_bytes", "seconds", "bound_seconds"], rows)
    _draw(console, plot, {"monet_like": [(row[0] / 2**30, float(row[2])) for row in rows]}, problem, ready)


def _gap(point: Point) -> str:
    assert point.plan is not None
    if point.plan.bound_kind == "none":
        return "no bound"
    return f"{100 * point.plan.gap:.1f} %" + ("" if point.plan.bound_kind == "unrestricted" else " restricted")


def smallest(*, profile_file: Path | None, **options: Any) -> None:
    """The smallest budget that is feasible, from both sides."""
    problem, ready = _prepared(profile_file, options)
    request = problem.request
    found = smallest_budget(
        ready.captured.program,
        ready.costs,
        extra_bytes=ready.extra_bytes,
        solver=request.solver,
        time_limit_seconds=request.time_limit_seconds,
    )
    console = Console(highlight=False)
    console.print(_title(problem, ready))
    table = aligned_table()
    table.add_row(
        "smallest found", f"{format_bytes(found.report.peak_bytes)} ({found.report.peak_bytes} bytes), at {found.step}"
    )
    table.add_row("its step", f"{format_seconds(found.report.seconds)}")
    table.add_row("proven minimum", f"not below {format_bytes(found.proven_bytes)} ({found.proven_bytes} bytes)")
    console.print(table)


def _title(problem: Problem, ready: Prepared) -> str:
    plain = ready.plain
    return (
        f"{problem.request.expression}, batch {problem.request.batch}, {problem.request.mode}; plain PyTorch: "
        f"{format_bytes(plain.peak_bytes)}, {format_seconds(plain.seconds)} ({ready.profile.device})"
    )


def _draw(
    console: Console,
    path: Path | None,
    fronts: dict[str, list[tuple[float, float]]],
    problem: Problem,
    ready: Prepared,
) -> None:
    """Step time over memory, a line for each front."""
    plain = ready.plain.peak_bytes / 2**30, ready.plain.seconds
    labels = "memory budget, GB", "step, predicted seconds"
    draw(console, path, _title(problem, ready), fronts, labels, {"plain PyTorch": plain})
