"""Strategies side by side: each is what its source says, all are replayable, and the integer program is never worse."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from planning import chain_of, network, peak
from random_programs import best_seconds, random_program

from monet_like.errors import SolverError
from monet_like.ir.program import Cost, Program
from monet_like.ir.schedule import prune
from monet_like.ir.simulate import Report, simulate
from monet_like.plan import Plan, plan
from monet_like.plan.ilp.search import Search
from monet_like.plan.local_search.searcher import Searcher
from monet_like.plan.strategies import STRATEGIES
from monet_like.plan.strategies.checkpointing import Keeping
from monet_like.plan.strategies.griewank import _Chain, _revolve
from monet_like.plan.strategies.ogc import best_vertices
from monet_like.plan.strategies.torch_budget import knapsack
from monet_like.plan.subprogram import plain_operators

SOLVED = {"milp": {"solver": "HIGHS", "gap": 0.0}, "checkmate": {"solver": "HIGHS", "gap": 0.0}}


def report(name: str, program: Program, costs: dict[str, Cost], budget: int) -> Report:
    return STRATEGIES[name](program, costs, budget, **SOLVED.get(name, {})).report


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_takes_the_settings_of_a_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, costs = chain_of(4)
    asked: list[int] = []
    run = Search.run

    def noticed(search: Search) -> Plan:
        asked.append(search.threads)
        return run(search)

    monkeypatch.setattr(Search, "run", noticed)
    found = plan(program, costs, 10**9, solver="HIGHS", time_limit_seconds=10.0, gap=0.0, threads=2, strategy=name)
    assert found.report == simulate(program, found.schedule, costs)
    assert asked == ([2] if name in SOLVED else [])


def random_graph(seed: int) -> tuple[list[frozenset[int]], list[int]]:
    rng = random.Random(seed)
    count, density = rng.randint(2, 11), rng.choice([0.1, 0.3, 0.6])
    reads = []
    for v in range(count):
        before = {u for u in range(v) if rng.random() < density * (1 if v - u < 4 else 0.3)}
        reads.append(frozenset(before or ({v - 1} if v and rng.random() < 0.8 else ())))
    return reads, [rng.randint(0, 9) for _ in range(count)]


def fewest_bytes_of_all_segmentations(reads: list[frozenset[int]], weights: list[int]) -> int:
    """OGC's objective by trying every set of kept vertices."""
    count = len(weights)
    before = [set(us) or {-1} for us in reads]
    after = [{v for v in range(count) if u in before[v]} or {count} for u in range(count)]
    near = [before[v] | after[v] for v in range(count)]
    best = sum(weights)
    for kept in range(1 << count):
        left, largest = {v for v in range(count) if not kept >> v & 1}, 0
        while left:
            part, new = set[int](), {min(left)}
            while new:
                part |= new
                new = {u for v in new for u in near[v] & left} - part
            left -= part
            entries = {u for v in part for u in before[v]} - part
            exits = {u for v in part for u in after[v]} - part
            if len(entries) != 1 or len(exits) != 1:
                break
            largest = max(largest, sum(weights[v] for v in part))
        else:
            best = min(best, sum(w for v, w in enumerate(weights) if kept >> v & 1) + largest)
    return best


def test_ogc_is_the_best_of_all_segmentations() -> None:
    saving = 0
    for seed in range(100):
        reads, weights = random_graph(seed)
        kept, objective = best_vertices(reads, weights)
        assert objective == fewest_bytes_of_all_segmentations(reads, weights), seed
        assert sum(weights[v] for v in kept) <= objective
        saving += objective < sum(weights)
    assert saving > 50


@pytest.mark.slow
def test_checkmate_is_the_best_without_variants() -> None:
    solved = 0
    for seed in range(8):
        program, costs = random_program(random.Random(seed), 5)
        plain = plain_operators(program)
        budget = program.resident_bytes + 18
        best = best_seconds(plain.program, costs, budget)
        if best is None:
            continue
        found = report("checkmate", program, costs, budget)
        assert found.seconds == pytest.approx(best), seed
        assert found.peak_bytes <= budget
        solved += 1
    assert solved > 4


def fewest_runs(links: int, snapshots: int) -> int:
    """The least number of links run again to reverse a chain that has just been run, by dynamic programming."""
    if links <= 1:
        return 0
    if snapshots == 0:
        return links * (links - 1) // 2
    return min(fewest_runs(links - m, snapshots - 1) + m + fewest_runs(m, snapshots) for m in range(1, links))


def test_griewank_runs_as_few_links_again_as_possible() -> None:
    for links in range(2, 9):
        program, costs = chain_of(links)
        keeping = Keeping(program, costs)
        for snapshots in range(1, 4):
            chain = _Chain.of(keeping)
            schedule = prune(program, _revolve(keeping, chain, snapshots))
            assert len(chain.links) == links
            assert schedule.rerun_count == fewest_runs(links, snapshots), (links, snapshots)


def test_griewank_fits_budgets_that_one_rerun_each_cannot() -> None:
    program, costs = chain_of(30)
    assert peak(program, costs) == 31
    for budget in (14, 8, 6):
        assert report("griewank", program, costs, budget).peak_bytes <= budget
    assert report("chen_greedy", program, costs, 6).peak_bytes > 6


def test_griewank_refuses_programs_that_are_not_chains() -> None:
    program, costs = chain_of(1)
    with pytest.raises(SolverError, match="chains only"):
        report("griewank", program, costs, 10)


def test_knapsack_is_exact() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        items = [(name, rng.randint(0, 9), float(rng.randint(0, 9))) for name in range(rng.randint(0, 7))]
        capacity = rng.randint(0, 25)
        subsets = itertools.chain.from_iterable(itertools.combinations(items, n) for n in range(len(items) + 1))
        best = max(sum(v for _, _, v in s) for s in subsets if sum(w for _, w, _ in s) <= capacity)
        chosen = knapsack(items, capacity)
        assert sum(w for name, w, _ in items if name in chosen) <= capacity
        assert sum(v for name, _, v in items if name in chosen) == best, seed


def test_interrupted_heuristic_returns_the_start_that_needs_no_annealing(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once; where nothing fits without it, the interrupt goes on."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    program, costs = network(30)
    monkeypatch.setattr(Searcher, "improve", interrupted)
    budget = int(0.8 * peak(program, costs))
    found = STRATEGIES["heuristic"](program, costs, budget)
    assert found.report.peak_bytes <= budget
    with pytest.raises(KeyboardInterrupt):
        STRATEGIES["heuristic"](program, costs, program.resident_bytes + 1)
