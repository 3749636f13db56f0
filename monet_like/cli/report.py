"""The report command: draws a schedule file as an HTML page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..capture.example_inputs import example_of
from ..errors import UsageError
from ..files import check_writable
from ..ir.schedule_file import ScheduleRecord
from ..ir.units import format_bytes, format_seconds
from ..job.job import Job
from ..models import is_registered
from ..profile.devices import DEVICES
from ..replay.checks.compatibility import check_program
from ..report.page import Figures, numbers, vega
from ..report.write import figures_of, write_report
from .output import check_results, write_table
from .prepare import job_of, problem_priced_by, source_of
from .terminal import Terminal, aligned_table


def report(
    *,
    file: Path,
    model: str | None,
    out: Path | None,
    png: bool,
    front: str,
    live: bool,
    device: str,
    profile_file: Path | None,
    time_limit: float,
    csv_file: Path | None,
    terminal: Terminal,
) -> Figures:
    """Capture the model of a schedule file, compute plain PyTorch's and the schedule's step, and write the page.

    Raises:
        UsageError: an argument is wrong, or the model must be named.
        ScheduleFileError: the file is unreadable, or of another program.
    """
    vega()  # said before anything takes time
    path = out or file.with_suffix(".html")
    record = ScheduleRecord.load(file)
    check_writable(path)
    check_results(csv_file)
    job = job_of_file(terminal, record, model, device, profile_file, time_limit=time_limit, here=live)
    ready = job.ready
    with terminal.progress() as progress:
        figures = figures_of(record, ready, job.request, job.device, front=front, live=live, progress=progress.at)
        progress.at("draw")
        drawn = write_report(figures, path, png=png)
    _show(terminal, figures, path, drawn)
    if csv_file is not None:
        write_table(terminal.console, csv_file, figures.to_frame())
    return figures


def job_of_file(
    terminal: Terminal,
    record: ScheduleRecord,
    model: str | None,
    device: str,
    profile_file: Path | None,
    *,
    time_limit: float = 60.0,
    here: bool = False,
) -> Job:
    """The job that a schedule was solved for: its model is captured again.

    Args:
        model: MODEL as the user typed it; None: as the file says, if building that runs no code but torchvision's or
            ours.
        profile_file: what prices it; None: the datasheet rates that it was planned with, if it was. Where it has a
            datasheet's, ``device`` may be a GPU that is not here, unless ``here`` says that steps run.

    Raises:
        UsageError: the model must be named by the user, or an argument is wrong.
        ScheduleFileError: the schedule is of another program.
    """
    if model is None and not is_registered(record.model):
        raise UsageError(
            f"the schedule is of {record.model!r}, and what a file names is not run unseen; if that is your model, say "
            "so: --model MODEL, such as --model path/to/file.py:make_model"
        )
    rates = profile_file or _rates_of(record)
    floating = [i.dtype for i in record.inputs if "float" in i.dtype]
    shape = record.inputs[0].shape if record.inputs else ()
    problem = problem_priced_by(
        None if here else rates,
        model=model or record.model,
        batch=str(shape[0] if shape else 1),
        budget=f"{max(record.budget_bytes, 1)} B",
        mode=record.mode,
        solver="HIGHS",
        device=device,
        dtype=floating[0] if floating else "float32",
        input_shape=None,
        time_limit=time_limit,
        ablation=record.ablation,
        optimizer=record.optimizer,
        optimizer_in_backward=record.optimizer_in_backward,
        autocast=record.autocast,
        attention=record.attention,
        channels_last=record.layout == "channels_last",
        processes=record.counts.get("processes"),
    )
    own_inputs = hasattr(problem.spec.source, "make_inputs")
    example = problem.request.example if own_inputs else example_of(record.inputs, problem.device)
    problem = replace(problem, request=replace(problem.request, example=example, made_last=record.made_last))
    job = job_of(terminal, problem, source_of(problem, rates))
    check_program(record, job.captured, problem.request.expression, problem.device)
    return job


def _rates_of(record: ScheduleRecord) -> Path | None:
    """The datasheet rates that a schedule was planned with, if it was."""
    kind, _, name = record.device.partition(":")
    return Path(record.device) if kind == "roofline" and name in DEVICES else None


def _show(terminal: Terminal, figures: Figures, path: Path, drawn: list[Path]) -> None:
    """Print the key numbers in the terminal."""
    console, plain, ours = terminal.console, figures.plain, figures.ours
    console.print(f"{figures.record.model}, budget {format_bytes(figures.record.budget_bytes)} ({figures.device})")
    table = aligned_table("", "peak", "kept", "step", "of that again")
    if (live := figures.live) is not None:
        table.add_row("this schedule (measured)", format_bytes(max(live.bytes)), "", format_seconds(live.seconds), "")
    for name, found in (("this schedule (predicted)", ours), ("plain PyTorch (predicted)", plain)):
        again = sum(run.seconds for run in found.runs if run.again)
        table.add_row(
            name,
            format_bytes(found.peak.total_bytes),
            format_bytes(found.kept_bytes),
            format_seconds(found.seconds),
            format_seconds(again) if again else "",
        )
    console.print(table)
    if ours.peak.total_bytes != figures.record.peak_bytes:
        console.print(
            f"the file predicts a peak of {format_bytes(figures.record.peak_bytes)}, by costs of "
            f"{figures.record.device}"
        )
    for written in (path, *drawn):
        console.print(f"wrote {written}", soft_wrap=True)
    terminal.result({**numbers(figures), "page": str(path), "pictures": [str(picture) for picture in drawn]})
