"""The results of planning: a schedule, its cost, and how good it is known to be. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..ir.schedule import Schedule
from ..ir.simulate import Report
from ..ir.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Plan:
    """A schedule within the budget, judged by `simulate`, and how good it is known to be.

    Attributes:
        schedule: the tasks to run.
        report: the simulator's report on it; ``report.peak_bytes`` is within the budget.
        status: ``optimal``: proven to be within the gap asked for; ``feasible``: not proven.
        bound_seconds: no schedule of the kind that ``bound_kind`` names is faster; 0 if nothing is known.
        bound_kind: ``unrestricted``: the bound holds for every schedule; ``restricted``: for schedules that always
            keep values below ``pin_bytes`` and run tasks again at most ``window`` slots early; ``none``.
        gap: ``(report.seconds - bound_seconds) / report.seconds``.
        rows, columns: size of the integer program; 0 for other strategies.
        solver: the solver asked for; "" for strategies without one.
        found_by: name of the stage that found the schedule: a stage of `Search` (``greedy``, ``parts``, ``heuristic``,
            ``bound``, ``lowest peak``, ``start``), a solver's name, or the strategy's.
        stage_seconds: wall seconds of the stages ``parts``, ``heuristic``, ``bound``, ``build`` and ``solve`` of
            `Search`, or of the strategy.
        pin_bytes, window: how the program was restricted; window None: not.
        interrupted: stopped by hand (Ctrl-C) with this plan at hand.
    """

    schedule: Schedule
    report: Report
    status: Literal["optimal", "feasible"]
    bound_seconds: float = 0.0
    bound_kind: Literal["unrestricted", "restricted", "none"] = "none"
    gap: float = 1.0
    rows: int = 0
    columns: int = 0
    solver: str = ""
    found_by: str = ""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    pin_bytes: int = 0
    window: int | None = None
    interrupted: bool = False

    def __repr__(self) -> str:
        gap = "no bound" if self.bound_kind == "none" else f"gap {100 * self.gap:.2f} %"
        return (
            f"Plan({self.status}: peak {format_bytes(self.report.peak_bytes)}, step "
            f"{format_seconds(self.report.seconds)}, {gap}, found by {self.found_by})"
        )


@dataclass(frozen=True)
class Smallest:
    """The smallest budget that is known to do.

    Attributes:
        schedule, report: of a schedule with the lowest peak that was found.
        proven_bytes: no schedule at all has a lower peak than this.
    """

    schedule: Schedule
    report: Report
    proven_bytes: int

    @property
    def step(self) -> str:
        """The task that needs the most memory in the schedule."""
        return self.report.peak_step.task
