"""Small random programs, and the slow judge that tries every schedule of one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from monet_like.errors import ScheduleError
from monet_like.ir.program import Cost, Program, Task, Value, ValueKind
from monet_like.ir.schedule import Schedule
from monet_like.ir.simulate import simulate
from monet_like.plan.analysis import find_needs


class ProgramMaker:
    """Collects values, tasks and costs under names."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.costs: dict[str, Cost] = {}

    def value(self, name: str, size: int, kind: ValueKind) -> int:
        """A new value; returns its index."""
        self.values.append(Value(name, size, kind))
        return len(self.values) - 1

    def task(self, name: str, reads: tuple[int, ...], writes: tuple[int, ...], cost: Cost, **rest: object) -> Task:
        """A task with its own cost."""
        self.costs[name] = cost
        return Task(name, reads, writes, cost=name, **rest)  # type: ignore[arg-type]


def random_program(rng: random.Random, most_tasks: int = 5) -> tuple[Program, dict[str, Cost]]:
    """A program with branches, alternatives, several ways, in-place variants, workspaces and first/again tasks."""
    maker = ProgramMaker()
    source = maker.value("x", rng.randint(0, 3), "input")
    chain: list[int] = []
    tasks: list[Task] = []
    while len(tasks) < most_tasks and (len(chain) < 2 or rng.random() < 0.8):
        _random_operation(rng, maker, source, chain, tasks, most_tasks - len(tasks))
    outputs = tuple({chain[-1]} | ({rng.choice(chain)} if rng.random() < 0.2 else set()))
    tasks = [t for t in tasks if t.overwrites not in outputs or t.overwrites is None]
    slots, tangents, gradients = _random_backward(rng, maker, chain)
    program = Program(tuple(maker.values), tuple(tasks), slots, outputs, tangents, gradients)
    return program, maker.costs


def _random_cost(rng: random.Random) -> Cost:
    return Cost(float(rng.randint(0, 9)), rng.choice((0, 0, 0, 1, 3)))


def _random_operation(
    rng: random.Random, maker: ProgramMaker, source: int, chain: list[int], tasks: list[Task], room: int
) -> None:
    """One operation: a task and, at times, variants of it."""
    step = len(chain)
    reads = tuple(sorted({rng.choice(chain) if chain else source, *([chain[-1]] if chain else [])}))
    if rng.random() < 0.2:
        reads = (*reads, source)
    result = maker.value(f"v{step}", rng.randint(1, 6), "forward")
    writes: tuple[int, ...] = (result,)
    if rng.random() < 0.25:
        writes = (result, maker.value(f"s{step}", rng.randint(1, 2), "forward"))
    name = f"t{len(tasks)}"
    runs = "first" if room > 1 and rng.random() < 0.15 else "both"
    tasks.append(maker.task(name, reads, writes, _random_cost(rng), runs=runs))
    own = [v for v in reads if v != source]
    if room > 1 and own and rng.random() < 0.3:
        tasks.append(
            maker.task(name + "i", reads, writes, _random_cost(rng), overwrites=rng.choice(own), variant="inplace")
        )
        room -= 1
    if room > 1 and rng.random() < 0.4:
        other = tuple(sorted({*reads, *(() if rng.random() < 0.5 else (rng.choice(chain),) if chain else ())}))
        again = rng.choice(("both", "both", "again", "first"))
        tasks.append(maker.task(name + "b", other, writes[: rng.randint(1, 2)], _random_cost(rng), runs=again))
    chain.extend(writes[::-1])


def _random_backward(
    rng: random.Random, maker: ProgramMaker, chain: list[int]
) -> tuple[tuple[tuple[Task, ...], ...], tuple[int, ...], tuple[int, ...]]:
    incoming = maker.value("g", rng.randint(1, 3), "backward")
    slots, gradients = [], []
    current = incoming
    for index in range(rng.randint(1, 4)):
        following = maker.value(f"g{index}", rng.randint(1, 4), "backward")
        writes: tuple[int, ...] = (following,)
        if rng.random() < 0.3:
            gradients.append(maker.value(f"w{index}", rng.randint(1, 3), "backward"))
            writes = (following, gradients[-1])
        ways = []
        for k in range(rng.choice((1, 1, 2))):
            # At most three slots may read, so that every schedule can be tried.
            some = [v for v in chain if rng.random() < 0.35] if index < 3 else []
            taken = current if rng.random() < 0.3 else None
            ways.append(maker.task(f"b{index}{k}", (*some, current), writes, _random_cost(rng), overwrites=taken))
        slots.append(tuple(ways))
        current = following
    return tuple(slots), (incoming,), tuple(gradients)


def all_schedules(
    program: Program, costs: dict[str, Cost], budget: int, best: list[float], anywhere: bool = False
) -> Iterator[Schedule]:
    """Every schedule within the budget whose seconds stay below ``best[0]`` as it falls.

    A beginning that the simulator refuses, or whose peak is over the budget, is not gone on with: what follows can
    only make values live longer.

    Args:
        anywhere: tasks run again before any slot, not only where it can be of use.
    """
    count = len(program.slots)
    stages_of_use = find_needs(program).stages if not anywhere else range(count + 1)
    beginnings = [replace(program, slots=program.slots[:slot]) for slot in range(count + 1)]
    fewest = [min(costs[way.cost].seconds for way in slot) for slot in program.slots]
    rest = [sum(fewest[slot:]) for slot in range(count + 1)]  # what is still to come takes at least this

    def extended(schedule: Schedule, seconds: float) -> Iterator[Schedule]:
        slot = len(schedule.ways)
        try:
            report = simulate(beginnings[slot], schedule, costs)
        except ScheduleError:
            return
        if report.peak_bytes > budget:
            return
        if slot == count:
            yield schedule
            return
        allowed = range(len(program.tasks)) if slot + 1 in stages_of_use else ()
        for chosen in subsets([i for i in allowed if program.tasks[i].runs != "first"]):
            spent = seconds + sum(costs[program.tasks[i].cost].seconds for i in chosen)
            for k, way in enumerate(program.slots[slot]):
                total = spent + costs[way.cost].seconds
                if total + rest[slot + 1] < best[0]:
                    yield from extended(
                        Schedule(schedule.forward, (*schedule.again, chosen), (*schedule.ways, k)), total
                    )

    for forward in subsets([i for i, task in enumerate(program.tasks) if task.runs != "again"]):
        start = sum(costs[program.tasks[i].cost].seconds for i in forward)
        if start + rest[0] < best[0]:
            yield from extended(Schedule(forward, (), ()), start)


def subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    """All subsets, small ones first."""
    for size in range(len(items) + 1):
        yield from combinations(items, size)


def best_seconds(program: Program, costs: dict[str, Cost], budget: int, anywhere: bool = False) -> float | None:
    """Fewest seconds of any schedule within the budget, by trying them all; None if there is none."""
    best = [float("inf")]
    for schedule in all_schedules(program, costs, budget, best, anywhere):
        best[0] = simulate(program, schedule, costs).seconds
    return None if best[0] == float("inf") else best[0]
