"""Which operators a model calls in place: its trace has none, but plain PyTorch's step writes one tensor fewer for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

import torch
import torch.fx.traceback

from ..ir.program import Call, Program, Ref, Task, refs

if TYPE_CHECKING:
    from .captured import TensorMeta


def in_place_form(
    program: Program, task: Task, metas: Sequence[TensorMeta], saved: Set[int], readers: Mapping[int, int]
) -> tuple[tuple[Call, ...], int | None] | None:
    """The calls of a forward ``task`` as a model makes them in place, and the value that they overwrite.

    Some operators are in place only by name: autograd first copies what their gradient needs (``hardtanh_``).

    Args:
        metas: for every value, its own tensor.
        saved: values copied by such calls.
        readers: how many tasks read a value.

    Returns:
        None where PyTorch has no such form, or where something else reads the argument, as it was, too: then the trace
        does not show what the model's call overwrites.
    """
    *views, call = task.calls
    if not (call.args and len(call.outs) == 1 and _has_in_place_form(call.op)):
        return None
    (first, *others), (out,) = call.args, call.outs
    if not (isinstance(first, Ref) and isinstance(first.name, int) and out is not None and isinstance(out.name, int)):
        return None
    if program.values[first.name].kind != "forward" or metas[first.name] != metas[out.name]:
        return None
    packet, name, overload = call.op.split(".")
    form = f"{packet}.{name}_.{overload}"
    if first.name in saved:
        copy = Call("aten.clone.default", (first,), (), (out,))
        return (*views, copy, Call(form, (out, *others), call.kwargs, ())), None
    once = readers[first.name] == 1 == sum(first == ref for other in task.calls for ref in refs(other))
    if not once or first.name in program.outputs or out.name in program.outputs:
        return None
    return (*views, Call(form, call.args, call.kwargs, call.outs)), first.name


def _has_in_place_form(op: str) -> bool:
    packet, name, overload = op.split(".")
    form = getattr(getattr(torch.ops, packet), f"{name}_", None)
    return form is not None and overload in form.overloads()
