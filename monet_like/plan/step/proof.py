"""The fastest schedules of all pieces under one budget, with a proof how far from the best of all schedules they are.

`choice.fastest` takes the fastest of the menus. `prices.step_bound` says what no schedules can beat, and which
schedules would be of use that the menus lack. These join the menus, and the choice is made again, until it is near
enough to the bound or nothing is new.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from ...errors import ScheduleError
from ...ir.defaults import SOLVER
from ...ir.schedule import Schedule
from ...ir.step import Moment, Point, Step
from ..bound.prices import Relaxations, step_bound
from .choice import Choice, fastest
from .menus import efficient
from .streaming import most_freed

#: Relative distance from the bound at which no better bound and no faster choice is looked for.
NEAR = 0.003
#: Relative distance from the bound at which the solver stops choosing.
ENOUGH = 5e-4
#: Wall seconds of a choice at most: it mostly takes less than one. The manual has this number (docs/blocks.md,
#: `monet_like.auto_schedule`).
CHOICE_SECONDS = 20.0
#: Wall seconds for all bounds together: a decoder of 8B parameters takes one to eight. And for a second choice.
BOUND_SECONDS, SECOND_SECONDS = 20.0, 10.0


@dataclass
class Chooser:
    """Chooses points for the pieces of a step, if need be several times, and learns from one choice for the next.

    Attributes:
        step: with bases that no schedules make smaller. Its menus get the schedules that bounds find them to lack.
        relaxations, budget_bytes: see `step_bound`. Equal pieces have one relaxation and equal menus.
        point: what a schedule of a piece costs, by the piece's number. A schedule that it refuses with `ScheduleError`
            is left out.
        solver: of choices; bounds are HiGHS's.
        choice_seconds, bound_seconds: wall seconds that are left for a choice, and for all bounds together.
        seconds_left: wall seconds for all of that: a bound or a choice may take half of them.
        proven_seconds: no schedules that fit are faster; 0: nothing is known.
    """

    step: Step
    relaxations: Relaxations
    budget_bytes: int
    point: Callable[[int, Schedule], Point]
    solver: str = SOLVER
    choice_seconds: float = CHOICE_SECONDS
    bound_seconds: float = BOUND_SECONDS
    seconds_left: Callable[[], float] = lambda: inf
    proven_seconds: float = field(init=False, default=0.0)

    def choose(self) -> Choice:
        """The fastest points with which every moment is within the budget, else those with the lowest peak that were
        found.

        Raises:
            SolverError: the solver is missing.
        """
        self.prove(None)
        choice = self.fastest()
        if self._fits(choice) and self.prove(choice):
            self.choice_seconds = min(self.choice_seconds, SECOND_SECONDS)
            choice = min(choice, self.fastest(), key=lambda one: (not self._fits(one), one.seconds))
        return self.bounded(choice)

    def prove(self, known: Choice | None) -> bool:
        """Raise the bound and lengthen the menus, unless the bound is near the fastest choice that is known to fit.

        Returns:
            Whether a faster choice may be found now.
        """
        if known is not None and self._near(known):
            return False
        started = time.monotonic()
        found = step_bound(
            self.step, self.relaxations, self.budget_bytes + most_freed(self.step),
            known=None if known is None else known.points, gap=NEAR,
            time_limit_seconds=max(0.0, min(self.bound_seconds, self.seconds_left() / 2)),
        )  # fmt: skip
        self.bound_seconds -= time.monotonic() - started
        self.proven_seconds = max(self.proven_seconds, found.seconds)
        before, self.step = self.step, longer_menus(self.step, self.relaxations, found.schedules, self.point)
        return self.step != before and not (known is not None and self._near(known))

    def fastest(self, moments: Sequence[Moment] | None = None) -> Choice:
        """As `choice.fastest`; ``moments``: to choose with, if their bases are larger than the step's."""
        step = self.step if moments is None else replace(self.step, moments=tuple(moments))
        return fastest(
            step, self.budget_bytes, solver=self.solver,
            # that of the lowest peak is a second choice
            time_limit_seconds=min(self.choice_seconds, self.seconds_left() / 4),
            enough_seconds=(1 + ENOUGH) * self.proven_seconds if self.proven_seconds < inf else 0.0,
        )  # fmt: skip

    def bounded(self, choice: Choice) -> Choice:
        """A choice with the bound that is known."""
        return replace(choice, bound_seconds=min(self.proven_seconds, choice.seconds if self._fits(choice) else inf))

    def _fits(self, choice: Choice) -> bool:
        return choice.peak_bytes <= self.budget_bytes

    def _near(self, choice: Choice) -> bool:
        return self.proven_seconds >= (1 - NEAR) * choice.seconds


def longer_menus(
    step: Step,
    relaxations: Relaxations,
    schedules: Sequence[Sequence[Schedule]],
    point: Callable[[int, Schedule], Point],
) -> Step:
    """The step whose menus have further schedules (`Bound.schedules`), where the program's rules admit them.

    Equal pieces get the same. Other arguments are those of `Chooser`.
    """
    menus: list[tuple[Point, ...]] = []
    for place, (relaxation, menu) in enumerate(zip(relaxations, step.menus, strict=True)):
        first = relaxations.index(relaxation)
        if relaxation is not None and first < place and step.menus[first] == menu:
            menus.append(menus[first])
            continue
        known = {one.schedule for one in menu}
        more = []
        for schedule in schedules[place]:
            if schedule not in known:
                try:
                    more.append(point(place, schedule))
                except ScheduleError:  # such as a task in place before the last reader of what it takes over
                    continue
        longer = efficient([*menu, *more])
        menus.append(longer if {one.numbers for one in longer} != {one.numbers for one in menu} else menu)
    return step.with_menus(menus)
