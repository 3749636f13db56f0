"""Many blocks under one budget: the integer program against every choice, and points against hand-counted bytes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from planning import crash_solvers, network
from random_programs import random_program
from steps import assert_best_of_all, point, random_step

from monet_like.errors import SolverError
from monet_like.ir.schedule import Schedule
from monet_like.ir.simulate import simulate
from monet_like.ir.step import peak_of, seconds_of
from monet_like.plan import store_all
from monet_like.plan.random_schedules import random_schedule
from monet_like.plan.step import choice as blocks
from monet_like.plan.step import menus as block_points
from monet_like.plan.step.choice import fastest, smallest
from monet_like.plan.step.menus import efficient, menu, point_of, with_rest, without_rest
from monet_like.solvers.interface import Solution


@pytest.mark.slow(every=6)
@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    step = random_step(seed)
    assert_best_of_all(step, itertools.product(*step.menus), [1 / 3])


def test_the_smallest_points_fit_and_less_does_not() -> None:
    step = random_step(3)
    least = smallest(step)
    assert fastest(step, least.peak_bytes - 1) == least
    found = fastest(step, least.peak_bytes)
    assert found.peak_bytes == least.peak_bytes and found.bound_seconds > 0


def test_points_of_a_chain_by_hand() -> None:
    """x -> v0 -> v1 -> v2 (the result); each gradient reads its own value."""
    program, costs = network(3)
    sizes = {value.name: value.bytes for value in program.values}
    kept = point_of(program, Schedule((0, 1, 2), ((), (), ()), (0, 0, 0)), costs)
    assert kept.carried_bytes == sizes["v0"] + sizes["v1"]
    assert kept.forward_peak_bytes == sizes["v0"] + sizes["v1"] + sizes["v2"]
    # The result v2 is there when the backward begins, as its keeper's; first gradient: v0, v1 and one gradient of 1000.
    assert kept.backward_peak_bytes == sizes["v0"] + sizes["v1"] + 1000
    assert [program.values[v].name for v in kept.shared] == ["v2"]
    anew = point_of(program, Schedule((0, 1, 2), ((), (0, 1), ()), (0, 0, 0)), costs)
    assert anew.carried_bytes == 0
    assert [program.values[v].name for v in anew.shared] == ["x", "v2"]
    # v2 and the tangent are freed by the first gradient, then v0 and v1 are made anew and the second gradient is
    # written.
    assert anew.backward_peak_bytes == max(1000, sizes["v0"] + sizes["v1"] + 1000 - sizes["v2"])
    assert anew.seconds == pytest.approx(kept.seconds + costs["f0"].seconds + costs["f1"].seconds)


@pytest.mark.parametrize("seed", range(40))
def test_a_point_agrees_with_the_simulator(seed: int) -> None:
    """The peak of a step with this block alone; the results that it keeps may be freed in the backward, or held."""
    program, costs = random_program(random.Random(seed), 5)
    schedule = random_schedule(program, seed, drop=0.5)
    found = point_of(program, schedule, costs)
    ends = sum(program.values[v].bytes for v in (*program.outputs, *program.tangents))
    whole = simulate(program, schedule, costs).peak_bytes
    held = sum(program.values[v].bytes for v in found.shared if v in program.outputs)
    alone = program.resident_bytes + max(found.forward_peak_bytes, found.backward_peak_bytes + ends)
    assert alone <= whole <= alone + held
    assert found.backward_peak_bytes >= found.carried_bytes or not program.slots


@pytest.mark.parametrize("seed", range(20))
def test_gradients_that_are_added_to_earlier_ones_are_freed(seed: int) -> None:
    """The peak of the backward is lower by no more than they take, and the same if they come at its end."""
    program, costs = random_program(random.Random(seed), 5)
    schedule = random_schedule(program, seed, drop=0.5)
    made = {v: s for s, ways in enumerate(program.slots) for v in ways[0].writes if v in program.gradients}
    early = point_of(program, schedule, costs, (), made)
    late = point_of(program, schedule, costs, (), dict.fromkeys(made, len(program.slots)))
    assert late.adding_peak_bytes == late.backward_peak_bytes == early.backward_peak_bytes
    earlier = sum(program.values[v].bytes for v, s in made.items() if s < len(program.slots) - 1)
    assert early.backward_peak_bytes - earlier <= early.adding_peak_bytes <= early.backward_peak_bytes


@pytest.mark.parametrize("seed", range(20))
def test_the_slot_of_the_rest_measures_what_is_carried(seed: int) -> None:
    """With a workspace above all others there, the peak is that workspace, what is carried, results and gradients."""
    program, costs = random_program(random.Random(seed), 5)
    if not program.slots:
        return
    schedule = random_schedule(program, seed, drop=0.7)
    rest = 10**6
    longer, priced = with_rest(program, costs, rest)
    longer.check()
    other = Schedule(schedule.forward, ((), *schedule.again), (0, *schedule.ways))
    ends = sum(program.values[v].bytes for v in (*program.outputs, *program.tangents))
    carried = point_of(program, schedule, costs).carried_bytes
    assert simulate(longer, other, priced).peak_bytes == program.resident_bytes + ends + carried + rest
    assert without_rest(other) == schedule


def test_what_runs_before_the_rest_runs_after_it() -> None:
    early = Schedule((0, 1, 2), ((1,), (0,), (), ()), (0, 0, 0, 0))
    assert without_rest(early) == Schedule((0, 1, 2), ((0, 1), (), ()), (0, 0, 0))


@pytest.mark.slow(but=["heuristic"])
@pytest.mark.parametrize("strategy", ["heuristic", "milp"])
def test_a_menu_goes_from_least_carried_to_fastest(strategy: str) -> None:
    program, costs = network(4)
    found = menu(program, costs, strategy=strategy, time_limit_seconds=60)
    plain = point_of(program, store_all(program), costs)
    assert found[0].carried_bytes == 0 and len(found) >= 4
    assert min(p.seconds for p in found) == pytest.approx(plain.seconds)
    assert found == efficient(found)
    for one, other in itertools.permutations(found, 2):
        assert any(mine < theirs for mine, theirs in zip(one.numbers, other.numbers, strict=True))


@pytest.mark.parametrize("seed", [7, 8, 19, 26, 29])
def test_the_first_points_of_a_menu_have_one_that_carries_little_and_peaks_low(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No random schedule is nearer to the least of both."""
    monkeypatch.setattr(block_points, "CARRIED_SHARES", ())
    program, costs = random_program(random.Random(seed), 8)
    found = menu(program, costs, strategy="heuristic")
    peak = {p: simulate(program, p.schedule, costs).peak_bytes for p in found}
    least, low = min(p.carried_bytes for p in found), min(peak.values())

    def above(carried_bytes: int, peak_bytes: int) -> int:
        return max(carried_bytes - least, peak_bytes - low)

    best = min(above(p.carried_bytes, peak[p]) for p in found)
    for drop, number in itertools.product((0.3, 0.6, 0.9), range(60)):
        schedule = random_schedule(program, number, drop=drop)
        other = point_of(program, schedule, costs)
        assert best <= above(other.carried_bytes, simulate(program, schedule, costs).peak_bytes)


def test_workspaces_may_be_larger_than_all_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of convolutions of small images are."""
    monkeypatch.setattr(block_points, "CARRIED_SHARES", ())
    program, costs = random_program(random.Random(0), 8)
    values = sum(value.bytes for value in program.values)
    large = {key: replace(cost, workspace_bytes=10 * values) for key, cost in costs.items()}
    found = {
        name: [p.schedule for p in menu(program, of, strategy="heuristic")]
        for name, of in (("large", large), ("own", costs))
    }
    assert found["large"] and min(p.forward for p in found["large"]) == min(p.forward for p in found["own"])


@pytest.mark.parametrize("seed", range(6))
def test_what_fits_does_not_depend_on_measured_seconds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine measures other seconds; a menu's least bytes are the same."""
    monkeypatch.setattr(block_points, "CARRIED_SHARES", ())
    program, costs = random_program(random.Random(seed), 20)
    found = set()
    for noise in range(4):
        rng = random.Random(noise)
        noisy = {key: replace(cost, seconds=cost.seconds * 10 ** rng.uniform(-1, 1)) for key, cost in costs.items()}
        points = menu(program, noisy, strategy="heuristic")
        peaks = [simulate(program, p.schedule, costs).peak_bytes for p in points]
        both = min(p.carried_bytes + peak for p, peak in zip(points, peaks, strict=True))
        found.add((min(p.carried_bytes for p in points), min(peaks), both))
    assert len(found) == 1


@pytest.mark.parametrize("limit", [0.0, 4.0, 9.0])
def test_a_menu_ends_with_its_time(limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second with each search of a menu: four come first, and nothing begins after the
    limit.
    """
    program, costs = network(4)
    asked: list[dict[str, Any]] = []

    def timed(own: Callable[..., Any]) -> Callable[..., Any]:
        def search(*args: Any, **options: Any) -> Any:
            asked.append(options)
            return own(*args, **{name: option for name, option in options.items() if name != "enough"})

        return search

    for name in ("plan", "smallest_known"):
        monkeypatch.setattr(block_points, name, timed(getattr(block_points, name)))
    monkeypatch.setattr(block_points, "time", SimpleNamespace(monotonic=lambda: float(len(asked))))
    found = menu(program, costs, strategy="heuristic", time_limit_seconds=limit)
    assert found[0].carried_bytes == 0
    assert len(asked) == max(4, limit)
    for number, options in enumerate(asked):
        left = max(0.0, limit - number)
        assert options.get("seconds", left) == left
        assert options["enough"](*[True] * ("seconds" in options)) == (len(asked) >= limit)


def test_points_that_others_dominate_are_removed() -> None:
    lean, fast, worse = point(3, 1, 5, 5), point(1, 9, 9, 9), point(3, 2, 5, 5)
    keeps = point(3, 1, 5, 5, (4,))
    assert efficient([worse, fast, keeps, lean]) == (lean, fast)
    faster = point(2, 1, 5, 5, (4,))
    assert set(efficient([faster, lean])) == {lean, faster}  # the faster one keeps a result for it


def test_a_solver_that_finds_nothing_in_time_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search chooses then, within the budget, and mostly the fastest points."""
    late = Solution("no_incumbent", None, math.inf, -math.inf, math.inf)
    monkeypatch.setattr(blocks, "solve", lambda *_, **__: late)
    best = 0
    for seed in range(40):
        step = random_step(seed)
        every = [(peak_of(step, points)[0], seconds_of(step, points)) for points in itertools.product(*step.menus)]
        peaks = sorted({peak for peak, _ in every})
        for budget in (peaks[0], peaks[len(peaks) // 3]):
            choice = fastest(step, budget)
            least = min(seconds for peak, seconds in every if peak <= budget)
            assert choice.peak_bytes == peak_of(step, choice.points)[0] <= budget
            assert choice.bound_seconds <= least <= choice.seconds == seconds_of(step, choice.points)
            best += choice.seconds == least
        assert fastest(step, peaks[0] - 1).peak_bytes >= peaks[0]
    assert best >= 75  # of 80


def test_a_menu_without_the_integer_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The local search's schedules are a menu where it finds nothing in time."""
    monkeypatch.setattr(block_points, "plan", _late(block_points.plan))
    monkeypatch.setattr(block_points, "smallest_budget", _late(None))
    program, costs = network(4)
    points = menu(program, costs, strategy="milp", time_limit_seconds=1)
    assert len(points) >= 2 and points[0].carried_bytes == 0


def _late(own: Any) -> Callable[..., Any]:
    """A planner whose integer program finds nothing in time."""

    def late(*args: Any, **options: Any) -> Any:
        if options.get("strategy") != "heuristic":
            raise SolverError("nothing in time")
        return own(*args, **options)

    return late


def test_a_solver_that_crashes_is_told_and_a_search_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is killed as soon as it has started."""
    step = random_step(3)
    least = smallest(step)
    proven = fastest(step, least.peak_bytes)
    assert (proven.status, proven.reason, least.status) == ("optimal", "", "optimal")
    crash_solvers(monkeypatch.setattr)
    with pytest.warns(
        UserWarning, match=r"the solver HIGHS failed \(the solver's process ended with code -11\), so a local search"
    ):
        found = fastest(step, least.peak_bytes)
    assert found.peak_bytes <= least.peak_bytes
    assert (found.status, found.reason) == ("searched", "the solver's process ended with code -11")
    assert found.bound_seconds <= proven.seconds <= found.seconds
    with pytest.warns(UserWarning, match="failed"):
        lean = smallest(step)
    assert lean.status == "searched" and lean.peak_bytes >= least.peak_bytes
