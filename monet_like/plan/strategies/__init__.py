"""Planning strategies by name: each turns a program, its costs and a memory budget into a `Plan`.

``milp``, ``heuristic``, ``checkmate``, ``chen_greedy``, ``griewank`` and ``torch_budget`` plan for the budget. The
others make one schedule, whatever the budget. `register_strategy` adds strategies from outside the package. A strategy
uses only what `Program` says; `simulate` judges its schedule.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from ...errors import InfeasibleError, SolverError, UsageError
from ...ir.program import Cost, Program
from ...ir.schedule import Schedule
from ...ir.simulate import simulate
from ...ir.units import format_bytes
from ..baseline import store_all
from ..ilp.lowest_peak import find_quickly, smallest_known_budget
from ..ilp.search import Search
from ..instance import Instance
from ..local_search.searcher import find_start
from ..offload import plans_with_copies
from ..result import Plan
from ..subprogram import plain_operators
from .chen import chen_greedy, chen_sqrt
from .griewank import griewank
from .ogc import ogc
from .torch_budget import torch_budget

#: Settings of `monet_like.plan.plan` that a strategy may have no use for.
_SETTINGS = frozenset({"solver", "time_limit_seconds", "gap", "threads", "progress"})


class Strategy(Protocol):
    """The signature of all strategies: that of `monet_like.plan.plan` without ``strategy``.

    A strategy ignores the settings that it has no use for. Its plan may exceed the budget: `monet_like.plan.plan`
    refuses it then.
    """

    def __call__(
        self,
        program: Program,
        costs: Mapping[str, Cost],
        budget_bytes: int,
        *,
        solver: str = ...,
        time_limit_seconds: float = ...,
        gap: float = ...,
        threads: int = ...,
        extra_bytes: int = ...,
        progress: Callable[[str], None] | None = ...,
        **options: Any,
    ) -> Plan: ...


def from_schedule(name: str, make: Callable[..., Any]) -> Strategy:
    """The strategy of a function that returns a schedule or a plan.

    Args:
        name: of the strategy, for `Plan.found_by`.
        make: called as ``make(program, costs, budget_bytes, extra_bytes=..., **options)``, with those settings of
            `Strategy` that it names; with ``**options`` it gets all.

    Raises:
        UsageError: it does not take these arguments.
    """
    parameters = inspect.signature(make).parameters
    try:
        inspect.signature(make).bind(None, None, 0, extra_bytes=0)
    except TypeError as error:
        raise UsageError(
            f"strategy {name} must be a function (program, costs, budget_bytes, *, extra_bytes=0): {error}"
        ) from None
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def strategy(
        program: Program, costs: Mapping[str, Cost], budget_bytes: int, *, extra_bytes: int = 0, **settings: Any
    ) -> Plan:
        started = time.monotonic()
        if not takes_all:
            settings = {key: value for key, value in settings.items() if key in parameters or key not in _SETTINGS}
        found = make(program, costs, budget_bytes, extra_bytes=extra_bytes, **settings)
        if isinstance(found, Plan):
            return found
        if not isinstance(found, Schedule):
            raise UsageError(f"strategy {name} returned {type(found).__name__}, not a Schedule or a Plan")
        return _judged(name, program, costs, found, extra_bytes, time.monotonic() - started)

    return strategy


def _judged(
    name: str, program: Program, costs: Mapping[str, Cost], schedule: Schedule, extra_bytes: int, seconds: float
) -> Plan:
    """The plan of a schedule that was found in so many wall seconds."""
    report = simulate(program, schedule, costs, extra_bytes=extra_bytes)
    return Plan(schedule, report, "feasible", found_by=name, stage_seconds={name: seconds})


@plans_with_copies
def milp(program: Program, costs: Mapping[str, Cost], budget_bytes: int, **settings: Any) -> Plan:
    """The integer program: the fastest schedule within the budget; settings are fields of `Search`."""
    return Search(program, costs, budget_bytes, **settings).run()


def checkmate(
    program: Program, costs: Mapping[str, Cost], budget_bytes: int, *, extra_bytes: int = 0, **settings: Any
) -> Plan:
    """Checkmate (Jain et al. 2020): optimal rematerialisation of plain PyTorch's operators; settings as for `milp`.

    Its decisions, run again (R) and keep (S), are those of `Formulation` on a program without variants. The stages of
    the forward are not unrolled: nothing is ever worth running again there.
    """
    started = time.monotonic()
    plain = plain_operators(program)
    with plain.planning():
        found = Search(plain.program, costs, budget_bytes, extra_bytes=extra_bytes, **settings).run()
    seconds = time.monotonic() - started
    return _judged("checkmate", program, costs, plain.whole(found.schedule), extra_bytes, seconds)


def heuristic(
    program: Program, costs: Mapping[str, Cost], budget_bytes: int, *, extra_bytes: int = 0, **options: Any
) -> Schedule:
    """The schedule of the local search, in seconds; options are those of `find_quickly`.

    Only where it finds none, small programs are solved for their lowest peak.

    Raises:
        InfeasibleError: nothing fits.
        SolverError: it found nothing that fits.
    """
    instance = Instance(program, costs, extra_bytes)
    options = {name: value for name, value in options.items() if name not in _SETTINGS}
    try:
        found = find_quickly(instance, budget_bytes, **options)
    except KeyboardInterrupt:  # end at once with the start that needs no annealing, as solvers end with their incumbent
        kept = {name: value for name, value in options.items() if name not in ("seconds", "enough")}
        schedule = find_start(instance, budget_bytes, **{**kept, "evaluations": 0})
        if schedule is None:
            raise
        return schedule
    if found is not None and found.report.peak_bytes <= budget_bytes:
        return found.schedule
    budget = format_bytes(budget_bytes)
    if found is None:
        raise SolverError(f"the heuristic found no schedule within {budget}; allow more memory or use strategy milp")
    known, report = smallest_known_budget(found.report), found.report
    error: InfeasibleError | SolverError = SolverError(
        f"the heuristic found no schedule within {budget}; {known}; allow more memory or use strategy milp",
        report.peak_bytes,
    )
    if found.proven_bytes > budget_bytes:
        error = InfeasibleError(
            f"no schedule fits into {budget} (proven); {known}; give more memory or a smaller batch",
            report.peak_bytes,
            report.peak_step.task,
            proven=True,
        )
    error.smallest = found.schedule
    raise error


STRATEGIES: dict[str, Strategy] = {
    "milp": milp,
    "heuristic": plans_with_copies(from_schedule("heuristic", heuristic)),
    "store_all": from_schedule("store_all", lambda program, costs, budget_bytes, **_: store_all(program)),
    "chen_sqrt": from_schedule("chen_sqrt", chen_sqrt),
    "chen_greedy": from_schedule("chen_greedy", chen_greedy),
    "griewank": from_schedule("griewank", griewank),
    "checkmate": checkmate,
    "ogc": from_schedule("ogc", ogc),
    "torch_budget": from_schedule("torch_budget", torch_budget),
}


Function = TypeVar("Function", bound=Callable[..., Any])
#: The package's own strategies.
_BUILT_IN = frozenset(STRATEGIES)


def register_strategy(make: Function, *, name: str = "") -> Function:
    """Add a strategy, so that `plan`, ``--strategy`` and ``monet-like compare`` know it; also a decorator.

    The function is called as ``make(program, costs, budget_bytes, extra_bytes=...)``, with those of ``solver``,
    ``time_limit_seconds``, ``gap``, ``threads`` and ``progress`` that it has, and further options of `plan`. It returns
    a `Schedule`, which the simulator judges, or a `Plan`.

    Args:
        make: the function, which is returned.
        name: of the strategy; default: the function's.

    Raises:
        UsageError: the name is taken, or the function does not take these arguments.
    """
    chosen = name or make.__name__
    if chosen in STRATEGIES:
        advice = "" if chosen in _BUILT_IN else f", or unregister_strategy({chosen!r}) first"
        raise UsageError(f"there is a strategy {chosen!r} already; give another name{advice}")
    STRATEGIES[chosen] = from_schedule(chosen, make)
    return make


def unregister_strategy(name: str) -> None:
    """Take a registered strategy out again.

    Raises:
        UsageError: no strategy of this name has been registered.
    """
    if name in _BUILT_IN or name not in STRATEGIES:
        registered = ", ".join(sorted(STRATEGIES.keys() - _BUILT_IN)) or "none"
        raise UsageError(f"no strategy {name!r} has been registered; registered: {registered}")
    del STRATEGIES[name]


def check_strategy(name: str) -> None:
    """Refuse a name that is not a strategy's.

    Raises:
        UsageError: lists the names.
    """
    if name not in STRATEGIES:
        raise UsageError(f"unknown strategy {name!r}; there are: {', '.join(sorted(STRATEGIES))}")
