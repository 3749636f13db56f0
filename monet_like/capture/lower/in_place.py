"""In-place operators, which a trace does not have: the model's own in-place calls, and sums of gradients.

Each saves plain PyTorch's step a tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace

import torch
import torch.fx.traceback

from ...ir.program import Call, Program, Ref, Task, refs
from ..captured import TensorMeta
from .values import Values

#: Operators that the trace makes of a write into a part of a tensor (``x[:4] = y``), and what is the part.
PARTS = {"aten.slice_scatter.default": "aten.slice.Tensor", "aten.select_scatter.default": "aten.select.int"}


def into_part(call: Call) -> tuple[Call, ...]:
    """The calls that write into a part of the first argument of a call of one of `PARTS`, where that
    copies it whole.
    """
    taken, source, *where = call.args
    part = Ref(f"part_of_{taken.name}")
    return (
        Call(PARTS[call.op], (taken, *where), call.kwargs, (part,)),
        Call("aten.copy_.default", (part, source), (), ()),
        Call("aten.alias.default", (taken,), (), call.outs),
    )


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
    if not (call.args and len(call.outs) == 1 and (call.op in PARTS or _has_in_place_form(call.op))):
        return None
    (first, *others), (out,) = call.args, call.outs
    if not (isinstance(first, Ref) and isinstance(first.name, int) and out is not None and isinstance(out.name, int)):
        return None
    if program.values[first.name].kind != "forward" or metas[first.name] != metas[out.name]:
        return None
    once = readers[first.name] == 1 == sum(first == ref for other in task.calls for ref in refs(other))
    if call.op in PARTS:
        free = once and first.name not in program.outputs and out.name not in program.outputs
        return ((*views, *into_part(call)), first.name) if free else None
    packet, name, overload = call.op.split(".")
    form = f"{packet}.{name}_.{overload}"
    if first.name in saved:
        copy = Call("aten.clone.default", (first,), (), (out,))
        return (*views, copy, Call(form, (out, *others), call.kwargs, ())), None
    if not once or first.name in program.outputs or out.name in program.outputs:
        return None
    return (*views, Call(form, call.args, call.kwargs, call.outs)), first.name


def _has_in_place_form(op: str) -> bool:
    packet, name, overload = op.split(".")
    form = getattr(getattr(torch.ops, packet), f"{name}_", None)
    return form is not None and overload in form.overloads()


def with_in_place_calls(lowering: Values, program: Program) -> Program | None:
    """``program`` with in-place operators where the model calls them; None if it calls none."""
    readers = Counter(value for task in program.every_task() for value in task.reads)
    tasks = list(program.tasks)
    for index, task in enumerate(tasks):
        if not lowering.in_place.issuperset(task.writes) and task.calls[-1].op not in PARTS:
            continue
        if (found := in_place_form(program, task, lowering.metas, lowering.saved, readers)) is not None:
            calls, overwrites = found
            tasks[index] = lowering.make_task(task.name, calls, task.writes, overwrites=overwrites, runs=task.runs)
    return replace(program, tasks=tuple(tasks)) if tasks != list(program.tasks) else None


def with_held(program: Program, held: Set[int]) -> Program:
    """``program`` with values that the contexts of custom functions hold to the end of the step, see `note_held`."""
    overwritten = {task.overwrites for task in program.every_task()}
    kept = {v for v in held if program.values[v].kind == "forward" and program.producers[v]} - overwritten
    return replace(program, outputs=tuple(sorted({*program.outputs, *kept}))) if kept else program


def accumulate_in_place(lowering: Values, gradients: set[int]) -> list[Task]:
    """The slots, with sums of gradients added in place where nothing reads one summand later, as the autograd engine
    does.

    Args:
        gradients: values that leave the step, which are never overwritten.
    """
    slots = list(lowering.slots)
    last = {value: index for index, slot in enumerate(lowering.slots) for value in slot.reads}
    keep = {*gradients, *lowering.tangent_of.values()}
    for index, slot in enumerate(lowering.slots):
        call = slot.calls[-1]
        if call.op != "aten.add.Tensor" or len(slot.calls) > 1 or call.kwargs or len(call.args) != 2:
            continue
        (out,) = slot.writes
        for mine, other in (call.args, call.args[::-1]):
            if (
                isinstance(mine, Ref)
                and isinstance(mine.name, int)
                and isinstance(other, Ref)
                and mine != other
                and lowering.values[mine.name].kind == "backward"
                and mine.name not in keep
                and last[mine.name] == index
                and lowering.metas[mine.name] == lowering.metas[out]
            ):
                add = Call("aten.add_.Tensor", (mine, other), (), (Ref(out),))
                slots[index] = lowering.make_task(slot.name, (add,), (out,), overwrites=mine.name)
                break
    return slots
