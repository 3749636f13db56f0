"""Columns and rows that the integer program (ilp/formulation.py) and its relaxation (bound/relaxation.py) share.

Both decide which forward tasks run in a *stage*, which values are kept after it, and which way each slot takes. They
differ in what a stage is: the forward or one slot, or the forward or a block of slots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..ir.program import Task
from ..ir.schedule import Schedule, prune
from ..solvers.matrix import ONE, ZERO, Builder, Expr, total
from .instance import Instance

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Rows:
    """The decisions of one instance within a budget, in stages; stage 0 is the forward.

    Attributes:
        stages: those in which tasks may run.
        e: for (p, t), whether task p runs in stage t.
        K: for (v, t), whether value v is carried from stage t to the next.
        w: for slot + 1 and each of its useful ways, whether it is taken.
        tracked: the values that may be carried: forward values without outputs and ``pinned`` ones.
        span: for these and outputs, the groups of their first and their last producer.
        read_before: tracked values that a rerun may read before the place where they were made.
    """

    def __init__(self, instance: Instance, budget_bytes: int, pinned: Collection[int] = ()) -> None:
        self.instance, self.budget, self.builder = instance, budget_bytes, Builder()
        self.program = program = instance.program
        self.needs, self.backward, self.sizes = instance.needs, instance.backward, instance.sizes
        self.group_of = instance.needs.group_of
        self.outputs, self.dominated, self.pinned = frozenset(program.outputs), instance.dominated_tasks, pinned
        #: For every value, the forward tasks that read it.
        self.readers: list[list[int]] = [[] for _ in program.values]
        for p, task in enumerate(program.tasks):
            for v in set(task.reads):
                self.readers[v].append(p)
        #: Resident throughout the step, in bytes; outputs come on top.
        self.resident, self.output_bytes = instance.resident_bytes, instance.output_bytes
        self.e: dict[tuple[int, int], Expr] = {}
        self.K: dict[tuple[int, int], Expr] = {}
        self.w: dict[int, dict[int, Expr]] = {}
        self.tracked = tuple(
            v for v, makers in enumerate(program.producers) if makers and v not in self.outputs and v not in pinned
        )
        self.span = {
            v: (self.group_of[program.producers[v][0]], self.group_of[program.producers[v][-1]])
            for v in {*self.tracked, *program.outputs}
        }
        self.read_before = frozenset(
            v for v in self.tracked if any(self.group_of[p] < self.span[v][0] for p in self.readers[v])
        )
        seconds = [instance.cost_of(task).seconds for task in program.every_task()]
        #: Objective unit: about a thousandth of the step, so that solver tolerances mean the same for every model.
        self.seconds_per_unit = (sum(seconds) or 1.0) / 1000
        self._alive: dict[tuple[int, int, int], Expr] = {}
        self._reading: dict[tuple[int, int], list[int]] = {}

    def _set_stages(self, stages: Iterable[int]) -> None:
        self.stages = tuple(stages)
        self._previous = dict(zip(self.stages[1:], self.stages, strict=False))

    def stage_of(self, slot: int) -> int:
        """The stage that a slot belongs to."""
        raise NotImplementedError

    def _made(self, v: int, t: int, *, low: int = 0, high: int | None = None) -> Expr:
        """Sum of e[p,t] over the producers of v, those in groups low <= g < high only."""
        return total(
            self.e[p, t]
            for p in self.program.producers[v]
            if (p, t) in self.e and low <= self.group_of[p] and (high is None or self.group_of[p] < high)
        )

    def _incoming(self, v: int, t: int) -> Expr:
        """Whether a value is carried into a stage."""
        return ZERO if t == 0 else self.K.get((v, self._previous[t]), ZERO)

    def _ends(self, v: int, stage: int) -> list[Expr]:
        """What needs a value when all tasks of a stage have run: the way of its slot, and later stages."""
        raise NotImplementedError

    def _units(self, task: Task) -> float:
        return self.instance.cost_of(task).seconds / self.seconds_per_unit

    def _choose_way(self, slot: int) -> dict[int, Expr]:
        """Columns w of the useful ways of a slot, of which one is taken; the constant 1 of the only one."""
        ways = self.program.slots[slot]
        useful = self.instance.useful_ways(slot)
        if len(useful) == 1:
            self.builder.offset += self._units(ways[useful[0]])
            return {useful[0]: ONE}
        chosen = {k: self.builder.column(self._units(ways[k])) for k in useful}
        self.builder.equal(total(chosen.values()), ONE)
        return chosen

    def _reads_of_ways(self, slot: int, chosen: Mapping[int, Expr]) -> dict[int, Expr]:
        """For every value that a way of a slot reads, whether a way that reads it is taken."""
        ways, found = self.program.slots[slot], dict[int, Expr]()
        for v in {v for k in chosen for v in ways[k].reads}:
            reading = [taken for k, taken in chosen.items() if v in ways[k].reads]
            found[v] = ONE if len(reading) == len(chosen) else total(reading)
        return found

    def _extra_of_ways(self, slot: int, chosen: Mapping[int, Expr]) -> Expr:
        """The bytes that the way of a slot takes beyond the values it reads and writes."""
        ways = self.program.slots[slot]
        return total(taken * self.instance.net_workspace(ways[k]) for k, taken in chosen.items())

    def _reader_groups(self, v: int, stage: int) -> list[int]:
        """The groups of the tasks that may read a value in a stage."""
        if (v, stage) not in self._reading:
            runs = {self.group_of[p] for p in self.readers[v] if (p, stage) in self.e}
            self._reading[v, stage] = sorted(runs)
        return self._reading[v, stage]

    def _group_reads(self, v: int, group: int, stage: int) -> Expr:
        """Whether a task of a group runs in a stage and reads a value."""
        members = (p for p in self.needs.groups[group] if v in self.program.tasks[p].reads)
        return total(self.e[p, stage] for p in members if (p, stage) in self.e)

    def _alive_from(self, v: int, group: int, stage: int) -> Expr:
        """L: a value, once made, is needed by this group of a stage or later."""
        later = next((g for g in self._reader_groups(v, stage) if g >= group), len(self.needs.groups))
        key = (v, later, stage)
        if key not in self._alive:
            parts = self._ends(v, stage)
            if later < len(self.needs.groups):
                parts = [self._alive_from(v, later + 1, stage), self._group_reads(v, later, stage)]
            self._alive[key] = self.builder.highest(parts)
        return self._alive[key]

    def _overwrite_rows(self, stage: int) -> None:
        """A task that takes over the storage of a value does not run where something needs the value afterwards."""
        for r, task in enumerate(self.program.tasks):
            u = task.overwrites
            if u is None or (run := self.e.get((r, stage))) is None:
                continue
            later = [g for g in self._reader_groups(u, stage) if g > self.group_of[r]]
            for end in (*(self._group_reads(u, group, stage) for group in later), *self._ends(u, stage)):
                if not end.is_zero:
                    self.builder.at_most(run + end, ONE)

    def _run_bytes(self, t: int, group: int, outputs: Iterable[Expr] = ()) -> list[Expr]:
        """The left side of the row (9) of a group's tasks in a stage, without constant bytes; empty if none can run.

        Args:
            outputs: bytes of outputs that exist already.
        """
        tasks = ((self.program.tasks[p], self.e.get((p, t))) for p in self.needs.groups[group])
        parts = [run * self.instance.running_bytes(task) for task, run in tasks if run is not None]
        if not parts:
            return parts
        parts += outputs
        for v in self.tracked:
            low, high = self.span[v]
            if high < group or (t and v in self.read_before):
                alive = self._alive_from(v, group, t)
            elif low >= group:
                alive = self._incoming(v, t)
            else:
                alive = self._alive_between(v, group, t)
            if not alive.is_zero:
                parts.append(alive * self.sizes[v])
        return parts

    def _alive_between(self, v: int, group: int, t: int) -> Expr:
        """A lower bound of whether a value takes memory while a group runs that has producers of it on both sides."""
        return ZERO

    def chosen(self, x: NDArray[Any]) -> tuple[int, ...]:
        """The way of every slot."""
        return tuple(max(ways, key=lambda k, w=ways: w[k].value(x)) for ways in self.w.values())  # type: ignore[misc]

    def point(self, schedule: Schedule, *, check: bool = True) -> NDArray[Any] | None:
        """The point of a schedule, to start a solver from; None if restrictions or dominated tasks exclude it.

        Without ``check`` the point may break rows.
        """
        import numpy as np

        schedule = prune(self.program, schedule)
        runs = {0: {*schedule.forward}}
        readers: dict[int, list[Task]] = {}  # by stage
        chosen: list[Expr | None] = []
        for slot, (again, way) in enumerate(zip(schedule.again, schedule.ways, strict=True)):
            runs.setdefault(self.stage_of(slot), set()).update(again)
            readers.setdefault(self.stage_of(slot), []).append(self.program.slots[slot][way])
            chosen.append(self.w[slot + 1].get(way))
        chosen += [self.e.get((p, t)) for t, tasks in runs.items() for p in tasks]
        wanted = set[int]()
        for t in reversed(self.stages):  # carried out of a stage: what is read after it before it is made again
            chosen += [self.K.get((v, t)) for v in wanted if v in self.span and v not in self.outputs]
            running = [self.program.tasks[p] for p in runs.get(t, ())]
            wanted |= {v for task in (*running, *readers.get(t, ())) for v in self.program.forward_reads(task)}
            wanted -= {v for task in running for v in task.writes}
        x = np.zeros(self.builder.columns)
        for expr in chosen:
            if expr is None or expr.is_zero:
                return None
            x[[column for column, _ in expr.terms]] = 1.0
        for column, parts in self.builder.follows:
            x[column] = min(1.0, max(0.0, *(part.value(x) for part in parts)))
        return x if not check or self.builder.finish(1.0).violation(x) < 1e-6 else None
