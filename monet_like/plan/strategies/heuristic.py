"""The planner's local search: seconds at most. Only where it finds nothing, small programs are asked for their lowest peak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import InfeasibleError, SolverError
from ...ir.program import Cost, Program
from ...ir.schedule import Schedule
from ...units import format_bytes
from ..ilp.lowest_peak import find_quickly
from ..local_search.searcher import find_start


def heuristic(program: Program, costs: Mapping[str, Cost], budget_bytes: int, **options: Any) -> Schedule:
    """What `find_quickly` finds; options are its own: ``extra_bytes``, ``seed``, ``evaluations``.

    Raises:
        InfeasibleError: nothing fits.
        SolverError: it found nothing that fits.
    """
    try:
        found = find_quickly(program, costs, budget_bytes, **options)
    except KeyboardInterrupt:  # at once what needs no annealing, as other solvers end with what they have
        schedule = find_start(program, costs, budget_bytes, **{**options, "evaluations": 0})
        if schedule is None:
            raise
        return schedule
    if found is not None and found.report.peak_bytes <= budget_bytes:
        return found.schedule
    budget, known = format_bytes(budget_bytes), ""
    if found is not None:
        known = f"; {format_bytes(found.report.peak_bytes)} ({found.report.peak_bytes} bytes) is known to do"
        if found.proven_bytes > budget_bytes:
            raise InfeasibleError(
                f"no schedule fits into {budget} (proven){known}; give more memory or a smaller batch",
                found.report.peak_bytes,
                found.report.peak_step.task,
                proven=True,
            )
    raise SolverError(f"the heuristic found no schedule within {budget}{known}; allow more memory or use strategy milp")
