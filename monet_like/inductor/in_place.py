"""Kernels that write their result into the memory of what they read for the last time, as Inductor has them do.

Inductor looks for such an input of every elementwise kernel: of the dtype and the bytes of the result, read element by
element in its order. A sum over processes or a broadcast is made within a copy of its input, an elementwise kernel too.
In the forward and in the backward it may be any buffer that the graph makes itself. In the
backward it may also be what the forward has saved (PyTorch calls that a *donated buffer*), if it is no input or result
of the graph or a view of one. A concatenation's or a scatter's memory is given to nobody.

* A slot writes into the memory of a gradient, or of a forward value that no later stage can use, whatever the plan.
* Whether a forward task can do so depends on the plan: it is a task of its own, beside the one that does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from ..ir.program import Program, Runs, Task
from ..ir.schedule import Schedule
from ..plan.analysis import find_needs
from .collectives import begins_as_copy
from .joint import Kernel, is_elementwise, is_view, name_of

#: Views that keep the order of the elements.
_IN_ORDER = frozenset({"aten::view", "aten::unsqueeze", "aten::squeeze", "aten::_unsafe_view", "aten::alias"})
#: Elementwise operators that read other places of an input than those that they write, or only some of them.
_SHIFTS = frozenset(
    {
        "aten::constant_pad_nd", "aten::select_scatter", "aten::slice_scatter", "aten::permute_copy",
        "aten::expand_copy",
        "aten::copy", "prims::broadcast_in_dim", "prims::inductor_force_stride_order",
    }
)  # fmt: skip

#: Inductor gives the memory of their results to nobody: a scatter's begins as a copy or as zeros that elements are
#: written into, and a concatenation's is written by the kernels of its parts.
_NOT_GIVEN = frozenset(
    {
        "aten::scatter", "aten::scatter_add", "aten::scatter_reduce", "aten::index_put", "aten::_unsafe_index_put",
        "aten::cat",
    }
)  # fmt: skip


def with_takeovers(
    program: Program, value_of: Mapping[fx.Node, int], tasks: Sequence[Kernel | None], slots: Sequence[Sequence[Kernel]]
) -> tuple[Program, tuple[Kernel | None, ...]]:
    """The program with all that may overwrite what it reads.

    Args:
        value_of: of every item and input.
        tasks, slots: the kernels of the program's forward tasks and of its slots' ways.

    Returns:
        The program, and the kernels of its forward tasks.
    """
    saved_too = torch._functorch.config.donated_buffer
    able = _Able(program, value_of)
    made: list[tuple[Task, Kernel | None]] = []
    last = able.last_readers()
    for place, (task, kernel) in enumerate(zip(program.tasks, tasks, strict=True)):
        made.append((task, kernel))
        if kernel is not None and task.variant == "aten":
            for v in able.taken_by(task, kernel):
                if place >= last.get(v, -1) and (saved_too or task.runs != "again"):
                    runs: Runs = task.runs if saved_too else "first"
                    name = f"{task.name}.over_{program.values[v].name}"
                    made.append((replace(task, name=name, overwrites=v, runs=runs), kernel))
    ways = tuple(able.slots(slots, saved_too))
    return replace(program, tasks=tuple(task for task, _ in made), slots=ways), tuple(kernel for _, kernel in made)


class _Able:
    """Which values kernels of a program may overwrite."""

    def __init__(self, program: Program, value_of: Mapping[fx.Node, int]) -> None:
        self.program, self.needs = program, find_needs(program)
        self.node_of = {v: node for node, v in value_of.items()}
        self.kept = {*program.outputs, *program.gradients, *program.tangents}

    def last_readers(self) -> dict[int, int]:
        """For every forward value, the last task that reads it whenever it runs in the forward."""
        tasks = enumerate(self.program.tasks)
        return {v: p for p, task in tasks if task.variant == "aten" and task.runs != "again" for v in task.reads}

    def taken_by(self, task: Task, kernel: Kernel) -> Iterator[int]:
        """The forward values that the kernel could overwrite if nothing read them later."""
        for v in self.program.forward_reads(task):
            if v not in self.kept and self._can_take(kernel, v, task):
                yield v

    def slots(self, kernels: Sequence[Sequence[Kernel]], saved_too: bool) -> Iterator[tuple[Task, ...]]:
        """The slots; each way overwrites what it can."""
        values, slots = self.program.values, self.program.slots
        last = {v: place for place, ways in enumerate(slots) for v in ways[0].reads if values[v].kind == "backward"}
        for place, (ways, own) in enumerate(zip(slots, kernels, strict=True)):
            made = []
            for task, kernel in zip(ways, own, strict=True):
                dying = [v for v in task.reads if last.get(v) == place]
                dying += [v for v in self.program.forward_reads(task) if saved_too and self.needs.last[v] == place + 1]
                able = (v for v in dying if v not in self.kept and self._can_take(kernel, v, task))
                made.append(replace(task, overwrites=next(able, None)))
            yield tuple(made)

    def _can_take(self, kernel: Kernel, v: int, task: Task) -> bool:
        values, given = self.program.values, self.node_of[v]
        if kernel.root is None or not (is_elementwise(kernel.root) or begins_as_copy(kernel.root)):
            return False
        if len(task.writes) != 1 or name_of(given) in _NOT_GIVEN:
            return False
        made = values[task.writes[0]]
        same = values[v].spec.split("[")[0] == made.spec.split("[")[0] and values[v].bytes == made.bytes
        return same and _alike(given, kernel.root) and all(map(_in_order, _between(given, kernel)))


def _between(given: fx.Node, kernel: Kernel) -> Iterator[fx.Node]:
    """The nodes of a kernel that are computed from one that it reads."""
    reached = {given}
    for node in (*kernel.inlined, kernel.root):
        if node is not None and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            yield node


def _in_order(node: fx.Node) -> bool:
    if is_view(node):
        return name_of(node) in _IN_ORDER
    return (is_elementwise(node) and name_of(node) not in _SHIFTS) or begins_as_copy(node)


def _alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether elements lie in the same order in both."""
    first, second = one.meta["val"], other.meta["val"]
    if first.shape == second.shape:
        return bool(first.stride() == second.stride())
    return bool(first.is_contiguous() and second.is_contiguous())


def settled(program: Program, schedule: Schedule) -> Schedule:
    """The schedule with all forward tasks in place that can be: Inductor takes no note of what the planner chose."""
    twins: dict[tuple[object, ...], list[int]] = {}
    for p, task in enumerate(program.tasks):
        twins.setdefault((task.reads, task.writes, task.cost), []).append(p)
    wanted: set[int] = set()

    def chosen(runs: Collection[int], when: str) -> tuple[int, ...]:
        """The tasks of one stage; ``wanted`` becomes the values needed before it."""
        found = []
        for p in sorted(runs, reverse=True):
            task = program.tasks[p]
            wanted.difference_update(task.writes)
            able = (
                q
                for q in twins[task.reads, task.writes, task.cost]
                if program.tasks[q].runs in ("both", when) and program.tasks[q].overwrites not in (None, *wanted)
            )
            found.append(next(able, p))
            wanted.update(program.forward_reads(task))
        return tuple(reversed(found))

    again: list[tuple[int, ...]] = []
    for slot in reversed(range(len(program.slots))):
        wanted.update(program.forward_reads(program.slots[slot][schedule.ways[slot]]))
        again.insert(0, chosen(schedule.again[slot], "again"))
    wanted.update(program.outputs)
    return Schedule(chosen(schedule.forward, "first"), tuple(again), schedule.ways)
