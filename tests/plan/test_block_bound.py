"""The bound of a step for all schedules of its blocks, against every choice among all schedules of small programs."""

from __future__ import annotations

import functools
import itertools
import os
import random
from dataclasses import replace

import pytest
from random_programs import ProgramMaker, all_schedules, random_program
from steps import in_a_row, pieces_of

from monet_like.errors import ScheduleError
from monet_like.ir.program import Cost, Program
from monet_like.ir.schedule import Schedule
from monet_like.ir.step import Point, Step, peak_of, seconds_of
from monet_like.plan.bound import prices as block_bound
from monet_like.plan.bound.pieces import block_relaxation
from monet_like.plan.bound.prices import Relaxations, step_bound
from monet_like.plan.step import choice as blocks
from monet_like.plan.step.choice import Choice
from monet_like.plan.step.menus import efficient, point_of
from monet_like.plan.step.proof import Chooser, longer_menus

#: Steps of the sweep.
SEEDS = int(os.environ.get("MONET_LIKE_RANDOM_BLOCKS", "16"))
#: A program, its costs and the efficient points of all its schedules.
Small = tuple[Program, dict[str, Cost], tuple[Point, ...]]


def small(seed: int) -> Small:
    program, costs = random_program(random.Random(seed), 4)
    every = all_schedules(program, costs, 10**6, [float("inf")])
    return program, costs, efficient([point_of(program, schedule, costs) for schedule in every])


@functools.cache
def random_bounded(seed: int) -> tuple[Step, Relaxations, list[Small], int, float]:
    """Two or three blocks of one or two kinds with short menus; their programs, a budget, and the fewest seconds that
    fit.
    """
    rng = random.Random(seed)
    kinds = [small(rng.randint(0, 10**6)) for _ in range(rng.randint(1, 2))]
    of = [rng.choice(kinds) for _ in range(rng.randint(2, 3))]
    names = [moment.name for moment in in_a_row(len(of), 0)]
    moments = in_a_row(len(of), rng.randint(0, 9), {name: rng.randint(0, 6) for name in names})
    moments = tuple(replace(m, adds=m.stage == "backward" and rng.random() < 0.3) for m in moments)
    calls = [rng.randint(1, 2) for _ in of]
    relaxations = {id(kind): block_relaxation(kind[0], kind[1]) for kind in kinds}
    menus = {id(kind): kind[2][:1] for kind in kinds}
    step = Step(pieces_of([menus[id(k)] for k in of], calls), moments)
    every = [(peak_of(step, points)[0], seconds_of(step, points)) for points in itertools.product(*(k[2] for k in of))]
    peaks = sorted({peak for peak, _ in every})
    budget = peaks[len(peaks) // rng.choice((2, 3, 4))]
    best = min(seconds for peak, seconds in every if peak <= budget)
    return step, [relaxations[id(k)] for k in of], of, budget, best


@functools.cache
def chosen(seed: int) -> Choice:
    step, relaxations, of, budget, _ = random_bounded(seed)

    def point(block: int, schedule: Schedule) -> Point:
        return point_of(of[block][0], schedule, of[block][1])

    return Chooser(step, relaxations, budget, point).choose()


@pytest.mark.slow(every=8)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_choice_of_any_schedules_is_faster(seed: int) -> None:
    step, relaxations, of, budget, best = random_bounded(seed)
    found = chosen(seed)
    assert found.bound_seconds <= best + 1e-6
    if found.peak_bytes <= budget:
        assert found.seconds >= best - 1e-6
        assert peak_of(step, found.points)[0] == found.peak_bytes
    exact = step.with_menus(kind[2] for kind in of)
    choice = blocks.fastest(exact, budget)
    assert choice.seconds == pytest.approx(best, abs=1e-6)
    split = step_bound(exact, relaxations, budget, known=choice.points, gap=0.0, time_limit_seconds=20.0)
    assert split.seconds <= best + 1e-6


@pytest.mark.slow
def test_bounds_are_mostly_near_and_menus_grow() -> None:
    near = grown = tried = 0
    for seed in range(SEEDS):
        *_, budget, best = random_bounded(seed)
        found = chosen(seed)
        tried += 1
        near += found.bound_seconds >= 0.9 * best - 1e-6
        grown += found.peak_bytes <= budget and found.seconds <= 1.1 * best + 1e-6
    assert near > 0.5 * tried
    assert grown > 0.6 * tried


def test_a_block_alone_of_its_kind_is_no_mixture_of_two_schedules() -> None:
    """A head with a fast task that needs 10 bytes of workspace, or a slow one that needs none; there are 6."""
    maker = ProgramMaker()
    x, result = maker.value("x", 1, "input"), maker.value("result", 1, "forward")
    given, gradient = maker.value("given", 1, "backward"), maker.value("gradient", 1, "backward")
    tasks = (
        maker.task("fast", (x,), (result,), Cost(1.0, 10)),
        maker.task("tiled", (x,), (result,), Cost(5.0, 0)),
    )
    program = Program(
        tuple(maker.values), tasks, ((maker.task("back", (x, given), (gradient,), Cost(1.0)),),), (result,), (given,)
    )
    points = [point_of(program, Schedule((task,), ((),), (0,)), maker.costs) for task in (0, 1)]
    assert [(point.seconds, point.forward_peak_bytes) for point in points] == [(2.0, 11), (6.0, 1)]
    asked = Step(pieces_of([points]), in_a_row(1, 0)), [block_relaxation(program, maker.costs)], 7
    mixed = step_bound(*asked, known=None, gap=0.0, time_limit_seconds=20.0)
    assert mixed.parts == 1
    assert mixed.seconds == pytest.approx(2.0 + 4.0 * (11 - 7) / 10, abs=1e-3)
    apart = step_bound(*asked, known=[points[1]], gap=0.0, time_limit_seconds=20.0)
    assert apart.parts > 1
    assert apart.seconds == pytest.approx(6.0, abs=1e-3)


def test_nothing_fits_is_a_high_bound() -> None:
    step, relaxations, *_ = random_bounded(1)
    found = Chooser(step, relaxations, 1, lambda block, schedule: step.menus[block][0]).choose()
    assert found.peak_bytes > 1
    assert found.bound_seconds > 5 * sum(min(p.seconds for p in menu) for menu in step.menus)


def test_nothing_is_known_without_time_or_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    step, relaxations, _, budget, _ = random_bounded(1)
    assert step_bound(step, relaxations, budget, known=None, gap=0.0, time_limit_seconds=0.0).seconds == 0.0
    monkeypatch.setattr(block_bound.Pool, "solve", lambda self, problems, *rest: [None] * len(problems))
    assert step_bound(step, relaxations, budget, known=None, gap=0.0, time_limit_seconds=9.0).seconds == 0.0


def test_a_schedule_that_breaks_a_rule_joins_no_menu() -> None:
    step, relaxations, of, *_ = random_bounded(1)

    def refuses(block: int, schedule: Schedule) -> Point:
        raise ScheduleError("a rule")

    schedules = [[Schedule((), (), ())] for _ in of]
    assert longer_menus(step, relaxations, schedules, refuses) == step
