"""Plain PyTorch's schedule: run everything once, keep what the backward reads until its last read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import ScheduleError
from ..ir.program import Cost, Program, Task
from ..ir.schedule import Schedule, prune
from ..ir.simulate import Report, simulate


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


def plain_report(plain: Program, costs: Mapping[str, Cost], extra_bytes: int) -> Report:
    """The simulator on plain PyTorch's schedule: every operator once, everything kept until its last use."""
    program, schedule, eager = plain_step(plain, costs)
    return simulate(program, schedule, eager, extra_bytes=extra_bytes)


def plain_step(program: Program, costs: Mapping[str, Cost]) -> tuple[Program, Schedule, dict[str, Cost]]:
    """Plain PyTorch's program and schedule, and what its operators cost there."""
    eager = dict(costs)
    for (weight, *_), (given, *_) in zip(program.slots, program.slots[1:], strict=False):
        # PyTorch makes both gradients of a convolution in one operator, the input's first.
        if _halves(weight, given):
            for way, other, sign in ((weight, given, 1), (given, weight, -1)):
                beside = sum(program.values[v].bytes for v in other.writes)
                cost = costs[way.cost]
                eager[way.cost] = replace(cost, workspace_bytes=cost.workspace_bytes + sign * beside)
    return program, store_all(program), eager


def _halves(one: Task, other: Task) -> bool:
    """Whether two slots' own ways are one operator of PyTorch's, asked for other results."""
    first, second = one.calls[-1], other.calls[-1]
    return first.op == second.op == "aten.convolution_backward.default" and first.args[:-1] == second.args[:-1]
