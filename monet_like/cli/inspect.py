"""The inspect command: what a schedule file was made for, what it promises and what it does."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table

from ..ir.schedule_file import ScheduleRecord
from ..ir.units import format_bytes, format_seconds
from .terminal import Terminal, aligned_table


def summary(record: ScheduleRecord) -> dict[str, Any]:
    """All fields of a schedule file except the schedule itself, for the JSON output."""
    return {name: value for name, value in asdict(record).items() if name != "schedule"}


def bound_in_words(record: ScheduleRecord) -> str:
    if record.bound_seconds is None or record.gap is None:
        return "none proven"
    kind = "" if record.bound_kind == "unrestricted" else f" ({record.bound_kind} program)"
    return f"{format_seconds(record.bound_seconds)}, {100 * record.gap:.2f} %{kind}"


def add_counts(table: Table, record: ScheduleRecord) -> None:
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
    """Print a schedule file as a table, or all of it as JSON."""
    terminal.result(asdict(record))
    console, table = terminal.console, aligned_table()
    inputs = ", ".join(f"{i.dtype}{list(i.shape)}" for i in record.inputs)
    table.add_row("model", record.model)
    table.add_row("inputs", inputs + (f", autocast {record.autocast}" if record.autocast else ""))
    if record.attention:
        table.add_row("attention", record.attention)
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
    table.add_row("bound, gap", bound_in_words(record))
    add_counts(table, record)
    if record.made_last:
        table.add_row("made last", f"the gradients of {', '.join(record.made_last)}")
    table.add_row("profile", f"{record.device}{'; ' + record.note if record.note else ''}")
    table.add_row("versions", ", ".join(f"{k} {v}" for k, v in sorted(record.versions.items())))
    table.add_row("fingerprint", record.fingerprint[:16])
    console.print(table)
