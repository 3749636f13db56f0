"""A program with some tasks and ways left out, and the translation of schedules between it and the whole program.

Three things leave tasks out: tasks that the device cannot run (`without_refused`), copies that overlap with computing
(`without_overlap`), and all operator variants but plain PyTorch's own (`plain_operators`). Planners work on what is
left; schedules name tasks by their indices in the whole program, so a plan is translated at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from ..errors import MonetError, ProfileError
from ..ir.program import REFUSED, Cost, Program, Task
from ..ir.schedule import Schedule
from ..ir.simulate import cost_of

Ask = TypeVar("Ask", bound=Callable[..., Any])


@dataclass(frozen=True)
class Subprogram:
    """Part of a program: some of its forward tasks, and some ways of each of its backward slots.

    Attributes:
        program: the part as a program by itself, with the same values.
        tasks: for each of its forward tasks, the index in the whole program.
        ways: for each of its slots, the indices of its ways in the whole program's slot.
    """

    program: Program
    tasks: tuple[int, ...]
    ways: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(program: Program, tasks: Iterable[int], ways: Iterable[Iterable[int]] | None = None) -> Subprogram:
        """Keep these tasks, by index, and these ways of every slot; without ``ways``, all of them."""
        kept = tuple(tasks)
        chosen = tuple(map(tuple, ways if ways is not None else (range(len(slot)) for slot in program.slots)))
        slots = tuple(tuple(slot[k] for k in ks) for slot, ks in zip(program.slots, chosen, strict=True))
        return Subprogram(replace(program, tasks=tuple(program.tasks[p] for p in kept), slots=slots), kept, chosen)

    def whole(self, schedule: Schedule) -> Schedule:
        """A schedule of this program, in the indices of the whole program."""
        return Schedule(
            tuple(self.tasks[p] for p in schedule.forward),
            tuple(tuple(self.tasks[p] for p in tasks) for tasks in schedule.again),
            tuple(chosen[k] for chosen, k in zip(self.ways, schedule.ways, strict=True)),
        )

    def part(self, schedule: Schedule) -> Schedule:
        """The reverse of `whole`: a schedule of the whole program that uses nothing left out, in this one's indices."""
        index = {p: own for own, p in enumerate(self.tasks)}
        return Schedule(
            tuple(index[p] for p in schedule.forward),
            tuple(tuple(index[p] for p in tasks) for tasks in schedule.again),
            tuple(chosen.index(k) for chosen, k in zip(self.ways, schedule.ways, strict=True)),
        )

    @contextmanager
    def planning(self) -> Iterator[None]:
        """While this program is planned: the schedule of an error becomes one of the whole program."""
        try:
            yield
        except MonetError as error:
            error.smallest = error.smallest and self.whole(error.smallest)
            raise


def plain_operators(program: Program) -> Subprogram:
    """Plain PyTorch's own operators, and the tasks that run them again: no variant, nothing in place."""

    def plain(task: Task) -> bool:
        return task.variant == "aten" and not task.word and task.overwrites is None

    tasks = (p for p, task in enumerate(program.tasks) if plain(task))
    return Subprogram.of(
        program, tasks, ([k for k, way in enumerate(ways) if plain(way)] or [0] for ways in program.slots)
    )


def has_overlap(program: Program) -> bool:
    """Whether the program has copies to or from the host that may overlap with computing."""
    return any(task.copies == "start" for task in program.tasks)


def without_overlap(program: Program, copies: bool = True) -> Subprogram:
    """The program with those copies only for which the step waits; with ``copies`` false, without any copy."""
    admitted = ("", "whole") if copies else ("",)
    return Subprogram.of(program, (p for p, task in enumerate(program.tasks) if task.copies in admitted))


def without_refused(program: Program, costs: Mapping[str, Cost]) -> Subprogram | None:
    """The program without the tasks and ways that the device refuses; None if it refuses none.

    Tasks and ways that read a value which no remaining task makes are left out as well.

    Raises:
        ProfileError: a slot has no way left, or ``costs`` lacks a task.
    """
    if not any(cost == REFUSED for cost in costs.values()):
        return None
    given = {v for v, value in enumerate(program.values) if value.kind != "forward"}
    tasks = [index for index, task in enumerate(program.tasks) if cost_of(task, costs) != REFUSED]
    made: set[int] = set()

    def runs(task: Task) -> bool:
        return cost_of(task, costs) != REFUSED and made.issuperset(task.reads)

    count = -1
    while count != len(tasks):
        count = len(tasks)
        made = given.union(v for index in tasks for v in program.tasks[index].writes)
        tasks = [index for index in tasks if runs(program.tasks[index])]
    ways = [[k for k, task in enumerate(slot) if runs(task)] for slot in program.slots]
    for slot, left in zip(program.slots, ways, strict=True):
        if not left:
            raise ProfileError(
                f"the profile says that {slot[0].name} cannot run; profile this model again on this device"
            )
    return Subprogram.of(program, tasks, ways)


def _plans_of_a_part(
    part_of: Callable[[Program, Mapping[str, Cost]], Subprogram | None],
) -> Callable[[Ask], Ask]:
    """A decorator: the function sees part of a program, and its schedules are translated to the whole program.

    It returns a schedule, an object with a field ``schedule``, or None; its option ``start``, if any, is a schedule.
    Everything else in its answer, such as the report, is the same for both programs.
    """

    def decorator(ask: Ask) -> Ask:
        @functools.wraps(ask)
        def asked(program: Program, costs: Mapping[str, Cost], *args: Any, **options: Any) -> Any:
            part = part_of(program, costs)
            if part is None:
                return ask(program, costs, *args, **options)
            if options.get("start") is not None:
                options["start"] = part.part(options["start"])
            finite = {key: cost for key, cost in costs.items() if cost != REFUSED}
            with part.planning():
                answer = ask(part.program, finite, *args, **options)
            if isinstance(answer, Schedule):
                return part.whole(answer)
            return answer and replace(answer, schedule=part.whole(answer.schedule))

        return cast(Ask, asked)

    return decorator


#: Decorator: the function sees no task that the device refuses, and no cost that is not a number.
plans_without_refused = _plans_of_a_part(without_refused)
#: Decorator: the function sees only copies for which the step waits. Overlapped ones hold their values for longer.
plans_without_overlap = _plans_of_a_part(lambda program, _: without_overlap(program) if has_overlap(program) else None)
