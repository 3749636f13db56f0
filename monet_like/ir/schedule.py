"""Schedules: which forward tasks run, which are recomputed when, and which way each backward slot takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .frames import frame
from .program import Program

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class Schedule:
    """The tasks to run. Everything else follows: a value is freed right after its last read.

    Attributes:
        forward: indices into ``Program.tasks``, ascending: the tasks that the forward runs.
        again: for every backward slot, the tasks run again just before it, ascending.
        ways: for every backward slot, the index of the way it takes.
    """

    forward: tuple[int, ...]
    again: tuple[tuple[int, ...], ...]
    ways: tuple[int, ...]

    def __repr__(self) -> str:
        return (
            f"Schedule({len(self.forward)} forward tasks, {self.rerun_count} recomputed, {len(self.ways)} backward "
            "slots)"
        )

    def to_frame(self, program: Program | None = None) -> pandas.DataFrame:
        """One row per backward slot: the way it takes, and the forward tasks that are recomputed just before it.

        Args:
            program: what the schedule is of; with it tasks have names, else numbers.
        """

        def name(task: int) -> str:
            return program.tasks[task].name if program else str(task)

        columns = {"slot": "int64", "way": "int64", "recomputed": "int64", "recomputed_tasks": "object"}
        rows = (
            (slot, way, len(again), ", ".join(map(name, again)))
            for slot, (way, again) in enumerate(zip(self.ways, self.again, strict=True))
        )
        found = frame(columns, rows)
        if program:
            found.insert(1, "task", [program.slots[slot][way].name for slot, way in enumerate(self.ways)])
        return found

    @property
    def rerun_count(self) -> int:
        """Number of recomputations of forward tasks."""
        return sum(map(len, self.again))

    def runs(self) -> list[tuple[int, int]]:
        """(stage, task) of every run in order, as `simulate` reports its steps; -1: the slot itself.

        Stage 0 is the forward, stage ``t >= 1`` backward slot ``t - 1``.
        """
        found = [(0, p) for p in self.forward]
        for slot, tasks in enumerate(self.again):
            found += [(slot + 1, p) for p in (*tasks, -1)]
        return found


def prune(program: Program, schedule: Schedule) -> Schedule:
    """Remove runs whose results nobody reads before they are recomputed."""
    wanted: set[int] = set()
    again: list[tuple[int, ...]] = [()] * len(schedule.again)
    for slot in reversed(range(len(schedule.again))):
        wanted.update(program.forward_reads(program.slots[slot][schedule.ways[slot]]))
        again[slot] = _useful(program, schedule.again[slot], wanted)
    wanted.update(program.outputs)
    return Schedule(_useful(program, schedule.forward, wanted), tuple(again), schedule.ways)


def _useful(program: Program, tasks: Iterable[int], wanted: set[int]) -> tuple[int, ...]:
    """The tasks of one stage that produce wanted values; ``wanted`` becomes the values needed before the stage."""
    useful: list[int] = []
    for index in sorted(tasks, reverse=True):
        task = program.tasks[index]
        if wanted.isdisjoint(task.writes):
            continue
        useful.append(index)
        wanted.difference_update(task.writes)
        wanted.update(program.forward_reads(task))
    return tuple(reversed(useful))


def kept_values(program: Program, schedule: Schedule) -> set[int]:
    """Activations kept for the backward: they exist when the forward ends and are read before they are recomputed."""
    remade: set[int] = set()
    kept: set[int] = set()
    for slot, tasks in enumerate(schedule.again):
        for task in (*(program.tasks[i] for i in tasks), program.slots[slot][schedule.ways[slot]]):
            kept.update(v for v in program.forward_reads(task) if v not in remade)
            remade.update(task.writes)
    return kept
