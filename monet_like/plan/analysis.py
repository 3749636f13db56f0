"""Properties of a program that all planners use: in which stages values are needed, what memory the backward takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf

from ..ir.program import Program, Task
from ..ir.units import MIB


@dataclass(frozen=True)
class Needs:
    """In which stages values may be needed and tasks may run.

    Stage 0 is the forward, ``t >= 1`` backward slot ``t - 1``.

    Attributes:
        stages: the stages in which forward tasks may run: 0 and those in which a rerun can save memory or time.
        reading_stages: of these, 0 and those whose slot reads a forward value.
        last: for every value, the last stage that could use it; -1 for a forward value that none can use.
        first: for every value, the first stage >= 1 whose slot may read it; if no slot reads it, the first such
            stage of a value made from it; `NEVER` if there is none.
        rerun: for every task, whether it may run again at all.
        groups: neighbouring tasks whose sets of results are nested: in one stage at most one of them is of use.
    """

    stages: tuple[int, ...]
    reading_stages: tuple[int, ...]
    last: tuple[int, ...]
    first: tuple[int, ...]
    rerun: tuple[bool, ...]
    groups: tuple[tuple[int, ...], ...]

    @cached_property
    def group_of(self) -> dict[int, int]:
        """For every task, the number of its group."""
        return {p: g for g, group in enumerate(self.groups) for p in group}


NEVER = 1 << 30


def find_needs(program: Program) -> Needs:
    """Compute `Needs`. The ways that read a value need it, and every task that could read it in that stage."""
    rerun, first, last = _uses(program)
    reading = (slot + 1 for slot, reads in enumerate(program.slot_reads) if reads)
    return Needs((0, *_rerun_stages(program)), (0, *reading), last, first, rerun, _groups(program.tasks))


def _uses(program: Program) -> tuple[tuple[bool, ...], tuple[int, ...], tuple[int, ...]]:
    """`Needs.rerun`, ``first`` and ``last``."""
    outputs = set(program.outputs)
    last = [-1] * len(program.values)
    first = [NEVER] * len(program.values)
    for slot, ways in enumerate(program.slots):
        for value in {v for way in ways for v in program.forward_reads(way)}:
            first[value] = min(first[value], slot + 1)
            last[value] = slot + 1
    read_by_slots = {value for value, stage in enumerate(last) if stage >= 0}
    rerun = tuple(task.runs != "first" and not outputs & set(task.writes) for task in program.tasks)
    for index in reversed(range(len(program.tasks))):
        task = program.tasks[index]
        if rerun[index]:
            for value in task.reads:
                last[value] = max(last[value], *(last[v] for v in task.writes), -1)
                if value not in read_by_slots:
                    first[value] = min(first[value], *(first[v] for v in task.writes), NEVER)
    return rerun, tuple(first), tuple(last)


def _rerun_stages(program: Program) -> list[int]:
    """Stages whose slot reads a forward value, and between two of these all with fewer backward bytes than those before
    it, or than those after it.

    A rerun in any other stage can move to one of these without taking more memory in any slot: to a later stage of no
    more backward bytes where its results are larger than the inputs that it frees, else to an earlier one.
    """
    before = find_backward_bytes(program).before
    reading = [slot for slot, reads in enumerate(program.slot_reads) if reads]
    stages = set(reading)
    for previous, end in zip([-1, *reading], reading, strict=False):
        gap = range(previous + 1, end)
        for order, first in ((reversed(gap), before[end]), (gap, inf)):
            least: float = first
            for slot in order:
                if before[slot] < least:
                    stages.add(slot)
                    least = before[slot]
    return [slot + 1 for slot in sorted(stages)]


def pinned_values(program: Program, pin_bytes: int) -> frozenset[int]:
    """Values of at most ``pin_bytes``, which a restricted search always keeps and always counts."""
    excluded = set(program.outputs) | {task.overwrites for task in program.every_task()}
    return frozenset(
        v
        for v, value in enumerate(program.values)
        if value.kind == "forward" and value.bytes <= pin_bytes and v not in excluded
        if any(program.tasks[p].runs != "again" for p in program.producers[v])
    )


def default_pin_bytes(program: Program, budget_bytes: int) -> int:
    """The size in bytes such that all values up to it together take at most 1/1000 of the budget; at most 1 MiB."""
    sizes = sorted(value.bytes for value in program.values if value.kind == "forward" and value.bytes <= MIB)
    left, largest = budget_bytes // 1000, 0
    for size in sizes:
        left -= size
        if left < 0:
            break
        largest = size
    return largest if sizes and left >= 0 else max(0, largest - 1)


def _groups(tasks: tuple[Task, ...]) -> tuple[tuple[int, ...], ...]:
    """Neighbours with nested results: of two tasks that run in one stage, the one with fewer results is useless."""
    groups: list[list[int]] = []
    for index, task in enumerate(tasks):
        if groups and all(_exchangeable(tasks[other], task) for other in groups[-1]):
            groups[-1].append(index)
        else:
            groups.append([index])
    return tuple(map(tuple, groups))


def _exchangeable(first: Task, second: Task) -> bool:
    one, two = set(first.writes), set(second.writes)
    return bool(one) and bool(two) and (one <= two or two <= one) and not one & set(second.reads)


@dataclass(frozen=True)
class BackwardBytes:
    """Bytes of backward values alive around each slot, apart from what overwriting saves.

    Attributes:
        before: for every slot, alive while tasks run again before it: made earlier and read by this slot or later.
        during: these and the slot's results.
        possible: for every slot, the ways that may run, because they overwrite nothing that is read later.
    """

    before: tuple[int, ...]
    during: tuple[int, ...]
    possible: tuple[tuple[int, ...], ...]


def find_backward_bytes(program: Program) -> BackwardBytes:
    """Compute `BackwardBytes`. No decision matters: all ways of a slot read and write the same gradients.

    A way that overwrites a forward value is possible if no later stage can use that value.
    """
    count = len(program.slots)
    kept = set(program.gradients)
    lives: dict[int, list[list[int]]] = {value: [[-1, -1]] for value in program.tangents}
    for index, slot in enumerate(program.slots):
        for value in set(slot[0].reads):
            if program.values[value].kind == "backward":
                lives[value][-1][1] = index
        for value in slot[0].writes:
            lives.setdefault(value, []).append([index, index])
    before = [0] * count
    ends: dict[int, list[int]] = {}
    for value, spans in lives.items():
        if value in kept:
            spans[-1][1] = count
        ends[value] = [end for _, end in spans]
        for start, end in spans:
            for index in range(start + 1, min(end, count - 1) + 1):
                before[index] += program.values[value].bytes
    during = tuple(
        before[index] + sum(program.values[v].bytes for v in slot[0].writes) for index, slot in enumerate(program.slots)
    )
    last = _uses(program)[2]
    ends.update((v, [last[v] - 1]) for v, value in enumerate(program.values) if value.kind == "forward")
    possible = tuple(
        tuple(k for k, way in enumerate(slot) if way.overwrites is None or index in ends[way.overwrites])
        for index, slot in enumerate(program.slots)
    )
    return BackwardBytes(tuple(before), during, possible)
