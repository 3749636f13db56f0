"""What people see in the terminal: progress while it works, one table when it is done."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from ..errors import UsageError
from ..files import check_writable, write_atomically
from ..ir.schedule_file import ScheduleRecord
from ..units import format_bytes, format_seconds

if TYPE_CHECKING:
    from ..compiler.pipeline import Compiled
    from ..compiler.problem import Problem


#: Columns where nothing says how wide the output is: a file or a pipe.
_WIDTH = 160


class Terminal:
    """Where a command's words go.

    Args:
        as_json: nothing but one JSON object on stdout, at the end.
        quiet: nothing on stdout, and no progress; errors are still told.

    Attributes:
        console: for people; silent in either case. Without colours where it is not a terminal.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json, self.quiet = as_json, quiet
        narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
        self.console = Console(
            highlight=False, markup=False, quiet=as_json or quiet, width=None if narrow else _WIDTH
        )  # no markup: names come from files and models

    def progress(self) -> Progress:
        """A bar on stderr for as long as a ``with`` statement lasts."""
        return Progress(quiet=self.quiet)

    def result(self, content: Mapping[str, Any]) -> None:
        """What the command found, for programs."""
        if self.as_json:
            click.echo(json.dumps(content))


class Progress:
    """A bar for each stage, on stderr; silent where that is not a terminal."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.bar = Bar(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}", markup=False),
            BarColumn(28),
            TextColumn("{task.fields[count]}", justify="right"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[what]}", markup=False, style="dim"),
            console=Console(stderr=True),
            transient=True,
            disable=quiet or not sys.stderr.isatty(),
        )
        self.stage, self.task = "", TaskID(0)

    def __enter__(self) -> Progress:
        self.bar.start()
        self.at("capture")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def at(self, stage: str, what: str = "", done: int | None = None, total: int | None = None) -> None:
        """The stage that work is at, and at what in it; the stage before is done."""
        if stage != self.stage:
            if self.stage:
                self.bar.update(self.task, total=1, completed=1, count="", what="")
            self.stage, self.task = stage, self.bar.add_task(stage, total=total, count="", what="")
        count = f"{done}/{total}" if total else ""
        self.bar.update(self.task, completed=done, total=total, count=count, what=what[:60])

    def profiling(self, what: str, done: int, total: int) -> None:
        """An operator is about to be measured."""
        self.at("profile", what, done, total)

    def planning(self, message: str) -> None:
        """The planner has news."""
        self.at("plan", message)


def aligned_table(*columns: str) -> Table:
    """A table without lines: the first column left, numbers right; without names, two columns of text."""
    table = Table(show_header=bool(columns), box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns or ("", "")):
        table.add_column(column, justify="left" if index == 0 or not columns else "right", overflow="fold")
    return table


def show_compiled(terminal: Terminal, problem: Problem, compiled: Compiled, path: Path, profile: Path) -> None:
    """The short table after a solve."""
    console, record, found = terminal.console, compiled.record, compiled.plan
    terminal.result(
        {
            **summary(record),
            "peak_step": found.report.peak_step.task,
            "stage_seconds": dict(compiled.stage_seconds),
            "schedule_file": str(path),
            "profile_file": str(profile),
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
    details.add_row("bound, gap", _bound(record))
    details.add_row("stages", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in compiled.stage_seconds.items()))
    details.add_row("profile", f"{record.note or 'reused'} ({record.device})")
    _add_counts(details, record)
    details.add_row("peak at", found.report.peak_step.task)
    console.print(details)
    console.print(f"wrote {path}", soft_wrap=True)
    console.print(f"profile in {profile}", soft_wrap=True)


def summary(record: ScheduleRecord) -> dict[str, Any]:
    """Everything that a schedule file says but the schedule itself, for programs."""
    return {name: value for name, value in asdict(record).items() if name != "schedule"}


def _bound(record: ScheduleRecord) -> str:
    if record.bound_seconds is None or record.gap is None:
        return "none proven"
    kind = "" if record.bound_kind == "unrestricted" else f" ({record.bound_kind} program)"
    return f"{format_seconds(record.bound_seconds)}, {100 * record.gap:.2f} %{kind}"


def _add_counts(table: Table, record: ScheduleRecord) -> None:
    counts = record.counts
    if record.cublas_bytes:
        table.add_row("cuBLAS", f"{format_bytes(record.cublas_bytes)} for its workspaces, in all peaks")
    table.add_row(
        "values",
        f"{counts.get('kept', 0)} kept for the backward, {counts.get('dropped', 0)} not; "
        f"{counts.get('recomputed', 0)} operators run again, {counts.get('reruns', 0)} runs in all",
    )
    if "host_bytes" in counts:
        table.add_row("host", f"{format_bytes(counts['host_bytes'])} of its memory for copies")
    variants = [f"{n} x {name.removeprefix('variant ')}" for name, n in counts.items() if name.startswith("variant ")]
    table.add_row("variants", ", ".join(variants) or "none: PyTorch's own operators only")


def show_record(terminal: Terminal, record: ScheduleRecord) -> None:
    """A schedule file for people, or whole for programs."""
    terminal.result(asdict(record))
    console, table = terminal.console, aligned_table()
    inputs = ", ".join(f"{i.dtype}{list(i.shape)}" for i in record.inputs)
    table.add_row("model", record.model)
    table.add_row("inputs", inputs + (f", autocast {record.autocast}" if record.autocast else ""))
    table.add_row("mode", record.mode + (", ablation" if record.ablation else ""))
    optimizer = (
        f", {record.optimizer} state {format_bytes(record.optimizer_bytes)} included" if record.optimizer_bytes else ""
    )
    table.add_row("budget", format_bytes(record.budget_bytes) + optimizer)
    table.add_row(
        "predicted peak", f"{format_bytes(record.peak_bytes)} (plain PyTorch {format_bytes(record.plain_peak_bytes)})"
    )
    table.add_row(
        "predicted step", f"{format_seconds(record.seconds)} (plain PyTorch {format_seconds(record.plain_seconds)})"
    )
    table.add_row("solver", f"{record.solver}: {record.status}, {record.solve_seconds:.1f} s")
    table.add_row("bound, gap", _bound(record))
    _add_counts(table, record)
    if record.made_last:
        table.add_row("made last", f"the gradients of {', '.join(record.made_last)}")
    table.add_row("profile", f"{record.device}{'; ' + record.note if record.note else ''}")
    table.add_row("versions", ", ".join(f"{k} {v}" for k, v in sorted(record.versions.items())))
    table.add_row("fingerprint", record.fingerprint[:16])
    console.print(table)


def write_table(console: Console, path: Path | None, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Figures as CSV, if a file was asked for."""
    if path is None:
        return
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())
    console.print(f"wrote {path}", soft_wrap=True)


_PICTURES = (".png", ".svg", ".pdf")


def check_results(plot: Path | None, *files: Path | None) -> None:
    """Fail early, before hours of work, if a picture or other files that are asked for could not be written.

    Raises:
        UsageError: not a picture's name, matplotlib is not installed, or as of `check_writable`.
    """
    for path in (plot, *files):
        if path is not None:
            check_writable(path)
    if plot is not None and plot.suffix not in _PICTURES:
        raise UsageError(f"--plot {plot} must end in one of {', '.join(_PICTURES)}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'monet_like[plots]'")


def draw(
    console: Console,
    path: Path | None,
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    labels: tuple[str, str],
    stars: Mapping[str, tuple[float, float]] | None = None,
) -> None:
    """Lines through points and single stars, by name, if a picture was asked for.

    Raises:
        UsageError: as `check_results`.
    """
    check_results(path)
    if path is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for number, (name, points) in enumerate(lines.items()):
        if points:  # hollow, and each of its own shape and size: what lies on another is still seen
            style: dict[str, Any] = {
                "marker": "osD^v"[number % 5],
                "markersize": 4 + 2 * (number % 5),
                "fillstyle": "none",
            }
            axes.plot(*zip(*sorted(points), strict=True), linewidth=1.2, label=name, **style)
    for name, point in (stars or {}).items():
        axes.plot(*([extent] for extent in point), "k*", markersize=11, label=name)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    axes.set_title(title, fontsize=9, wrap=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    data = io.BytesIO()
    figure.savefig(data, format=path.suffix.lstrip("."), dpi=130)
    pyplot.close(figure)
    write_atomically(path, data.getvalue())
    console.print(f"wrote {path}", soft_wrap=True)
