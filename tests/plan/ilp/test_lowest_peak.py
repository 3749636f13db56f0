"""All planners find the lowest peak that `smallest` finds, and a budget refused as proven has no schedule."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from least_memory import least_peak
from random_programs import best_seconds, random_program
from torch import nn

from monet_like.compiler.pipeline import prepare
from monet_like.compiler.request import Request
from monet_like.errors import InfeasibleError, MonetError, SolverError
from monet_like.ir.program import Cost, Program
from monet_like.ir.simulate import simulate
from monet_like.plan import plan
from monet_like.plan.budgets import fits, pareto, smallest_budget
from monet_like.plan.ilp import lowest_peak
from monet_like.plan.ilp.lowest_peak import find_lowest, minimise_peak
from monet_like.plan.ilp.search import Search
from monet_like.plan.instance import Instance
from monet_like.plan.local_search.searcher import find_start, smallest_known
from monet_like.plan.result import Smallest
from monet_like.profile.devices import DEVICES
from monet_like.solvers.interface import installed_solvers

#: Programs of eight tasks whose lowest peak the local search does not find.
HARD = (189, 215, 430, 456, 536)
NAMES = ("HIGHS", "CBC", "heuristic")


def program_of(seed: int, most_tasks: int = 8) -> tuple[Program, dict[str, Cost]]:
    return random_program(random.Random(seed), most_tasks)


def planned_peak(program: Program, costs: Any, budget: int, name: str) -> int:
    """Peak of a plan by a solver, or by the local search."""
    options: dict[str, Any] = {"strategy": "heuristic"} if name == "heuristic" else {"solver": name}
    return plan(program, costs, budget, gap=0.9, time_limit_seconds=10, **options).report.peak_bytes


def test_least_memory_helper_agrees_with_trying_all_schedules() -> None:
    for seed in range(8):
        program, costs = program_of(seed, 4)
        least = least_peak(program, costs)
        assert best_seconds(program, costs, least, anywhere=True) is not None, seed
        assert best_seconds(program, costs, least - 1, anywhere=True) is None, seed


@pytest.mark.slow
def test_lowest_peak_is_found_and_proven_to_the_byte() -> None:
    lower = 0
    for seed in (*HARD, *range(6)):
        program, costs = program_of(seed)
        known = smallest_known(Instance(program, costs))
        assert known is not None
        least = least_peak(program, costs)
        begin = replace(known, proven_bytes=0)
        found = minimise_peak(Instance(program, costs), begin) if least else begin
        assert found.report == simulate(program, found.schedule, costs)
        assert (found.report.peak_bytes, found.proven_bytes) == (least, least), seed
        lower += found.report.peak_bytes < known.report.peak_bytes
    assert lower >= 4


@pytest.mark.slow
def test_plan_fits_pareto_and_smallest_budget_agree_on_the_lowest_peak() -> None:
    program, costs = program_of(HARD[1])
    least = least_peak(program, costs)
    smallest = smallest_budget(program, costs, time_limit_seconds=10)
    assert (smallest.report.peak_bytes, smallest.proven_bytes) == (least, least)
    assert fits(program, costs, least) is not None
    assert fits(program, costs, least - 1) is None
    for name in NAMES:
        if name != "CBC" or name in installed_solvers():
            assert planned_peak(program, costs, least, name) == least
            with pytest.raises(
                InfeasibleError, match=r"\(proven\).*; the smallest known budget is .* bytes\)"
            ) as caught:
                planned_peak(program, costs, least - 1, name)
            assert caught.value.proven
            if Instance(program, costs).floor[0] < least:  # else it is refused at once, without a solver
                assert caught.value.smallest_bytes == least
    points = pareto(program, costs, [least - 1, least], time_limit_seconds=10, gap=0.9)
    assert [point.plan is not None for point in points] == [False, True]


@pytest.mark.slow
def test_a_tiny_net_at_its_smallest_budget_and_above() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8))
    request = Request(net, ((torch.zeros(16, 8),), {}), "inplace_conv_multiway_newnode")
    ready = prepare(request, torch.device("cpu"), profile=DEVICES["cpu"])
    program, costs = ready.captured.program, ready.costs
    smallest = smallest_budget(program, costs, time_limit_seconds=10)
    least = smallest.report.peak_bytes
    assert smallest.proven_bytes == least
    for budget in (least, least + 1, (least + ready.plain.peak_bytes) // 2, ready.plain.peak_bytes):
        assert planned_peak(program, costs, budget, "heuristic") <= budget
    for solver in ("HIGHS", "CBC"):
        if solver in installed_solvers():
            assert planned_peak(program, costs, least, solver) == least
    for solver in ("HIGHS", "heuristic"):
        with pytest.raises(InfeasibleError, match="proven"):
            planned_peak(program, costs, least - 1, solver)


def test_start_that_fits_survives_a_faster_policy_that_is_no_plan() -> None:
    """What annealing ends with cannot be carried out here; greedy cuts fit."""
    program, costs = program_of(456)
    assert find_start(Instance(program, costs), 23, evaluations=0) is not None
    assert find_start(Instance(program, costs), 23) is not None


def test_larger_programs_are_bisected_down_to_the_wanted_budget() -> None:
    program, costs = program_of(215)
    known = smallest_known(Instance(program, costs))
    assert known is not None
    large = Smallest(known.schedule, simulate(program, known.schedule, costs, extra_bytes=1000), 400)
    asked: list[int] = []

    def ask(budget: int, seconds: float) -> Any:
        asked.append(budget)
        if budget < 600:
            raise InfeasibleError("", proven=budget < 550)
        return known.schedule, simulate(program, known.schedule, costs, extra_bytes=budget - known.report.peak_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lowest_peak, "is_small", lambda _: False)
        found = find_lowest(Instance(program, costs), large, ask)
        assert asked[0] == (400 + large.report.peak_bytes) // 2 == 708
        assert asked[1:4] == [554, 631, 592]  # 554 is not proven, so what is proven stays
        assert found.proven_bytes == 400
        assert 600 <= found.report.peak_bytes <= 606
        asked.clear()
        low = Smallest(large.schedule, large.report, 40)
        assert find_lowest(Instance(program, costs), low, ask).proven_bytes == 529
        asked.clear()
        found = find_lowest(Instance(program, costs), large, ask, enough_bytes=650)
        assert min(asked) == found.report.peak_bytes == 650
        asked.clear()
        found = find_lowest(Instance(program, costs), large, ask, enough_bytes=590)
        assert found.report.peak_bytes > 590
        assert min(asked) >= 590


def test_a_quick_search_gives_the_integer_program_no_more_seconds_than_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    program, costs = program_of(HARD[0])
    given: list[float] = []

    def minimise(*args: Any, seconds: float, **options: Any) -> Smallest:
        given.append(seconds)
        return minimise_peak(*args, **options)

    monkeypatch.setattr(lowest_peak, "minimise_peak", minimise)
    for seconds, most in ((2.5, 2.5), (0.0, 0.0), (1000.0, lowest_peak.SECONDS)):
        given.clear()
        budget = least_peak(program, costs)
        assert lowest_peak.find_quickly(Instance(program, costs), budget, seconds=seconds) is not None
        assert given == [most]


def test_errors_name_the_smallest_known_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    program, costs = program_of(215)
    for place in ("lowest_peak", "search"):
        monkeypatch.setattr(f"monet_like.plan.ilp.{place}.is_small", lambda _: False)
    monkeypatch.setattr(Search, "_solve", lambda *_: "no_incumbent")
    monkeypatch.setattr(Search, "_refine", lambda *_, **__: None)
    known = smallest_known(Instance(program, costs))
    assert known is not None
    bytes_ = known.report.peak_bytes
    assert least_peak(program, costs) < bytes_
    with pytest.raises(
        SolverError, match=rf"found no plan within .*; the smallest known budget is .*\({bytes_} bytes\); allow more"
    ):
        plan(program, costs, bytes_ - 1, solver="HIGHS", time_limit_seconds=2)
    with pytest.raises(
        SolverError, match=rf"heuristic found no schedule within .*; the smallest known budget is .*\({bytes_} bytes\)"
    ):
        plan(program, costs, bytes_ - 1, strategy="heuristic")
    with pytest.raises(MonetError) as caught:
        plan(program, costs, Instance(program, costs).floor[0] - 1, strategy="heuristic")
    assert getattr(caught.value, "proven", False)
