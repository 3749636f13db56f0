"""`BlockPlan`: what the schedules of a model's blocks promise for the whole step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.schedule_file import ScheduleRecord
from ..ir.step import Point
from ..ir.units import format_bytes, format_seconds
from ..plan.step.choice import ChoiceStatus

#: What is said of a choice whose speed is not proven.
_UNPROVEN = {
    "feasible": ", the choice of schedules not proven best",
    "searched": ", schedules chosen by a local search instead of the solver",
}


@dataclass(frozen=True, repr=False)
class BlockPlan:
    """What the schedules of a model's blocks promise for the whole step; as text, in one line.

    Attributes:
        peak_bytes: predicted; in several processes of the one that needs most.
        moment: of that peak, in words.
        budget_bytes: of the whole step.
        plain_peak_bytes: predicted for the model without schedules.
        seconds, plain_seconds: predicted, of all blocks together.
        kinds: how many different programs the blocks have, sizes included.
        points: by block; one of zeros where nothing has a gradient.
        status: of the choice among the blocks' menus. ``optimal``: the fastest, proven; ``feasible``: the solver's
            best, not proven; ``searched``: by a local search, because the solver failed or found nothing in time. Such
            a plan is not kept in the cache.
        reason: where it was ``searched``: what the solver said.
        bound_seconds: no schedules of the blocks that fit are faster, whether they are in the menus or not, by the
            memory that the rest of the model took when this was planned; 0: nothing is known.
        moments: name and predicted bytes of every part of the step: the forward and the backward of each block, and
            what the rest of the model does between them.
    """

    peak_bytes: int
    moment: str
    budget_bytes: int
    plain_peak_bytes: int
    seconds: float
    plain_seconds: float
    kinds: int
    points: tuple[Point, ...]
    status: ChoiceStatus = "optimal"
    reason: str = ""
    bound_seconds: float = 0.0
    moments: tuple[tuple[str, int], ...] = ()

    def at(self, moments: tuple[tuple[str, int], ...], more_bytes: int) -> BlockPlan:
        """The same schedules with a step that takes so much at its moments, and more bytes throughout."""
        moments = tuple((name, count + more_bytes) for name, count in moments)
        moment, peak = max(moments, key=lambda entry: entry[1])
        return replace(self, peak_bytes=peak, moment=moment, moments=moments)

    @property
    def gap(self) -> float:
        """By how much of its seconds the plan may be slower than the fastest of all schedules that fit; 1: nothing is
        known.
        """
        return 1 - self.bound_seconds / self.seconds if self.seconds else 0.0

    @property
    def numbers(self) -> str:
        """What the step was to need, and what it needs beside plain PyTorch, for a line of ``repr``."""
        return (
            f"budget {format_bytes(self.budget_bytes)}, peak {format_bytes(self.peak_bytes)}, plain PyTorch's "
            f"{format_bytes(self.plain_peak_bytes)}, blocks {format_seconds(self.seconds)}, plain PyTorch's "
            f"{format_seconds(self.plain_seconds)}"
        )

    def __repr__(self) -> str:
        proof = (
            f", within {100 * self.gap:.2f} % of a bound for all schedules"
            if self.bound_seconds and self.seconds
            else ""
        )
        return (
            f"{len(self.points)} blocks of {self.kinds} kinds: budget {format_bytes(self.budget_bytes)}, peak "
            f"{format_bytes(self.peak_bytes)} instead of {format_bytes(self.plain_peak_bytes)}, {self.moment}; "
            f"blocks {format_seconds(self.seconds)} instead of {format_seconds(self.plain_seconds)} "
            f"(predicted{_UNPROVEN.get(self.status, '')}{proof})"
        )

    def of_block(self, record: ScheduleRecord | None, carried_bytes: int, backend: str) -> str:
        """Two lines for ``repr`` of a block: the whole step's numbers, and what this block has of it.

        Args:
            record: of the block; None: it runs as it is.
            carried_bytes: that the block keeps from its forward to its backward.
        """
        own = "as in plain PyTorch"
        if record is not None:
            own = (
                f"keeps {format_bytes(carried_bytes)} for its backward, {format_seconds(record.seconds)}, plain "
                f"PyTorch's {format_seconds(record.plain_seconds)}, {record.mode}, {backend}"
            )
        return f"whole step: {self.numbers}\nthis block: {own}"
