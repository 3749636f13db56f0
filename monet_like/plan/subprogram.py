"""Programs without the tasks that their device refuses, and schedules of one as schedules of the other.

No planner then meets a cost that is no number, and schedules still name tasks by their place in the whole program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from ..errors import ProfileError
from ..ir.program import REFUSED, Cost, Program, Task
from ..ir.schedule import Schedule
from ..ir.simulate import cost_of
from .offload import numbered

Options = ParamSpec("Options")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Without:
    """A program without its refused tasks and ways.

    Attributes:
        program: what is left.
        costs: of that.
        tasks: for each of its forward tasks, the place of that in the whole program.
        ways: for every slot the same of its ways.
    """

    program: Program
    costs: Mapping[str, Cost]
    tasks: tuple[int, ...]
    ways: tuple[tuple[int, ...], ...]

    def whole(self, schedule: Schedule) -> Schedule:
        """A schedule of what is left as one of the whole program."""
        ways = tuple(places[way] for places, way in zip(self.ways, schedule.ways, strict=True))
        return replace(numbered(schedule, self.tasks), ways=ways)

    def part(self, schedule: Schedule) -> Schedule:
        """The reverse of `whole`; the schedule takes nothing that is refused."""
        places = {place: index for index, place in enumerate(self.tasks)}
        forward = tuple(places[place] for place in schedule.forward)
        again = tuple(tuple(places[place] for place in tasks) for tasks in schedule.again)
        return Schedule(
            forward, again, tuple(left.index(way) for left, way in zip(self.ways, schedule.ways, strict=True))
        )


def without_refused(program: Program, costs: Mapping[str, Cost]) -> Without | None:
    """None if nothing is refused.

    What reads a value that nothing is left to make is left out as well.

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
    ways = tuple(tuple(way for way, task in enumerate(slot) if runs(task)) for slot in program.slots)
    for slot, left in zip(program.slots, ways, strict=True):
        if not left:
            raise ProfileError(
                f"the profile says that {slot[0].name} cannot run; profile this model again on this device"
            )
    left_slots = tuple(tuple(slot[way] for way in left) for slot, left in zip(program.slots, ways, strict=True))
    smaller = replace(program, tasks=tuple(program.tasks[index] for index in tasks), slots=left_slots)
    return Without(smaller, {key: cost for key, cost in costs.items() if cost != REFUSED}, tuple(tasks), ways)


def about_the_rest(
    ask: Callable[Concatenate[Program, Mapping[str, Cost], Options], Answer],
) -> Callable[Concatenate[Program, Mapping[str, Cost], Options], Answer]:
    """``ask`` about a program without its refused tasks, and give the answer as one about the whole.

    Args:
        ask: its answer is a schedule, has one, or is None; its option ``start`` is a schedule. What else it answers, reports
            among it, is the same for both programs.
    """

    @functools.wraps(ask)
    def asked(program: Program, costs: Mapping[str, Cost], *args: Options.args, **options: Options.kwargs) -> Answer:
        left = without_refused(program, costs)
        if left is None:
            return ask(program, costs, *args, **options)
        if isinstance(start := options.get("start"), Schedule):
            options["start"] = left.part(start)
        answer: Any = ask(left.program, left.costs, *args, **options)
        if isinstance(answer, Schedule):
            answer = left.whole(answer)
        elif answer is not None:
            answer = replace(answer, schedule=left.whole(answer.schedule))
        return cast(Answer, answer)

    return asked
