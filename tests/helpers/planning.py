"""Programs that the planner's tests share, and their optima by HiGHS through scipy."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from random_programs import ProgramMaker, random_program
from scipy.optimize import Bounds, LinearConstraint, milp

from monet_like.ir.program import Cost, Program
from monet_like.ir.schedule import Schedule
from monet_like.ir.simulate import simulate
from monet_like.plan import store_all
from monet_like.plan.ilp.decode import decode
from monet_like.plan.ilp.formulation import Formulation
from monet_like.solvers import interface, processes
from monet_like.solvers.matrix import MatrixProgram

#: The checkout, which subprocesses import from.
ROOT = Path(__file__).resolve().parents[2]


def crash_solvers(replace: Callable[[Any, str, Any], None]) -> None:
    """Let every solver's process crash as soon as it has started.

    Args:
        replace: such as ``monkeypatch.setattr``.
    """
    own = processes.start_worker

    def start(*args: Any) -> Any:
        worker = own(*args)
        os.kill(worker.child.pid, signal.SIGSEGV)
        worker.child.wait()
        return worker

    processes.stop_waiting()  # those that an earlier solve has left
    for module in (processes, interface):
        replace(module, "start_worker", start)


def network(layers: int, seed: int = 0) -> tuple[Program, dict[str, Cost]]:
    """A chain of ``layers`` tasks whose backward reads every value, in kilobytes and milliseconds."""
    rng, maker = random.Random(seed), ProgramMaker()
    last = maker.value("x", 1000, "input")
    forward: list[int] = []
    tasks = []
    for layer in range(layers):
        value = maker.value(f"v{layer}", 1000 * rng.randint(2, 9), "forward")
        tasks.append(maker.task(f"f{layer}", (last,), (value,), Cost(rng.randint(1, 20) / 1000)))
        forward.append(value)
        last = value
    gradient = maker.value("g", 1000, "backward")
    tangents, slots = (gradient,), []
    for layer in reversed(range(layers)):
        following = maker.value(f"g{layer}", 1000, "backward")
        ways = [maker.task(f"b{layer}", (forward[layer], gradient), (following,), Cost(0.01))]
        if layer:
            ways.append(
                maker.task(f"b{layer}.other", (forward[layer - 1], gradient), (following,), Cost(0.012), variant="o")
            )
        slots.append(tuple(ways))
        gradient = following
    return Program(tuple(maker.values), tuple(tasks), tuple(slots), (last,), tangents), maker.costs


def peak(program: Program, costs: dict[str, Cost]) -> int:
    return simulate(program, store_all(program), costs).peak_bytes


def hard_problem(rows: int = 30, columns: int = 400) -> MatrixProgram:
    """A multidimensional knapsack: feasible at 0, not proven within seconds."""
    rng = np.random.default_rng(1)
    weights = rng.integers(10, 100, (rows, columns)).astype(float)
    cost = -weights.mean(axis=0) - rng.random(columns)
    half = weights.sum(axis=1) / 2
    return MatrixProgram(
        sp.csr_matrix(weights), np.full(rows, -np.inf), half, cost, np.ones(columns, dtype=bool), 1e6, 1e-3
    )


def best_point(problem: MatrixProgram) -> Any:
    """By HiGHS, through scipy; None if there is none."""
    if problem.contradiction:
        return None
    if not problem.columns:
        return np.zeros(0)
    rows = LinearConstraint(problem.matrix, problem.lower, problem.upper)
    answer = milp(
        problem.cost, constraints=rows, bounds=Bounds(0, 1), integrality=problem.integral.astype(int),
        options={"mip_rel_gap": 0.0},
    )  # fmt: skip
    assert answer.status in (0, 2), answer.message
    return answer.x


def solve_exactly(formulation: Formulation, every_row: bool = False) -> tuple[Schedule, float] | None:
    """Solve, adding the run rows that a schedule breaks, or all of them at once."""
    if every_row:
        formulation.add_run_rows(formulation.stages)
    while True:
        problem = formulation.matrix()
        x = best_point(problem)
        if x is None:
            return None
        schedule = decode(formulation, x)
        report = formulation.instance.simulate(schedule)
        if report.peak_bytes <= formulation.budget:
            return schedule, (problem.offset + float(problem.cost @ x)) * problem.seconds_per_unit
        assert not every_row, "all rows stand, and yet the schedule is over the budget"
        broken = [
            run for step, run in zip(report.steps, schedule.runs(), strict=True) if step.bytes > formulation.budget
        ]
        assert all(p >= 0 for _, p in broken), "a slot is over the budget, whose row stands from the start"
        added = [formulation.add_run_row(t, formulation.group_of[p]) for t, p in broken]
        assert any(added)


def instance(seed: int, most_tasks: int = 5) -> tuple[Program, dict[str, Cost], int]:
    rng = random.Random(seed)
    program, costs = random_program(rng, most_tasks)
    program.check()
    return program, costs, rng.randint(program.resident_bytes + 4, program.resident_bytes + 24)


def optimum(problem: MatrixProgram) -> float | None:
    """Seconds of the program's best point; None if it has none."""
    x = best_point(problem)
    return None if x is None else (problem.offset + float(problem.cost @ x)) * problem.seconds_per_unit


def chain_of(links: int) -> tuple[Program, dict[str, Cost]]:
    """Equal links, each of whose results the backward needs; nothing else takes memory."""
    maker = ProgramMaker()
    x = maker.value("x", 1, "input")
    values, tasks, before = [], [], x
    for k in range(links):
        before_value = before
        before = maker.value(f"v{k}", 1, "forward")
        values.append(before)
        tasks.append(maker.task(f"f{k}", (before_value,), (before,), Cost(1.0)))
    gradient = tangent = maker.value("gy", 0, "backward")
    slots = []
    for k in reversed(range(links)):
        result = maker.value(f"g{k}", 0, "backward")
        slots.append((maker.task(f"b{k}", (gradient, values[k]), (result,), Cost(0.0)),))
        gradient = result
    done = maker.value("done", 0, "forward")
    tasks.append(maker.task("out", (before,), (done,), Cost(0.0), runs="first"))
    return Program(tuple(maker.values), tuple(tasks), tuple(slots), (done,), (tangent,), (gradient,)), maker.costs
