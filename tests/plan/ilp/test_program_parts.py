"""The relaxation by parts: its bound holds for every schedule, recovered plans fit, equal parts are solved once."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from random_programs import ProgramMaker, best_seconds, random_program

from monet_like.ir.program import Cost, Program, Task
from monet_like.ir.simulate import simulate
from monet_like.plan import plan, store_all
from monet_like.plan.bound import cuts as partition
from monet_like.plan.bound.cuts import split
from monet_like.plan.bound.parts import PartsRelaxation
from monet_like.plan.ilp.primal_recovery import Recovery, recover_plan
from monet_like.plan.instance import Instance
from monet_like.plan.local_search.searcher import Searcher
from monet_like.solvers.pool import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """Workers for all tests: starting them takes longer than most programs."""
    with Pool() as workers:
        yield workers


def composed(
    program: Program, costs: dict[str, Cost], budget: int, pool: Pool
) -> tuple[PartsRelaxation, Recovery | None]:
    """The parts of a program and what they give, with all the time in the world."""
    parts = PartsRelaxation(Instance(program, costs), pool)
    return parts, recover_plan(parts, Searcher(Instance(program, costs)), budget)


def blocks_in_a_row(blocks: int, seed: int = 0, again: bool = False) -> tuple[Program, dict[str, Cost]]:
    """Equal blocks with a residual, a task in place and values of several sizes.

    ``again``: the backward also makes something of every block's input, in two tasks at the end of the forward.
    """
    rng, maker = random.Random(seed), ProgramMaker()
    widths = dict(zip("abcd", (rng.randint(5_000, 50_000) for _ in "abcd"), strict=True))
    maker.costs.update({name: Cost(rng.randint(1, 9), rng.choice((0, 3_000))) for name in (*"abcd+<", "in")})
    stream = maker.value("in", 30_000, "forward")
    tasks, steps = [Task("in", (maker.value("x", 1_000, "input"),), (stream,), "in")], []
    last: list[Task] = []
    for k in range(blocks):
        a, b, c, d = (maker.value(f"{name}{k}", size, "forward") for name, size in widths.items())
        out = maker.value(f"out{k}", 30_000, "forward")
        tasks += [
            Task(f"a{k}", (stream,), (a,), "a"),
            Task(f"b{k}", (a,), (b,), "b"),
            Task(f"i{k}", (a,), (b,), "b", overwrites=a, variant="inplace"),
            Task(f"c{k}", (b,), (c,), "c"),
            Task(f"d{k}", (c,), (d,), "d"),
            Task(f"add{k}", (d, stream), (out,), "+"),
        ]
        made: tuple[int, ...] = ()
        if again:
            twice, made = maker.value(f"twice{k}", 30_000, "forward"), (maker.value(f"cube{k}", 30_000, "forward"),)
            last.append(Task(f"twice{k}", (stream,), (twice,), "a", runs="again"))
            last.append(Task(f"cube{k}", (twice,), made, "a", runs="again"))
        steps += [(stream, a), (b,), (c, d, *made)]
        stream = out
    tangent = gradient = maker.value("g", 30_000, "backward")
    slots = []
    for k, read in enumerate(reversed(steps)):
        following = maker.value(f"g{k}", 20_000 + 10_000 * (k % 3 == 2), "backward")
        slots.append((Task(f"back{k}", (*read, gradient), (following,), "<"),))
        gradient = following
    return Program(tuple(maker.values), (*tasks, *last), tuple(slots), (stream,), (tangent,)), maker.costs


@pytest.mark.slow
def test_lagrangian_bound_holds_for_every_schedule(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "LEAST_TASKS", 1)
    monkeypatch.setattr(partition, "SMALL_BYTES", 0)
    tried = cut = planned = tight = 0
    for seed in range(120):
        program, costs = random_program(random.Random(seed), 4)
        for room in (9, 14, 20):
            budget = program.resident_bytes + room
            best = best_seconds(program, costs, budget)
            if best is None:
                continue
            parts, found = composed(program, costs, budget, pool)
            assert found is not None, (seed, room)
            assert found.bound_seconds <= best + 1e-6, (seed, room)
            tried += 1
            cut += len(parts.parts) > 1
            tight += found.bound_seconds >= best - 1e-6
            fits = found.found is not None and found.found.judgement.peak_bytes <= budget
            planned += fits
            if found.found is not None and fits:
                assert found.found.judgement.seconds >= best - 1e-6, (seed, room)
    assert tried > 150
    assert cut > 60  # of several parts
    assert planned > 0.7 * tried
    assert tight > 0.4 * tried


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_deep_programs_are_planned_from_parts_alone(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monet_like.plan.ilp.search.MOST_WINDOWED", 0)
    program, costs = blocks_in_a_row(20)
    most = simulate(program, store_all(program), costs).peak_bytes
    budget = int(program.resident_bytes + share * (most - program.resident_bytes))
    found = plan(program, costs, budget, solver="HIGHS", time_limit_seconds=20, gap=0.02)
    assert found.report.peak_bytes <= budget
    assert found.bound_kind == "unrestricted"
    assert found.gap <= 0.05
    assert found.columns == 0  # no program for the whole


@pytest.mark.slow
def test_equal_blocks_are_solved_once(pool: Pool) -> None:
    solved = []
    for blocks in (12, 24):
        program, costs = blocks_in_a_row(blocks)
        most = simulate(program, store_all(program), costs).peak_bytes
        parts, found = composed(program, costs, most // 2, pool)
        assert found is not None
        assert len(parts.parts) >= blocks / 3
        solved.append(len(parts.shapes))
    assert solved[0] == solved[1]


def test_split_covers_every_task_once_in_order() -> None:
    for seed in range(60):
        program, _ = random_program(random.Random(seed))
        parts = split(program)
        assert sorted(p for part in parts for p in part.tasks) == list(range(len(program.tasks)))
        slots = [slot for part in parts for slot in part.slots]
        assert len(slots) == len(set(slots))
        assert parts[0].enters == parts[-1].leaves == ()
        assert all(a.leaves == b.enters for a, b in zip(parts, parts[1:], strict=False))


def test_values_that_only_the_backward_uses_do_not_cross_cuts() -> None:
    plain, _ = blocks_in_a_row(20)
    program, _ = blocks_in_a_row(20, again=True)
    names = [{program.tasks[p].name for p in part.tasks} for part in split(program)]
    with_blocks = [part for part in names if any(name.startswith("add") for name in part)]
    assert len(with_blocks) == len(split(plain)) > 5
    for k in range(20):
        (own,) = [part for part in names if f"d{k}" in part]
        assert {f"twice{k}", f"cube{k}"} <= own


def test_relaxation_without_time_gives_no_bound(pool: Pool) -> None:
    program, costs = blocks_in_a_row(20)
    parts = PartsRelaxation(Instance(program, costs), pool, time_left=lambda: 0.0)
    assert parts.shortest_path(0.0) is None
    assert recover_plan(parts, Searcher(Instance(program, costs)), 10**6) is None


def test_dead_workers_give_no_path() -> None:
    program, costs = blocks_in_a_row(20)
    with Pool() as pool:
        parts = PartsRelaxation(Instance(program, costs), pool)
        assert parts.shortest_path(0.0) is not None
        for lent in pool.workers:
            lent.child.kill()
            lent.child.wait()
        assert parts.shortest_path(1e-9) is None
