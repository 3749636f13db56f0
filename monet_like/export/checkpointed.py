"""The step of selectively checkpointed regions as a program: `torch.utils.checkpoint` with a policy for every operator.

The mechanism is described in `monet_like.export.selection`, which chooses what is saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..ir.program import Cost, Program, Task
from ..ir.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Region:
    """A checkpointed part of the step.

    Attributes:
        name: of the module.
        tasks: forward tasks, ascending.
        slots: backward slots, ascending; those of its operators.
    """

    name: str
    tasks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """Operators of a region that are saved together or recomputed together.

    Attributes:
        region: its number.
        tasks: forward tasks.
        always: it must be saved: what it does may happen once only.
        implies: items that must be saved if this one is.
        never: it must be recomputed.
    """

    region: int
    tasks: tuple[int, ...]
    always: bool = False
    implies: tuple[int, ...] = ()
    never: bool = False


@dataclass(frozen=True)
class StepOfRegions:
    """Plain PyTorch's step and the regions of it that are checkpointed.

    Attributes:
        program, schedule: of plain PyTorch, as `plain_step` returns them.
        costs: of its tasks.
        extra_bytes: resident memory beyond the program's.
        regions, items: as above; every task of a region that makes something is in one item.
        held: for a forward task of a region, values of the region that exist until it has run though nothing reads them
            any more: a variable of the model names them.
        caches: saved operators keep all of their results, and a recomputation stops at the last one that is read. If
            not, as in ``torch_remat``.
    """

    program: Program
    schedule: Schedule
    costs: Mapping[str, Cost]
    extra_bytes: int
    regions: tuple[Region, ...]
    items: tuple[Item, ...]
    held: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    caches: bool = True


@dataclass(frozen=True)
class Checkpointed:
    """The step of a choice as a program: recomputed values are values of their own.

    Attributes:
        program, schedule: of the step.
        again: of each forward task that runs again, the task that does so.
    """

    program: Program
    schedule: Schedule
    again: Mapping[int, int]


def checkpointed(step: StepOfRegions, saved: frozenset[int]) -> Checkpointed:
    """The step with these items saved."""
    editing = _Editing(step, saved)
    for region in step.regions:
        if region.slots:
            editing.recompute(region)
    return editing.finished()


class _Editing:
    """Adds the recomputation of regions to plain PyTorch's step."""

    def __init__(self, step: StepOfRegions, saved: frozenset[int]) -> None:
        self.step = step
        self.values, self.tasks = list(step.program.values), list(step.program.tasks)
        for p, held in step.held.items():
            self.tasks[p] = _reading(self.tasks[p], held)
        self.slots = [ways[k] for ways, k in zip(step.program.slots, step.schedule.ways, strict=True)]
        self.runs = [list(runs) for runs in step.schedule.again]
        self.kept = {p for i in saved for p in step.items[i].tasks}
        self.again: dict[int, int] = {}

    def recompute(self, region: Region) -> None:
        """Have the recomputed tasks of a region run when its backward begins, and the backward read their results."""
        wanted = read_by(self.step, region.slots)
        read = (p for p in region.tasks if not self.step.caches or not wanted.isdisjoint(self.tasks[p].writes))
        last = max(read, default=-1)
        first = self._first_reading_slot(region)
        over = {self.tasks[p].overwrites for p in region.tasks}
        # A variable of the model may name a value until the recomputation stops.
        made = {v for p in region.tasks if p <= last for v in self.tasks[p].writes}
        at_last = [v for p in region.tasks if p > last for v in self.step.held.get(p, ()) if v in made]
        twins: dict[int, int] = {}
        late: list[int] = []  # what stays to the end of the region's backward
        for p in region.tasks:
            stored = tuple(v for v in self.tasks[p].writes if v not in over)
            if p in self.kept and not self.step.caches:
                continue
            if p in self.kept and p <= last:  # handed out as the recomputation comes to it
                held = (*self.step.held.get(p, ()), *(at_last if p == last else ()))
                task = Task(f"{self.tasks[p].name}.saved", stored, (), runs="again")
                self._run(first, _reading(task, [twins.get(v, v) for v in held]))
            elif p in self.kept:
                late += stored
            elif p <= last:
                for v in self.tasks[p].writes:
                    twins[v] = len(self.values)
                    self.values.append(replace(self.values[v], name=f"{self.values[v].name}.again"))
                self.again[p] = len(self.tasks)
                task = _reading(self.tasks[p], at_last) if p == last else self.tasks[p]
                again = replace(_mapped(task, twins), name=f"{task.name}.again", runs="again")
                self._run(first, again)
        for k in region.slots:
            self.slots[k] = _mapped(self.slots[k], twins)
            for p in self.step.schedule.again[k]:  # forward operators that only the backward runs
                self.tasks[p] = _mapped(self.tasks[p], twins)
        end = region.slots[-1]
        self.slots[end] = _reading(self.slots[end], (*_inputs(self.step.program, region.tasks), *late))

    def _run(self, slot: int, task: Task) -> None:
        self.runs[slot].append(len(self.tasks))
        self.tasks.append(task)

    def _first_reading_slot(self, region: Region) -> int:
        """The slot at whose beginning autograd asks for a saved tensor of the region, parameters included."""
        for k in region.slots:
            reads = any(self.values[v].kind != "backward" for v in self.slots[k].reads)
            if reads or self.step.schedule.again[k]:
                return k
        return region.slots[0]

    def finished(self) -> Checkpointed:
        """The step with all that was added."""
        program = replace(
            self.step.program,
            values=tuple(self.values),
            tasks=tuple(self.tasks),
            slots=tuple((slot,) for slot in self.slots),
        )
        again = tuple(tuple(sorted(runs)) for runs in self.runs)
        return Checkpointed(program, Schedule(self.step.schedule.forward, again, (0,) * len(again)), self.again)


def _reading(task: Task, values: Iterable[int]) -> Task:
    """The task that reads these values, too, so that they exist until it has run."""
    more = (v for v in values if v not in task.writes)
    return replace(task, reads=tuple(dict.fromkeys((*task.reads, *more))))


def _mapped(task: Task, twins: Mapping[int, int]) -> Task:
    """The task on recomputed values."""
    taken = task.overwrites
    return replace(
        task,
        reads=tuple(dict.fromkeys(twins.get(v, v) for v in task.reads)),
        writes=tuple(twins.get(v, v) for v in task.writes),
        overwrites=None if taken is None else twins.get(taken, taken),
    )


def read_by(step: StepOfRegions, slots: Sequence[int]) -> set[int]:
    """The forward values that these slots, and what runs just before them, read."""
    program, schedule = step.program, step.schedule
    tasks = [program.slots[k][schedule.ways[k]] for k in slots]
    tasks += [program.tasks[p] for k in slots for p in schedule.again[k]]
    return {v for task in tasks for v in program.forward_reads(task)}


def _inputs(program: Program, tasks: Sequence[int]) -> list[int]:
    """The forward values that a region reads and does not make."""
    made = {v for p in tasks for v in program.tasks[p].writes}
    read = (v for p in tasks for v in program.forward_reads(program.tasks[p]))
    return list(dict.fromkeys(v for v in read if v not in made))
