"""The commands compare, pareto and smallest: what a model's step costs at which budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ..compiler.pipeline import Prepared, strategy_points
from ..compiler.problem import Problem
from ..errors import UsageError
from ..ir.schedule import Schedule
from ..ir.units import format_bytes, format_seconds
from ..plan import STRATEGIES
from ..plan.budgets import Point, pareto, seconds_per_gigabyte, smallest_budget
from ..plan.strategies import check_strategy
from .output import check_results, draw, write_table
from .prepare import read_and_prepare, read_budgets
from .terminal import Terminal, aligned_table

#: Budgets of a front.
MOST_POINTS = 1000


def compare(
    *,
    budgets: str,
    strategies: str,
    profile_file: Path | None,
    csv_file: Path | None,
    plot: Path | None,
    terminal: Terminal | None = None,
    **options: Any,
) -> None:
    """The compare command: plan every budget with every strategy; one simulator judges all."""
    terminal = terminal or Terminal()
    names = [name.strip() for name in strategies.split(",") if name.strip()] if strategies else list(STRATEGIES)
    for name in names:
        check_strategy(name)
    check_results(plot, csv_file)
    problem, ready = read_and_prepare(terminal, profile_file, options)
    limits = sorted(read_budgets(budgets, ready.plain.peak_bytes), reverse=True)
    console, request = terminal.console, problem.request
    console.print(_title(problem, ready))
    with terminal.progress() as progress:
        points = strategy_points(ready, request, names, limits, progress.at)
    table = aligned_table("strategy", *(format_bytes(limit) for limit in limits))
    rows: list[list[Any]] = []
    for name in names:
        cells = []
        for point in (point for point in points if point.strategy == name):
            report, took = point.report, f"{point.planning_seconds:.2f}"
            if report is None:
                cells.append("-")
                rows.append([name, point.budget_bytes, "", "", took])
            else:
                cells.append(_relative(report.seconds, ready))
                rows.append([name, point.budget_bytes, report.peak_bytes, repr(report.seconds), took])
        table.add_row(name, *cells)
    console.print(table)
    refused = any(point.report is None for point in points)
    console.print("step time against plain PyTorch" + ("; -: no schedule:" if refused else ""), soft_wrap=True)
    for point in points:
        if point.report is None:
            console.print(
                Text(f"{point.strategy} at {format_bytes(point.budget_bytes)}: {point.reason}"), soft_wrap=True
            )
    write_table(console, csv_file, ["strategy", "budget_bytes", "peak_bytes", "seconds", "planning_seconds"], rows)
    found = [
        {
            "strategy": point.strategy,
            "budget_bytes": point.budget_bytes,
            "peak_bytes": point.report.peak_bytes if point.report else None,
            "seconds": point.report.seconds if point.report else None,
            "planning_seconds": point.planning_seconds,
            "reason": point.reason,
        }
        for point in points
    ]
    terminal.result({**_described(problem, ready), "points": found})
    fronts = {name: [(row[1] / 2**30, float(row[3])) for row in rows if row[0] == name and row[3]] for name in names}
    _draw(terminal, plot, fronts, problem, ready)


def front(
    *,
    points: int,
    budgets: str,
    profile_file: Path | None,
    csv_file: Path | None,
    plot: Path | None,
    terminal: Terminal | None = None,
    **options: Any,
) -> None:
    """The pareto command: the time-memory front of a model, and the time that each further GB saves."""
    terminal = terminal or Terminal()
    if points < 2:
        raise UsageError(f"--points {points} must be at least 2")
    if points > MOST_POINTS:
        raise UsageError(f"--points must be at most {MOST_POINTS}, each of which is a plan; give fewer, or --budgets")
    check_results(plot, csv_file)
    problem, ready = read_and_prepare(terminal, profile_file, options)
    request = problem.request
    limits, start = _front_budgets(ready, budgets, points, request.solver)
    with terminal.progress() as progress:
        found = pareto(
            ready.captured.program,
            ready.costs,
            limits,
            extra_bytes=ready.extra_bytes,
            solver=request.solver,
            time_limit_seconds=request.time_limit_seconds,
            gap=request.gap,
            start=start,
            progress=lambda done, total: progress.at("plan", format_bytes(sorted(limits)[done]), done, total),
        )
    terminal.console.print(_title(problem, ready))
    terminal.console.print(_front_table(found, ready))
    rows = [
        [p.budget_bytes, p.plan.report.peak_bytes, repr(p.plan.report.seconds), repr(p.plan.bound_seconds)]
        for p in found
        if p.plan is not None
    ]
    write_table(terminal.console, csv_file, ["budget_bytes", "peak_bytes", "seconds", "bound_seconds"], rows)
    listed = [
        {
            "budget_bytes": point.budget_bytes,
            "peak_bytes": point.plan.report.peak_bytes if point.plan else None,
            "seconds": point.plan.report.seconds if point.plan else None,
            "bound_seconds": point.plan.bound_seconds if point.plan and point.plan.bound_kind != "none" else None,
            "seconds_saved_per_gigabyte": saved,
        }
        for point, saved in zip(found, seconds_per_gigabyte(found), strict=True)
    ]
    terminal.result({**_described(problem, ready), "points": listed})
    drawn = [(p.budget_bytes / 2**30, p.plan.report.seconds) for p in found if p.plan is not None]
    _draw(terminal, plot, {"monet_like": drawn}, problem, ready)


def _front_budgets(ready: Prepared, budgets: str, points: int, solver: str) -> tuple[list[int], Schedule | None]:
    """The budgets of a front, and a schedule for the smallest of them if one is known.

    Args:
        budgets: what the user gave; "": ``points`` budgets from the smallest to plain PyTorch's peak.
    """
    most = ready.plain.peak_bytes
    if budgets:
        return read_budgets(budgets, most), None
    smallest = smallest_budget(
        ready.captured.program, ready.costs, extra_bytes=ready.extra_bytes, solver=solver, time_limit_seconds=5.0
    )
    least = smallest.report.peak_bytes
    return [least + (most - least) * k // (points - 1) for k in range(points)], smallest.schedule


def _front_table(found: Sequence[Point], ready: Prepared) -> Table:
    table = aligned_table("budget", "peak", "step", "overhead", "gap", "1 GB more saves")
    for point, saved in zip(found, seconds_per_gigabyte(found), strict=True):
        if point.plan is None:
            table.add_row(format_bytes(point.budget_bytes), "-", "-", "-", "-", "-")
            continue
        report = point.plan.report
        table.add_row(
            format_bytes(point.budget_bytes),
            format_bytes(report.peak_bytes),
            format_seconds(report.seconds),
            _relative(report.seconds, ready),
            _gap(point),
            "" if saved is None else format_seconds(saved),
        )
    return table


def _gap(point: Point) -> str:
    assert point.plan is not None
    if point.plan.bound_kind == "none":
        return "no bound"
    return f"{100 * point.plan.gap:.1f} %" + ("" if point.plan.bound_kind == "unrestricted" else " restricted")


def smallest(*, profile_file: Path | None, terminal: Terminal | None = None, **options: Any) -> None:
    """The smallest command: the lowest peak found and the proven lower bound."""
    terminal = terminal or Terminal()
    problem, ready = read_and_prepare(terminal, profile_file, options)
    request = problem.request
    found = smallest_budget(
        ready.captured.program,
        ready.costs,
        extra_bytes=ready.extra_bytes,
        solver=request.solver,
        time_limit_seconds=request.time_limit_seconds,
    )
    console = terminal.console
    console.print(_title(problem, ready))
    table = aligned_table()
    table.add_row(
        "smallest found", f"{format_bytes(found.report.peak_bytes)} ({found.report.peak_bytes} bytes), at {found.step}"
    )
    table.add_row("its step", f"{format_seconds(found.report.seconds)}")
    table.add_row("proven minimum", f"not below {format_bytes(found.proven_bytes)} ({found.proven_bytes} bytes)")
    console.print(table)
    terminal.result(
        {
            **_described(problem, ready),
            "peak_bytes": found.report.peak_bytes,
            "seconds": found.report.seconds,
            "proven_bytes": found.proven_bytes,
            "peak_step": found.step,
        }
    )


def _described(problem: Problem, ready: Prepared) -> dict[str, Any]:
    """The problem as fields of the JSON output."""
    return {
        "model": problem.request.expression,
        "batch": problem.request.batch,
        "mode": problem.request.mode,
        "device": ready.profile.device,
        "plain_peak_bytes": ready.plain.peak_bytes,
        "plain_seconds": ready.plain.seconds,
    }


def _title(problem: Problem, ready: Prepared) -> str:
    plain = ready.plain
    return (
        f"{problem.request.expression}, batch {problem.request.batch}, {problem.request.mode}; plain PyTorch: "
        f"{format_bytes(plain.peak_bytes)}, {format_seconds(plain.seconds)} ({ready.profile.device})"
    )


def _relative(seconds: float, ready: Prepared) -> str:
    plain = ready.plain.seconds
    return f"{100 * (seconds / plain - 1):+.1f} %" if plain else "-"  # a profile may say that nothing takes time


def _draw(
    terminal: Terminal,
    path: Path | None,
    fronts: dict[str, list[tuple[float, float]]],
    problem: Problem,
    ready: Prepared,
) -> None:
    """Draw step time over peak memory, one line per strategy."""
    plain = ready.plain.peak_bytes / 2**30, ready.plain.seconds
    labels = "memory budget, GB", "step, predicted seconds"
    draw(terminal.console, path, _title(problem, ready), fronts, labels, {"plain PyTorch": plain})
