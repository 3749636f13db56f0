"""Planning end to end: solvers agree, time limits count wall seconds, and errors say which budget would fit."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from planning import ROOT, hard_problem, network, peak
from random_programs import ProgramMaker, best_seconds, random_program

from monet_like.errors import InfeasibleError, SolverError, UsageError
from monet_like.ir.program import Cost, Program
from monet_like.plan import plan, store_all
from monet_like.plan.ilp.columns import Options
from monet_like.plan.ilp.search import Search
from monet_like.plan.instance import Instance
from monet_like.plan.local_search.searcher import smallest_known
from monet_like.solvers import interface, processes
from monet_like.solvers.interface import check_solver, installed_solvers, solve

KILLED = "the solver's process ended with code -9"

needs_cbc = pytest.mark.skipif("CBC" not in installed_solvers(), reason="CBC (PuLP) is not installed")


def answers_with(monkeypatch: pytest.MonkeyPatch, status: str, message: str = "") -> None:
    """No solver runs: each solve ends at once, with this status of HiGHS and without an incumbent."""
    monkeypatch.setattr(interface, "_run_child", lambda *_: {"status": status, "message": message, "x": None})


@functools.cache
def tried(seed: int, bytes_above: int) -> tuple[Program, dict[str, Cost], int, float | None]:
    """A program, its costs, a budget, and the seconds of the best of all its schedules within the budget."""
    program, costs = random_program(random.Random(seed), 4)
    budget = program.resident_bytes + bytes_above
    return program, costs, budget, best_seconds(program, costs, budget)


@pytest.mark.parametrize("solver", ["HIGHS", pytest.param("cbc", marks=needs_cbc)])
def test_solvers_find_the_best_of_all_schedules(solver: str) -> None:
    planned = 0
    for seed in range(400, 404):
        program, costs, budget, wanted = tried(seed, 18)
        if wanted is None:
            with pytest.raises(InfeasibleError):
                plan(program, costs, budget, solver=solver, gap=0.0, time_limit_seconds=20)
            continue
        found = plan(program, costs, budget, solver=solver, gap=0.0, time_limit_seconds=20, evaluations=0)
        assert found.report.seconds == pytest.approx(wanted)
        assert found.report.peak_bytes <= budget
        assert found.status == "optimal"
        planned += 1
    assert planned >= 2


@needs_cbc
def test_cbc_and_highs_agree_and_the_gap_is_against_a_true_bound() -> None:
    program, costs = network(14)
    budget = int(peak(program, costs) * 0.6)
    exact = {"options": Options(), "evaluations": 0}
    one = plan(program, costs, budget, solver="CBC", gap=1e-6, time_limit_seconds=30, **exact)
    two = plan(program, costs, budget, solver="highs", gap=1e-6, time_limit_seconds=30, **exact)
    assert one.report.seconds == pytest.approx(two.report.seconds)
    loose = plan(program, costs, budget, solver="HIGHS", gap=0.2, time_limit_seconds=30)
    for found in (one, two, loose):
        assert found.status == "optimal"
        assert found.bound_seconds <= two.report.seconds + 1e-9
        assert found.gap == pytest.approx(1 - found.bound_seconds / found.report.seconds)
        assert found.rows > 0
        assert found.columns > 0
    assert (one.bound_kind, one.solver, one.found_by) == ("unrestricted", "CBC", "CBC")
    assert loose.gap <= 0.2


@pytest.mark.parametrize("solver", ["HIGHS", pytest.param("CBC", marks=needs_cbc)])
def test_a_solver_is_stopped_at_the_time_limit(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that each question moves on by a second; the solver's process does not answer."""
    seconds, seen = itertools.count(), []

    def wait(lent: processes.Worker, *_: object) -> None:
        seen.append(lent.child)
        lent.child.wait()

    monkeypatch.setattr(interface, "time", SimpleNamespace(monotonic=lambda: float(next(seconds)), time=time.time))
    monkeypatch.setattr(interface, "_converse", wait)
    solution = solve(hard_problem(), solver, time_limit_seconds=4, gap=0.0)
    assert (solution.status, solution.message) == ("no_incumbent", "stopped at the time limit")
    assert 4 <= next(seconds) <= 8
    assert [child.poll() is None for child in seen] == [False]


def test_start_is_the_solution_if_the_solver_finds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = hard_problem()
    answers_with(monkeypatch, "killed")
    solution = solve(problem, "HIGHS", gap=0.0, start=np.zeros(problem.columns))
    assert solution.status == "feasible"
    assert solution.objective_seconds == pytest.approx(1000.0)


def test_values_that_break_rows_are_refused_whatever_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = hard_problem(2, 5)
    for x in (np.full(5, 0.5), np.ones(5), np.full(4, 1.0)):
        answer = {"status": "kOptimal", "x": x if len(x) == 5 else None, "bound": None}
        monkeypatch.setattr(interface, "_run_child", lambda *_, answer=answer: dict(answer))
        assert solve(problem, "HIGHS").status == "error"
    monkeypatch.setattr(interface, "_run_child", lambda *_: {"status": "optimal_inaccurate", "x": np.ones(5)})
    assert solve(problem, "HIGHS").status == "no_incumbent"


def test_planning_without_an_incumbent_raises_solver_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for search in ("search.find_start", "search_state.smallest_known"):
        monkeypatch.setattr(f"monet_like.plan.ilp.{search}", lambda *_, **__: None)
    program, costs = network(8)
    answers_with(monkeypatch, "kTimeLimit")
    with pytest.raises(SolverError, match=r"found no plan within .*\(no_incumbent\); allow more time or more memory"):
        plan(program, costs, 30_000, solver="HIGHS", options=Options())
    answers_with(monkeypatch, "error", KILLED)
    with pytest.raises(SolverError, match=rf"found no plan within .*\(HIGHS failed: {KILLED}\); allow more time"):
        plan(program, costs, 30_000, solver="HIGHS", options=Options())


def test_a_plan_without_its_solver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the system kills the solver's process for its memory: the plan is the local search's."""
    program, costs = network(25)
    budget = int(peak(program, costs) * 0.7)
    answers_with(monkeypatch, "error", KILLED)
    with pytest.warns(
        UserWarning, match=rf"HIGHS failed: {KILLED}. The plan fits, and is the best that was found without it"
    ):
        found = plan(program, costs, budget, solver="HIGHS", gap=0.0, options=Options())
    assert found.report.peak_bytes <= budget and found.found_by != "HIGHS"


def test_schedule_with_the_lowest_known_peak_is_the_plan_where_nothing_else_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, costs = network(20)
    known = smallest_known(Instance(program, costs))
    assert known is not None
    monkeypatch.setattr("monet_like.plan.ilp.search.find_start", lambda *_, start=None, **__: start)
    budget = known.report.peak_bytes
    answers_with(monkeypatch, "kTimeLimit")
    found = plan(program, costs, budget, solver="HIGHS", options=Options())
    assert found.report.peak_bytes == budget


def test_local_search_gets_twice_the_time_limit_where_nothing_fits() -> None:
    program, costs = network(8)
    search = Search(program, costs, 6_000, time_limit_seconds=10)
    for seconds, over in ((9, (False, False)), (11, (True, False)), (21, (True, True))):
        search.incumbent.started = time.monotonic() - seconds
        assert (search._is_time_up(fits=True), search._is_time_up(fits=False)) == over
    search.evaluations = 100  # counted, not clocked
    assert not search._is_time_up(fits=True)


def test_infeasible_error_names_a_budget_that_fits() -> None:
    program, costs = network(8)
    with pytest.raises(
        InfeasibleError, match=r"no schedule fits into .* the smallest known budget is .* which .* needs"
    ) as caught:
        plan(program, costs, 6_000, solver="HIGHS", time_limit_seconds=20)
    assert caught.value.step
    smallest = caught.value.smallest_bytes
    assert smallest is not None
    assert plan(program, costs, smallest, solver="HIGHS", time_limit_seconds=20).report.peak_bytes <= smallest


def test_slot_over_the_budget_is_refused_without_a_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    program, costs = network(8)
    monkeypatch.setattr(processes, "start_worker", None)
    processes.stop_waiting()
    with pytest.raises(InfeasibleError, match="alone needs"):
        plan(program, costs, 3_000, solver="HIGHS", time_limit_seconds=20)


def test_unknown_names_are_usage_errors_that_list_the_known() -> None:
    program, costs = network(3)
    with pytest.raises(UsageError, match=r"unknown solver 'CBCC'; installed: .*HIGHS"):
        plan(program, costs, 10**6, solver="CBCC")
    with pytest.raises(
        UsageError, match=r"unknown strategy 'magic'; there are: checkmate, chen_greedy, .* milp, .* torch_budget"
    ):
        plan(program, costs, 10**6, strategy="magic")
    with pytest.raises(UsageError, match="must be more than 0"):
        plan(program, costs, 0)
    missing = next(name for name in ("XPRESS", "CPLEX", "GUROBI", "COPT") if name not in installed_solvers())
    with pytest.raises(SolverError, match=f"{missing.lower()} is not installed here"):
        check_solver(missing.lower())


def test_interrupt_stops_the_solver_process() -> None:
    script = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests' / 'helpers')!r}]\n"
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it\n"
        "import os; from planning import hard_problem; from monet_like.solvers import interface, processes\n"
        "real = processes.subprocess.Popen\n"
        "def popen(*a, **k):\n    child = real(*a, **k); print(child.pid, flush=True); return child\n"
        "processes.subprocess.Popen = popen\n"
        "interface.solve(hard_problem(), 'HIGHS', time_limit_seconds=600, gap=0.0)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    time.sleep(1)
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_keeping_everything_and_segments_of_a_chain() -> None:
    program, costs = network(25)
    plain = plan(program, costs, 10**9, strategy="store_all")
    segments = plan(program, costs, 10**9, strategy="chen_sqrt")
    assert plain.schedule == store_all(program)
    assert plain.report.rerun_seconds == 0
    assert segments.report.peak_bytes < plain.report.peak_bytes * 0.6
    assert segments.schedule.rerun_count <= 25
    with pytest.raises(SolverError, match=r"strategy store_all needs .* use strategy milp"):
        plan(program, costs, plain.report.peak_bytes - 1, strategy="store_all")


def test_store_all_runs_again_only_tasks_just_before_their_reader() -> None:
    maker = ProgramMaker()
    x, a, s, u = (maker.value(n, 8, "input" if n == "x" else "forward") for n in "xasu")
    g, h, k = (maker.value(n, 8, "backward") for n in "ghk")
    one = Cost(1.0)
    tasks = (
        maker.task("a", (x,), (a,), one),
        maker.task("s", (a,), (s,), one),
        maker.task("u", (s,), (u,), one, runs="again"),
        maker.task("u2", (s,), (u,), one, variant="other"),
    )
    slots = ((maker.task("b0", (a, g), (h,), one),), (maker.task("b1", (u, h), (k,), one),))
    program = Program(tuple(maker.values), tasks, slots, (a,), (g,))
    program.check()
    schedule = store_all(program)
    assert (schedule.forward, schedule.again, schedule.ways) == ((0, 1), ((), (2,)), (0, 0))
