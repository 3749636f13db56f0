"""Small random programs, and the slow judge that tries every schedule of one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

from monet_like.errors import ScheduleError
from monet_like.plan.needs import find_needs
from monet_like.program import Cost, Program, Task, Value, ValueKind
from monet_like.schedule import Schedule
from monet_like.simulate import simulate


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
    program: Program, costs: dict[str, Cost], best: list[float], anywhere: bool = False
) -> Iterator[Schedule]:
    """Every schedule whose reads find their values and whose seconds stay below ``best[0]`` as it falls.

    Args:
        anywhere: tasks run again before any slot, not only where it can be of use.
    """
    count = len(program.slots)
    stages_of_use = find_needs(program).stages if not anywhere else range(count + 1)

    def stages(slot: int, born: frozenset[int], seconds: float, again: tuple, ways: tuple) -> Iterator[tuple]:
        if slot == count:
            yield again, ways
            return
        allowed = range(len(program.tasks)) if slot + 1 in stages_of_use else ()
        for chosen in subsets([i for i in allowed if program.tasks[i].runs != "first"]):
            after = run(chosen, born)
            if after is None:
                continue
            spent = seconds + sum(costs[program.tasks[i].cost].seconds for i in chosen)
            for k, way in enumerate(program.slots[slot]):
                total = spent + costs[way.cost].seconds
                if total < best[0] and all(v in after for v in program.forward_reads(way)):
                    yield from stages(slot + 1, after, total, (*again, chosen), (*ways, k))

    def run(chosen: tuple[int, ...], born: frozenset[int]) -> frozenset[int] | None:
        for i in chosen:
            task = program.tasks[i]
            if not all(v in born for v in program.forward_reads(task)):
                return None
            born = (born - {task.overwrites}) | set(task.writes)
        return born

    for forward in subsets([i for i, task in enumerate(program.tasks) if task.runs != "again"]):
        after = run(forward, frozenset())
        if after is not None and set(program.outputs) <= after:
            start = sum(costs[program.tasks[i].cost].seconds for i in forward)
            for again, ways in stages(0, after, start, (), ()):
                yield Schedule(forward, again, ways)


def subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    """All subsets, small ones first."""
    for size in range(len(items) + 1):
        yield from combinations(items, size)


def best_seconds(program: Program, costs: dict[str, Cost], budget: int, anywhere: bool = False) -> float | None:
    """Fewest seconds of any schedule within the budget, by trying them all; None if there is none."""
    best = [float("inf")]
    for schedule in all_schedules(program, costs, best, anywhere):
        try:
            report = simulate(program, schedule, costs)
        except ScheduleError:
            continue
        if report.peak_bytes <= budget:
            best[0] = min(best[0], report.seconds)
    return None if best[0] == float("inf") else best[0]
