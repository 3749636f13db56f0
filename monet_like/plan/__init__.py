"""Planning: from a program, its costs and a memory budget to the fastest schedule that fits.

Importing this module imports neither a solver nor numpy; the ``milp`` strategy does when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import SolverError, UsageError
from ..ir.defaults import SOLVER
from ..ir.program import Cost, Program
from ..ir.units import MOST_BYTES, MOST_SECONDS, format_bytes
from .baseline import store_all
from .result import Plan
from .strategies import STRATEGIES, check_strategy
from .subprogram import plans_without_refused

__all__ = ["STRATEGIES", "Plan", "plan", "store_all"]


@plans_without_refused
def plan(
    program: Program,
    costs: Mapping[str, Cost],
    budget_bytes: int,
    *,
    solver: str = SOLVER,
    time_limit_seconds: float = 300.0,
    gap: float = 0.01,
    threads: int = 1,
    strategy: str = "milp",
    extra_bytes: int = 0,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Plan:
    """Find a schedule whose simulated peak memory is within ``budget_bytes``.

    Args:
        program: the training step, with the variants that may be used.
        costs: seconds and workspace bytes per task key.
        budget_bytes: the limit on everything the step allocates. A plan that does not fit is refused, whatever the
            strategy.
        solver: a cvxpy solver's name, in any case of letters.
        time_limit_seconds: wall seconds for the whole search. Where nothing fits by then, the search goes on for up to
            as many again, or five for small programs. An annealing that has begun is not cut short.
        gap: relative distance from the bound at which the search stops.
        threads: of the solver.
        strategy: a name in `STRATEGIES`.
        extra_bytes: resident memory beyond the program's, such as optimizer state.
        progress: called with lines for people: who is at work, incumbent, bound, gap, seconds.
        options: further fields of `Search`, for ``milp``.

    Raises:
        UsageError: unknown strategy or solver, or a number out of range.
        InfeasibleError: no schedule fits; says what would do.
        SolverError: the solver is not installed, failed, or found nothing in time.
        ProfileError: ``costs`` lacks a task.
    """
    check_strategy(strategy)
    if not (0 < budget_bytes <= MOST_BYTES and 0 < time_limit_seconds <= MOST_SECONDS and 0 <= gap < 1):
        raise UsageError(
            f"budget_bytes ({budget_bytes:.4g}) and time_limit_seconds ({time_limit_seconds}) must be more than 0 and "
            f"at most {MOST_BYTES:.4g} and {MOST_SECONDS:g}, and gap ({gap}) at least 0 and less than 1"
        )
    found = STRATEGIES[strategy](
        program, costs, budget_bytes, solver=solver, time_limit_seconds=time_limit_seconds, gap=gap,
        threads=threads, extra_bytes=extra_bytes, progress=progress, **options,
    )  # fmt: skip
    if found.report.peak_bytes > budget_bytes:
        error = SolverError(
            f"strategy {strategy} needs {format_bytes(found.report.peak_bytes)}, more than "
            f"{format_bytes(budget_bytes)}, and finds nothing smaller; use strategy milp",
            found.report.peak_bytes,
        )
        error.smallest = found.schedule
        raise error
    return found
