"""The planner's local search alone: no solver, seconds at most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import SolverError
from ...program import Cost, Program
from ...schedule import Schedule
from ...units import format_bytes
from ..heuristic import find_start


def heuristic(program: Program, costs: Mapping[str, Cost], budget_bytes: int, **options: Any) -> Schedule:
    """What `find_start` finds; options are its own: ``extra_bytes``, ``seed``, ``evaluations``.

    Raises:
        SolverError: it found nothing that fits.
    """
    try:
        schedule = find_start(program, costs, budget_bytes, **options)
    except KeyboardInterrupt:  # at once what needs no annealing, as other solvers end with what they have
        schedule = find_start(program, costs, budget_bytes, **{**options, "evaluations": 0})
        if schedule is None:
            raise
    if schedule is None:
        raise SolverError(
            f"the heuristic found no schedule within {format_bytes(budget_bytes)}; allow more memory or use strategy milp"
        )
    return schedule
