"""Buffers and inputs that a forward changes: their new contents are copied in when the forward ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...errors import CaptureError
from ...ir.program import Call, Ref, Task
from ..captured import Tensor
from .values import Values


def add_update(lowering: Values, target: Any, node: fx.Node) -> None:
    """Add the task that gives a buffer or an input its new contents, which ``node`` makes.

    Raises:
        CaptureError: ``target`` is neither.
    """
    buffer = lowering.value_of(target)
    if buffer is None:
        raise CaptureError(
            f"{type(lowering.flat.model).__name__}.forward changes {target} in place, which is not supported"
        )
    name = lowering.values[buffer].name
    tensor = lowering.tensor(node)
    if tensor.ref == Ref(buffer):
        return  # batch-norm statistics: updated where they live
    lowering.changed.add(buffer)
    if not tensor.calls and lowering.metas[tensor.value] == lowering.metas[buffer]:
        lowering.contents[tensor.value] = buffer
    counted = _counting_tasks(lowering, tensor.value, buffer) if tensor.value in lowering.contents else []
    if counted:  # num_batches_tracked: counted where it lives, as in eager mode
        lowering.tasks = [task for task in lowering.tasks if task not in counted]
        calls = tuple(
            Call("aten.add_.Tensor", (Ref(buffer), *t.calls[0].args[1:]), t.calls[0].kwargs, ()) for t in counted
        )
    else:
        calls = (*tensor.calls, Call("aten.copy_.default", (Ref(buffer), tensor.ref), (), ()))
    lowering.add_effect(f"{name}.update", calls, f"{name}.update")


def _counting_tasks(lowering: Values, value: int, buffer: int) -> list[Task]:
    """The tasks that make ``value`` from ``buffer`` by additions alone; none if another task reads their results."""
    found: list[Task] = []
    while value != buffer:
        readers = [task for task in (*lowering.tasks, *lowering.slots) if value in task.reads and task not in found]
        makers = [task for task in lowering.tasks if task.writes == (value,)]
        call = makers[0].calls[-1] if len(makers) == 1 and not readers else None
        if call is None or call.op != "aten.add.Tensor" or len(makers[0].reads) != 1 or len(makers[0].calls) > 1:
            return []
        found.insert(0, makers[0])
        (value,) = makers[0].reads
    return found


def in_its_place(lowering: Values, result: Tensor) -> Tensor:
    """A result without a gradient; one that is a changed buffer or input, or a view of it, is in its memory."""
    resident = lowering.contents.get(result.value)
    if resident is None:
        return result
    before, now = Ref(result.value), Ref(resident)
    views = (replace(call, args=tuple(now if arg == before else arg for arg in call.args)) for call in result.calls)
    return Tensor(now if result.ref == before else result.ref, resident, tuple(views))


def forbid_strides_over_changed(lowering: Values, graph: fx.Graph) -> None:
    """Forbid ``as_strided`` where the forward changes a tensor whose elements have gaps between them.

    The trace computes the changed tensor anew, without gaps, so ``as_strided`` would see other elements than in eager
    mode.

    Raises:
        CaptureError: the forward does both.
    """
    if not graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        return
    for value in sorted(lowering.changed):
        like = lowering.metas[value].empty()
        if not torch.ops.aten.is_non_overlapping_and_dense(like):
            raise CaptureError(
                f"{type(lowering.flat.model).__name__}.forward changes {lowering.values[value].name} in place, whose "
                "elements do not lie next to each other in memory, and calls as_strided; change a clone"
            )


def forbid_rereading_changed(lowering: Values) -> None:
    """Have no task run again that reads a buffer or an input which the forward changes.

    Raises:
        CaptureError: the backward reads one, as it was.
    """
    for task in (*lowering.again, *lowering.slots):
        if not lowering.changed.isdisjoint(task.reads):
            names = ", ".join(lowering.values[v].name for v in task.reads if v in lowering.changed)
            raise CaptureError(
                f"{type(lowering.flat.model).__name__}.forward changes {names} in place after {task.name} has read it, "
                "and the gradient needs the old contents; change a clone"
            )
    lowering.tasks = [
        replace(task, runs="first") if not lowering.changed.isdisjoint(task.reads) else task
        for task in lowering.tasks
        if task.runs != "again" or lowering.changed.isdisjoint(task.reads)
    ]
