"""What people see in the terminal: progress while it works, one table when it is done."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from .errors import UsageError
from .files import write_atomically
from .schedule_file import ScheduleRecord
from .units import format_bytes, format_seconds

if TYPE_CHECKING:
    from .compiler import Compiled
    from .problem import Problem


class Progress:
    """A bar while profiling, a line while planning; both on stderr, silent where it is not a terminal."""

    def __init__(self) -> None:
        self.bar = Bar(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self.profile: Any = None
        self.plan: Any = None

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def profiling(self, what: str, done: int, total: int) -> None:
        """An operator is about to be measured."""
        if self.profile is None:
            self.profile = self.bar.add_task("profile", total=total)
        self.bar.update(self.profile, completed=done, total=total, description=f"profile {what[:48]}")

    def planning(self, message: str) -> None:
        """The planner has news."""
        if self.plan is None:
            self.plan = self.bar.add_task("plan", total=None)
        self.bar.update(self.plan, description=f"plan {message}")


def aligned_table(*columns: str) -> Table:
    """A table without lines: the first column left, numbers right; without names, two columns of text."""
    table = Table(show_header=bool(columns), box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns or ("", "")):
        table.add_column(column, justify="left" if index == 0 or not columns else "right", overflow="fold")
    return table


def show_compiled(problem: Problem, compiled: Compiled, path: Path, profile: Path) -> None:
    """The short table after a solve."""
    console, record, found = Console(highlight=False), compiled.record, compiled.plan
    console.print(
        f"[bold]{escape(record.model)}[/bold], batch {problem.request.batch}, budget {format_bytes(record.budget_bytes)}, "
        f"{record.mode}{', ablation' if record.ablation else ''}"
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
    details.add_row("program", f"{found.columns:,} columns, {found.rows:,} rows")
    by = "" if found.found_by in ("", found.solver) else f", plan found by {found.found_by}"
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


def _bound(record: ScheduleRecord) -> str:
    if record.bound_seconds is None or record.gap is None:
        return "none proven"
    kind = "" if record.bound_kind == "unrestricted" else f" ({record.bound_kind} program)"
    return f"{format_seconds(record.bound_seconds)}, {100 * record.gap:.2f} %{kind}"


def _add_counts(table: Table, record: ScheduleRecord) -> None:
    counts = record.counts
    table.add_row(
        "values",
        f"{counts.get('kept', 0)} kept for the backward, {counts.get('dropped', 0)} not; "
        f"{counts.get('recomputed', 0)} operators run again, {counts.get('reruns', 0)} runs in all",
    )
    if "host_bytes" in counts:
        table.add_row("host", f"{format_bytes(counts['host_bytes'])} of its memory for copies")
    variants = [f"{n} x {name.removeprefix('variant ')}" for name, n in counts.items() if name.startswith("variant ")]
    table.add_row("variants", ", ".join(variants) or "none: PyTorch's own operators only")


def show_record(record: ScheduleRecord) -> None:
    """A schedule file for people."""
    console = Console(highlight=False, markup=False)  # its texts are whatever the file says
    table = aligned_table()
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
        UsageError: matplotlib is not installed.
    """
    if path is None:
        return
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install 'monet_like[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name, points in lines.items():
        if points:
            axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, linewidth=1.2, label=name)
    for name, point in (stars or {}).items():
        axes.plot(*([extent] for extent in point), "k*", markersize=11, label=name)
    axes.set(xlabel=labels[0], ylabel=labels[1])
    axes.set_title(title, fontsize=9, wrap=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    data = io.BytesIO()
    figure.savefig(data, format=path.suffix.lstrip(".") or "png", dpi=130)
    pyplot.close(figure)
    write_atomically(path, data.getvalue())
    console.print(f"wrote {path}", soft_wrap=True)
