"""The lowest peak memory of all schedules: a schedule with a low peak, and a lower bound of every schedule's peak.

There are two methods, both starting from a known schedule:

1. For small programs, one integer program whose objective is the peak. `Formulation` with ``above_bytes`` lets every
   memory row exceed the budget by a share of these bytes, the same in all rows; the smallest share is wanted.
2. For programs of any size, bisection: is there a schedule halfway between the known and the proven peak?
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil
from typing import Any

from ...errors import InfeasibleError, ScheduleError, SolverError
from ...ir.schedule import Schedule
from ...ir.simulate import Report
from ...ir.units import format_bytes
from ...solvers.interface import solve
from ..instance import Instance
from ..local_search.searcher import find_start, smallest_known
from ..result import Smallest
from .columns import estimated_columns
from .decode import decode
from .formulation import Formulation

#: Programs with more columns than this are not asked for their lowest peak in one integer program.
MOST_COLUMNS = 3000
#: Wall seconds for that program where no other limit is given; it takes far less than one, mostly to start the solver.
SECONDS = 10.0
#: The least limit otherwise: starting the solver takes seconds where other processes use the processors.
LEAST_SECONDS = 5.0
#: Programs with at most this many (stage, group, value) have all their memory rows from the start.
MOST_ROW_PARTS = 100_000
#: Bisection ends when the known and the proven peak differ by this share of the peak.
CLOSE = 0.01

#: Finds any schedule within so many bytes, in so many seconds; raises `InfeasibleError` or `SolverError`.
FindWithin = Callable[[int, float], tuple[Schedule, Report]]


def smallest_known_budget(report: Report) -> str:
    """The part of an error message that names the lowest peak found, rounded and in bytes."""
    return f"the smallest known budget is {format_bytes(report.peak_bytes)} ({report.peak_bytes} bytes)"


def is_small(instance: Instance) -> bool:
    """Whether one integer program finds the lowest peak in about a second."""
    return estimated_columns(instance) <= MOST_COLUMNS


def find_lowest(
    instance: Instance,
    known: Smallest,
    find: FindWithin | None,
    *,
    enough_bytes: int = 0,
    seconds: float = SECONDS,
) -> Smallest:
    """Lower the peak of a known schedule, down to ``enough_bytes``.

    Args:
        known: the schedule to begin with.
        find: finds a schedule within a budget, for programs that are not small; None: only small programs are asked.
        enough_bytes: a peak of at most this ends the search.
        seconds: wall seconds for all; small programs may have `LEAST_SECONDS`.
    """
    ends = time.monotonic() + seconds
    best = known
    if best.report.peak_bytes > max(best.proven_bytes, enough_bytes) and is_small(instance):
        most = max(seconds, LEAST_SECONDS)
        best = minimise_peak(instance, best, enough_bytes, seconds=most)
    low = best.proven_bytes  # rises where no schedule was found, which is no proof
    while find is not None and (peak := best.report.peak_bytes) > max(low, enough_bytes):
        close = peak - low <= CLOSE * peak
        left = ends - time.monotonic()
        if left < 1 or (low >= enough_bytes if enough_bytes else close):
            break
        target = enough_bytes if close else max(enough_bytes, (low + peak) // 2)
        try:
            schedule, report = find(target, left / 2)
            best = Smallest(schedule, report, best.proven_bytes)
        except InfeasibleError as error:
            low = target
            if error.proven:
                best = Smallest(best.schedule, best.report, max(best.proven_bytes, target + 1))
        except SolverError:
            low = target
    return best


def find_quickly(
    instance: Instance,
    budget_bytes: int,
    *,
    seconds: float = SECONDS,
    enough: Callable[[bool], bool] = lambda fits: False,
    **options: Any,
) -> Smallest | None:
    """A schedule within the budget by local search; where it finds none, one with the lowest peak that is found.

    For small programs an integer program finds the lowest peak to the byte, and thereby whether anything fits.

    Args:
        seconds: wall seconds for that program.
        enough: called with whether a schedule that fits is found; returns whether time is up. Called before every
            annealing.
        options: further ones of `find_start`.
    """

    def start(**more: Any) -> Smallest | None:
        found = find_start(instance, budget_bytes, **{"enough": enough, **options, **more})
        return None if found is None else Smallest(found, instance.simulate(found), instance.floor[0])

    def lowest() -> Smallest | None:
        return smallest_known(instance, enough=lambda: enough(False))

    if instance.floor[0] > budget_bytes:
        return lowest()
    if not is_small(instance) or start(evaluations=0) is not None:
        return start() or lowest()
    known = lowest()  # annealing would try for long here
    if known is None or known.report.peak_bytes <= budget_bytes:
        return start() or known
    most = min(seconds, SECONDS)
    found = minimise_peak(instance, known, budget_bytes, seconds=most)
    return (start(start=found.schedule) if found.report.peak_bytes <= budget_bytes else None) or found


def minimise_peak(
    instance: Instance,
    known: Smallest,
    enough_bytes: int = 0,
    *,
    seconds: float = SECONDS,
) -> Smallest:
    """The lowest peak by one integer program, without restrictions; arguments as for `find_lowest`.

    Given enough time, the peak and the bound meet to the byte, but for solvers' tolerance of about a millionth.
    """
    ends = time.monotonic() + seconds
    low = max(known.proven_bytes, enough_bytes)
    above = known.report.peak_bytes - low
    formulation = Formulation(instance, low, above_bytes=above)
    groups = len(formulation.needs.groups)
    if len(formulation.stages) * groups * len(formulation.tracked) <= MOST_ROW_PARTS:
        formulation.add_run_rows(formulation.stages)  # else those that a solution breaks are added later
    best = known
    while best.report.peak_bytes > max(best.proven_bytes, enough_bytes) and (left := ends - time.monotonic()) > 0:
        start = formulation.point(best.schedule, check=False)
        if start is not None:
            start[formulation.over_column] = (best.report.peak_bytes - low) / above
            start = start if formulation.matrix().violation(start) < 1e-6 else None
        gap = max(1e-6, 0.4 / above)
        found = solve(formulation.matrix(), "HIGHS", time_limit_seconds=left, gap=gap, start=start)
        if found.bound_seconds > max(0.25, 1e-6 * above) and found.status != "infeasible":  # a known one is feasible
            # Rows admit half a byte more than they say, so a peak of n bytes above has a share of n - 1/2 bytes.
            proven = low + ceil(min(found.bound_seconds, above) + 0.5 - max(0.25, 1e-6 * above))
            best = Smallest(best.schedule, best.report, max(best.proven_bytes, min(proven, best.report.peak_bytes)))
        if found.x is None:
            break
        schedule = decode(formulation, found.x)
        try:
            report = instance.simulate(schedule)
        except ScheduleError:  # seconds cost nothing here, so it may make a value twice, which not every task may do
            break
        if report.peak_bytes < best.report.peak_bytes:
            best = Smallest(schedule, report, best.proven_bytes)
        claimed = low + above * float(found.x[formulation.over_column]) + 0.5
        steps = zip(report.steps, schedule.runs(), strict=True)
        over = [(t, formulation.group_of[p]) for step, (t, p) in steps if p >= 0 and step.bytes > claimed]
        if sum(formulation.add_run_row(t, group) for t, group in over) == 0:
            break
    return best
