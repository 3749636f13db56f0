"""Plain PyTorch's schedule: run everything once, keep what the backward reads until its last read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import ScheduleError
from ..ir.program import Cost, Program, Task
from ..ir.schedule import Schedule, prune
from ..ir.simulate import Launches, Report, simulate


def store_all(program: Program) -> Schedule:
    """Plain PyTorch's schedule: its own operators, each run once in the forward.

    Tasks that may only run again run just before their first reader.

    Raises:
        ScheduleError: a value that is needed has no ``aten`` producer.
    """
    slots = [next((k for k, way in enumerate(slot) if way.variant == "aten"), 0) for slot in program.slots]
    made = {v for task in program.tasks if _first(task) for v in task.writes}
    anew: set[int] = set()
    again: list[tuple[int, ...]] = []
    wanted = set(program.outputs)
    for slot, k in zip(program.slots, slots, strict=True):
        runs: set[int] = set()
        pending = list(program.forward_reads(slot[k]))
        while pending:
            v = pending.pop()
            if v in made:
                wanted.add(v)
                continue
            if v in anew:
                continue
            p = _maker(program, v, lambda task: task.variant == "aten" and task.runs == "again")
            runs.add(p)
            anew.update(program.tasks[p].writes)
            pending += program.forward_reads(program.tasks[p])
        again.append(tuple(sorted(runs)))
    forward = {_maker(program, v, _first) for v in wanted}
    pending = [v for p in forward for v in program.forward_reads(program.tasks[p])]
    while pending:
        p = _maker(program, pending.pop(), _first)
        if p not in forward:
            forward.add(p)
            pending += program.forward_reads(program.tasks[p])
    return prune(program, Schedule(tuple(sorted(forward)), tuple(again), tuple(slots)))


def _first(task: Task) -> bool:
    return task.variant == "aten" and task.runs != "again"


def _maker(program: Program, value: int, allowed: Any) -> int:
    for p in program.producers[value]:
        if allowed(program.tasks[p]):
            return p
    raise ScheduleError(f"{program.values[value].name} has no aten producer that may run where it is needed")


def plain_report(
    plain: Program,
    costs: Mapping[str, Cost],
    extra_bytes: int,
    *,
    autograd_nodes: Mapping[str, int],
    launches: Launches | None = None,
) -> Report:
    """The simulator on plain PyTorch's schedule: every operator once, everything kept until its last use."""
    program, schedule, eager = plain_step(plain, costs, autograd_nodes=autograd_nodes)
    return simulate(program, schedule, eager, extra_bytes=extra_bytes, launches=launches)


def plain_step(
    program: Program, costs: Mapping[str, Cost], *, autograd_nodes: Mapping[str, int]
) -> tuple[Program, Schedule, dict[str, Cost]]:
    """Plain PyTorch's program and schedule, and what its operators cost there.

    Args:
        autograd_nodes: the node of autograd's graph that each slot, by its name, belongs to.
    """
    program = with_saved_tensors(program, autograd_nodes)
    eager = dict(costs)
    for (weight, *_), (given, *_) in zip(program.slots, program.slots[1:], strict=False):
        # PyTorch makes both gradients of a convolution in one operator, the input's first.
        if _halves(weight, given):
            for way, other, sign in ((weight, given, 1), (given, weight, -1)):
                beside = sum(program.values[v].bytes for v in other.writes)
                cost = costs[way.cost]
                eager[way.cost] = replace(cost, workspace_bytes=cost.workspace_bytes + sign * beside)
    return program, store_all(program), eager


def with_saved_tensors(program: Program, autograd_nodes: Mapping[str, int]) -> Program:
    """``program`` with the last slot of each autograd node reading what any slot of the node reads.

    Autograd releases the tensors that a node has saved, and its incoming gradients, when the node has made all of its
    gradients: a product of two activations keeps both factors until then.
    """
    slots = list(program.slots)
    node_of = [autograd_nodes.get(ways[0].name, -1 - place) for place, ways in enumerate(slots)]
    for _, places in itertools.groupby(range(len(slots)), node_of.__getitem__):
        members = list(places)
        while members and _adds(slots[members[-1]][0]):  # the engine's sum of two gradients, after the node
            members.pop()
        if len(members) < 2:
            continue
        tasks = [slots[place][0] for place in members]
        gone = {v for task in tasks for v in (*task.writes, task.overwrites)}
        read = (v for task in (tasks[-1], *tasks) for v in task.reads if v not in gone or task is tasks[-1])
        last = replace(tasks[-1], reads=tuple(dict.fromkeys(read)))
        slots[members[-1]] = (last, *slots[members[-1]][1:])
    return replace(program, slots=tuple(slots))


def _adds(task: Task) -> bool:
    return len(task.calls) == 1 and task.calls[0].op in ("aten.add.Tensor", "aten.add_.Tensor")


def _halves(one: Task, other: Task) -> bool:
    """Whether two slots' own ways are one operator of PyTorch's, asked for other results."""
    first, second = one.calls[-1], other.calls[-1]
    return first.op == second.op == "aten.convolution_backward.default" and first.args[:-1] == second.args[:-1]
