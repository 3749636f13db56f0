"""Choices of selective checkpointing: counted by hand on a chain, and against all choices of random costs."""

from __future__ import annotations

import itertools
import random

import pytest

from monet_like.errors import InfeasibleError
from monet_like.export.checkpointed import Item, Region, StepOfRegions
from monet_like.export.selection import choose, report_of
from monet_like.ir.program import Cost, Program, Task, Value
from monet_like.ir.schedule import Schedule
from monet_like.ir.simulate import Report, simulate
from monet_like.plan.baseline import store_all


def chain(sizes: list[int], seconds: list[float], regions: list[range]) -> StepOfRegions:
    """Operators in a row; the gradient of each reads its input and its result."""
    count = len(sizes)
    values = [Value("x", 5, "input")]
    values += [Value(f"v{k}", size, "forward") for k, size in enumerate(sizes)]
    gradients = [Value(f"g{k}", size, "backward") for k, size in enumerate(sizes)]
    first = len(values)
    tasks = tuple(Task(f"f{k}", (k,), (k + 1,), cost=f"f{k}") for k in range(count))
    slots = []
    for k in reversed(range(count)):
        writes = (first + k - 1,) if k else (first + count,)
        slots.append((Task(f"b{k}", (first + k, k, k + 1), writes, cost=f"b{k}"),))
    program = Program(
        (*values, *gradients, Value("gx", 5, "backward")),
        tasks,
        tuple(slots),
        (count,),
        (first + count - 1,),
        (first + count,),
    )
    program.check()
    costs = {f"f{k}": Cost(s, 3 * k) for k, s in enumerate(seconds)} | {f"b{k}": Cost(1.0) for k in range(count)}
    parts = tuple(
        Region(f"r{k}", tuple(part), tuple(sorted(count - 1 - p for p in part))) for k, part in enumerate(regions)
    )
    items = tuple(Item(k, (p,)) for k, part in enumerate(regions) for p in part)
    return StepOfRegions(program, store_all(program), costs, 0, parts, items)


def test_a_region_of_two_operators_by_hand() -> None:
    """f0 f1 | f2: with nothing saved, f0 and f1 run again before the slot of f1; x is an input, which is there anyway.

    Bytes, without workspaces, with v0 = 10, v1 = 20, v2 = 40 (the result), and gradients of the same sizes.
    """
    step = chain([10, 20, 40], [1.0, 1.0, 1.0], [range(2)])
    free = {key: Cost(cost.seconds) for key, cost in step.costs.items()}
    step = StepOfRegions(step.program, step.schedule, free, 0, step.regions, step.items)
    found = report_of(step, frozenset())
    steps = [(s.task, s.bytes) for s in found.steps]
    assert steps == [
        ("f0", 5 + 10),
        ("f1", 5 + 10 + 20),
        ("f2", 5 + 20 + 40),
        ("b2", 5 + 20 + 40 + 40 + 20),  # v1 is the input of what follows the region, so it is kept
        ("f0.again", 5 + 40 + 20 + 10),
        ("f1.again", 5 + 40 + 20 + 10 + 20),
        ("b1", 5 + 40 + 20 + 10 + 20 + 10),
        ("b0", 5 + 40 + 10 + 10 + 5),
    ]
    assert found.seconds == 8.0
    kept = report_of(step, frozenset({0}))
    assert [s.task for s in kept.steps][4:6] == ["f0.saved", "f1.again"]
    assert kept.steps[3].bytes == 5 + 20 + 40 + 40 + 20 + 10
    assert kept.seconds == 7.0


def reports_of_all(step: StepOfRegions) -> list[Report]:
    """The reports of all choices."""
    everything = range(len(step.items))
    return [
        report_of(step, frozenset(saved))
        for count in range(len(step.items) + 1)
        for saved in itertools.combinations(everything, count)
    ]


@pytest.mark.slow(every=2)
@pytest.mark.parametrize("seed", range(4))
def test_no_choice_is_faster(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.randint(1, 9) * 10 for _ in range(7)]
    seconds = [draw.randint(1, 9) / 4 for _ in range(7)]
    step = chain(sizes, seconds, [range(1, 4), range(4, 6)])
    plain = simulate(step.program, step.schedule, step.costs).peak_bytes
    least = report_of(step, frozenset()).peak_bytes
    reports = reports_of_all(step)
    for budget in sorted({least, (least + plain) // 2, (least + 3 * plain) // 4, plain, 2 * plain}):
        found = choose(step, budget)
        assert found.report.peak_bytes <= budget
        wanted = min(report.seconds for report in reports if report.peak_bytes <= budget)
        assert found.report.seconds == pytest.approx(wanted, rel=0.003)
        assert found.bound_seconds <= wanted + 1e-9
    with pytest.raises(InfeasibleError, match="selective checkpointing cannot fit"):
        choose(step, least - 1)


@pytest.mark.parametrize("more", [0, 30, 60, 100, 190])
def test_items_that_must_be_saved_and_those_they_imply(more: int) -> None:
    """With as few bytes as there must be, and with more, up to all that can be of use."""
    step = chain([10, 20, 30, 40], [1.0, 1.0, 1.0, 1.0], [range(4)])
    always = StepOfRegions(
        step.program, step.schedule, step.costs, 0, step.regions,
        (Item(0, (0,)), Item(0, (1,), always=True), Item(0, (2,), implies=(0,)), Item(0, (3,), never=True)),
    )  # fmt: skip
    saved = choose(always, report_of(always, frozenset({1})).peak_bytes + more).saved
    assert 1 in saved
    assert 2 not in saved or 0 in saved
    assert 3 not in saved


def test_the_schedule_is_plain_pytorchs_without_regions() -> None:
    step = chain([10, 20, 30], [1.0, 1.0, 1.0], [])
    plain = simulate(step.program, step.schedule, step.costs)
    assert isinstance(step.schedule, Schedule)
    assert report_of(step, frozenset()) == plain
