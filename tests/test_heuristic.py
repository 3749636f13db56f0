"""The start without a solver: feasible where one is easily found, the same every time, never better than the best."""

from __future__ import annotations

import random

import pytest
from random_programs import best_seconds, random_program
from test_plan import network, peak

from monet_like.plan import store_all
from monet_like.plan.heuristic import Policy, Searcher, find_start, smallest_known
from monet_like.simulate import simulate


def test_ample_budget_gives_the_fastest_ways_without_reruns() -> None:
    program, costs = network(12)
    schedule = find_start(program, costs, peak(program, costs), evaluations=0)
    assert schedule is not None
    report = simulate(program, schedule, costs)
    assert report.rerun_seconds == 0
    assert report.seconds == pytest.approx(simulate(program, store_all(program), costs).seconds)


@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
def test_fits_smaller_budgets(share: float) -> None:
    program, costs = network(40)
    budget = int(peak(program, costs) * share)
    schedule = find_start(program, costs, budget, evaluations=300)
    assert schedule is not None
    assert simulate(program, schedule, costs).peak_bytes <= budget


def test_is_reproducible_and_search_does_not_make_it_worse() -> None:
    program, costs = network(30)
    budget = peak(program, costs) // 2
    first, second = (find_start(program, costs, budget, evaluations=200) for _ in range(2))
    none = find_start(program, costs, budget, evaluations=0)
    assert first is not None
    assert first == second
    if none is not None:
        assert simulate(program, first, costs).seconds <= simulate(program, none, costs).seconds


def test_never_beats_the_best_of_all_schedules_and_often_meets_it() -> None:
    met = found = possible = 0
    for seed in range(60):
        program, costs = random_program(random.Random(seed), 4)
        budget = program.resident_bytes + 18
        best = best_seconds(program, costs, budget)
        schedule = find_start(program, costs, budget, evaluations=100)
        possible += best is not None
        if schedule is None:
            continue
        report = simulate(program, schedule, costs)
        assert report.peak_bytes <= budget
        assert best is not None, seed
        assert report.seconds >= best - 1e-9
        found += 1
        met += report.seconds == pytest.approx(best)
    assert found >= 0.8 * possible
    assert met >= 0.6 * found


def test_smallest_known_is_below_plain() -> None:
    program, costs = network(30)
    known = smallest_known(program, costs)
    assert known is not None
    schedule, report = known
    assert simulate(program, schedule, costs) == report
    assert report.peak_bytes < peak(program, costs) / 2


def test_policies_that_lack_something_give_no_schedule() -> None:
    program, costs = network(3)
    searcher = Searcher(program, costs)
    assert searcher.derive(Policy(frozenset(), frozenset(), (0, 0, 0))) is not None
    searcher.makers_again = [[] for _ in program.values]
    assert searcher.derive(Policy(frozenset(), frozenset(), (0, 0, 0))) is None
