"""The fastest schedules of all blocks under one budget, with a proof how far from the best of all schedules they are.

`choice.choose` takes the fastest of the menus. `prices.step_bound` says what no schedules can beat, and which schedules would be of use
that the menus lack. These join the menus, and the choice is made again, until it is near enough to the bound or nothing is new.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from ...errors import ScheduleError
from ...ir.defaults import SOLVER
from ...ir.schedule import Schedule
from ...ir.step import Point, Step
from ..bound.prices import Relaxations, step_bound
from .choice import Choice, choose
from .menus import efficient

#: Relative distance from the bound at which no better bound and no faster choice is looked for.
NEAR = 0.003
#: Relative distance from the bound at which the solver stops choosing.
ENOUGH = 5e-4
#: Wall seconds for all bounds together: a decoder of 8B parameters takes one to eight. And for the second choice.
BOUND_SECONDS, SECOND_SECONDS = 20.0, 10.0


@dataclass(frozen=True)
class ProvenChoice:
    """A choice among menus, and a bound for all schedules.

    Attributes:
        choice: None: no schedules that fit were found.
        step: with the schedules in its menus that were found on the way.
        bound_seconds: no schedules of the pieces that fit are faster; 0: nothing is known.
    """

    choice: Choice | None
    step: Step
    bound_seconds: float


def choose_with_proof(
    step: Step,
    relaxations: Relaxations,
    budget_bytes: int,
    point: Callable[[int, Schedule], Point],
    *,
    solver: str = SOLVER,
    choice_seconds: float,
    bound_seconds: float = BOUND_SECONDS,
) -> ProvenChoice:
    """The fastest points with which every moment is within the budget, and a bound for all schedules.

    Args:
        step, relaxations, budget_bytes: see `step_bound`. Equal pieces have one relaxation and equal menus.
        point: what a schedule of a piece costs, by the piece's number. A schedule that it refuses with `ScheduleError` is left out.
        solver: of the choice; bounds are HiGHS's.
        choice_seconds, bound_seconds: wall seconds for the first choice, and for all bounds together.

    Raises:
        SolverError: the solver is missing.
    """
    choice: Choice | None = None
    proven, spent = 0.0, 0.0
    for limit in (choice_seconds, min(choice_seconds, SECOND_SECONDS)):
        started = time.monotonic()
        known = None if choice is None else choice.points
        left = max(0.0, bound_seconds - spent)
        found = step_bound(step, relaxations, budget_bytes, known=known, gap=NEAR, time_limit_seconds=left)
        spent += time.monotonic() - started
        proven = max(proven, found.seconds)
        longer = longer_menus(step, relaxations, found.schedules, point)
        if choice is not None and (longer == step or proven >= (1 - NEAR) * choice.seconds):
            break
        step = longer
        better = choose(
            step, budget_bytes, solver=solver, time_limit_seconds=limit,
            enough_seconds=(1 + ENOUGH) * proven if proven < inf else 0.0,
        )  # fmt: skip
        choice = min((one for one in (choice, better) if one is not None), key=lambda one: one.seconds, default=None)
        if choice is None or proven >= (1 - NEAR) * choice.seconds:
            break
    return ProvenChoice(choice, step, proven if choice is None else min(proven, choice.seconds))


def longer_menus(
    step: Step,
    relaxations: Relaxations,
    schedules: Sequence[Sequence[Schedule]],
    point: Callable[[int, Schedule], Point],
) -> Step:
    """The step whose menus have further schedules, where the program's rules admit them; equal pieces get the same.

    Args:
        step, relaxations, point: see `choose_with_proof`.
        schedules: see `Bound.schedules`.
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
