"""The simulator against bytes counted by hand, and against every rule it enforces."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from monet_like.errors import ProfileError, ScheduleError
from monet_like.ir.program import Call, Cost, Program, Runs, Task, Value
from monet_like.ir.schedule import Schedule
from monet_like.ir.simulate import Launches, simulate

W, X, A, B, C, S, GC, GB, GA, GW = range(10)


def chain() -> tuple[Program, dict[str, Cost]]:
    """x -> a -> b -> c (the output) with weights; b has an in-place variant; the backward reads b, then a, then x."""
    values = (
        Value("w", 100, "parameter"),
        Value("x", 10, "input"),
        Value("a", 40, "forward"),
        Value("b", 30, "forward"),
        Value("c", 5, "forward"),
        Value("s", 0, "forward"),
        Value("gc", 5, "backward"),
        Value("gb", 30, "backward"),
        Value("ga", 40, "backward"),
        Value("gw", 100, "backward"),
    )
    tasks = (
        Task("ta", (X, W), (A,), "ta"),
        Task("tb", (A,), (B,), "tb"),
        Task("tb.in_place", (A,), (B,), "tb", variant="in_place", overwrites=A),
        Task("tc", (B,), (C, S), "tc"),
    )
    slots = (
        (Task("bc", (B, GC), (GB,), "bc"),),
        (Task("bb", (A, GB), (GA,), "bb"), Task("bb.in_place", (A, GB), (GA,), "bb", overwrites=GB)),
        (Task("ba", (X, GA), (GW,), "ba"),),
    )
    costs = {
        "ta": Cost(1.0, 7),
        "tb": Cost(2.0),
        "tc": Cost(3.0, 2),
        "bc": Cost(4.0, 11),
        "bb": Cost(5.0),
        "ba": Cost(6.0, 1),
    }
    return Program(values, tasks, slots, outputs=(C, S), tangents=(GC,), gradients=(GW,)), costs


def bytes_of(schedule: Schedule) -> list[int]:
    program, costs = chain()
    program.check()
    return [step.bytes for step in simulate(program, schedule, costs).steps]


def test_store_all_bytes_per_step() -> None:
    # resident 110; ta: +40 and 7 workspace; tb: 40+30; tc: 40+30+5+2; bc: 40+30+5 (c) +5 (gc) +30+11; bb: 40+5+30+40;
    # ba: 5+40+100+1
    assert bytes_of(Schedule((0, 1, 3), ((), (), ()), (0, 0, 0))) == [157, 180, 187, 231, 225, 256]


def test_overwriting_takes_over_the_storage() -> None:
    # tb.in_place: 40 + 30 - 40 while it runs, then 30 are left; a is made again before slot 1, next to gb.
    steps = bytes_of(Schedule((0, 2, 3), ((), (0,), ()), (0, 1, 0)))
    assert steps == [157, 140, 147, 191, 110 + 5 + 30 + 40 + 7, 110 + 5 + 30 + 40 + 40 - 30, 256]


def test_rerun_in_the_slot_that_reads_it() -> None:
    # a and b are freed in the forward; slot 0 makes both again, and a stays for slot 1. gc is there from the start.
    steps = bytes_of(Schedule((0, 1, 3), ((0, 1), (), ()), (0, 0, 0)))
    assert steps[:3] == [157, 180, 110 + 30 + 5 + 2]
    assert steps[3:5] == [110 + 5 + 5 + 40 + 7, 110 + 5 + 5 + 40 + 30]
    assert steps[5:] == [110 + 5 + 5 + 40 + 30 + 30 + 11, 225, 256]


def test_report_sums() -> None:
    program, costs = chain()
    report = simulate(program, Schedule((0, 1, 3), ((0, 1), (), ()), (0, 0, 0)), costs, extra_bytes=1000)
    assert (report.peak_bytes, report.seconds, report.rerun_seconds) == (1256, 24.0, 3.0)
    assert report.peak_step.task == "ba"
    assert [step.slot for step in report.steps] == [None, None, None, 0, 0, 0, 1, 2]


STORE_ALL = Schedule((0, 1, 3), ((), (), ()), (0, 0, 0))


def with_calls(program: Program, counts: dict[str, int]) -> Program:
    """The program with as many operator calls in each task as ``counts`` has under its cost."""

    def made(task: Task) -> Task:
        return replace(task, calls=(Call("aten.relu.default", (), (), ()),) * counts[task.cost])

    slots = tuple(tuple(map(made, slot)) for slot in program.slots)
    return replace(program, tasks=tuple(map(made, program.tasks)), slots=slots)


@pytest.mark.parametrize(
    ("start", "call", "spent"),
    [
        # The GPU is the slower one: it waits for the first launch, at 10 + 2 * 0.25, and for nothing else.
        (10.0, 0.25, [11.5, 2.0, 3.0, 4.0, 5.0, 6.0]),
        # The CPU is: launched at 20, 30, 60, 80, 90 and 110, and each has ended before the next.
        (0.0, 10.0, [21.0, 11.0, 31.0, 21.0, 11.0, 21.0]),
        # Launched at 3, 4.5, 9, 12, 13.5 and 16.5: tb waits until 4.5, tc until 9; from then on the GPU is behind.
        (0.0, 1.5, [4.0, 2.5, 5.5, 4.0, 5.0, 6.0]),
        (0.0, 0.0, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
    ],
)
def test_a_run_takes_place_when_it_is_launched_and_its_turn_has_come(
    start: float, call: float, spent: list[float]
) -> None:
    program, costs = chain()
    program = with_calls(program, {"ta": 2, "tb": 1, "tc": 3, "bc": 2, "bb": 1, "ba": 2})
    found = simulate(program, STORE_ALL, costs, launches=Launches(start, call))
    alone = simulate(program, STORE_ALL, costs)
    assert [step.seconds for step in found.steps] == spent and found.seconds == sum(spent)
    assert [step.bytes for step in found.steps] == [step.bytes for step in alone.steps] and alone.seconds == 21.0


def test_two_clocks_end_with_the_last_stretch_without_a_wait() -> None:
    """At some launch the GPU waits for the last time: what is left then runs without a gap. So the step's end is the
    latest of the launches, each with all that runs from there.
    """
    rng = random.Random(3)
    waited = 0
    for _ in range(200):
        program, costs = chain()
        counts = {name: rng.randint(0, 4) for name in costs}
        costs = {name: Cost(rng.choice((0.0, 0.5, 2.0, 8.0))) for name in costs}
        start, call = rng.choice((0.0, 3.0)), rng.choice((0.0, 0.5, 2.0))
        order = ["ta", "tb", "tc", "bc", "bb", "ba"]
        left = [sum(costs[name].seconds for name in order[k:]) for k in range(6)]
        launched = [start + call * sum(counts[name] for name in order[: k + 1]) for k in range(6)]
        found = simulate(with_calls(program, counts), STORE_ALL, costs, launches=Launches(start, call)).seconds
        assert found == max(at + rest for at, rest in zip(launched, left, strict=True))
        waited += found > max(left[0] + launched[0], launched[-1] + left[-1])
    assert waited > 20  # neither the GPU nor the CPU alone decides


@pytest.mark.parametrize(
    ("schedule", "wording"),
    [
        (Schedule((0, 1, 3), ((), ()), (0, 0)), "the schedule has 2 backward slots, the program 3"),
        (Schedule((1, 0, 3), ((), (), ()), (0, 0, 0)), "task 0 is out of order or out of range in the forward"),
        (Schedule((0, 1, 9), ((), (), ()), (0, 0, 0)), "task 9 is out of order or out of range in the forward"),
        (Schedule((1, 3), ((), (), ()), (0, 0, 0)), "tb reads a in the forward, but nothing has made it"),
        (
            Schedule((0, 2, 3), ((), (), ()), (0, 0, 0)),
            "bb reads a in backward slot 1, after tb.in_place took over its storage",
        ),
        (Schedule((0, 1), ((), (), ()), (0, 0, 0)), "the forward does not make its output c"),
        (Schedule((0, 1, 3), ((3,), (), ()), (0, 0, 0)), "tc writes c a second time; the caller holds it"),
        (Schedule((0, 1, 3), ((), (), ()), (0, 2, 0)), "slot 1 has no way 2"),
    ],
)
def test_broken_rules(schedule: Schedule, wording: str) -> None:
    program, costs = chain()
    with pytest.raises(ScheduleError) as caught:
        simulate(program, schedule, costs)
    assert str(caught.value) == wording


@pytest.mark.parametrize(("runs", "stage"), [("again", "the forward"), ("first", "backward slot 0")])
def test_tasks_run_only_where_they_may(runs: str, stage: str) -> None:
    program, costs = chain()
    tasks = (replace(program.tasks[0], runs=runs), *program.tasks[1:])
    with pytest.raises(ScheduleError, match=f"ta may not run in {stage}"):
        simulate(replace(program, tasks=tasks), Schedule((0, 1, 3), ((0,), (), ()), (0, 0, 0)), costs)


@pytest.mark.parametrize("runs", [("first", "first"), ("first", "both"), ("both", "first")])
def test_noise_is_not_drawn_twice(runs: tuple[Runs, Runs]) -> None:
    """Such as a dropout and the one that packs its mask, which is there to be chosen instead."""
    program, costs = chain()
    values = (*program.values, Value("bits", 4, "forward"))
    draw = replace(program.tasks[0], runs=runs[0])
    pack = Task("ta.pack", draw.reads, (A, len(program.values)), "ta", variant="pack", runs=runs[1])
    noisy = replace(program, values=values, tasks=(draw, pack, *program.tasks[1:]))
    noisy.check()
    for forward in ((0, 2, 4), (1, 2, 4)):
        simulate(noisy, Schedule(forward, ((), (), ()), (0, 0, 0)), costs)
    with pytest.raises(ScheduleError) as caught:
        simulate(noisy, Schedule((0, 1, 2, 4), ((), (), ()), (0, 0, 0)), costs)
    assert str(caught.value) == (
        "ta.pack and ta both write a in the forward; what runs only there, such as a random draw, may not be done twice"
    )


def test_missing_cost_is_named() -> None:
    program, costs = chain()
    del costs["bb"]
    with pytest.raises(ProfileError, match="no entry for bb"):
        simulate(program, Schedule((0, 1, 3), ((), (), ()), (0, 0, 0)), costs)
