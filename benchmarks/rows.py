"""What was measured, as rows of CSV files that are always whole, and as tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pandas

from monet_like.ir.frames import dtypes_of, frame_of, write_csv


@dataclass(frozen=True)
class Point:
    """A contender at one setting.

    Attributes:
        status: measured, failed, refused (there is no such schedule) or not applicable; ``reason`` then says why.
        peak_bytes: of a step, by the allocator, parameters, buffers, gradients and inputs included.
        process_bytes: the same by the process's high-water mark on a CPU, by reserved memory on CUDA.
        static_bytes: parameters, their gradients, buffers and inputs.
        seconds, spread_seconds: median of the steps, and half of what lies between their quartiles.
        plain_seconds: of plain PyTorch at the same pace: ``seconds`` over the median of the ratios in the same turns.
        gradient_error, rounding, checked, correct: see `benchmarks.worker.Verdict`.
        planning_seconds: planning and wrapping without profiling, and what a first step that compiles took longer.
        predicted_bytes, predicted_seconds, predicted_plain_seconds, gap: what the planner promised; 0: nothing.
        load: of the machine, a minute's average when the steps were over.
        torch: its version.
    """

    model: str
    batch: int
    contender: str
    setting: str
    status: str = "measured"
    reason: str = ""
    peak_bytes: int = 0
    process_bytes: int = 0
    static_bytes: int = 0
    seconds: float = 0.0
    spread_seconds: float = 0.0
    plain_seconds: float = 0.0
    gradient_error: float = 0.0
    rounding: float = 0.0
    checked: str = ""
    correct: bool = False
    planning_seconds: float = 0.0
    predicted_bytes: int = 0
    predicted_seconds: float = 0.0
    predicted_plain_seconds: float = 0.0
    gap: float = -1.0
    load: float = 0.0
    torch: str = ""

    @property
    def key(self) -> tuple[str, int, str, str]:
        """What there is one row of."""
        return self.model, self.batch, self.contender, self.setting

    @property
    def ratio(self) -> float:
        """Seconds in units of plain PyTorch's in the same turns."""
        return self.seconds / self.plain_seconds if self.plain_seconds else 0.0

    @property
    def label(self) -> str:
        """Contender and setting."""
        return f"{self.contender} {self.setting}".strip()


@dataclass(frozen=True)
class Trial:
    """A batch under a limit.

    Attributes:
        limit_bytes: what a step may hold.
        status: fits; died: the process ended at the limit; over: it lived, by what malloc had kept, and its tensors
            took more; refused: there is no schedule; not found: no schedule in the solver's time; failed before any
            limit.
        seconds, plain_seconds: of a step at this batch, and of plain PyTorch's at ``plain_batch``, taking turns.
        peak_bytes: of a step without the limit; 0: it never took one.
        torch: its version.
    """

    model: str
    contender: str
    setting: str
    limit_bytes: int
    batch: int
    status: str
    reason: str = ""
    seconds: float = 0.0
    plain_seconds: float = 0.0
    plain_batch: int = 0
    load: float = 0.0
    peak_bytes: int = 0
    torch: str = ""

    @property
    def key(self) -> tuple[str, int, str, str, int]:
        """What there is one row of."""
        return self.model, self.batch, self.contender, self.setting, self.limit_bytes

    @property
    def overhead(self) -> float:
        """Further seconds per sample, in units of plain PyTorch's."""
        return self.seconds / self.batch / (self.plain_seconds / self.plain_batch) - 1


class Keyed(Protocol):
    """A frozen dataclass of strings and numbers."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What there is one row of."""


Row = TypeVar("Row", bound=Keyed)


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """The rows of a file; none if there is no file. A column that an older file lacks has its default."""
    if not path.exists():
        return []
    table = pandas.read_csv(path, dtype=dtypes_of(kind), keep_default_na=False, float_precision="round_trip")
    names = [name for name in dtypes_of(kind) if name in table.columns]
    return [kind(**row) for row in table[names].to_dict("records")]


def to_frame(rows: Sequence[Row]) -> pandas.DataFrame:
    """A row for each, in order of their keys; numbers have six digits."""
    found = sorted(rows, key=lambda row: row.key)
    table = frame_of(type(found[0]), found)
    for name in table.select_dtypes("float"):
        table[name] = table[name].map(lambda value: float(f"{value:.6g}"))
    return table


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write all rows, in order of their keys, or nothing."""
    if found := list(rows):
        write_csv(to_frame(found), path)


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown, without a line break at its end."""
    lines = (f"| {' | '.join(map(str, cells))} |" for cells in rows)
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines])


def merged(rows: list[Row], more: Iterable[Row]) -> list[Row]:
    """With ``more`` in place of those of the same keys."""
    return list({row.key: row for row in (*rows, *more)}.values())
