"""`Instance`: what all planners plan, and the properties of it that depend on costs; each is found once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ..ir.program import Cost, Program, Task
from ..ir.schedule import Schedule
from ..ir.simulate import Report, cost_of, simulate
from .analysis import BackwardBytes, Needs, find_backward_bytes, find_needs


@dataclass(frozen=True, eq=False)
class Instance:
    """A program, its costs, and the resident memory beyond the program's; as of `monet_like.plan.plan`."""

    program: Program
    costs: Mapping[str, Cost]
    extra_bytes: int = 0

    @cached_property
    def needs(self) -> Needs:
        """In which stages values may be needed and tasks may run."""
        return find_needs(self.program)

    @cached_property
    def backward(self) -> BackwardBytes:
        """The backward values alive around each slot."""
        return find_backward_bytes(self.program)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of every value."""
        return tuple(value.bytes for value in self.program.values)

    @property
    def resident_bytes(self) -> int:
        """Memory that is there throughout the step; outputs come on top."""
        return self.program.resident_bytes + self.extra_bytes

    @cached_property
    def output_bytes(self) -> int:
        """Bytes of all outputs."""
        return sum(self.sizes[v] for v in set(self.program.outputs))

    def simulate(self, schedule: Schedule) -> Report:
        """The simulator's report on a schedule."""
        return simulate(self.program, schedule, self.costs, extra_bytes=self.extra_bytes)

    def cost_of(self, task: Task) -> Cost:
        """Seconds and workspace of a task."""
        return cost_of(task, self.costs)

    def net_workspace(self, task: Task) -> int:
        """Bytes that a task takes beyond the values it reads and writes, less the storage that it takes over."""
        return self.cost_of(task).workspace_bytes - (0 if task.overwrites is None else self.sizes[task.overwrites])

    def running_bytes(self, task: Task) -> int:
        """Bytes by which memory is higher while a task runs than before it."""
        return sum(self.sizes[v] for v in task.writes) + self.net_workspace(task)

    @cached_property
    def dominated_tasks(self) -> frozenset[int]:
        """Tasks that another task of their group replaces in every schedule, at no more seconds and bytes."""
        found: set[int] = set()
        for group in self.needs.groups:
            for p in reversed(group):  # of equals, the first stays
                found.update(p for q in group if q != p and q not in found and self._replaces(q, p))
        return frozenset(found)

    def _replaces(self, q: int, p: int) -> bool:
        better, worse = self.program.tasks[q], self.program.tasks[p]
        return (
            better.writes == worse.writes
            and better.overwrites == worse.overwrites
            and better.runs in ("both", worse.runs)
            and set(self.program.forward_reads(better)) <= set(self.program.forward_reads(worse))
            and self.cost_of(better).seconds <= self.cost_of(worse).seconds
            and self.cost_of(better).workspace_bytes <= self.cost_of(worse).workspace_bytes
        )

    def useful_ways(self, slot: int) -> tuple[int, ...]:
        """The possible ways of a slot without those that another way replaces at no more seconds and bytes."""
        ways = self.program.slots[slot]

        def price(k: int) -> tuple[float, int, set[int]]:
            return self.cost_of(ways[k]).seconds, self.net_workspace(ways[k]), set(self.program.forward_reads(ways[k]))

        kept: list[int] = []
        for k in sorted(self.backward.possible[slot], key=lambda k: (*price(k)[:2], len(price(k)[2]), k)):
            one = price(k)
            if not any(other[1] <= one[1] and other[2] <= one[2] for other in map(price, kept)):
                kept.append(k)
        return tuple(sorted(kept))

    @cached_property
    def floor(self) -> tuple[int, str]:
        """A lower bound of every schedule's peak memory, in bytes, and the name of the backward task that takes it.

        It is the memory of the largest backward slot by itself, in its smallest way, with nothing else kept.
        """
        base, outputs = self.resident_bytes + self.output_bytes, set(self.program.outputs)

        def own_bytes(way: Task) -> int:
            return sum(self.sizes[v] for v in set(self.program.forward_reads(way)) - outputs) + self.net_workspace(way)

        found = (base, "")
        for slot, ways in enumerate(self.program.slots):
            least = base + self.backward.during[slot] + min(own_bytes(ways[k]) for k in self.backward.possible[slot])
            found = max(found, (least, ways[0].name), key=lambda item: item[0])
        return found

    def fitting_runs(self, budget_bytes: int) -> tuple[frozenset[int], ...]:
        """For every slot, the tasks whose rerun before it fits into the budget in some schedule.

        A rerun takes at least what it reads and writes, and the values that are alive then in every schedule: a later
        slot reads them in all its ways, and no rerun in between can make them. Every rerun that is ruled out may add
        such values, so this is repeated until nothing changes.
        """
        program, needs, backward, size = self.program, self.needs, self.backward, self.sizes
        outputs, count = set(program.outputs), len(program.slots)
        base = self.resident_bytes + self.output_bytes
        reads = [set(program.forward_reads(task)) - outputs for task in program.tasks]
        alone = [
            sum(size[v] for v in {*reads[p], *task.writes}) + self.net_workspace(task)
            for p, task in enumerate(program.tasks)
        ]
        stages = {stage - 1 for stage in needs.stages}
        candidates = {p for p, again in enumerate(needs.rerun) if again}
        fitting = [set(candidates) if slot in stages else set() for slot in range(count)]
        forced = [
            set.intersection(*(set(program.forward_reads(ways[k])) for k in backward.possible[slot])) - outputs
            for slot, ways in enumerate(program.slots)
        ]
        while True:
            count_before = sum(map(len, fitting))
            beyond: set[int] = set()
            for slot in reversed(range(count)):
                beyond = (beyond | forced[slot]) - {v for p in fitting[slot] for v in program.tasks[p].writes}
                free = budget_bytes - base - backward.before[slot] - sum(size[v] for v in beyond)
                for p in tuple(fitting[slot]):
                    taken = alone[p] - sum(size[v] for v in reads[p] & beyond)
                    if taken > free or program.tasks[p].overwrites in beyond:
                        fitting[slot].discard(p)
            if sum(map(len, fitting)) == count_before:
                return tuple(map(frozenset, fitting))
