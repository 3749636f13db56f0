"""The simulator: replays a schedule without running it and counts every byte and second. It judges all plans.

It shares no code with any planner and needs neither torch nor a solver. Its rules are those of the replay:

* Tasks run in the order of the schedule. A task needs every forward value it reads to exist.
* A forward value exists from the run that writes it until its last read before it is written anew (for
  outputs: to the end of the step). Then its storage is freed at once.
* What runs only in the forward may do what must happen once, such as draw noise or update statistics: no other task
  that writes one of its values may run there too.
* A task that overwrites a value takes over its storage: nobody may read that value afterwards.
* The memory of a run is: resident bytes, plus all values that exist before it and are still needed by it or
  later, plus what it writes, plus its workspace, minus the storage it takes over.
* Runs take place one after the other, and copies to and from the host one after the other: a copy begins when its
  run's turn has come and the copy before it has ended. Whether a run waits for it says `Task.copies`; who reads what a
  copy writes waits until it has ended. Without copies the time is the sum of the runs'.
* On a GPU the CPU may have a clock, too (`Launches`): it launches the runs in order and waits for nothing, and a run
  takes place when it is launched and its turn has come. Planners do not count this: they know the GPU's time alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ProfileError, ScheduleError
from .frames import frame
from .program import FREE, Cost, Program, Task
from .schedule import Schedule
from .units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a task.

    Attributes:
        task: its name.
        slot: None in the forward, else the backward slot that it belongs to or prepares.
        bytes: memory while it runs: everything the step has allocated, workspace included.
        seconds: its time, and that for which it waits for copies and for its launch.
        again: a forward task run again.
    """

    task: str
    slot: int | None
    bytes: int
    seconds: float
    again: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """Peak memory, time and every step of a schedule; ``host_bytes``: the peak on the host."""

    peak_bytes: int
    seconds: float
    rerun_seconds: float
    steps: tuple[Run, ...]
    host_bytes: int = 0

    def __repr__(self) -> str:
        return (
            f"Report(peak {format_bytes(self.peak_bytes)}, step {format_seconds(self.seconds)}, {len(self.steps)} "
            "tasks run)"
        )

    def to_frame(self) -> pandas.DataFrame:
        """The memory timeline: one row per task that runs, in order; ``bytes`` is all that the step holds meanwhile.

        ``slot`` is missing in the forward; ``begins_seconds`` counts from the step's start.
        """
        begins = itertools.accumulate((step.seconds for step in self.steps), initial=0.0)
        rows = (
            (step.task, step.slot, step.again, since, step.seconds, step.bytes)
            for step, since in zip(self.steps, begins, strict=False)
        )
        return frame(
            {
                **{"task": "object", "slot": "Int64", "again": "bool", "begins_seconds": "float64"},
                **{"seconds": "float64", "bytes": "int64"},
            },
            rows,
        )

    @property
    def peak_step(self) -> Run:
        """The step with the highest memory."""
        return max(self.steps, key=lambda step: step.bytes)


@dataclass(frozen=True, slots=True)
class Launches:
    """The CPU's clock of a step on a GPU.

    Attributes:
        start_seconds: from the call to the first launch.
        call_seconds: for each operator call of a task.
    """

    start_seconds: float
    call_seconds: float


@dataclass(slots=True)
class _Turn:
    task: Task
    slot: int | None
    again: bool


class Free(dict[str, Cost]):
    """Costs of 0 for every task: for checking rules and counting values only."""

    def __missing__(self, key: str) -> Cost:
        return FREE


def cost_of(task: Task, costs: Mapping[str, Cost]) -> Cost:
    """The task's cost; tasks with an empty key are free.

    Raises:
        ProfileError: the profile lacks it.
    """
    if not task.cost:
        return FREE
    try:
        return costs[task.cost]
    except KeyError:
        raise ProfileError(
            f"the profile has no entry for {task.name} ({task.cost}); profile this model again on this device"
        ) from None


def simulate(
    program: Program,
    schedule: Schedule,
    costs: Mapping[str, Cost],
    *,
    extra_bytes: int = 0,
    launches: Launches | None = None,
) -> Report:
    """Simulate ``schedule``: check its rules, count bytes and add up seconds.

    Args:
        program: the training step.
        schedule: the tasks to run.
        costs: seconds and workspace of every task.
        extra_bytes: resident memory beyond the program's, such as optimizer state.
        launches: the CPU's clock; None: whatever runs is launched in time.

    Raises:
        ScheduleError: the schedule breaks a rule; says which task and value.
    """
    found = list(running(program, schedule, costs, extra_bytes=extra_bytes, launches=launches))
    steps = tuple(moment.step for moment in found)
    return Report(
        peak_bytes=max((step.bytes for step in steps), default=program.resident_bytes + extra_bytes),
        seconds=sum(step.seconds for step in steps),
        rerun_seconds=sum(step.seconds for step in steps if step.again),
        steps=steps,
        host_bytes=max((moment.host_bytes for moment in found), default=0),
    )


class Running(NamedTuple):
    """A step of a simulation and the values that exist during it.

    Its memory is resident bytes, those given as extra, ``alive`` without a value that the task overwrites, what the
    task writes, and its workspace.

    Attributes:
        step: the report's entry for it.
        task: the task that runs.
        alive: bytes of the values that exist when it begins; the simulator's own, to be read before the next moment.
        host_bytes: on the host, of what is alive and written.
    """

    step: Run
    task: Task
    alive: dict[int, int]
    host_bytes: int


def running(
    program: Program,
    schedule: Schedule,
    costs: Mapping[str, Cost],
    *,
    extra_bytes: int = 0,
    launches: Launches | None = None,
) -> Iterator[Running]:
    """Every step of a schedule with what exists then; see `simulate`."""
    runs = _flatten(program, schedule)
    last_read = _last_reads(program, runs)
    values = program.values
    alive: dict[int, int] = {}
    memory = program.resident_bytes + extra_bytes
    engine = _Engine(launches or Launches(0.0, 0.0))
    host = 0
    for index, run in enumerate(runs):
        if index == len(schedule.forward):  # the backward starts: its incoming gradients appear
            alive.update((value, values[value].bytes) for value in program.tangents)
            memory += sum(values[value].bytes for value in program.tangents)
        task = run.task
        cost = cost_of(task, costs)
        taken = values[task.overwrites].bytes if task.overwrites is not None else 0
        written = sum(values[value].bytes for value in task.writes)
        seconds = engine.run(task, cost.seconds)
        host -= values[task.overwrites].host_bytes if task.overwrites is not None else 0
        host += sum(values[value].host_bytes for value in task.writes if value not in alive)
        step = Run(task.name, run.slot, memory + written + cost.workspace_bytes - taken, seconds, run.again)
        yield Running(step, task, alive, host)
        if task.overwrites is not None:
            memory -= alive.pop(task.overwrites)
        for value in task.writes:
            memory += values[value].bytes - alive.get(value, 0)
            alive[value] = values[value].bytes
        for value in {*task.reads, *task.writes}:
            if value in alive and last_read.get((value, index)) == index:
                memory -= alive.pop(value)
                host -= values[value].host_bytes


class _Engine:
    """Clocks of the tasks, of the copies that overlap with them, and of the CPU that launches both."""

    def __init__(self, launches: Launches) -> None:
        self.now = self.free = 0.0
        self.ends: dict[int, float] = {}
        self.launched, self.call_seconds = launches.start_seconds, launches.call_seconds

    def run(self, task: Task, seconds: float) -> float:
        """Run a task of ``seconds``; returns by how much the clock advances."""
        self.launched += self.call_seconds * len(task.calls)
        ready = max((self.ends.pop(value) for value in task.reads if value in self.ends), default=0.0)
        spent = max(0.0, ready - self.now, self.launched - self.now)
        if task.copies in ("whole", "start"):
            turn = max(0.0, self.free - (self.now + spent))
            self.free = self.now + spent + turn + seconds
            if task.copies == "start":
                turn = 0.0
                self.ends.update(dict.fromkeys(task.writes, self.free))
            spent += turn
        spent += 0.0 if task.copies == "start" else seconds
        self.now += spent
        return spent


def _flatten(program: Program, schedule: Schedule) -> list[_Turn]:
    """All runs in order, after checking that the schedule's indices fit the program."""
    slots = len(program.slots)
    if len(schedule.again) != slots or len(schedule.ways) != slots:
        raise ScheduleError(f"the schedule has {len(schedule.ways)} backward slots, the program {slots}")
    runs: list[_Turn] = []
    for slot, tasks in ((None, schedule.forward), *enumerate(schedule.again)):
        previous = -1
        for index in tasks:
            if not previous < index < len(program.tasks):
                raise ScheduleError(f"task {index} is out of order or out of range in {_stage(slot)}")
            previous = index
            task = program.tasks[index]
            if task.runs == ("again" if slot is None else "first"):
                raise ScheduleError(f"{task.name} may not run in {_stage(slot)}")
            runs.append(_Turn(task, slot, slot is not None))
        if slot is not None:
            if not 0 <= schedule.ways[slot] < len(program.slots[slot]):
                raise ScheduleError(f"slot {slot} has no way {schedule.ways[slot]}")
            runs.append(_Turn(program.slots[slot][schedule.ways[slot]], slot, False))
    return runs


def _last_reads(program: Program, runs: list[_Turn]) -> dict[tuple[int, int], int]:
    """For (value, run that touches it): the run after which the value's current storage is free.

    Also checks that every read finds its value, and that nothing reads an overwritten one.
    """
    kept = {*program.outputs, *program.gradients}
    born: dict[int, int] = dict.fromkeys(program.tangents, -1)
    touched: dict[int, list[int]] = {value: [] for value in program.tangents}
    dead: dict[int, str] = {}
    made_in_forward: dict[int, Task] = {}
    result: dict[tuple[int, int], int] = {}

    def close(value: int) -> None:
        """The current storage of ``value`` ends: it was last touched by the last entry of its list."""
        touches = touched[value]
        result.update(((value, touch), touches[-1]) for touch in touches)

    for index, run in enumerate(runs):
        for value in run.task.reads:
            if program.values[value].kind in ("forward", "backward"):
                if value in dead:
                    raise ScheduleError(
                        f"{run.task.name} reads {program.values[value].name} in {_stage(run.slot)}, "
                        f"after {dead[value]} took over its storage"
                    )
                if value not in born:
                    raise ScheduleError(
                        f"{run.task.name} reads {program.values[value].name} in {_stage(run.slot)}, but nothing has "
                        "made it"
                    )
                touched[value].append(index)
        if run.task.overwrites is not None:
            dead[run.task.overwrites] = run.task.name
        for value in run.task.writes:
            if value in kept and value in born:
                raise ScheduleError(
                    f"{run.task.name} writes {program.values[value].name} a second time; the caller holds it"
                )
            if value in born and touched[value]:
                close(value)
            born[value] = index
            touched[value] = [index]
            dead.pop(value, None)
            if run.slot is None:
                other = made_in_forward.setdefault(value, run.task)
                if other is not run.task and "first" in (other.runs, run.task.runs):
                    raise ScheduleError(
                        f"{run.task.name} and {other.name} both write {program.values[value].name} in the forward; "
                        "what runs only there, such as a random draw, may not be done twice"
                    )
    missing = [program.values[value].name for value in program.outputs if value not in made_in_forward]
    if missing:
        raise ScheduleError(f"the forward does not make its output {missing[0]}")
    for value in born:
        if value not in kept and touched[value]:
            close(value)
    return result


def _stage(slot: int | None) -> str:
    return "the forward" if slot is None else f"backward slot {slot}"
