"""Points of a block: schedules of one block of a model, and what each costs the step of the whole model.

Before its backward a block waits while all blocks after it run. So its schedule is judged by five numbers instead of
one peak: the bytes that it carries from its forward to its backward, the peaks of both, the backward's peak where its
gradients are added to earlier ones, and its seconds. `menu` finds schedules that trade these off. It asks the planner
for them with one more slot at the start of the block's backward, which computes nothing and has a workspace: the memory
that the rest of the model takes meanwhile (`with_rest`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ...errors import InfeasibleError, ScheduleError, SolverError
from ...ir.defaults import SOLVER
from ...ir.program import Cost, Program, Task
from ...ir.schedule import Schedule, kept_values
from ...ir.simulate import Run, simulate
from ...ir.step import Point
from .. import plan
from ..budgets import smallest_budget
from ..instance import Instance
from ..local_search.searcher import quick_evaluations, smallest_known
from ..result import Smallest

#: Cost key of the slot that stands for the rest of the model.
REST = "the rest of the model"

#: Share of a copy's seconds by which what runs beside it takes longer: both use the device's memory.
BESIDE = 0.01
#: Limits of the carried bytes that are tried, as shares of the way from the least to those of the fastest schedule;
#: those first that tell most, because the time may not do for all.
CARRIED_SHARES = (0.0, 0.5, 0.15, 0.75, 0.3)
#: The same for the peak, as shares of the way from the least peak to that of a point.
PEAK_SHARES = (0.0, 0.5)


def point_of(
    program: Program,
    schedule: Schedule,
    costs: Mapping[str, Cost],
    held: Collection[int] = (),
    handed: Mapping[int, int] = MappingProxyType({}),
) -> Point:
    """What a schedule of a block costs, by the simulator.

    Args:
        held: incoming gradients and results that the rest of the model holds until the block's backward has ended, or
            that do not come: they are not freed in the block's backward.
        handed: for gradients of parameters the backward slot after which autograd gets them.

    Raises:
        ScheduleError: the schedule breaks a rule of the program.
        ProfileError: ``costs`` lacks a task.
    """
    values, outputs = program.values, frozenset(program.outputs)
    whole = simulate(program, schedule, costs)
    forward, resident = len(schedule.forward), program.resident_bytes
    kept = kept_values(program, schedule)
    # The caller holds the results during the forward only: in the backward they are there if they are kept.
    ends = replace(
        program,
        outputs=tuple(v for v in program.outputs if v in held and v in kept),
        gradients=(*program.gradients, *(v for v in program.tangents if v in held)),
    )
    freed = simulate(ends, schedule, costs).steps[forward:]
    there = resident + sum(values[v].bytes for v in (*program.tangents, *(kept & outputs)))
    return Point(
        schedule,
        whole.seconds,
        sum(values[v].bytes for v in kept - outputs),
        max((step.bytes for step in whole.steps[:forward]), default=resident) - resident,
        max((step.bytes for step in freed), default=there) - there,
        max((step.bytes - _added_bytes(program, handed, step) for step in freed), default=there) - there,
        tuple(sorted((kept & outputs) | kept_inputs(program, schedule))),
        sum(step.seconds for step in whole.steps[:forward]),
        min(_fetch_seconds(program, schedule, costs), sum(step.seconds for step in whole.steps[forward:])),
    )


def _fetch_seconds(program: Program, schedule: Schedule, costs: Mapping[str, Cost]) -> float:
    """Seconds of the copies from the host that a schedule's backward makes."""
    tasks = (program.tasks[index] for again in schedule.again for index in again)
    return sum(costs[task.cost].seconds for task in tasks if task.copies in ("start", "whole"))


def _added_bytes(program: Program, handed: Mapping[int, int], step: Run) -> int:
    """Bytes of gradients that are added to earlier ones and freed before a step of the backward."""
    assert step.slot is not None
    return sum(program.values[value].bytes for value, slot in handed.items() if slot < step.slot)


def with_rest(program: Program, costs: Mapping[str, Cost], rest_bytes: int) -> tuple[Program, dict[str, Cost]]:
    """The program and its costs with a slot at the start of the backward that takes ``rest_bytes`` of workspace."""
    rest = Task(REST, (), (), REST)
    return replace(program, slots=((rest,), *program.slots)), {**costs, REST: Cost(0.0, rest_bytes)}


def without_rest(schedule: Schedule) -> Schedule:
    """A schedule of `with_rest` for the block itself: what runs again before the rest runs after it."""
    if len(schedule.again) == 1:
        return Schedule(schedule.forward, (), ())
    early, first, *others = schedule.again
    return Schedule(schedule.forward, (tuple(sorted({*early, *first})), *others), schedule.ways[1:])


def owning(point: Point, program: Program, lone: Collection[int], copied: Collection[int] = ()) -> Point:
    """The point with inputs and results among what it carries that are its own.

    Args:
        lone: inputs that exist only while the block keeps them.
        copied: inputs and results that it keeps a copy of, made when its forward ends.
    """
    mine = [v for v in point.shared if v in lone or v in copied]
    size = sum(program.values[v].bytes for v in mine)
    more = sum(program.values[v].bytes for v in mine if v in copied)
    return replace(
        point, carried_bytes=point.carried_bytes + size, shared=tuple(v for v in point.shared if v not in mine),
        forward_peak_bytes=point.forward_peak_bytes + more, backward_peak_bytes=point.backward_peak_bytes + size,
        adding_peak_bytes=point.adding_peak_bytes + size,
    )  # fmt: skip


def kept_inputs(program: Program, schedule: Schedule) -> set[int]:
    """The inputs that something in the backward reads."""
    read: set[int] = set()
    for tasks, slot, way in zip(schedule.again, program.slots, schedule.ways, strict=True):
        read.update(slot[way].reads)
        for index in tasks:
            read.update(program.tasks[index].reads)
    return {v for v in read if program.values[v].kind == "input"}


def offloading(point: Point, program: Program, movable: Collection[int], bytes_per_second: float) -> Iterator[Point]:
    """The ways to have some of what a point keeps on the host between its forward and its backward: the inputs; the
    largest values, as far as their copies are hidden; all.

    A copy to the host runs beside the next block's forward, one from it beside the backward of a block that follows.
    What takes longer than the block's own forward and backward is waited for: blocks in a row are mostly equal.

    Args:
        movable: values that leave the device when the block lets go of them; inputs among them are carried (`owning`).
        bytes_per_second: of the link, each way.
    """
    values = program.values
    kept = kept_values(program, point.schedule) | kept_inputs(program, point.schedule)
    may = sorted(kept & set(movable), key=lambda v: (-values[v].bytes, v))
    forward, backward = point.forward_seconds, point.seconds - point.forward_seconds
    room, hidden = min(forward, backward) * bytes_per_second, []
    for value in may:
        if values[value].bytes <= room:
            hidden.append(value)
            room -= values[value].bytes
    inputs = [value for value in may if values[value].kind == "input"]
    for some in dict.fromkeys(tuple(sorted(one)) for one in (inputs, hidden, may) if one):
        sizes = tuple(values[v].bytes for v in some)
        yield replace(with_copies(point, program, some, sizes, bytes_per_second), offloaded=some)


def with_copies(
    point: Point, program: Program, some: Collection[int], copies: tuple[int, ...], bytes_per_second: float
) -> Point:
    """The point with copies on the host.

    Args:
        some: inputs and results among what is copied: they are shared no longer.
        copies: bytes of all that is copied.
    """
    forward, backward = point.forward_seconds, point.seconds - point.forward_seconds
    copy = sum(copies) / bytes_per_second
    sent = forward + max(0.0, copy - forward) + BESIDE * copy
    seconds = sent + backward + max(0.0, copy - backward) + BESIDE * copy
    apart = sum(program.values[v].bytes for v in some if v in point.shared)  # they are not carried
    return replace(
        point, seconds=seconds, carried_bytes=point.carried_bytes - (sum(copies) - apart),
        backward_peak_bytes=point.backward_peak_bytes + apart, adding_peak_bytes=point.adding_peak_bytes + apart,
        shared=tuple(v for v in point.shared if v not in some), forward_seconds=sent,
        fetch_seconds=min(point.fetch_seconds + copy, seconds - sent), copies=copies,
    )  # fmt: skip


def efficient(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points that no other one dominates, those with the fewest carried bytes first."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.numbers, len(p.shared))):
        if not any(_dominates(other, point) for other in found):
            found.append(point)
    return tuple(sorted(found, key=lambda p: (p.carried_bytes, p.numbers)))


def _dominates(one: Point, other: Point) -> bool:
    no_worse = all(mine <= theirs for mine, theirs in zip(one.numbers, other.numbers, strict=True))
    return no_worse and set(one.shared) <= set(other.shared)


def menu(
    program: Program,
    costs: Mapping[str, Cost],
    *,
    solver: str = SOLVER,
    strategy: str = "milp",
    time_limit_seconds: float = 60.0,
    gap: float = 0.01,
    threads: int = 1,
    progress: Callable[[str], None] | None = None,
    peak_shares: Sequence[float] = PEAK_SHARES,
) -> tuple[Point, ...]:
    """Points of a block, from the one that carries the fewest bytes to the fastest.

    Args:
        program, costs: of the block.
        solver, strategy, gap, threads: see `plan`; strategy ``heuristic`` searches as briefly as a quick plan does.
        time_limit_seconds: wall seconds for all points together; then nothing new is begun, and the best that is known
            is taken. The first four are there in any case: the fastest, the one that carries least, the one with the
            lowest peak, and one near both.
        progress: called with lines for people.
        peak_shares: where between the least peak and that of a point other points are looked for; none: less time.

    Raises:
        SolverError: no schedule was found at all.
    """
    asked = _Asked(
        program, costs, solver, strategy, time_limit_seconds / 12, gap, threads, progress, peak_shares,
        time.monotonic() + time_limit_seconds,
    )  # fmt: skip
    return efficient([point for point in asked.points() if math.isfinite(point.seconds)])


@dataclass(frozen=True)
class _Asked:
    """The planner, asked for schedules of one block."""

    program: Program
    costs: Mapping[str, Cost]
    solver: str
    strategy: str
    seconds: float
    gap: float
    threads: int
    progress: Callable[[str], None] | None
    peak_shares: Sequence[float]
    ends: float  # on the clock `time.monotonic`

    def points(self) -> Iterator[Point]:
        """All points that are found, dominated ones included."""
        program = self.program
        workspace = max((cost.workspace_bytes for cost in self.costs.values()), default=0)
        room = 2 * (program.resident_bytes + sum(value.bytes for value in program.values) + workspace)
        fastest = self.within(room, room) or replace(self, strategy="heuristic").within(room, room)
        if fastest is None:
            raise SolverError("the planner found no schedule of the block at all")
        yield fastest
        least = self.smallest(*with_rest(program, self.costs, room))
        lean = point_of(program, without_rest(least.schedule), self.costs)
        yield lean
        smallest = self.smallest(program, self.costs)
        lowest_bytes = smallest.report.peak_bytes
        yield point_of(program, smallest.schedule, self.costs)
        yield self.balanced(lowest_bytes, lean.carried_bytes)
        low, high = lean.carried_bytes, fastest.carried_bytes
        for share in CARRIED_SHARES:
            if self.is_over():
                return
            limit = low + int(share * (high - low))
            found = self.within(room, limit)
            if found is None:
                continue
            yield found
            top = self.whole_peak(found)
            for part in self.peak_shares if top > lowest_bytes else ():
                if self.is_over():
                    return
                peak = lowest_bytes + int(part * (top - lowest_bytes))
                if (narrow := self.within(peak, limit)) is not None:
                    yield narrow

    def is_over(self) -> bool:
        """Whether the time is."""
        return time.monotonic() >= self.ends

    def whole_peak(self, point: Point) -> int:
        """The peak that the planner sees of a schedule."""
        return simulate(self.program, point.schedule, self.costs).peak_bytes

    def within(self, peak_bytes: int, carried_bytes: int) -> Point | None:
        """The fastest schedule whose peak and whose carried bytes are within limits; None if none was found."""
        program = self.program
        rest = self.rest(peak_bytes, carried_bytes)
        options: dict[str, Any] = {}
        if self.strategy == "heuristic":
            left = max(0.0, self.ends - time.monotonic())
            options = {"evaluations": quick_evaluations(), "seconds": left, "enough": lambda _: self.is_over()}
        with suppress(InfeasibleError, SolverError, ScheduleError):
            found = plan(
                *with_rest(program, self.costs, rest), peak_bytes, solver=self.solver, strategy=self.strategy,
                time_limit_seconds=max(self.seconds, 0.5), gap=self.gap, threads=self.threads, progress=self.progress,
                **options,
            )  # fmt: skip
            return point_of(program, without_rest(found.schedule), self.costs)
        return None

    def balanced(self, peak_bytes: int, carried_bytes: int) -> Point:
        """A schedule that is above the least peak and the least carried bytes by as little as can be found.

        Of schedules with the least peak, any may be found first, however much it carries.
        """
        found = self.smallest(*with_rest(self.program, self.costs, self.rest(peak_bytes, carried_bytes)))
        return point_of(self.program, without_rest(found.schedule), self.costs)

    def rest(self, peak_bytes: int, carried_bytes: int) -> int:
        """Bytes of the rest of the model with which a block that carries so much reaches this peak."""
        program = self.program
        ends = sum(program.values[v].bytes for v in (*program.outputs, *program.tangents))
        return max(0, peak_bytes - program.resident_bytes - ends - carried_bytes)

    def smallest(self, program: Program, costs: Mapping[str, Cost]) -> Smallest:
        """The schedule with the lowest peak that is found.

        All tasks take equally long meanwhile: what fits must not depend on how busy the machine was when it was
        measured.
        """
        even = {key: replace(cost, seconds=1.0) if math.isfinite(cost.seconds) else cost for key, cost in costs.items()}
        if self.strategy == "milp":
            with suppress(SolverError):
                return smallest_budget(program, even, solver=self.solver, time_limit_seconds=max(self.seconds, 0.5))
        known = smallest_known(Instance(program, even), enough=self.is_over)
        if known is None:
            raise SolverError("the search found no schedule of the block at all")
        return known
