"""The plan without a solver: its memory and time are the simulator's, with and without the compiled library, and it
finds what is easily found, the same every time."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
from planning import network, peak
from random_programs import best_seconds, random_program
from torch import nn

from monet_like.capture.lower.step import capture
from monet_like.ir.program import Cost, Program, Task, Value
from monet_like.ir.schedule import Schedule, prune
from monet_like.ir.simulate import simulate
from monet_like.plan import store_all
from monet_like.plan.instance import Instance
from monet_like.plan.local_search.native import engine, library
from monet_like.plan.local_search.policy import Settings, to_policy
from monet_like.plan.local_search.searcher import Found, Searcher, find_start, smallest_known
from monet_like.plan.local_search.uncompiled import Uncompiled
from monet_like.variants import admitted


@pytest.mark.slow(every=5)
@pytest.mark.parametrize("first", range(5))
def test_the_compiled_judge_agrees_with_the_simulator(first: int) -> None:
    if library() is None:
        pytest.skip("not compiled")
    judged = 0
    for seed in range(first, 150, 5):
        program, costs = random_program(random.Random(seed), 6) if seed < 140 else network(seed - 125)
        searcher = Searcher(Instance(program, costs), pin_bytes=seed % 3)
        native, tables = searcher.engine, searcher.tables
        budget = program.resident_bytes + 18
        start = tables.policy([True] * len(tables.bytes), hold=True, smallest=False)
        found = native.improve(start, Settings(budget, 200, 10**9, seed))
        answer = native.judge(found, budget)
        if answer is not None and not seed % 3:
            plan = searcher.plan(found, budget)
            assert plan is not None
            assert plan[1].peak_bytes == answer[0].peak_bytes, seed
            assert plan[1].seconds == pytest.approx(answer[0].seconds, rel=1e-12), seed
            judged += 1
    assert judged > 8


@pytest.mark.parametrize("engine", ["native", "python"])
def test_ample_budget_gives_the_fastest_ways_without_reruns(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine == "python":
        monkeypatch.setattr("monet_like.plan.local_search.native.library", lambda: None)
    program, costs = network(12)
    schedule = find_start(Instance(program, costs), peak(program, costs), evaluations=0)
    assert schedule is not None
    report = simulate(program, schedule, costs)
    assert report.rerun_seconds == 0
    assert report.seconds == pytest.approx(simulate(program, store_all(program), costs).seconds)


@pytest.mark.parametrize("engine", ["native", "python"])
def test_local_search_fits_a_smaller_budget(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine == "python":
        monkeypatch.setattr("monet_like.plan.local_search.native.library", lambda: None)
    program, costs = network(40)
    budget = int(peak(program, costs) * 0.4)
    schedule = find_start(Instance(program, costs), budget, evaluations=300)
    assert schedule is not None
    assert simulate(program, schedule, costs).peak_bytes <= budget
    known = smallest_known(Instance(program, costs), evaluations=300)
    assert known is not None and known.report.peak_bytes < peak(program, costs) / 2
    assert known.report == simulate(program, known.schedule, costs)


def test_local_search_is_reproducible_and_no_worse_than_its_start() -> None:
    program, costs = network(30)
    budget = peak(program, costs) // 2
    first, second = (find_start(Instance(program, costs), budget, evaluations=200) for _ in range(2))
    none = find_start(Instance(program, costs), budget, evaluations=0)
    assert first is not None
    assert first == second
    if none is not None:
        assert simulate(program, first, costs).seconds <= simulate(program, none, costs).seconds


def test_local_search_nearly_always_finds_the_best_of_all_schedules() -> None:
    met = found = possible = 0
    for seed in range(60):
        program, costs = random_program(random.Random(seed), 4)
        budget = program.resident_bytes + 18
        best = best_seconds(program, costs, budget)
        schedule = find_start(Instance(program, costs), budget, evaluations=1000)
        possible += best is not None
        if schedule is None:
            continue
        report = simulate(program, schedule, costs)
        assert report.peak_bytes <= budget
        assert best is not None, seed
        assert report.seconds >= best - 1e-9
        found += 1
        met += report.seconds == pytest.approx(best)
    assert found == possible
    assert met >= 0.95 * found


def test_crossover_joins_the_good_stretches_of_two_policies() -> None:
    program, costs = network(40)
    searcher, budget = Searcher(Instance(program, costs)), peak(program, costs)
    kept, values = {*range(len(program.values))}, searcher.tables.changeable
    half = {*values[: round(len(values) / 2)]}
    found = [searcher.judge(searcher.keeping(kept - dropped), budget) for dropped in (set(), half, set(values) - half)]
    best, one, other = (f for f in found if f is not None)
    assert best.score(budget) < min(one.score(budget), other.score(budget))
    for first, second in ((one, other), (other, one)):
        assert searcher.crossover(first, second, budget).judgement == best.judgement
    assert searcher.crossover(one, one, budget).judgement == one.judgement


def test_steps_near_the_lowest_peak_are_at_most_a_few_times_slower() -> None:
    """Alone, annealing ends where every result is made anew for nearly every reader, at 7 times the seconds."""
    program, costs = network(30)
    known = smallest_known(Instance(program, costs), evaluations=3000)
    assert known is not None
    budget = int(1.2 * known.report.peak_bytes)
    schedule = find_start(Instance(program, costs), budget, evaluations=3000)
    assert schedule is not None
    found = simulate(program, schedule, costs)
    assert found.peak_bytes <= budget
    assert found.seconds < 1.7 * simulate(program, store_all(program), costs).seconds


def test_search_ends_with_its_best_schedule_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    program, costs = network(30)
    known = smallest_known(Instance(program, costs), evaluations=3000)
    assert known is not None
    budget = int(1.2 * known.report.peak_bytes)  # near enough for crossing
    improve, annealed = Searcher.improve, []

    def counted(self: Searcher, *args: Any, **options: Any) -> Found:
        annealed.append(True)
        return improve(self, *args, **options)

    def found(**options: Any) -> Schedule | None:
        annealed.clear()
        return find_start(Instance(program, costs), budget, evaluations=3000, rounds=3, **options)

    monkeypatch.setattr(Searcher, "improve", counted)
    whole = found()
    asked_for = len(annealed)
    assert found(enough=lambda fits: False) == whole
    assert len(annealed) == asked_for > 10
    for most in (1, 2, 5, 10):
        schedule = found(enough=lambda fits, most=most: len(annealed) >= most)
        assert len(annealed) == most
        assert schedule is None or simulate(program, schedule, costs).peak_bytes <= budget
    told = []
    found(enough=lambda fits: told.append(fits) or False)
    assert told == sorted(told)  # what fits once is not lost
    assert told[-1]


def test_schedule_to_policy_and_back_is_the_same_schedule() -> None:
    program, costs = network(30)
    budget = int(peak(program, costs) * 0.5)
    schedule = find_start(Instance(program, costs), budget, evaluations=3000)
    assert schedule is not None
    searcher = Searcher(Instance(program, costs))
    again = searcher.judge(to_policy(program, searcher.tables, schedule), budget)
    assert again is not None
    assert again.judgement.peak_bytes <= budget
    assert again.judgement.seconds <= simulate(program, schedule, costs).seconds * (1 + 1e-9)


def test_tasks_that_run_only_first_write_no_value_twice_in_the_forward() -> None:
    """As RMS norm trained: its statistics and result in one task that runs only first, or in two that run again."""
    values = tuple(Value(name, 1, "forward") for name in ("input", "statistics", "result", "output"))
    tasks = (
        Task("begin", (), (0,), "slow"),
        Task("measure", (0,), (1,), "slow"),
        Task("both", (0,), (1, 2), "fast", runs="first"),
        Task("apply", (0, 1), (2,), "slow"),
        Task("end", (2,), (3,), "slow"),
    )
    slots = ((Task("back", (1, 2), (), "slow"),),)
    program = Program(values, tasks, slots, (3,))
    searcher = Searcher(Instance(program, {"slow": Cost(2.0), "fast": Cost(1.0)}))
    if library() is None:
        pytest.skip("not compiled")
    tables = searcher.tables
    carried_out = set()
    for keep, prefer in product(product((False, True), repeat=4), product((-1, *range(len(tables.writes))), repeat=2)):
        policy = tables.policy(keep, hold=True, smallest=False)
        policy.prefer[1], policy.prefer[2] = prefer
        answer = searcher.engine.judge(policy, 10)
        if answer is not None:
            schedule = prune(program, answer[1])
            assert searcher.instance.simulate(schedule).seconds == answer[0].seconds
            carried_out.add(schedule.forward)
    assert carried_out == {(0, 2, 4), (0, 1, 3, 4)}


def test_without_the_library_simple_policies_of_a_chain_cost_the_same() -> None:
    if library() is None:
        pytest.skip("not compiled")
    searcher = Searcher(Instance(*network(12)))
    python = Uncompiled(searcher.instance, searcher.tables)
    once = {v for v, makers in enumerate(searcher.tables.again) if not makers}
    kept = [v in once for v in range(len(searcher.tables.bytes))]
    for keep, hold in (([True] * len(kept), True), (kept, True), (kept, False)):
        policy = searcher.tables.policy(keep, hold=hold, smallest=False)
        found, expected = python.judge(policy, 2**40), searcher.plan(policy, 2**40)
        assert found is not None and expected is not None
        assert found[1] == expected[0]
        assert (found[0].peak_bytes, found[0].seconds) == (expected[1].peak_bytes, expected[1].seconds)


def test_without_the_library_a_way_that_reads_what_is_there_is_taken() -> None:
    """A packed copy is made in the forward where it is kept, and cannot be made again where it is not."""
    values = tuple(Value(name, 1, "forward") for name in ("input", "packed", "output"))
    tasks = (
        Task("begin", (), (0,), "slow"),
        Task("pack", (0,), (1,), "fast", variant="packs", runs="first"),
        Task("end", (0,), (2,), "slow"),
    )
    ways = (Task("back", (0,), (), "slow"), Task("back.packed", (1,), (), "fast", variant="packs"))
    searcher = Searcher(Instance(Program(values, tasks, (ways,), (2,)), {"slow": Cost(2.0), "fast": Cost(1.0)}))
    python = Uncompiled(searcher.instance, searcher.tables)
    for keep, expected in (
        ([True, True, True], Schedule((0, 1, 2), ((),), (1,))),
        ([True, False, True], Schedule((0, 2), ((),), (0,))),
    ):
        found = python.judge(searcher.tables.policy(keep, hold=True, smallest=False), 10)
        assert found is not None and found[1] == expected


def test_policies_that_lack_a_needed_value_give_no_schedule() -> None:
    program, costs = network(3)
    searcher = Searcher(Instance(program, costs))
    assert searcher.plan(searcher.keeping(()), peak(program, costs)) is not None
    barren = searcher.tables.__class__(**(vars(searcher.tables) | {"again": ((),) * len(searcher.tables.again)}))
    nothing = barren.policy([False] * len(barren.bytes), hold=False, smallest=False)
    assert Uncompiled(searcher.instance, barren).judge(nothing, 1) is None
    assert engine(searcher.instance, barren).judge(nothing, 1) is None


def test_the_fastest_ways_have_a_plan_where_a_gpu_has_many_batch_norms() -> None:
    """Three tasks may write a batch norm's statistics, one of them with the sum after it; cuDNN's alone writes its
    reserve.
    """
    block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU6(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    class Inverted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.after = block, nn.Conv2d(4, 4, 1)

        def forward(self, x: Any) -> Any:
            return self.after(x + self.block(x))

    target = torch.device("cuda", 0)
    captured = admitted(capture(Inverted(), (torch.randn(2, 4, 6, 6),), target=target), "inplace_conv_multiway_newnode")
    for seed in range(40):
        draw = random.Random(seed)
        costs = {task.cost: Cost(draw.uniform(1.0, 3.0), 0) for task in captured.every_task()}
        searcher = Searcher(Instance(captured.program, costs))
        everything = [True] * len(captured.program.values)
        assert searcher.judge(searcher.tables.policy(everything, hold=True, smallest=False), 2**40), seed
