"""The child process that runs solvers: reads problems from stdin, writes progress to stdout and answers to a pipe.

Solvers do not reliably stop in time or on Ctrl-C, and print where they like. In a process of its own a solver can be
stopped at a hard deadline, and its log, the only place where CBC reports its bound, can be read.

This module imports little: it is started often, and most parts' programs are solved faster than `monet_like.plan` is
imported.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from typing import Any

#: Linux: nanoseconds that this process ran, and that it waited for a processor.
SCHEDSTAT = "/proc/self/schedstat"


def main(answer_fd: int) -> None:
    """Solve the problems on stdin, one after another; answer on ``answer_fd``."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # CBC installs its own handler while it searches, and ends with its incumbent
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with os.fdopen(answer_fd, "wb") as pipe:
        while True:
            try:
                job: dict[str, Any] = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            pickle.dump(run_highs(job) if job["solver"] == "HIGHS" else run_cvxpy(job), pipe)
            pipe.flush()


def _end_with(parent: int) -> None:
    """End this process once its parent has gone, however that went."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def run_highs(job: dict[str, Any]) -> dict[str, Any]:
    """Solve with HiGHS through its own interface, which unlike cvxpy's takes a start and reports a bound."""
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
    options: dict[str, Any] = {
        "log_to_console": False,
        "time_limit": _left(job),
        "mip_rel_gap": float(job["gap"]),
    }
    options |= {"threads": job["threads"], "parallel": "on" if job["threads"] > 1 else "off"}
    options |= {"mip_abs_gap": 1e-9, "mip_feasibility_tolerance": 1e-7} | job["options"]
    for name, value in options.items():
        solver.setOptionValue(name, value)
    if job["log"]:
        solver.cbMipLogging.subscribe(
            lambda event: print("progress", event.data_out.mip_primal_bound, event.data_out.mip_dual_bound, flush=True)
        )
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


def _left(job: dict[str, Any]) -> float:
    """Wall seconds left for a job, counted from when it was sent: starting this process and importing count."""
    return float(max(0.1, job["limit"] - (time.time() - job["sent"])))


def processor_share() -> float:
    """The share of the time it could have run in which this process ran; 1 where the system does not report it."""
    try:
        with open(SCHEDSTAT) as file:
            ran, waited = map(int, file.read().split()[:2])
    except (OSError, ValueError):
        return 1.0
    return ran / (ran + waited) if ran else 1.0  # a kernel without these statistics writes zeros


def run_cvxpy(job: dict[str, Any]) -> dict[str, Any]:
    """Solve with any other solver through cvxpy, in matrix form: integral columns first, bounds on the variables."""
    import cvxpy
    import numpy as np

    from .dialects import DIALECTS

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
    dialect = DIALECTS[job["solver"]]
    seconds = _left(job)
    if job["solver"] == "CBC":
        # Its limit is of processor seconds. (The signal that the parent sends when time is up does not reach a search
        # within a search, as its heuristics are.)
        seconds *= processor_share()
        from cvxpy.reductions.solvers.conic_solvers.cbc_conif import CBC

        # cvxpy reports an interrupted search as an error, and so loses its incumbent.
        CBC.STATUS_MAP_MIP = CBC.STATUS_MAP_MIP | {"stopped on user event": cp.OPTIMAL_INACCURATE}
    options = dialect.options(seconds, job["gap"], job["threads"]) | job["options"]
    try:
        problem.solve(solver=job["solver"], verbose=False, **options)
    except cp.error.SolverError as error:
        return {"status": "solver_error", "x": None, "bound": None, "message": str(error)}
    values = None
    if x.value is not None and len(x.value) == len(order):
        values = np.zeros(len(order))
        values[order] = x.value
    stats = getattr(problem.solver_stats, "extra_stats", None)
    bound = dialect.bound(stats) if stats is not None else None
    return {"status": str(problem.status), "x": values, "bound": bound}


if __name__ == "__main__":
    main(int(sys.argv[1]))
