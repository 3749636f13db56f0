"""Translates solutions of the integer program to schedules, and schedules to points that a solver can start from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...ir.schedule import Schedule, prune
from ...solvers.matrix import Expr
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
    ways = [max(w, key=lambda k, w=w: w[k].value(x)) for _, w in sorted(formulation.w.items())]  # type: ignore[misc]
    again = tuple(tuple(sorted(runs[t])) for t in range(1, len(formulation.program.slots) + 1))
    return prune(formulation.program, Schedule(tuple(sorted(runs[0])), again, tuple(ways)))


def encode(formulation: Formulation, schedule: Schedule, *, check: bool = True) -> NDArray[Any] | None:
    """The point of a schedule, to start a solver from; None if the restrictions exclude it.

    Without ``check`` the point may break memory rows.
    """
    import numpy as np

    schedule = prune(formulation.program, schedule)
    x = np.zeros(len(formulation.builder.cost))

    def choose(expr: Expr | None) -> bool:
        if expr is None or expr.is_zero:
            return False
        x[[column for column, _ in expr.terms]] = 1.0
        return True

    stages = {0: schedule.forward} | {t + 1: again for t, again in enumerate(schedule.again)}
    runs = [(p, t) for t, tasks in stages.items() for p in tasks]
    chosen = [choose(formulation.e.get(run)) for run in runs]
    chosen += [choose(formulation.w[slot + 1].get(way)) for slot, way in enumerate(schedule.ways)]
    if not all(chosen):
        return None
    for v, t in _carried(formulation, schedule):
        if v in formulation.span and v not in formulation.outputs and not choose(formulation.K.get((v, t))):
            return None
    for column, parts in formulation.builder.follows:
        x[column] = min(1.0, max(0.0, *(part.value(x) for part in parts)))
    return x if not check or formulation.matrix().violation(x) < 1e-6 else None


def _carried(formulation: Formulation, schedule: Schedule) -> list[tuple[int, int]]:
    """(v, t) for every value v that is carried out of stage t: read after it before it is made again."""
    found: list[tuple[int, int]] = []
    wanted: set[int] = set()
    for t in reversed(formulation.stages):
        found += [(v, t) for v in wanted]
        tasks = formulation.program.tasks
        runs = schedule.again[t - 1] if t else schedule.forward
        made = {v for p in runs for v in tasks[p].writes}
        wanted |= {v for p in runs for v in formulation.program.forward_reads(tasks[p])}
        if t:
            wanted |= set(formulation.program.forward_reads(formulation.program.slots[t - 1][schedule.ways[t - 1]]))
        wanted -= made
    return found


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
