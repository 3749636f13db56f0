"""The fastest schedules of all blocks under one budget, with a proof how far from the best of all schedules they are.

`blocks.choose` takes the fastest of the menus. `block_bound.step_bound` says what no schedules can beat, and which schedules would be of use
that the menus lack. These join the menus, and the choice is made again, until it is near enough to the bound or nothing is new.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from ..errors import ScheduleError
from ..ir.defaults import SOLVER
from ..ir.schedule import Schedule
from .block_bound import Asked, step_bound
from .block_points import Point, efficient
from .blocks import Choice, Moment, choose

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
        menus: by block, with the schedules that were found on the way.
        bound_seconds: no schedules of the blocks that fit are faster; 0: nothing is known.
    """

    choice: Choice | None
    menus: tuple[tuple[Point, ...], ...]
    bound_seconds: float


def choose_with_proof(
    asked: Asked,
    point: Callable[[int, Schedule], Point],
    *,
    moments: Sequence[Moment] | None = None,
    solver: str = SOLVER,
    choice_seconds: float,
    bound_seconds: float = BOUND_SECONDS,
) -> ProvenChoice:
    """The fastest points with which every moment is within the budget, and a bound for all schedules.

    Args:
        asked: the step. Equal blocks have one relaxation and equal menus.
        point: what a schedule of a block costs, by the block's number. A schedule that it refuses with `ScheduleError` is left out.
        moments: those to choose with, if their bases are larger than those of ``asked``.
        solver: of the choice; bounds are HiGHS's.
        choice_seconds, bound_seconds: wall seconds for the first choice, and for all bounds together.

    Raises:
        SolverError: the solver is missing.
    """
    menus = tuple(map(tuple, asked.menus))
    choice: Choice | None = None
    proven, spent = 0.0, 0.0
    for limit in (choice_seconds, min(choice_seconds, SECOND_SECONDS)):
        started = time.monotonic()
        known = None if choice is None else choice.points
        step = replace(asked, menus=menus)
        found = step_bound(step, known=known, gap=NEAR, time_limit_seconds=max(0.0, bound_seconds - spent))
        spent += time.monotonic() - started
        proven = max(proven, found.seconds)
        longer = longer_menus(step, found.schedules, point)
        if choice is not None and (longer == menus or proven >= (1 - NEAR) * choice.seconds):
            break
        menus = longer
        better = choose(
            menus, moments or asked.moments, asked.budget_bytes, calls=asked.calls, solver=solver,
            time_limit_seconds=limit, enough_seconds=(1 + ENOUGH) * proven if proven < inf else 0.0,
        )  # fmt: skip
        choice = min((one for one in (choice, better) if one is not None), key=lambda one: one.seconds, default=None)
        if choice is None or proven >= (1 - NEAR) * choice.seconds:
            break
    return ProvenChoice(choice, menus, proven if choice is None else min(proven, choice.seconds))


def longer_menus(
    asked: Asked, schedules: Sequence[Sequence[Schedule]], point: Callable[[int, Schedule], Point]
) -> tuple[tuple[Point, ...], ...]:
    """The menus with further schedules, by block, where the program's rules admit them; equal blocks get the same.

    Args:
        asked, point: see `choose_with_proof`.
        schedules: see `Bound.schedules`.
    """
    menus: list[tuple[Point, ...]] = []
    for block, (relaxation, menu) in enumerate(zip(asked.relaxations, asked.menus, strict=True)):
        first = asked.relaxations.index(relaxation)
        if relaxation is not None and first < block and asked.menus[first] == menu:
            menus.append(menus[first])
            continue
        known = {one.schedule for one in menu}
        more = []
        for schedule in schedules[block]:
            if schedule not in known:
                try:
                    more.append(point(block, schedule))
                except ScheduleError:  # such as a task in place before the last reader of what it takes over
                    continue
        longer = efficient([*menu, *more])
        menus.append(longer if {one.numbers for one in longer} != {one.numbers for one in menu} else tuple(menu))
    return tuple(menus)
