"""The commands compare, pareto and smallest: what a model's step costs at which budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from ..errors import UsageError
from ..ir.simulate import Report
from ..ir.units import format_bytes, format_seconds, parse_budgets
from ..job.job import MOST_POINTS, Job
from ..plan import STRATEGIES
from ..plan.budgets import FrontPoint, percent_per_tenth, seconds_per_gigabyte
from ..plan.strategies import check_strategy
from ..report.fronts import LABELS, Comparison, Front, stars
from .output import check_results, draw, write_table
from .prepare import read_job
from .terminal import Terminal, aligned_table


def compare(
    *,
    budgets: str,
    strategies: str,
    profile_file: Path | None,
    csv_file: Path | None,
    plot: Path | None,
    terminal: Terminal,
    **options: Any,
) -> None:
    """The compare command: plan every budget with every strategy; one simulator judges all."""
    names = [name.strip() for name in strategies.split(",") if name.strip()] if strategies else list(STRATEGIES)
    for name in names:
        check_strategy(name)
    wanted = parse_budgets(budgets)
    check_results(csv_file, plot=plot)
    job = read_job(terminal, profile_file, options)
    terminal.console.print(job.title, soft_wrap=True)
    found = job.compare(wanted, names)
    _show_comparison(terminal, found)
    table = found.to_frame()
    write_table(terminal.console, csv_file, table.drop(columns="reason"))
    points = [
        {
            "strategy": point.strategy,
            "budget_bytes": point.budget_bytes,
            "peak_bytes": point.report.peak_bytes if point.report else None,
            "seconds": point.report.seconds if point.report else None,
            "planning_seconds": point.planning_seconds,
            "reason": point.reason,
        }
        for point in found.points
    ]
    terminal.result({**_described(job), "points": points})
    _draw(terminal, plot, found)


def _show_comparison(terminal: Terminal, found: Comparison) -> None:
    """Print a row for each strategy and a column for each budget, then why there is no schedule where there is none."""
    console = terminal.console
    limits = list(dict.fromkeys(point.budget_bytes for point in found.points))
    table = aligned_table("strategy", *(format_bytes(limit) for limit in limits))
    for name in found.strategies:
        reports = [point.report for point in found.points if point.strategy == name]
        table.add_row(name, *("-" if report is None else _relative(report.seconds, found.plain) for report in reports))
    console.print(table)
    refused = [point for point in found.points if point.report is None]
    words = "predicted step time against plain PyTorch" + ("; -: no schedule:" if refused else "")
    console.print(words, soft_wrap=True)
    for point in refused:
        console.print(Text(f"{point.strategy} at {format_bytes(point.budget_bytes)}: {point.reason}"), soft_wrap=True)


def front(
    *,
    points: int,
    budgets: str,
    profile_file: Path | None,
    csv_file: Path | None,
    plot: Path | None,
    terminal: Terminal,
    **options: Any,
) -> None:
    """The pareto command: the time-memory front of a model, and the time that more memory saves."""
    if points < 2:
        raise UsageError(f"--points {points} must be at least 2")
    if points > MOST_POINTS:
        raise UsageError(f"--points must be at most {MOST_POINTS}, each of which is a plan; give fewer, or --budgets")
    wanted = parse_budgets(budgets) if budgets else None
    check_results(csv_file, plot=plot)
    job = read_job(terminal, profile_file, options)
    found = job.pareto(wanted, points=points)
    terminal.console.print(job.title, soft_wrap=True)
    terminal.console.print(_front_table(found))
    write_table(terminal.console, csv_file, found.to_frame())
    listed = [
        {
            "budget_bytes": point.budget_bytes,
            "peak_bytes": point.plan.report.peak_bytes if point.plan else None,
            "seconds": point.plan.report.seconds if point.plan else None,
            "bound_seconds": point.plan.bound_seconds if point.plan and point.plan.bound_kind != "none" else None,
            "seconds_saved_per_gigabyte": saved,
            "percent_saved_by_tenth": percent,
        }
        for point, saved, percent in zip(
            found.points, seconds_per_gigabyte(found.points), percent_per_tenth(found.points), strict=True
        )
    ]
    terminal.result({**_described(job), "points": listed})
    _draw(terminal, plot, found)


def _front_table(found: Front) -> Table:
    table = aligned_table("budget", "predicted peak", "predicted step", "overhead", "gap", "10 % more memory saves")
    for point, saved in zip(found.points, percent_per_tenth(found.points), strict=True):
        if point.plan is None:
            table.add_row(format_bytes(point.budget_bytes), "-", "-", "-", "-", "-")
            continue
        report = point.plan.report
        table.add_row(
            format_bytes(point.budget_bytes),
            format_bytes(report.peak_bytes),
            format_seconds(report.seconds),
            _relative(report.seconds, found.plain),
            _gap(point),
            "" if saved is None else f"{saved:.1f} %",
        )
    return table


def _gap(point: FrontPoint) -> str:
    assert point.plan is not None
    if point.plan.bound_kind == "none":
        return "no bound"
    return f"{100 * point.plan.gap:.1f} %" + ("" if point.plan.bound_kind == "unrestricted" else " restricted")


def smallest(*, profile_file: Path | None, terminal: Terminal, **options: Any) -> None:
    """The smallest command: the lowest peak found and the proven lower bound."""
    job = read_job(terminal, profile_file, options)
    found = job.smallest()
    console = terminal.console
    console.print(job.title, soft_wrap=True)
    table = aligned_table()
    table.add_row(
        "smallest found (predicted)",
        f"{format_bytes(found.report.peak_bytes)} ({found.report.peak_bytes} bytes), at {found.step}",
    )
    table.add_row("its step (predicted)", f"{format_seconds(found.report.seconds)}")
    table.add_row("proven minimum", f"not below {format_bytes(found.proven_bytes)} ({found.proven_bytes} bytes)")
    console.print(table)
    terminal.result(
        {
            **_described(job),
            "peak_bytes": found.report.peak_bytes,
            "seconds": found.report.seconds,
            "proven_bytes": found.proven_bytes,
            "peak_step": found.step,
        }
    )


def _described(job: Job) -> dict[str, Any]:
    """The job as fields of the JSON output."""
    return {
        "model": job.request.expression,
        "batch": job.request.batch,
        "mode": job.request.mode,
        "device": job.profile.device,
        "plain_peak_bytes": job.plain.peak_bytes,
        "plain_seconds": job.plain.seconds,
    }


def _relative(seconds: float, plain: Report) -> str:
    return f"{100 * (seconds / plain.seconds - 1):+.1f} %" if plain.seconds else "-"  # a profile may say: no time


def _draw(terminal: Terminal, path: Path | None, found: Front | Comparison) -> None:
    """Draw step time over the budget, if a picture was asked for."""
    draw(terminal.console, path, found.title, found.lines, LABELS, stars(found.plain))
