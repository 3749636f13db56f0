"""The integer program against the best of all schedules, on programs small enough to try them all."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from planning import instance, solve_exactly
from random_programs import ProgramMaker, best_seconds, random_program

from monet_like.ir.program import Cost, Program, Task, Value
from monet_like.ir.schedule import Schedule, prune
from monet_like.ir.simulate import simulate
from monet_like.plan.analysis import find_needs
from monet_like.plan.baseline import store_all
from monet_like.plan.ilp.columns import Options
from monet_like.plan.ilp.decode import decode
from monet_like.plan.ilp.formulation import Formulation
from monet_like.plan.instance import Instance


@pytest.mark.parametrize("block", range(10))
def test_optimum_is_the_best_of_all_schedules(block: int) -> None:
    feasible = 0
    for seed in range(block * 32, block * 32 + 32):
        program, costs, budget = instance(seed, 5 if seed % 8 == 0 else 4)
        wanted = best_seconds(program, costs, budget)
        found = solve_exactly(Formulation(Instance(program, costs), budget), every_row=seed % 2 == 0)
        assert (found is None) == (wanted is None), f"seed {seed}: {wanted} by trying all, {found} by the program"
        if found is not None:
            feasible += 1
            seconds = simulate(program, found[0], costs).seconds
            assert seconds == pytest.approx(wanted), f"seed {seed}"
            assert found[1] == pytest.approx(wanted, abs=1e-6), f"seed {seed}: objective"
    assert 5 < feasible < 32  # both kinds occur


def with_a_copy(rng: random.Random, program: Program, costs: dict[str, Cost]) -> Program:
    """The program and a copy of one value, made in the forward alone; in the backward it makes the value again."""
    made = [v for v in {v for task in program.tasks for v in task.writes} if v not in program.outputs]
    if not made:
        return program
    v, copy = max(made, key=lambda v: program.values[v].bytes), len(program.values)
    costs["pack"], costs["restore"] = (Cost(float(rng.randint(0, 1)), rng.choice((0, 1))) for _ in range(2))
    place = program.producers[v][-1] + 1
    tasks = [
        *program.tasks[:place],
        Task("restore", (copy,), (v,), cost="restore", runs="again"),
        *program.tasks[place:],
    ]
    last = rng.randint(place + 1, len(tasks))  # beside its maker, or later
    tasks.insert(last, Task("pack", (v,), (copy,), cost="pack", runs="first"))
    size = rng.randint(0, program.values[v].bytes // 2)
    values = (*program.values, Value("copy", size, "forward"))
    return replace(program, values=values, tasks=tuple(tasks))


@pytest.mark.slow
def test_optimum_with_copies_that_only_the_backward_reads() -> None:
    used = 0
    for seed in range(128):
        plain, costs, budget = instance(seed, 3)
        program = with_a_copy(random.Random(seed), plain, costs)
        program.check()
        wanted = best_seconds(program, costs, budget)
        found = solve_exactly(Formulation(Instance(program, costs), budget), every_row=seed % 2 == 0)
        assert (found is None) == (wanted is None), f"seed {seed}: {wanted} by trying all, {found} by the program"
        if found is not None:
            assert simulate(program, found[0], costs).seconds == pytest.approx(wanted), f"seed {seed}"
            used += any(program.tasks[p].name == "pack" for p in found[0].forward)
    assert used > 4


def test_a_copy_is_gone_once_the_value_is_made_again() -> None:
    """And not only where the task stands that made it in the forward: then it would not fit beside `wide`."""
    maker = ProgramMaker()
    x, v, copy, w = (
        maker.value("x", 0, "input"),
        *(maker.value(n, size, "forward") for n, size in (("v", 8), ("copy", 4), ("w", 8)))
    )  # fmt: skip
    one, other = (maker.value(name, 0, "forward") for name in ("one", "other"))
    tangent, gradient = (maker.value(name, 0, "backward") for name in ("tangent", "gradient"))
    tasks = (
        maker.task("slow", (x,), (v,), Cost(100.0)),
        maker.task("restore", (copy,), (v,), Cost(1.0), runs="again"),
        maker.task("wide", (v,), (w,), Cost(1.0, 4)),
        maker.task("out", (w,), (one,), Cost(1.0)),
        maker.task("pack", (v,), (copy,), Cost(1.0), runs="first"),
        maker.task("large", (x,), (other,), Cost(1.0, 16)),
    )
    slot = (maker.task("slot", (w, tangent), (gradient,), Cost(1.0)),)
    program = Program(tuple(maker.values), tasks, (slot,), (one, other), (tangent,), (gradient,))
    program.check()
    found = solve_exactly(Formulation(Instance(program, maker.costs), 20), every_row=True)
    assert found is not None and found[1] == pytest.approx(107.0)
    assert found[0].again == ((1, 2),)


def test_point_is_the_inverse_of_decode() -> None:
    tried = 0
    for seed in range(60):
        program, costs, _ = instance(seed)
        formulation = Formulation(Instance(program, costs), 1000)
        found = solve_exactly(formulation)
        if found is None:
            continue
        x = formulation.point(found[0])
        assert x is not None, seed
        assert decode(formulation, x) == found[0]
        assert formulation.matrix().violation(x) < 1e-9
        tried += 1
    assert tried > 30


def test_restricted_programs_are_no_faster() -> None:
    checked = 0
    for seed in range(100, 160):
        program, costs, budget = instance(seed, 4)
        given = Instance(program, costs)
        exact = solve_exactly(Formulation(given, budget))
        restricted = solve_exactly(Formulation(given, budget, options=Options(pin_bytes=2, window=1)))
        if restricted is not None:
            assert exact is not None
            assert restricted[1] >= exact[1] - 1e-6, seed
            checked += 1
    assert checked > 15


def test_extra_bytes_shift_the_budget() -> None:
    for seed in range(20):
        program, costs, budget = instance(seed, 3)
        plain = solve_exactly(Formulation(Instance(program, costs), budget))
        shifted = Formulation(Instance(program, costs, 7), budget + 7).matrix()
        assert shifted.contradiction == Formulation(Instance(program, costs), budget).matrix().contradiction
        assert plain is None or shifted.columns == Formulation(Instance(program, costs), budget).matrix().columns


def test_prune_removes_only_useless_runs() -> None:
    for seed in range(80):
        program, costs, _ = instance(seed)
        schedule = store_all(program)
        pruned = prune(program, schedule)
        assert pruned == prune(program, pruned)
        assert simulate(program, pruned, costs).seconds <= simulate(program, schedule, costs).seconds


def test_reruns_in_useful_stages_only_lose_no_schedule_of_the_best_time() -> None:
    early = tried = 0
    for seed in range(140):
        program, costs = random_program(random.Random(seed), 3)
        if len(program.slots) < 3 or all(program.slot_reads):
            continue
        stages = find_needs(program).stages
        early += any(not program.slot_reads[t - 1] for t in stages[1:])
        for room in (6, 9, 12):
            budget = program.resident_bytes + room
            assert best_seconds(program, costs, budget) == best_seconds(program, costs, budget, anywhere=True), seed
            tried += 1
    assert tried > 60
    assert early > 10


def test_early_rerun_fits_where_a_late_one_does_not() -> None:
    """Between two slots that read, a gradient grows: what the second one needs is better made before it does."""
    maker = ProgramMaker()
    x = maker.value("x", 1, "input")
    large, small = maker.value("large", 9, "forward"), maker.value("small", 1, "forward")
    out = maker.value("out", 1, "forward")
    tasks = (
        maker.task("a", (x,), (large,), Cost(1.0)),
        maker.task("b", (large,), (small,), Cost(1.0)),
        maker.task("c", (small,), (out,), Cost(1.0)),
    )
    g0, g1, g2, g3 = (maker.value(f"g{k}", size, "backward") for k, size in enumerate((1, 1, 8, 1)))
    slots = (
        (maker.task("reads nothing", (g0,), (g1,), Cost(1.0)),),
        (maker.task("grows", (g1,), (g2,), Cost(1.0)),),
        (maker.task("reads", (small, g2), (g3,), Cost(1.0)),),
    )
    program = Program(tuple(maker.values), tasks, slots, (out,), (g0,))
    assert find_needs(program).stages == (0, 1, 2, 3)
    assert find_needs(program).reading_stages == (0, 3)
    late = Schedule((0, 1, 2), ((), (), (0, 1)), (0, 0, 0))
    early = Schedule((0, 1, 2), ((), (0, 1), ()), (0, 0, 0))
    peaks = [simulate(program, schedule, maker.costs).peak_bytes for schedule in (late, early)]
    assert peaks == [1 + 1 + 8 + 9 + 1, 1 + 1 + 1 + 9 + 1]
