"""The relaxation in blocks and its refinement, against the best of all schedules of small programs."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from planning import instance, optimum, solve_exactly
from random_programs import random_program

from monet_like.errors import ScheduleError
from monet_like.ir.program import Cost, Program, Task, Value
from monet_like.ir.schedule import Schedule, prune
from monet_like.ir.simulate import simulate
from monet_like.plan.analysis import find_needs
from monet_like.plan.bound import relaxation
from monet_like.plan.bound.refinement import Refinement
from monet_like.plan.bound.relaxation import BlockProgram
from monet_like.plan.ilp.formulation import Formulation
from monet_like.plan.instance import Instance
from monet_like.plan.random_schedules import random_schedule
from monet_like.solvers.matrix import ONE, total


def test_any_blocks_and_rows_bound_the_best_schedule_and_the_finest_mostly_equal_it() -> None:
    tried = exact = 0
    for seed in range(200, 280):
        program, costs, budget = instance(seed, 4)
        found = solve_exactly(Formulation(Instance(program, costs), budget))
        if found is None:
            continue
        rng, groups = random.Random(seed), range(len(find_needs(program).groups))
        slots = range(len(program.slots))
        some = sorted(rng.sample(slots, len(slots) // 2))
        for alone in ((), some, slots):
            possible = {slot + 1 for slot in alone} & set(find_needs(program).stages) | {0}
            runs = [(stage, group) for stage in sorted(possible) for group in groups if rng.random() < 0.8]
            blocks = BlockProgram(Instance(program, costs), budget, alone).build(runs=runs)
            best = optimum(blocks.matrix)
            assert best is not None, seed
            assert best <= found[1] + 1e-6, (seed, alone, runs)
            point = blocks.point(found[0])
            assert point is not None, (seed, alone)
            value = (float(blocks.matrix.cost @ point) + blocks.matrix.offset) * blocks.matrix.seconds_per_unit
            assert value <= simulate(program, found[0], costs).seconds + 1e-9
            tried += 1
        exact += best >= found[1] - 1e-6
    assert tried > 90
    assert exact > 0.8 * tried / 3


def chain(length: int) -> tuple[Program, dict[str, Cost]]:
    """Every value, of 1 byte, is made from the one before it; every second one is read by a slot, the
    last one first.
    """
    values = tuple(Value(f"v{v}", 1, "forward") for v in range(length))
    tasks = tuple(Task(f"t{v}", (v - 1,) if v else (), (v,), "run") for v in range(length))
    slots = tuple((Task(f"s{v}", (v,), (), "slot"),) for v in reversed(range(0, length - 1, 2)))
    return Program(values, tasks, slots, (length - 1,)), {"run": Cost(1.0), "slot": Cost(1.0)}


def test_rows_over_several_blocks_raise_the_linear_bound_and_keep_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [instance(seed, 5) for seed in range(200, 230)] + [(*chain(10), budget) for budget in (3, 4)]
    gained = 0.0
    for number, (program, costs, budget) in enumerate(programs):
        values = []
        for share in (2.0, 0.01):  # no value is that big; all are
            monkeypatch.setattr(relaxation, "BIG_SHARE", share)
            problem = BlockProgram(Instance(program, costs), budget, range(len(program.slots))).build().matrix
            relaxed = replace(problem, integral=np.zeros(problem.columns, dtype=bool))
            values.append((optimum(problem), optimum(relaxed)))
        (plain, before), (strong, after) = values
        assert (plain is None) == (strong is None), number
        if plain is None or strong is None or before is None or after is None:
            continue
        assert strong == pytest.approx(plain), number
        assert after >= before - 1e-9, number
        gained = max(gained, (after - before) / before)
    assert gained > 0.04  # 18.2 to 19 s of 20


def test_reruns_ruled_out_by_fitting_runs_are_in_no_schedule() -> None:
    refused = 0
    for seed in range(200, 240):
        program, costs, budget = instance(seed, 4)
        needs = find_needs(program)
        for slot, fitting in enumerate(Instance(program, costs).fitting_runs(budget)):
            formulation = Formulation(Instance(program, costs), budget)
            gone = [
                run for (p, t), run in formulation.e.items()
                if t == slot + 1 and p not in fitting and needs.rerun[p]
            ]  # fmt: skip
            if gone:
                formulation.builder.at_most(ONE, total(gone))
                assert solve_exactly(formulation, every_row=True) is None, (seed, slot)
                refused += 1
    assert refused > 20


def test_points_of_the_finest_blocks_decode_to_their_schedule() -> None:
    tried = 0
    for seed in range(200, 250):
        program, costs, budget = instance(seed, 4)
        found = solve_exactly(Formulation(Instance(program, costs), budget))
        if found is None or find_needs(program).stages != tuple(range(len(program.slots) + 1)):
            continue
        blocks = BlockProgram(Instance(program, costs), budget, range(len(program.slots))).build()
        point = blocks.point(found[0])
        assert point is not None
        assert blocks.schedule(point) == prune(program, found[0])
        tried += 1
    assert tried > 10


@pytest.mark.slow
def test_refinement_proves_the_best_schedule_of_small_programs() -> None:
    proven = tried = steps = 0
    for seed in range(60):
        program, costs = random_program(random.Random(seed), 5)
        budget = program.resident_bytes + 12
        found = solve_exactly(Formulation(Instance(program, costs), budget))
        if found is None or not program.slots:
            continue
        refinement, proof = Refinement(Instance(program, costs), budget), 0.0
        while True:
            step = refinement.step(found[0], found[1], 1e-6, 10.0)
            steps += 1
            proof = max(proof, step.bound_seconds)
            if not step.finer:
                break
        assert proof <= found[1] + 1e-6
        proven += proof >= found[1] * (1 - 1e-3)
        tried += 1
        if tried == 8:
            break
    assert tried == 8
    assert proven >= 7
    assert steps > tried  # some needed more than one block


def test_schedule_over_the_budget_is_no_start() -> None:
    for seed in range(60):
        program, costs, budget = instance(seed, 4)
        roomy = solve_exactly(Formulation(Instance(program, costs), 1 << 40))
        tight = solve_exactly(Formulation(Instance(program, costs), budget))
        if roomy is None or tight is None or simulate(program, roomy[0], costs).peak_bytes <= budget:
            continue
        groups = range(len(find_needs(program).groups))
        stages = find_needs(program).stages
        runs = [(stage, group) for stage in stages for group in groups]
        fine = BlockProgram(Instance(program, costs), budget, range(len(program.slots))).build(runs=runs)
        if fine.point(roomy[0]) is None:
            return
    raise AssertionError("no row refused a schedule that is over the budget")


def test_runs_in_a_stage_where_no_plan_reruns_get_no_row() -> None:
    """A block's schedule may have them, at a cut that another slot made."""
    tried = 0
    for seed in range(400):
        program, costs, _ = instance(seed, 4)
        stages = find_needs(program).stages
        for schedule in _moved_to_other_stages(program, costs, seed, stages):
            report = simulate(program, schedule, costs)
            refinement = Refinement(Instance(program, costs), 0)
            refinement._refine(schedule, report)
            assert refinement.runs <= {(stage, group) for stage in stages for group in range(len(program.tasks))}
            BlockProgram(Instance(program, costs), 0, refinement.alone).build(runs=sorted(refinement.runs))
            tried += 1
        if tried >= 2:
            return
    raise AssertionError(f"only {tried} schedules have runs in other stages")


def _moved_to_other_stages(
    program: Program, costs: dict[str, Cost], seed: int, stages: tuple[int, ...]
) -> list[Schedule]:
    """A random schedule with a run moved to an earlier stage that is not among ``stages``."""
    schedule = random_schedule(program, seed, drop=0.9)
    found = []
    for slot, tasks in enumerate(schedule.again):
        for other in range(slot if tasks else 0):
            if other + 1 not in stages:
                again = [list(each) for each in schedule.again]
                again[other].append(again[slot].pop(0))
                moved = replace(schedule, again=tuple(tuple(sorted(each)) for each in again))
                with suppress(ScheduleError):
                    simulate(program, moved, costs)
                    found.append(moved)
    return found
