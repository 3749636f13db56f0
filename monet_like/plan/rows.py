"""Columns and rows that the integer program (ilp/formulation.py) and its relaxation (bound/relaxation.py) share.

Both decide which forward tasks run in a *stage*, which values are kept after it, and which way each slot takes. They
differ in what a stage is: the forward or one slot, or the forward or a block of slots.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..ir.program import Task
from ..solvers.matrix import ONE, Builder, Expr, total
from .instance import Instance


class Rows:
    """The decisions of one instance within a budget. Subclasses say what runs in a stage and what ends it."""

    def __init__(self, instance: Instance, budget_bytes: int) -> None:
        self.instance, self.budget, self.builder = instance, budget_bytes, Builder()
        self.program = program = instance.program
        self.needs, self.backward, self.sizes = instance.needs, instance.backward, instance.sizes
        self.group_of = instance.needs.group_of
        self.outputs, self.dominated = frozenset(program.outputs), instance.dominated_tasks
        #: For every value, the forward tasks that read it.
        self.readers: list[list[int]] = [[] for _ in program.values]
        for p, task in enumerate(program.tasks):
            for v in set(task.reads):
                self.readers[v].append(p)
        #: Resident throughout the step, in bytes; outputs come on top.
        self.resident, self.output_bytes = instance.resident_bytes, instance.output_bytes
        seconds = [instance.cost_of(task).seconds for task in program.every_task()]
        #: Objective unit: about a thousandth of the step, so that solver tolerances mean the same for every model.
        self.seconds_per_unit = (sum(seconds) or 1.0) / 1000
        self._alive: dict[tuple[int, int, int], Expr] = {}
        self._reading: dict[tuple[int, int], list[int]] = {}

    def _run(self, p: int, stage: int) -> Expr | None:
        """Whether task p runs in a stage; None if it cannot."""
        raise NotImplementedError

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
            runs = {self.group_of[p] for p in self.readers[v] if self._run(p, stage) is not None}
            self._reading[v, stage] = sorted(runs)
        return self._reading[v, stage]

    def _group_reads(self, v: int, group: int, stage: int) -> Expr:
        """Whether a task of a group runs in a stage and reads a value."""
        runs = (self._run(p, stage) for p in self.needs.groups[group] if v in self.program.tasks[p].reads)
        return total(run for run in runs if run is not None)

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
            if u is None or (run := self._run(r, stage)) is None:
                continue
            later = [g for g in self._reader_groups(u, stage) if g > self.group_of[r]]
            for end in (*(self._group_reads(u, group, stage) for group in later), *self._ends(u, stage)):
                if not end.is_zero:
                    self.builder.at_most(run + end, ONE)

    def _running_bytes(self, group: int, stage: int) -> list[Expr]:
        """The bytes that the tasks of a group write and work with in a stage; none if no such task can run."""
        runs = ((self.program.tasks[p], self._run(p, stage)) for p in self.needs.groups[group])
        return [run * self.instance.running_bytes(task) for task, run in runs if run is not None]
