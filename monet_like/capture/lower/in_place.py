"""In-place operators, which a trace does not have: the model's own in-place calls, and sums of gradients.

Each saves plain PyTorch's step a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

from ...ir.program import Call, Program, Ref, Task, refs
from ..captured import TensorMeta
from ..trace.graph_edits import WRITES_OF_PARTS
from .values import Values, has_in_place_form

#: Operators that the trace makes of a write into a part of a tensor (``x[:4] = y``), and what is the part.
PARTS = {str(write): str(part) for write, part in WRITES_OF_PARTS.items()}
#: Operators that no model calls but in place.
_WRITES = frozenset({*PARTS, "aten.copy.default"})


def _into_part(calls: Sequence[Call]) -> tuple[Call, ...]:
    """The calls that write into a part of a tensor, where the last of ``calls``, to one of `PARTS`, copies it whole.

    What is computed in place in that part, or written into a part of it, is so in these, too.
    """
    *before, call = calls
    taken, source, *where = call.args
    made = {out: each for each in before for out in each.outs}

    def seen(leaf: Any) -> Any:
        """A tensor as the views that lead to it."""
        if not isinstance(leaf, Ref) or leaf not in made:
            return leaf
        return made[leaf].op, *map(seen, made[leaf].args), made[leaf].kwargs

    wanted = (PARTS[call.op], seen(taken), *where, call.kwargs)
    if before and before[-1].outs == (source,) and seen(before[-1].args[0]) == wanted:
        *views, inner = before
        if inner.op in PARTS:
            return _into_part(before)
        return *views, replace(inner, op=_in_place(inner.op))
    part = Ref(f"part_of_{taken.name}")
    view = Call(PARTS[call.op], (taken, *where), call.kwargs, (part,))
    return *before, view, Call("aten.copy_.default", (part, source), (), ())


def in_place_form(
    program: Program, task: Task, metas: Sequence[TensorMeta], saved: Set[int], is_free: Callable[[int], bool]
) -> tuple[tuple[Call, ...], int | None] | None:
    """The calls of a ``task`` as a model makes them in place, and the value that they overwrite.

    Some operators are in place only by name: autograd first copies what their gradient needs (``hardtanh_``).

    Args:
        metas: for every value, its own tensor.
        saved: values copied by such calls.
        is_free: whether nothing reads a value after the task.

    Returns:
        None where PyTorch has no such form, or where something else reads the argument, as it was, too: then the trace
        does not show what the model's call overwrites.
    """
    *views, call = task.calls
    if not (call.args and len(call.outs) == 1 and (call.op in PARTS or has_in_place_form(call.op))):
        return None
    (first, *others), (out,) = call.args, call.outs
    if not (isinstance(first, Ref) and isinstance(first.name, int) and out is not None and isinstance(out.name, int)):
        return None
    own = program.values[first.name].kind in ("forward", program.values[out.name].kind)
    if not own or metas[first.name] != metas[out.name]:
        return None
    if first.name in saved:
        copy = Call("aten.clone.default", (first,), (), (out,))
        return (*views, copy, Call(_in_place(call.op), (out, *others), call.kwargs, ())), None
    leave = {*program.outputs, *program.tangents, *program.gradients}
    if not leave.isdisjoint((first.name, out.name)) or not is_free(first.name):
        return None
    if call.op in PARTS:
        return (*_into_part(task.calls), Call("aten.alias.default", (first,), (), call.outs)), first.name
    once = sum(first == ref for other in task.calls for ref in refs(other)) == 1
    return ((*views, replace(call, op=_in_place(call.op))), first.name) if once else None


def _in_place(op: str) -> str:
    packet, name, overload = op.split(".")
    return f"{packet}.{name}_.{overload}"


def with_in_place_calls(lowering: Values, program: Program) -> Program | None:
    """``program`` with in-place operators where the model calls them; None if it calls none."""
    reads = _Reads(program)

    def as_called(task: Task, is_free: Callable[[int], bool]) -> Task:
        if not lowering.in_place.issuperset(task.writes) and task.calls[-1].op not in _WRITES:
            return task
        found = in_place_form(program, task, lowering.metas, lowering.saved, is_free)
        if found is None:
            return task
        calls, overwrites = found
        return lowering.make_task(task.name, calls, task.writes, overwrites=overwrites, runs=task.runs)

    tasks = tuple(as_called(task, partial(reads.end_in_task, place)) for place, task in enumerate(program.tasks))
    slots = tuple((as_called(slot, partial(reads.end_in_slot, place)),) for place, (slot,) in enumerate(program.slots))
    return None if (tasks, slots) == (program.tasks, program.slots) else replace(program, tasks=tasks, slots=slots)


class _Reads:
    """Which tasks of plain PyTorch's step read a value last."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.tasks: dict[int, list[int]] = {}  # of each value, the tasks that read it
        for place, task in enumerate(program.tasks):
            for value in task.reads:
                self.tasks.setdefault(value, []).append(place)
        #: Of each value the last slot that reads it, or before which a task of the backward may.
        self.slot = {value: place for place, (slot,) in enumerate(program.slots) for value in slot.reads}
        for task in reversed(program.tasks):
            if task.runs == "again":
                until = max((self.slot.get(value, -1) for value in task.writes), default=-1)
                self.slot.update((value, until) for value in task.reads if self.slot.get(value, -1) < until)

    def end_in_task(self, place: int, value: int) -> bool:
        """Whether nothing reads a value after a task has; in the backward, tasks run when what they make is read."""
        task, others = self.program.tasks[place], {*self.tasks[value]} - {place}
        if any(value in slot.reads for (slot,) in self.program.slots):
            return False
        if task.runs != "again":
            return all(other < place and self.program.tasks[other].runs != "again" for other in others)
        return all(self.program.tasks[other].runs != "again" for other in others - self._before(place))

    def end_in_slot(self, place: int, value: int) -> bool:
        """Whether nothing reads a value after a slot has."""
        return self.slot[value] == place

    def _before(self, place: int) -> set[int]:
        """The tasks on which a task depends."""
        found: set[int] = set()
        pending = [place]
        while pending:
            for value in self.program.tasks[pending.pop()].reads:
                new = {*self.program.producers[value]} - found
                found |= new
                pending += new
        return found


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
