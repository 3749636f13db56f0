"""Solvers and their interfaces: each pitfall that was met, with a test that fails without its guard."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import scipy.sparse as sp
from planning import ROOT, hard_problem
from scipy.optimize import Bounds, LinearConstraint, milp

from monet_like.solvers import interface
from monet_like.solvers.dialects import DIALECTS
from monet_like.solvers.interface import installed_solvers, solve
from monet_like.solvers.matrix import MatrixProgram

SOLVERS = [
    pytest.param(name, marks=pytest.mark.skipif(name not in installed_solvers(), reason=f"{name} is not installed"))
    for name in ("HIGHS", "CBC", "GUROBI", "SCIP", "SCIPY")
]


def mixed_problem(seed: int) -> MatrixProgram:
    """Columns that must be 0 or 1 among columns that need not be; a start that is not the best."""
    rng = np.random.default_rng(seed)
    rows, columns = 6, 14
    matrix = rng.integers(-4, 10, (rows, columns)).astype(float)
    upper = np.maximum(1.0, matrix.clip(min=0).sum(axis=1) * 0.4)
    lower = np.full(rows, -np.inf)
    matrix[0], lower[0], upper[0] = 1.0, 5.0, 5.0  # an equality
    cost = -rng.integers(1, 30, columns).astype(float)
    integral = rng.random(columns) < 0.6
    return MatrixProgram(sp.csr_matrix(matrix), lower, upper, cost, integral, 100.0, 0.5)


@pytest.mark.slow(but=["HIGHS", "CBC"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_finds_the_optimum_of_mixed_programs(solver: str) -> None:
    """Also with columns between 0 and 1, equalities and a constant in the objective: the first program's best has two
    such columns.
    """
    for seed in range(4 if solver == "HIGHS" else 2):  # most solvers take seconds to start
        problem = mixed_problem(seed)
        wanted = milp(
            problem.cost,
            constraints=LinearConstraint(problem.matrix, problem.lower, problem.upper),
            bounds=Bounds(0, 1),
            integrality=problem.integral.astype(int),
        )
        found = solve(problem, solver, time_limit_seconds=20, gap=0.0)
        if wanted.status == 2:
            assert found.status == "infeasible", seed
            continue
        assert found.status == "optimal", seed
        assert found.objective_seconds == pytest.approx(0.5 * (wanted.fun + 100.0), abs=1e-5), seed
        assert found.bound_seconds <= found.objective_seconds + 1e-6


@pytest.mark.slow(but=["HIGHS", "CBC"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_no_bound_is_above_the_optimum_where_a_solver_stops_at_a_gap_of_the_whole_objective(solver: str) -> None:
    rng = np.random.default_rng(0)
    matrix = rng.integers(10, 60, (3, 40)).astype(float)
    cost, integral = rng.integers(5, 40, 40).astype(float), np.ones(40, dtype=bool)
    problem = MatrixProgram(
        sp.csr_matrix(-matrix), np.full(3, -np.inf), -matrix.sum(axis=1) / 2, cost, integral, 4000.0, 1.0
    )
    best = milp(cost, constraints=LinearConstraint(matrix, matrix.sum(axis=1) / 2), bounds=Bounds(0, 1), integrality=1)
    found = solve(problem, solver, time_limit_seconds=20, gap=0.05, start=np.ones(40))
    assert found.status == "optimal"
    assert found.bound_seconds <= 4000 + best.fun + 1e-6 <= found.objective_seconds + 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers_have_an_incumbent_a_bound_and_progress_at_the_time_limit(solver: str) -> None:
    """cvxpy calls this ``user_limit`` or ``optimal_inaccurate``, and calls the same what has no incumbent at all; CBC's
    bound stands in its log alone."""
    news: list[tuple[float, float]] = []
    # Small: each solver has a first plan at once when it is loaded, and none has a proof within minutes.
    problem = hard_problem(rows=15, columns=200)
    for limit in (4.0, 16.0, 64.0):  # a slow machine takes long to load cvxpy
        news.clear()
        found = solve(problem, solver, time_limit_seconds=limit, gap=0.0, watch=lambda *pair: news.append(pair))
        if found.x is not None and (len(news) > 1 or solver not in ("HIGHS", "CBC")):
            break
    assert found.status == "feasible"
    assert found.x is not None
    assert problem.violation(found.x) < 1e-6
    assert 0.9 * found.objective_seconds < found.bound_seconds <= found.objective_seconds
    assert found.gap < 0.1
    if solver in ("HIGHS", "CBC"):
        assert len(news) > 1
        incumbents, bounds = zip(*news, strict=True)
        assert list(incumbents) == sorted(incumbents, reverse=True)
        assert list(bounds) == sorted(bounds)
        assert min(incumbents) >= found.objective_seconds * (1 - 1e-8)  # CBC prints eight digits
        assert max(bounds) <= found.objective_seconds + 1e-6


def test_planning_loads_no_solver_into_this_process() -> None:
    """HiGHS's package and OR-Tools' cannot both be loaded; cvxpy loads every solver's package that it finds."""
    script = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from planning import network, peak\n"
        "from monet_like.plan import plan\n"
        "program, costs = network(8)\n"
        "plan(program, costs, int(peak(program, costs) * 0.8), solver='HIGHS', time_limit_seconds=20, gap=0.05)\n"
        "print([name for name in ('highspy', 'cvxpy', 'ortools') if name in sys.modules])\n"
    )
    arguments = [sys.executable, "-c", script, str(ROOT), str(ROOT / "tests" / "helpers")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_log_lines_of_cbc_and_highs_are_read() -> None:
    news: list[tuple[float, float]] = []
    log = interface._Log(hard_problem(), lambda *pair: news.append(pair))  # offset 1e6, a thousandth of a second a unit
    for line in (
        "Continuous objective value is 988699 - 0.02 seconds",  # six digits, which may have been rounded up
        "Cbc0012I Integer solution of 990000 found by rounding after 0 iterations and 0 nodes (0.01 seconds)",
        "Cbc0010I After 100 nodes, 57 on tree, 989100 best solution, best possible 988799.75 (1.07 seconds)\r",
        "progress 989000.0 988850.0",
        "progress inf -inf",
        "nothing of interest: -3",
    ):
        log.line(line)
    incumbents, bounds = zip(*news, strict=True)
    assert incumbents == (float("inf"), *map(pytest.approx, (990.0, 989.1, 989.0)))
    true_bounds = (988.6985, 988.6985, 988.799745, 988.85)
    assert all(bound <= true < bound + 0.006 for bound, true in zip(bounds, true_bounds, strict=True))


def test_every_dialect_passes_time_limit_gap_and_threads() -> None:
    for name, dialect in DIALECTS.items():
        if dialect.options is None:
            continue
        told = str(dialect.options(12.5, 0.0625, 3))
        assert "0.0625" in told, name
        assert any(text in told for text in ("12.5", "12500", "13")), name
