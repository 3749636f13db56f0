"""Predicted against measured steps on GPUs, by one clock and by two: python -m benchmarks.two_clocks

``replays.csv`` of a card, which ``scripts/gpu_check.sh`` writes, has measured steps and predicted ones: sums of
operators that were timed there. For every net a plan is made here without the card, from the rates of its datasheet;
the simulator says how long the GPU waits for the CPU in it (`monet_like.profile.launches`). Three predictions are
compared: the sum; the sum scaled by plain PyTorch's measured step; and sum and waits, scaled in the same way.

Below a card's rows are the constants that would fit them best, and how many predictions are near where those of a net
are by constants fitted to the other nets alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import click
import numpy as np

from monet_like.ir.defaults import MODE
from monet_like.ir.simulate import Launches, Report, simulate
from monet_like.plan import plan
from monet_like.plan.baseline import plain_report
from monet_like.profile.devices import DEVICES
from monet_like.profile.launches import HOST_PACES
from monet_like.profile.roofline import roofline
from scripts.gpu_check import FIRST, Replay, Work

from .operator_paces import captured_on
from .rows import markdown_table, read_rows

RESULTS = Path(__file__).parent / "results"
#: Folders of results and names of the cards' datasheets; the constants in use were fitted to the first one's rows.
CARDS = {"cuda-nvidia-h200": "h200", "cuda-nvidia-h100-80gb-hbm3": "h100"}
#: Predictions that are nearer than this share of the measured step are counted.
NEAR = 0.02


@dataclass(frozen=True)
class Waits:
    """How long a GPU waits for the CPU in plain PyTorch's step and in a plan; ``residents``: parameters and buffers."""

    plain_seconds: float
    seconds: float
    residents: int


@dataclass(frozen=True)
class Told:
    """A measured step and what was predicted for it; ``plain_seconds``: plain PyTorch's, the median of the card's."""

    row: Replay
    plain_seconds: float
    waits: Waits

    @property
    def sums(self) -> tuple[float, float]:
        """Seconds of the operators of plain PyTorch's step and of the plan's."""
        row = self.row
        return row.predicted_plain_seconds - row.plain_start_seconds, row.predicted_seconds - row.start_seconds

    @property
    def scale(self) -> float:
        """Measured seconds of plain PyTorch's step for a predicted one, on two clocks."""
        return self.plain_seconds / (self.sums[0] + self.waits.plain_seconds)

    @property
    def predictions(self) -> tuple[float, float, float]:
        """The sum of the operators; scaled; by two clocks and scaled."""
        plain, alone = self.sums
        return alone, alone * self.plain_seconds / plain, (alone + self.waits.seconds) * self.scale

    @property
    def errors(self) -> tuple[float, ...]:
        """Of `predictions`, in shares of the measured step."""
        return tuple(found / self.row.seconds - 1 for found in self.predictions)


def waits_of(work: Work, card: str) -> Waits:
    """The GPU's waits in a step and in a plan for plain PyTorch's memory."""
    limits = DEVICES[card]
    captured = captured_on(limits, work.model, work.inputs[0], work.autocast, MODE)
    costs = roofline(captured, limits)

    def plain(launches: Launches | None) -> Report:
        nodes = captured.autograd_nodes
        return plain_report(captured.plain, costs, 0, autograd_nodes=nodes, launches=launches)

    program, alone = captured.program, plain(None)
    found = plan(program, costs, alone.peak_bytes, strategy="heuristic", evaluations=3000)
    both = simulate(program, found.schedule, costs, launches=HOST_PACES["planned"].of(program))
    waits = plain(HOST_PACES["plain"].of(captured.plain)).seconds - alone.seconds
    return Waits(waits, both.seconds - found.report.seconds, program.residents)


def told(rows: Sequence[Replay], card: str) -> Iterator[Told]:
    """Every row of a plan with its predictions."""
    works = {(work.model, work.inputs[0].shape[0]): work for work in FIRST}
    waits = cache(lambda key: waits_of(works[key], card))
    for row in rows:
        if row.predicted_seconds:
            key = row.model, row.batch
            plain = statistics.median(each.plain_seconds for each in rows if (each.model, each.batch) == key)
            yield Told(row, plain, waits(key))


def fitted(rows: Sequence[Told]) -> tuple[float, float]:
    """Seconds before the first launch, and there for each resident, by least squares of relative errors."""
    scales = np.array([each.scale / each.row.seconds for each in rows])
    residents = np.array([each.waits.residents for each in rows])
    missing = 1 - scales * [each.sums[1] for each in rows]
    (start, resident), *_ = np.linalg.lstsq(np.stack((scales, scales * residents), 1), missing, rcond=None)
    return float(start), float(resident)


def left_out(rows: Sequence[Told]) -> Iterator[Told]:
    """Every row by constants that were fitted to the rows of other nets."""
    for each in rows:
        start, resident = fitted([other for other in rows if other.row.model != each.row.model])
        yield replace(each, waits=replace(each.waits, seconds=start + resident * each.waits.residents))


def is_near(found: Told, kind: int = -1) -> bool:
    """Whether a prediction is within `NEAR`; ``kind``: its place in `Told.predictions`."""
    return abs(found.errors[kind]) <= NEAR


def summary(rows: Sequence[Told]) -> str:
    """How many predictions are near, and which of the last kind are not."""
    near = [sum(is_near(each, k) for each in rows) for k in range(3)]
    far = [f"{each.row.file} ({100 * each.errors[-1]:+.1f} %)" for each in rows if not is_near(each)]
    return (
        f"Within {100 * NEAR:g} %: {near[0]} of {len(rows)} by the sum, {near[1]} scaled, {near[2]} by two clocks and "
        f"scaled. Not within by the latter: {', '.join(far) or 'none'}."
    )


@click.command()
def main() -> None:
    """Print predictions by one clock and by two beside measured steps."""
    heads = ("plan", "plain, measured", "step, measured", "sum", "scaled", "waits", "two clocks, scaled")
    for folder, card in CARDS.items():
        rows = list(told(read_rows(RESULTS / folder / "replays.csv", Replay), card))
        cells = []
        for each in rows:
            shown = [f"{1e3 * s:.2f} ms, {100 * e:+.1f} %" for s, e in zip(each.predictions, each.errors, strict=True)]
            shown.insert(2, f"{1e3 * each.waits.seconds:.2f} ms")
            cells.append(
                (each.row.file, f"{1e3 * each.plain_seconds:.2f} ms", f"{1e3 * each.row.seconds:.2f} ms", *shown)
            )
        print(f"## {rows[0].row.profile}\n\n{markdown_table(heads, cells)}\n\n{summary(rows)}")
        if len({each.waits.residents for each in rows}) > 1:
            start, resident = fitted(rows)
            near = sum(map(is_near, left_out(rows)))
            print(
                f"\nThese rows fit best with {1e3 * start:.2f} ms and {1e6 * resident:.2f} us for each parameter and "
                f"buffer. By constants fitted to the other nets alone, {near} of {len(rows)} are within."
            )
        print()


if __name__ == "__main__":
    main()
