"""The random numbers that a forward draws: whether code of Inductor draws the same."""

from __future__ import annotations

from ...capture.captured import Captured
from ...ir.program import RESIDENT_KINDS, Call, Task
from ...runtime.operators import is_random, overload
from ..branches import written_values


def draws_of(captured: Captured) -> int:
    """How often the forward draws random numbers."""
    return sum(map(_draws, captured.plain.tasks))


def why_other_draws(captured: Captured) -> str:
    """Why a compiler draws other random numbers, as far as the forward tells; "" if it does not tell.

    What nothing uses a compiler leaves out, and later draws depend on it. In another layout numbers have another order.
    """
    program = captured.plain
    needed = {output.value for output in captured.outputs}
    needed.update(v for first, *_ in program.slots for v in first.reads)
    for task in reversed(program.tasks):
        into = {v for v in written_values([task]) if isinstance(v, int)}
        is_update = any(program.values[v].kind in RESIDENT_KINDS for v in into)
        if is_update or not needed.isdisjoint((*task.writes, *into)):
            needed.update(task.reads)
            if _draws(task) and not _in_rows(captured, task):
                return (
                    "it draws random numbers for tensors that do not lie row by row, and Inductor may in another order"
                )
        elif _draws(task):
            return "it draws random numbers that nothing uses, and Inductor would not"
    return ""


def _in_rows(captured: Captured, task: Task) -> bool:
    attention = any("scaled_dot_product" in call.op for call in task.calls)  # which draws by position
    made = (v for v in task.writes if captured.program.values[v].spec != "state")
    return attention or all(captured.metas[v].contiguous for v in made)


def _draws(task: Task) -> bool:
    return task.runs != "again" and any(map(_is_random, task.calls))


def _is_random(call: Call) -> bool:
    return call.op.startswith("aten.") and is_random(overload(call.op), call.args, dict(call.kwargs))
