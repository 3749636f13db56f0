"""Steps that call one graph several times: memory by hand, and the bound against all schedules of small programs."""

from __future__ import annotations

import random

import pytest
from random_programs import all_schedules, random_program

from monet_like.inductor.planned_graph import parameter_bytes, point_of_call, step_of_calls
from monet_like.ir.program import Cost, Program
from monet_like.ir.schedule import Schedule, kept_values
from monet_like.ir.simulate import simulate
from monet_like.ir.step import Point, peak_of, seconds_of
from monet_like.plan.bound.pieces import block_relaxation
from monet_like.plan.step.proof import Chooser


def small(seed: int) -> tuple[Program, dict[str, Cost], list[Schedule]]:
    """A random program and all its schedules."""
    program, costs = random_program(random.Random(seed), 4)
    return program, costs, list(all_schedules(program, costs, 10**6, [float("inf")]))


def saved(program: Program, schedule: Schedule) -> int:
    return sum(program.values[v].bytes for v in kept_values(program, schedule))


def needed(program: Program, costs: dict[str, Cost], schedule: Schedule, calls: int) -> int:
    """While one call runs backward, each of the others holds its parameters, and what it has saved or its gradients."""
    gradients = sum(program.values[v].bytes for v in program.gradients if v not in program.tangents)
    each = parameter_bytes(program) + max(saved(program, schedule), gradients)
    return simulate(program, schedule, costs).peak_bytes + (calls - 1) * each


@pytest.mark.parametrize("seed", range(12))
def test_calls_need_what_is_counted_by_hand(seed: int) -> None:
    program, costs, every = small(seed)
    for calls in (1, 2, 5):
        step = step_of_calls(program, calls)
        for schedule in every[:50] if program.slots else ():
            point = point_of_call(program, costs, schedule, saved(program, schedule))
            assert peak_of(step, [point])[0] == needed(program, costs, schedule, calls)
            assert seconds_of(step, [point]) == calls * simulate(program, schedule, costs).seconds


@pytest.mark.slow(every=6)
@pytest.mark.parametrize("seed", range(9))
def test_no_schedule_of_all_is_faster_than_the_bound(seed: int) -> None:
    program, costs, every = small(seed)
    if not program.slots:
        return
    calls = 3
    sizes = sorted({needed(program, costs, schedule, calls) for schedule in every})
    budget = sizes[len(sizes) // 3]

    def point(_: int, schedule: Schedule) -> Point:
        return point_of_call(program, costs, schedule, saved(program, schedule))

    step = step_of_calls(program, calls).with_menus([[point(0, schedule) for schedule in every[:2]]])
    found = Chooser(step, [block_relaxation(program, costs)], budget, point).choose()
    fitting = (schedule for schedule in every if needed(program, costs, schedule, calls) <= budget)
    best = calls * min(simulate(program, schedule, costs).seconds for schedule in fitting)
    assert found.bound_seconds <= best + 1e-6
    assert found.peak_bytes > budget or found.seconds >= best - 1e-6
