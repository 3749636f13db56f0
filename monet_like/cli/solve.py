"""The solve command: plans a model and writes a schedule file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.text import Text

from ..errors import UsageError
from ..ir.units import format_bytes, format_seconds
from ..job.solved import SolvedPlan
from .inspect import add_counts, bound_in_words, summary
from .output import check_results, write_table
from .prepare import job_of, problem_priced_by, say_input, schedule_path, source_of
from .problem import Problem
from .terminal import Terminal, aligned_table


def solve(
    *,
    profile_file: Path | None,
    out: Path | None,
    csv_file: Path | None,
    quick: bool,
    terminal: Terminal,
    **options: Any,
) -> SolvedPlan:
    """Read the problem, compile it, print a summary and write the schedule and profile files."""
    problem = problem_priced_by(profile_file, **options)
    strategy = problem.request.strategy
    if quick and strategy != "milp":
        raise UsageError(f"--quick plans by the local search; leave out --quick or --strategy {strategy}")
    say_input(terminal, problem)
    path = out or schedule_path(problem)
    check_results(path, csv_file)
    source = source_of(problem, profile_file)
    plan = job_of(terminal, problem, source).plan(problem.budget, quick=quick)
    plan.save(path)
    show_plan(terminal, problem, plan, path, source.latest)
    if csv_file is not None:
        write_table(terminal.console, csv_file, plan.to_frame())
    return plan


def show_plan(terminal: Terminal, problem: Problem, plan: SolvedPlan, path: Path, profile: Path | None) -> None:
    """Print the short table at the end of a solve."""
    console, record, compiled, found = terminal.console, plan.record, plan.compiled, plan.compiled.plan
    terminal.result(
        {
            **summary(record),
            "peak_step": found.report.peak_step.task,
            "stage_seconds": dict(compiled.stage_seconds),
            "schedule_file": str(path),
            "profile_file": None if profile is None else str(profile),
        }
    )
    console.print(
        Text.assemble(
            (record.model, "bold"),
            f", batch {problem.request.batch}, budget {format_bytes(record.budget_bytes)}, {record.mode}",
            ", ablation" if record.ablation else "",
        )
    )
    table = aligned_table("", "peak", "step", "overhead")
    table.add_row(
        "plain PyTorch (predicted)", format_bytes(record.plain_peak_bytes), format_seconds(record.plain_seconds), ""
    )
    table.add_row(
        "this schedule (predicted)",
        format_bytes(record.peak_bytes),
        format_seconds(record.seconds),
        f"{100 * (record.seconds / record.plain_seconds - 1):+.1f} %" if record.plain_seconds else "",
    )
    console.print(table)
    details = aligned_table()
    if found.columns:
        details.add_row("program", f"{found.columns:,} columns, {found.rows:,} rows")
    by = "" if found.found_by in ("", record.solver) else f", plan found by {found.found_by}"
    stopped = ", stopped by hand" if found.interrupted else ""
    details.add_row("solver", f"{record.solver}: {record.status}{by}{stopped}")
    details.add_row("incumbent", format_seconds(record.seconds))
    details.add_row("bound, gap", bound_in_words(record))
    details.add_row("stages", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in compiled.stage_seconds.items()))
    details.add_row("profile", f"{record.note or 'reused'} ({record.device})")
    add_counts(details, record)
    details.add_row("peak at", found.report.peak_step.task)
    console.print(details)
    console.print(f"wrote {path}", soft_wrap=True)
    if profile is not None:
        console.print(f"profile in {profile}", soft_wrap=True)
