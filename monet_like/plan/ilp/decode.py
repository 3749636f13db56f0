"""Translates solutions of the integer program to schedules, and finds the columns that could repair one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...ir.schedule import Schedule, prune
from .formulation import Formulation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def decode(formulation: Formulation, x: NDArray[Any]) -> Schedule:
    """The schedule of a 0/1 point, without useless runs."""
    runs: dict[int, list[int]] = {t: [] for t in range(len(formulation.program.slots) + 1)}
    for (p, t), expr in formulation.e.items():
        if expr.value(x) > 0.5:
            runs[t].append(p)
    again = tuple(tuple(sorted(runs[t])) for t in range(1, len(formulation.program.slots) + 1))
    return prune(formulation.program, Schedule(tuple(sorted(runs[0])), again, formulation.chosen(x)))


def neighbourhood(formulation: Formulation, x: NDArray[Any], stages: Iterable[int], reach: int) -> NDArray[np.bool_]:
    """Columns that could repair a memory row which a solution breaks in one of ``stages``; they are left free.

    These are all ways, the reruns at most ``reach`` slots before a broken stage or just after it, and all columns
    about the values carried into or out of one. The other integral columns may stay as they are in ``x``.
    """
    import numpy as np

    free = ~formulation.matrix().integral
    near = {t for t in formulation.stages if any(broken - reach <= t <= broken + 3 for broken in stages)}
    carried = {v for (v, t), expr in formulation.K.items() if t in near and expr.value(x) > 0.5}
    loose = [expr for (_, t), expr in formulation.e.items() if t in near]
    loose += [expr for (v, t), expr in formulation.K.items() if v in carried or t in near]
    loose += [w for ways in formulation.w.values() for w in ways.values()]
    for v in carried:
        loose += [formulation.e[p, 0] for p in formulation.program.producers[v] if (p, 0) in formulation.e]
    free[[column for expr in loose for column, _ in expr.terms]] = True
    return np.asarray(free, dtype=bool)
