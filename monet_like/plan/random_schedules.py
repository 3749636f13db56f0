"""Random valid schedules of a program: every producer and way gets its turn, whatever a planner would choose."""

from __future__ import annotations

import random

from ..errors import ScheduleError
from ..ir.program import Program
from ..ir.schedule import Schedule
from ..ir.simulate import Free, simulate


class _Draw:
    """The choices of one schedule, and the values that are there so far."""

    def __init__(self, program: Program, rng: random.Random, drop: float, others: float) -> None:
        self.program, self.rng, self.drop, self.others = program, rng, drop, others
        self.have: set[int] = set()

    def makers(self, value: int, stage: str) -> list[int]:
        """The tasks that may write a value in the forward (``first``) or during the backward (``again``)."""
        tasks, outputs = self.program.tasks, self.program.outputs
        able = [i for i in self.program.producers[value] if tasks[i].runs in ("both", stage)]
        return [i for i in able if stage == "first" or set(tasks[i].writes).isdisjoint(outputs)]

    def producer(self, value: int, stage: str) -> int:
        allowed = self.makers(value, stage)
        plain = [i for i in allowed if self.program.tasks[i].variant == "aten"]
        if not allowed:
            raise ScheduleError("no producer")
        return self.rng.choice(plain) if plain and self.rng.random() > self.others else self.rng.choice(allowed)

    def make(self, value: int, stage: str, chosen: set[int]) -> None:
        if self.program.values[value].kind != "forward" or value in self.have:
            return
        index = self.producer(value, stage)
        task = self.program.tasks[index]
        for read in task.reads:
            self.make(read, stage, chosen)
        chosen.add(index)
        self.have.update(task.writes)


def random_schedule(
    program: Program, seed: int, *, drop: float = 0.5, others: float = 0.5, attempts: int = 200
) -> Schedule:
    """A schedule that the simulator accepts; it is the same for the same seed.

    Args:
        drop: share of values that are made again rather than kept.
        others: share of choices that take any producer or way rather than PyTorch's own.
        attempts: how often to draw until a schedule is valid, with smaller shares each time.

    Raises:
        ScheduleError: none was.
    """
    rng = random.Random(seed)
    for attempt in range(attempts):
        keep_plain = 1 - attempt / attempts  # ever tamer, so that one succeeds
        draw = _Draw(program, rng, drop * keep_plain, others * keep_plain)
        try:
            schedule = _one(program, draw, rng)
            simulate(program, schedule, Free())
        except ScheduleError:
            continue
        return schedule
    raise ScheduleError(f"none of {attempts} random schedules was valid")


def _one(program: Program, draw: _Draw, rng: random.Random) -> Schedule:
    ways = tuple(rng.randrange(len(slot)) if rng.random() < draw.others else 0 for slot in program.slots)
    forward: set[int] = set()
    wanted = [*program.outputs, *(v for slot, way in zip(program.slots, ways, strict=True) for v in slot[way].reads)]
    wanted += [value for value in _kept_to_run_again(program) if rng.random() < draw.others]
    for value in wanted:
        if program.values[value].kind == "forward" and draw.makers(value, "first"):
            draw.make(value, "first", forward)
    again = []
    for slot, way in zip(program.slots, ways, strict=True):
        chosen: set[int] = set()
        if any(program.values[v].kind == "forward" for way_ in slot for v in way_.reads):
            dropped = {v for v in draw.have if draw.rng.random() < draw.drop and draw.makers(v, "again")}
            draw.have -= dropped - set(program.outputs)
        for value in slot[way].reads:
            draw.make(value, "again", chosen)
        again.append(tuple(sorted(chosen)))
    for t in range(1, len(again)):  # some of it earlier than needed
        if again[t] and not program.slot_reads[t - 1] and not again[t - 1] and draw.rng.random() < draw.others:
            again[t - 1], again[t] = again[t], ()
    return Schedule(tuple(sorted(forward)), tuple(again), ways)


def _kept_to_run_again(program: Program) -> list[int]:
    """Values that the forward alone can make and only what runs again reads: copies.

    Not what a task makes beside something else, such as a dropout's bits: the noise would be drawn twice.
    """
    again = {value for task in program.tasks if task.runs == "again" for value in task.reads}
    of_slots = {value for slot in program.slots for way in slot for value in way.reads}
    return [
        value
        for value in sorted(again - of_slots)
        if (makers := [program.tasks[i] for i in program.producers[value]])
        and all(task.runs == "first" and task.writes == (value,) for task in makers)
    ]
