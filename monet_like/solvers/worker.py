"""The child process that runs solvers: reads problems from stdin, writes news and answers to a pipe.

Solvers do not reliably stop in time or on Ctrl-C, and print where they like. In a process of its own a solver can be
stopped at a hard deadline, and its log, the only place where CBC reports its bound, can be read. CBC itself is one more
process, in this one's group.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


def main(answer_fd: int) -> None:
    """Solve the problems on stdin, one after another; answer on ``answer_fd``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process stops it
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with os.fdopen(answer_fd, "wb") as pipe:
        while True:
            try:
                job: dict[str, Any] = pickle.load(sys.stdin.buffer)
            except EOFError:
                return

            def tell(message: Any) -> None:
                pickle.dump(message, pipe)
                pipe.flush()

            if job["solver"] == "HIGHS":
                tell(run_highs(job, tell))
            else:
                tell(run_cbc(job) if job["solver"] == "CBC" else run_cvxpy(job))


def _end_with(parent: int) -> None:
    """End this process, and a solver that it has started, once its parent has gone, however that went."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(os.getpid(), signal.SIGKILL)


def run_highs(job: dict[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """Solve with HiGHS through its own interface, which unlike cvxpy's takes a start and reports a bound.

    Args:
        job: of `interface.job_for`.
        tell: called with a line for each incumbent and bound, where the job asks for them.
    """
    import highspy
    import numpy as np

    (rows, columns), integral = job["shape"], job["integral"]
    model = highspy.HighsLp()
    model.num_row_, model.num_col_ = rows, columns
    model.col_cost_, model.row_lower_, model.row_upper_ = job["cost"], job["lower"], job["upper"]
    model.col_lower_, model.col_upper_ = np.zeros(columns), np.ones(columns)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.value_, model.a_matrix_.index_, model.a_matrix_.start_ = job["coefficients"]
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
            lambda event: tell(f"progress {event.data_out.mip_primal_bound} {event.data_out.mip_dual_bound}")
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


def run_cbc(job: dict[str, Any]) -> dict[str, Any]:
    """Solve with the CBC that comes with PuLP. It takes a start, and its limit is of wall seconds."""
    import pulp

    from .models import pulp_problem, pulp_values

    os.chdir(job["folder"])  # PuLP leaves its files there; whoever started this process deletes them
    model = pulp_problem(_matrix_program(job), start=job["start"])
    solver = pulp.COIN_CMD(
        path=pulp.PULP_CBC_CMD.pulp_cbc_path,
        keepFiles=True,
        warmStart=job["start"] is not None,
        gapRel=job["gap"],
        threads=job["threads"] if job["threads"] > 1 else None,  # one thread by itself, not one beside a waiting one
        timeLimit=_left(job),
        timeMode="elapsed",
        options=[f"{name} {value}" for name, value in ({"randomSeed": 1, "randomCbcSeed": 1} | job["options"]).items()],
    )
    if not solver.available():
        return {"status": "solver_error", "x": None, "bound": None, "message": f"cannot execute {solver.path}"}
    try:
        with _terminal():
            model.solve(solver)
    except pulp.PulpSolverError:
        # Version 2.10.3 may crash where its time is up before the first cuts. Its log has what it proved until then.
        status = "solver_error" if job["start"] is None else "user_limit"
        return {"status": status, "x": None, "bound": None, "message": "CBC ended with an error"}
    meaning = {pulp.LpSolutionOptimal: "optimal", pulp.LpSolutionInfeasible: "infeasible"}
    answer: dict[str, Any] = {"status": meaning.get(model.sol_status, "user_limit"), "x": None, "bound": None}
    if model.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        answer["x"] = pulp_values(model, len(job["cost"]))
    if model.sol_status == pulp.LpSolutionOptimal:  # to the gap, of the objective with or without its constant
        value = float(job["cost"] @ answer["x"])
        answer["bound"] = value - job["gap"] * max(abs(value), abs(value + job["offset"]))
    return answer


@contextmanager
def _terminal() -> Iterator[None]:
    """Give processes that are started a terminal as standard output, and copy what they write to this process's.

    CBC writes line by line only to a terminal. To a pipe it writes when several kilobytes are full, so its log would
    come late and, after a crash, never.
    """
    leader, follower = os.openpty()
    output = os.dup(1)
    os.dup2(follower, 1)
    os.close(follower)
    thread = threading.Thread(target=_copy, args=(leader, output), daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.dup2(output, 1)  # closes the terminal, which ends the thread
        thread.join()
        os.close(leader)
        os.close(output)


def _copy(source: int, target: int) -> None:
    """Copy until the source ends; a terminal that nobody has open any more ends with an error."""
    with suppress(OSError):
        while data := os.read(source, 1 << 16):
            os.write(target, data)


def _matrix_program(job: dict[str, Any]) -> Any:
    import scipy.sparse as sp

    from .matrix import MatrixProgram

    fields = ("lower", "upper", "cost", "integral", "offset")
    matrix = sp.csr_matrix(job["coefficients"], shape=job["shape"])
    return MatrixProgram(matrix, **{name: job[name] for name in fields}, seconds_per_unit=1.0)


def run_cvxpy(job: dict[str, Any]) -> dict[str, Any]:
    """Solve with any other solver through cvxpy, in matrix form: integral columns first, bounds on the variables."""
    import cvxpy
    import numpy as np

    from .dialects import DIALECTS
    from .models import cvxpy_problem

    cp: Any = cvxpy  # its functions carry no types
    problem, variables, order = cvxpy_problem(_matrix_program(job | {"offset": 0.0}))
    dialect = DIALECTS[job["solver"]]
    assert dialect.options is not None
    options = dialect.options(_left(job), job["gap"], job["threads"]) | job["options"]
    try:
        problem.solve(solver=job["solver"], verbose=False, **options)
    except cp.error.SolverError as error:
        return {"status": "solver_error", "x": None, "bound": None, "message": str(error)}
    values = None
    if all(variable.value is not None for variable in variables):
        values = np.zeros(len(order))
        values[order] = np.concatenate([variable.value for variable in variables])
    stats = getattr(problem.solver_stats, "extra_stats", None)
    bound = dialect.bound(stats) if stats is not None else None
    return {"status": str(problem.status), "x": values, "bound": bound}


if __name__ == "__main__":
    main(int(sys.argv[1]))
