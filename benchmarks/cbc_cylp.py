"""Solves one 0/1 program with the CBC of cylp, as the planner did before it took PuLP's: benchmarks/cbc.py compares
them.

`pip install cylp` for it; nothing else needs cylp. CBC runs in this process, through cvxpy, which gives it no start.
Its limit is of processor seconds, so it is told the wall seconds times the share of the time in which this process
runs; the process that waits for it sends SIGINT when the time is up.

python -m benchmarks.cbc_cylp PROGRAM SECONDS GAP ANSWER
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import numpy as np

from monet_like.solvers.interface import Solution, _judge, _Log
from monet_like.solvers.matrix import MatrixProgram
from monet_like.solvers.models import cvxpy_problem

#: Of a time limit, for CBC, which looks at its clock late.
SHARE = 0.85


def solve_with_cylp(problem: MatrixProgram, seconds: float, gap: float) -> Solution:
    """Solve in a child process, which is stopped at the time limit; its log is read for the bound."""
    started = time.monotonic()
    plain = MatrixProgram(
        problem.matrix, problem.lower, problem.upper, problem.cost, problem.integral, 0.0, problem.seconds_per_unit
    )
    log = _Log(plain, None)  # CBC is not told of the objective's constant
    answer: dict[str, Any] = {"status": "killed", "x": None, "bound": None}
    with TemporaryDirectory() as folder:
        given, made = Path(folder, "program.pkl"), Path(folder, "answer.pkl")
        given.write_bytes(pickle.dumps(problem))
        limit = seconds * SHARE - 0.5
        command = [sys.executable, "-W", "ignore", "-m", __spec__.name, str(given), str(limit), str(gap), str(made)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert child.stdout is not None
        reader = Thread(target=log.read, args=(child.stdout,), daemon=True)
        reader.start()
        while child.poll() is None and time.monotonic() < started + seconds:
            if time.monotonic() > started + limit:
                child.send_signal(signal.SIGINT)  # again and again: it may be between two searches
            with suppress(subprocess.TimeoutExpired):
                child.wait(0.2)
        child.kill()
        child.wait()
        reader.join(5)
        if made.exists():
            answer = pickle.loads(made.read_bytes())
    return _judge(problem, answer, log.bound + problem.offset, started, gap)


def processor_share() -> float:
    """The share of the time it could have run in which this process ran; 1 where the system does not report it."""
    with suppress(OSError):
        ran, waited = map(int, Path("/proc/self/schedstat").read_text().split()[:2])
        return ran / (ran + waited) if ran else 1.0
    return 1.0


def main(program: str, seconds: str, gap: str, answer: str) -> None:
    """Solve the pickled program and pickle the answer."""
    began = time.monotonic()
    import cvxpy as cp
    from cvxpy.reductions.solvers.conic_solvers.cbc_conif import CBC

    # cvxpy reports an interrupted search as an error, and so loses its incumbent.
    CBC.STATUS_MAP_MIP = CBC.STATUS_MAP_MIP | {"stopped on user event": cp.OPTIMAL_INACCURATE}
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # CBC installs its own handler, and ends with its incumbent
    problem: MatrixProgram = pickle.loads(Path(program).read_bytes())
    plain = MatrixProgram(problem.matrix, problem.lower, problem.upper, problem.cost, problem.integral, 0.0, 1.0)
    model, variables, order = cvxpy_problem(plain)
    left = max(0.1, float(seconds) - (time.monotonic() - began)) * processor_share()
    made: dict[str, Any] = {"status": "solver_error", "x": None, "bound": None}
    with suppress(cp.error.SolverError):
        model.solve(solver="CBC", maximumSeconds=left, allowableFractionGap=float(gap), logLevel=1)
        made["status"] = str(model.status)
        if all(variable.value is not None for variable in variables):
            x = np.zeros(len(order))
            x[order] = np.concatenate([variable.value for variable in variables])
            made["x"] = x
    Path(answer).write_bytes(pickle.dumps(made))


if __name__ == "__main__":
    main(*sys.argv[1:])
