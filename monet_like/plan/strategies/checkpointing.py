"""Checkpointing with plain PyTorch's operators: keep some results of the forward and run the others again.

Shared by the strategies that only decide what to keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...ir.program import Cost, Program
from ...ir.schedule import Schedule
from ...ir.simulate import Report
from ..baseline import store_all
from ..instance import Instance
from ..local_search.searcher import Searcher
from ..subprogram import plain_operators

#: A budget in bytes that no machine exceeds: the fastest variant always fits.
NO_LIMIT = 2**60


@dataclass(frozen=True)
class PlainForward:
    """Plain PyTorch's forward as a graph of operators. An operator's *place* is its number in the order of running.

    Attributes:
        schedule: plain PyTorch's.
        reads: for every place, the places whose results it reads.
        bytes: of the results, for every place.
        seconds: of the operator, for every place.
        values: the values that it makes, for every place.
    """

    schedule: Schedule
    reads: tuple[frozenset[int], ...]
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    values: tuple[tuple[int, ...], ...]


def plain_forward(instance: Instance) -> PlainForward:
    """Plain PyTorch's forward of a program."""
    program = instance.program
    schedule = store_all(program)
    tasks = [program.tasks[p] for p in schedule.forward]
    place = {v: index for index, task in enumerate(tasks) for v in task.writes}
    return PlainForward(
        schedule,
        tuple(frozenset(place[v] for v in program.forward_reads(task)) for task in tasks),
        tuple(sum(program.values[v].bytes for v in task.writes) for task in tasks),
        tuple(instance.cost_of(task).seconds for task in tasks),
        tuple(task.writes for task in tasks),
    )


class Keeping:
    """Schedules that keep the results of some operators and run the others again when they are first needed.

    ``program`` is the program with plain PyTorch's operators only. Schedules are in its indices until `whole`
    translates them.
    """

    def __init__(self, program: Program, costs: Mapping[str, Cost], extra_bytes: int = 0) -> None:
        self.plain = plain_operators(program)
        self.program = self.plain.program
        self.instance = Instance(self.program, costs, extra_bytes)
        self.forward = plain_forward(self.instance)
        self.searcher = Searcher(self.instance)
        #: Values that cannot be made again, such as the random state from which a dropout's mask is made again.
        self.once = {v for v, makers in enumerate(self.searcher.tables.again) if not makers}

    def schedule(self, places: Iterable[int]) -> Schedule:
        """Keep the results of these places of the forward; plain PyTorch's schedule where that is impossible."""
        keep = self.once.union(v for place in places for v in self.forward.values[place])
        planned = self.searcher.plan(self.searcher.keeping(keep), NO_LIMIT)
        return self.forward.schedule if planned is None else planned[0]

    def report(self, schedule: Schedule) -> Report:
        """The simulator's report on a schedule of ``self.program``."""
        return self.instance.simulate(schedule)

    def whole(self, schedule: Schedule) -> Schedule:
        """The schedule in the indices of the program that was given."""
        return self.plain.whole(schedule)

    def best(self, choices: Iterable[Iterable[int]], budget_bytes: int) -> Schedule:
        """Of several sets of places to keep: the fastest that fits, else the one with the lowest peak."""
        return self.fastest([self.schedule(places) for places in choices], budget_bytes)

    def fastest(self, schedules: Sequence[Schedule], budget_bytes: int) -> Schedule:
        """Of several schedules: the fastest that fits, else the one with the lowest peak."""

        def price(schedule: Schedule) -> tuple[int, float]:
            report = self.report(schedule)
            return max(0, report.peak_bytes - budget_bytes), report.seconds

        return min(schedules, key=price)
