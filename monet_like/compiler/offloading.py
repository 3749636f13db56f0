"""Plans a program, and under a budget that costs time also with copies of activations on the host: the faster plan is
taken. Both are of one capture and one profile; the copies cost what the measured rate of the link says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ..capture.captured import Captured
from ..errors import InfeasibleError, ProfileError, SolverError
from ..ir.mode import OFFLOAD
from ..ir.program import Cost, Program
from ..ir.schedule import Schedule
from ..ir.simulate import Free, Report, simulate
from ..ir.units import MOST_BYTES
from ..plan.instance import Instance
from ..plan.local_search.searcher import find_start, quick_evaluations
from ..plan.offload import PRICES
from ..plan.subprogram import plans_without_refused
from ..profile.rates import limits_like
from ..profile.roofline import copy_seconds
from .pipeline import Compiled, plan_for
from .prepared import Prepared
from .request import Request, readmitted

#: Copies are taken only if the step takes less than this share of the time without them: so far off predictions may be.
WORTH = 0.97

Compile = Callable[..., Compiled]


@dataclass(frozen=True)
class Host:
    """What copies on the host may use.

    Attributes:
        bytes_per_second: of the link to the host, each way.
        room_bytes: of the host's memory.
        pins: whether what a schedule has there finds room in pinned memory; asked for the plan that is taken.
    """

    bytes_per_second: float
    room_bytes: int
    pins: Callable[[Captured, Schedule], bool] = lambda captured, schedule: True


@dataclass(frozen=True)
class Found:
    """A plan.

    Attributes:
        request, compiled: what it is of, with `OFFLOAD` in the mode if it has copies on the host; and the plan.
        only: nothing was found that fits without copies.
    """

    request: Request
    compiled: Compiled
    only: bool = False

    @property
    def ready(self) -> Prepared:
        """The program and its costs."""
        return self.compiled.ready

    @cached_property
    def unlimited(self) -> Report:
        """The simulator's report on a step that may keep everything."""
        return plan_for(self.ready, self.request, MOST_BYTES, strategy="heuristic", evaluations=0).report


def planned(
    request: Request, ready: Prepared, budget_bytes: int, host: Callable[[], Host | None] | None, compiled: Compile
) -> Found:
    """Plan within the budget; with copies on the host if the step is at least 3 % faster so, or if nothing else fits.

    Args:
        host: called if copies may gain something; returns None where there are to be none. None: there are none.
        compiled: `compile_prepared` for this budget, as a function of a request, its program, and options.

    Raises:
        InfeasibleError, SolverError: nothing fits; names the smaller of the budgets that are enough.
    """
    if host is None:
        return Found(request, compiled(request, ready))
    failure: InfeasibleError | SolverError | None = None
    best: Found | None = None
    try:
        best = Found(request, compiled(request, ready))
    except (InfeasibleError, SolverError) as error:
        failure = error
    may = _may_fit(ready, budget_bytes, failure) if best is None else _may_gain(best)
    there = host() if may else None
    if there is not None and (best is None or _may_carry(best, budget_bytes, there)):
        try:
            found = _planned_with_copies(request, best.ready if best else ready, there, compiled, best)
        except (InfeasibleError, SolverError) as error:
            if failure is not None and _names_less(error, failure, there):
                failure = error
        except ProfileError:  # a workspace that matters to this plan alone could not be measured
            pass
        else:
            best = found or best
    if best is not None:
        return best
    assert failure is not None
    raise failure


def _planned_with_copies(
    request: Request, ready: Prepared, host: Host, compiled: Compile, without: Found | None
) -> Found | None:
    """The plan with copies, if it is worth having and its memory on the host can be pinned."""
    other, program = with_copies(request, ready, host)
    # The copies' times are no measurements that a later plan may reuse.
    options = {"save_profile": None, "prices": PRICES[1:], "host_bytes": host.room_bytes}
    found = Found(other, compiled(other, program, **options), only=without is None)
    report = found.compiled.plan.report
    is_worth = without is None or (report.seconds < WORTH * _seconds(without) and report.host_bytes > 0)
    if not is_worth:
        return None
    return found if host.pins(found.ready.captured, found.compiled.plan.schedule) else None


def with_copies(request: Request, ready: Prepared, host: Host) -> tuple[Request, Prepared]:
    """The request with `OFFLOAD` in its mode, and its program, of the same capture and with the same costs."""
    other = offloading(request)
    captured = readmitted(other, ready.captured)
    launch = limits_like(captured.device).launch_seconds
    copies = {
        task.cost: Cost(copy_seconds(captured, task, host.bytes_per_second, launch), 0)
        for task in captured.program.tasks
        if task.copies and task.cost
    }
    costs = {**ready.costs, **copies}
    note = f"{ready.profile.note}; copies at the {host.bytes_per_second / 1e9:.3g} GB/s of a large one"
    profile = replace(ready.profile, costs=costs, note=note)
    return other, replace(ready, captured=captured, costs=costs, profile=profile)


def offloading(request: Request) -> Request:
    """The request with the word `OFFLOAD` in its mode."""
    return replace(request, mode=f"{request.mode}_{OFFLOAD}")


def _seconds(found: Found) -> float:
    return found.compiled.plan.report.seconds


def _may_fit(ready: Prepared, budget_bytes: int, failure: InfeasibleError | SolverError | None) -> bool:
    """Whether a search has ended without a plan that fits, though every task does with what it reads."""
    if not isinstance(failure, InfeasibleError) and (failure is None or failure.smallest_bytes is None):
        return False  # a solver is missing, say
    least, _ = Instance(ready.captured.program, ready.costs, ready.extra_bytes).floor
    return least <= budget_bytes


def _may_gain(best: Found) -> bool:
    """Whether the budget costs time: a step that may keep everything is faster."""
    if best.compiled.plan.interrupted:
        return False
    return min(best.unlimited.seconds, best.ready.plain.seconds) < WORTH * _seconds(best)


def _may_carry(best: Found, budget_bytes: int, host: Host) -> bool:
    """Whether a step would be faster that has as much more memory as the link can carry out and back during it.

    The plan for that memory is sought from the one at hand on, in about a second.
    """
    carried = min(host.bytes_per_second * WORTH * _seconds(best) / 2, host.room_bytes)
    budget = min(budget_bytes + int(carried), MOST_BYTES)
    if best.unlimited.peak_bytes <= budget:
        return True
    program, costs, plan = best.ready.captured.program, best.ready.costs, best.compiled.plan
    extra = plan.report.peak_bytes - simulate(program, plan.schedule, costs).peak_bytes
    found = _search(program, costs, budget, extra_bytes=extra, start=plan.schedule)
    if found is None:  # the search has lost what is there
        return True
    return simulate(program, found, costs).seconds < WORTH * _seconds(best)


@plans_without_refused
def _search(
    program: Program, costs: Mapping[str, Cost], budget_bytes: int, *, extra_bytes: int, start: Schedule
) -> Schedule | None:
    instance = Instance(program, costs, extra_bytes)
    return find_start(instance, budget_bytes, start=start, evaluations=quick_evaluations())


def _names_less(error: InfeasibleError | SolverError, other: InfeasibleError | SolverError, host: Host) -> bool:
    """Whether an error has a plan for a smaller budget, with room on the host."""
    if error.smallest is None or error.smallest_bytes is None or error.found_for is None:
        return False
    report = simulate(error.found_for.captured.program, error.smallest, Free())
    return report.host_bytes <= host.room_bytes and error.smallest_bytes < (other.smallest_bytes or MOST_BYTES)
