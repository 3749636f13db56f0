"""The export command: a schedule file as decisions for people and for other programs."""

from __future__ import annotations

from pathlib import Path

from ..capture.precision import autocast_as
from ..errors import UsageError
from ..export.decisions import Decisions, decisions_of
from ..export.graph_plans import plan_model
from ..export.policy_file import SelectivePlan, write_policy
from ..export.remat import RematPlan, remat_plan
from ..export.selective import SelectivePolicy, selective_plan
from ..inductor.options import compile_options
from ..inductor.plan_file import CompilePlan, GraphDecisions
from ..ir.schedule_file import ScheduleRecord
from ..ir.units import format_bytes, format_seconds
from ..job.job import Job
from ..replay.verify.steps import real_example
from .output import check_results
from .report import job_of_file
from .terminal import Terminal, aligned_table

#: The ends of the names of files by default.
_ENDS = {"json": ".decisions.json", **{to: f".{to}.json" for to in ("sac", "inductor", "torchtitan", "remat")}}
#: The regions by default: the whole model, and what torchtitan's models call their layers.
_REGIONS = {"sac": ("",), "torchtitan": ("layers.*",), "remat": ("layers.*",)}


def export(
    *,
    file: Path,
    to: str,
    regions: tuple[str, ...],
    model: str | None,
    out: Path | None,
    device: str,
    profile_file: Path | None,
    terminal: Terminal,
) -> None:
    """Capture the model of a schedule file and write its decisions, or those of another mechanism for its budget.

    Raises:
        UsageError: an argument is wrong, or the model must be named.
        ScheduleFileError: the file is unreadable, or of another program.
        InfeasibleError: the mechanism cannot reach the budget.
    """
    if regions and to not in _REGIONS:
        raise UsageError(
            f"--regions are of checkpointing; give --to sac, torchtitan or remat, or leave them out for --to {to}"
        )
    path = out or file.with_suffix(_ENDS[to])
    record = ScheduleRecord.load(file)
    check_results(path)
    job = job_of_file(terminal, record, model, device, profile_file)
    found: Decisions | SelectivePlan | CompilePlan | RematPlan
    if to == "json":
        found = decisions_of(record, job.ready)
        found.to_json(path)
        _show(terminal, found)
    elif to == "inductor":
        found = _compile_plan(terminal, record, job)
        found.write(path)
    elif to == "remat":
        found = remat_plan(record, job.ready, job.request, job.device, regions or _REGIONS[to])
        found.write(path)
        terminal.console.print(repr(found), soft_wrap=True)
    else:
        patterns, draws_saved = regions or _REGIONS[to], to == "torchtitan"  # its graph trainer cannot repeat a draw
        found = selective_plan(record, job.ready, job.request, job.device, patterns, draws_saved=draws_saved)
        write_policy(found, path)
        terminal.console.print(repr(SelectivePolicy(found)), soft_wrap=True)
    terminal.console.print(f"wrote {path}", soft_wrap=True)
    terminal.result(found.content())


def _compile_plan(terminal: Terminal, record: ScheduleRecord, job: Job) -> CompilePlan:
    """Plans of Inductor's joint graphs for the budget of a schedule."""
    if job.request.target is not None:
        raise UsageError(
            "this schedule is for a GPU that is not here, and Inductor's graphs are planned where they run; export "
            "there"
        )
    extra = record.optimizer_bytes + record.cublas_bytes
    options = compile_options(record.budget_bytes, extra_bytes=extra)
    example = real_example(job.request.example, job.device)
    graphs = plan_model(job.request.model, example, options, autocast_as(job.request.autocast, job.device))
    for graph in graphs:
        terminal.console.print(repr(graph), soft_wrap=True)
    return CompilePlan(record.model, record.device, record.budget_bytes, extra, tuple(map(GraphDecisions.of, graphs)))


def _show(terminal: Terminal, found: Decisions) -> None:
    """Print how many operators have which fate, and their bytes."""
    table = aligned_table("results of the forward", "operators", "bytes", "run again")
    for fate in ("kept", "recomputed", "offloaded", "output", "freed"):
        mine = [d for d in found.decisions if d.stage != "backward" and d.fate == fate]
        again = sum(run.seconds for d in mine for run in d.reruns)
        if mine:
            total = format_bytes(sum(d.bytes for d in mine))
            table.add_row(fate, str(len(mine)), total, format_seconds(again) if again else "")
    terminal.console.print(table)
    terminal.console.print(
        f"predicted: peak {format_bytes(found.peak_bytes)}, step {format_seconds(found.seconds)}; plain PyTorch: "
        f"{format_bytes(found.plain_peak_bytes)}, {format_seconds(found.plain_seconds)}"
    )
