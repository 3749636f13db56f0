"""The child process that runs one solver: reads a problem, writes the log to stdout and the answer to a pipe.

A solver cannot be relied on to stop in time or on Ctrl-C, and prints where it likes. In a process of its own it
can be stopped at a hard deadline, and its log, the only place where CBC reports its bound, can be read.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from typing import Any


def main(answer_fd: int) -> None:
    """Solve the problem on stdin; answer on ``answer_fd``."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    job: dict[str, Any] = pickle.load(sys.stdin.buffer)
    started = time.monotonic()
    answer = run_highs(job) if job["solver"] == "HIGHS" else run_cvxpy(job, started)
    with os.fdopen(answer_fd, "wb") as pipe:
        pickle.dump(answer, pipe)


def _end_with(parent: int) -> None:
    """End this process once its parent has gone, however that went."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def run_highs(job: dict[str, Any]) -> dict[str, Any]:
    """HiGHS through its own interface: unlike cvxpy's, it takes a start and tells its bound."""
    import highspy
    import numpy as np

    matrix, integral = job["matrix"], job["integral"]
    model = highspy.HighsLp()
    model.num_row_, model.num_col_ = matrix.shape
    model.col_cost_, model.row_lower_, model.row_upper_ = job["cost"], job["lower"], job["upper"]
    model.col_lower_, model.col_upper_ = np.zeros(matrix.shape[1]), np.ones(matrix.shape[1])
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_, model.a_matrix_.index_, model.a_matrix_.value_ = matrix.indptr, matrix.indices, matrix.data
    model.offset_ = job["offset"]  # the gap is relative to the whole step
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    if integral.any():
        model.integrality_ = [kinds[int(flag)] for flag in integral]
    solver: Any = highspy.Highs()
    options = {"log_to_console": bool(job["log"]), "time_limit": float(job["limit"]), "mip_rel_gap": float(job["gap"])}
    options |= {"threads": 1, "mip_abs_gap": 1e-9, "mip_feasibility_tolerance": 1e-7} | job["options"]
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.passModel(model)
    if job["start"] is not None:
        start = highspy.HighsSolution()
        start.col_value = list(map(float, job["start"]))
        solver.setSolution(start)
    solver.run()
    info = solver.getInfo()
    has_values = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    bound = (info.mip_dual_bound if integral.any() else info.objective_function_value) - job["offset"]
    status = solver.getModelStatus().name
    return {
        "status": status,
        "x": np.array(solver.getSolution().col_value) if has_values else None,
        "bound": bound if integral.any() or status == "kOptimal" else None,
    }


def run_cvxpy(job: dict[str, Any], started: float) -> dict[str, Any]:
    """Any other solver, modelled in cvxpy's matrix form: integral columns first, bounds on the variables."""
    import cvxpy
    import numpy as np

    cp: Any = cvxpy  # its functions carry no types

    matrix, integral = job["matrix"].tocsc(), job["integral"]
    order = np.concatenate([np.flatnonzero(integral), np.flatnonzero(~integral)])
    count = int(integral.sum())
    parts = []
    if count:
        # bounds with integer=True: cvxpy's CBC interface misplaces the bounds of boolean variables.
        parts.append(cp.Variable(count, integer=True, bounds=[0, 1]))
    if count < len(order):
        parts.append(cp.Variable(len(order) - count, bounds=[0, 1]))
    x = cp.hstack(parts) if len(parts) > 1 else parts[0]
    matrix, cost = matrix[:, order].tocsr(), job["cost"][order]
    equal = job["lower"] == job["upper"]
    constraints = [matrix[~equal] @ x <= job["upper"][~equal]] if (~equal).any() else []
    if equal.any():
        constraints.append(matrix[equal] @ x == job["upper"][equal])
    problem = cp.Problem(cp.Minimize(cost @ x), constraints)
    left = max(1.0, job["limit"] - (time.monotonic() - started))
    try:
        problem.solve(
            solver=job["solver"], verbose=False, **solver_options(job["solver"], left, job["gap"]), **job["options"]
        )
    except cp.error.SolverError as error:
        return {"status": "solver_error", "x": None, "bound": None, "message": str(error)}
    values = None
    if x.value is not None and len(x.value) == len(order):
        values = np.zeros(len(order))
        values[order] = x.value
    bound = getattr(problem.solver_stats, "extra_stats", None)
    return {"status": str(problem.status), "x": values, "bound": getattr(bound, "mip_dual_bound", None)}


def solver_options(solver: str, seconds: float, gap: float) -> dict[str, Any]:
    """How each solver is told its time limit and relative gap through cvxpy."""
    known: dict[str, dict[str, Any]] = {
        # CPU seconds, and it often looks at the clock late: hence the margin. The log is wanted for its bound.
        "CBC": {"maximumSeconds": 0.85 * seconds, "allowableFractionGap": gap, "logLevel": 1},
        "GUROBI": {"TimeLimit": seconds, "MIPGap": gap},
        "SCIP": {"scip_params": {"limits/time": seconds, "limits/gap": gap}},
        "GLPK_MI": {"tm_lim": int(seconds * 1000), "mip_gap": gap},
        "CPLEX": {"cplex_params": {"timelimit": seconds, "mip.tolerances.mipgap": gap}},
        "XPRESS": {"maxtime": int(seconds) + 1, "miprelstop": gap},
        "MOSEK": {"mosek_params": {"MSK_DPAR_MIO_MAX_TIME": seconds, "MSK_DPAR_MIO_TOL_REL_GAP": gap}},
        "SCIPY": {"scipy_options": {"time_limit": seconds, "mip_rel_gap": gap}},
    }
    return known.get(solver, {})


if __name__ == "__main__":
    main(int(sys.argv[1]))
