"""Questions about budgets: the smallest that does (`smallest_budget`, `fits`), and step time against memory
(`pareto`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import InfeasibleError, SolverError
from ..ir.program import Cost, Program
from ..ir.schedule import Schedule
from . import plan
from .ilp.lowest_peak import find_lowest, find_quickly
from .ilp.search import find_within
from .instance import Instance
from .local_search.searcher import smallest_known
from .result import Plan, Smallest
from .subprogram import plans_without_overlap, plans_without_refused

#: Sizes of a step that are tried at most: batches, lengths.
MOST_SIZE = 1 << 24


def largest_size(fits: Callable[[int], bool], begin: int = 1, *, powers: bool = False) -> int:
    """The largest size from 1 on for which ``fits`` holds, where it holds for all smaller ones; 0: for none.

    Args:
        begin: the size that is tried first.
        powers: only 1, 2, 4 and so on are tried, for searches in which each size is planned anew.
    """
    begin = 1 if powers else begin
    low, high = (begin, 2 * begin) if fits(begin) else (0, begin)
    while low and high <= MOST_SIZE and fits(high):
        low, high = high, 2 * high
    while high - low > 1 and not powers:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@plans_without_refused
@plans_without_overlap
def lowest_quickly(program: Program, costs: Mapping[str, Cost], *, extra_bytes: int = 0) -> Smallest | None:
    """The schedule with the lowest peak that a plan falls back to where nothing fits; so a plan within it is found."""
    return smallest_known(Instance(program, costs, extra_bytes))


@plans_without_refused
@plans_without_overlap
def smallest_budget(
    program: Program,
    costs: Mapping[str, Cost],
    *,
    extra_bytes: int = 0,
    solver: str = "HIGHS",
    time_limit_seconds: float = 60.0,
) -> Smallest:
    """The lowest peak memory of all schedules: a schedule with a low peak, and a lower bound of all peaks.

    The local search lowers the peak as far as it can. From there an integer program gives the lowest peak of a small
    program to the byte. For a larger program it is asked for a schedule halfway between the lowest known peak and the
    bound, again and again, until the two meet or the time is over. `plan` does the same where nothing else fits, so it
    finds this schedule.

    Raises:
        SolverError: not even one schedule was found.
    """
    started = time.monotonic()
    known = lowest_quickly(program, costs, extra_bytes=extra_bytes)
    if known is None:
        raise SolverError("the search found no schedule of this program at all")
    instance = Instance(program, costs, extra_bytes)
    return find_lowest(
        instance,
        known,
        lambda budget, seconds: find_within(instance, budget, seconds, solver),
        seconds=time_limit_seconds - (time.monotonic() - started),
    )


@dataclass(frozen=True)
class FrontPoint:
    """One point of the front of step time against memory: a budget and its plan; None: no plan was found."""

    budget_bytes: int
    plan: Plan | None


def pareto(
    program: Program,
    costs: Mapping[str, Cost],
    budgets_bytes: Sequence[int],
    *,
    extra_bytes: int = 0,
    solver: str = "HIGHS",
    time_limit_seconds: float = 60.0,
    gap: float = 0.01,
    strategy: str = "milp",
    start: Schedule | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[FrontPoint, ...]:
    """Plans for several budgets, the smallest first; the search for each starts from the plan before.

    Args:
        strategy: ``milp`` or ``heuristic``.
        start: a schedule for the first budget to start from, with ``milp``.
        time_limit_seconds: wall seconds for each budget.
        progress: called with how many budgets are done and how many there are.
    """
    points: list[FrontPoint] = []
    last: Plan | None = None
    for done, budget in enumerate(sorted(budgets_bytes)):
        if progress is not None:
            progress(done, len(budgets_bytes))
        known = last.schedule if last is not None else start
        begin: dict[str, Any] = {"start": known} if known is not None and strategy == "milp" else {}
        try:
            found: Plan | None = plan(
                program, costs, budget, solver=solver, time_limit_seconds=time_limit_seconds, gap=gap,
                strategy=strategy, extra_bytes=extra_bytes, **begin,
            )  # fmt: skip
        except (InfeasibleError, SolverError):
            found = None
        if found is not None:
            if last is not None and last.report.seconds < found.report.seconds:
                found = replace(found, schedule=last.schedule, report=last.report)
            last = found
        points.append(FrontPoint(budget, found))
    return tuple(points)


def seconds_per_gigabyte(points: Sequence[FrontPoint]) -> tuple[float | None, ...]:
    """For every point, the seconds of a step that each further GB (2**30 bytes) up to the next point saves."""
    found: list[float | None] = []
    for one, other in zip(points, points[1:], strict=False):
        if one.plan is None or other.plan is None:
            found.append(None)
            continue
        gigabytes = (other.budget_bytes - one.budget_bytes) / 2**30
        found.append((one.plan.report.seconds - other.plan.report.seconds) / gigabytes)
    return (*found, None)


def percent_per_tenth(points: Sequence[FrontPoint]) -> tuple[float | None, ...]:
    """For every point, by how many percent the step gets shorter with 10 % more memory.

    Between two budgets the front is taken as a straight line, beyond the largest as level. None for the largest, and
    without a plan.
    """
    import numpy

    known = [(point.budget_bytes, point.plan.report.seconds) for point in points if point.plan is not None]
    budgets, seconds = [budget for budget, _ in known], [step for _, step in known]
    found: list[float | None] = []
    for point in points:
        here = point.plan.report.seconds if point.plan is not None else 0.0
        if not here or point.budget_bytes == known[-1][0]:
            found.append(None)
            continue
        there = numpy.interp(1.1 * point.budget_bytes, budgets, seconds)
        found.append(float(100 * (1 - there / here)))
    return tuple(found)


@plans_without_refused
@plans_without_overlap
def fits(program: Program, costs: Mapping[str, Cost], budget_bytes: int, *, extra_bytes: int = 0) -> Schedule | None:
    """A schedule within the budget, however slow its step, if one is found in seconds; see `find_quickly`."""
    found = find_quickly(Instance(program, costs, extra_bytes), budget_bytes)
    return found.schedule if found is not None and found.report.peak_bytes <= budget_bytes else None
