"""An optimizer that steps in the backward: gradients of parameters live until they have been handed over, not to the
end.

A hook on each parameter steps and frees the gradient (``register_post_accumulate_grad_hook``). It may change the
parameter, so a gradient is handed over once nothing reads it or its parameter any more. In the program that is a slot
which reads the gradient and makes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ir.program import Call, Ref, Task
from ..captured import Tensor
from .values import Values

#: Gradients are handed over in about this many groups of equal size, since each group ends a segment of the backward.
GROUPS = 64


def with_releases(lowering: Values, slots: Sequence[Task], gradients: Sequence[tuple[int, Tensor]]) -> list[Task]:
    """``slots`` with slots that read the gradients of parameters where they are handed over.

    Args:
        gradients: index of the parameter and gradient of each.
    """
    last = _last_uses(lowering, slots)
    ready: dict[int, dict[int, None]] = {}
    for index, tensor in gradients:
        place = max(last[tensor.value], last.get(lowering.parameters[index][1], 0))
        ready.setdefault(place, {})[tensor.value] = None
    sizes = {place: sum(lowering.metas[v].storage_bytes for v in values) for place, values in ready.items()}
    enough, size = sum(sizes.values()) / GROUPS, 0
    waiting: list[int] = []
    found: list[Task] = []
    for place, slot in enumerate(slots):
        found.append(slot)
        waiting += ready.get(place, ())
        size += sizes.get(place, 0)
        if waiting and (size >= enough or place == len(slots) - 1):
            found.append(_release(lowering, len(found), waiting))
            waiting, size = [], 0
    return found


def _last_uses(lowering: Values, slots: Sequence[Task]) -> dict[int, int]:
    """The last slot that reads or writes each value, or before which recomputation may read it."""
    last: dict[int, int] = {}
    for place, slot in enumerate(slots):
        last.update(dict.fromkeys((*slot.reads, *slot.writes), place))
    for task in reversed((*lowering.tasks, *lowering.again)):
        until = max((last.get(value, -1) for value in task.writes), default=-1)
        last.update((value, until) for value in task.reads if last.get(value, -1) < until)
    return last


def _release(lowering: Values, number: int, gradients: Sequence[int]) -> Task:
    calls = [
        Call("aten.detach.default", (Ref(value),), (), (Ref(f"released_{k}"),)) for k, value in enumerate(gradients)
    ]
    return lowering.make_task(f"release_{number}", calls, ())
