"""Solves a `MatrixProgram` with a named solver within a limit of wall seconds, and checks what the solver returns.

The solver runs in a child process (processes.py), which is stopped at the deadline, on Ctrl-C and on any error.
Whatever status it reports, its values count only after rounding and a check of every row.
"""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Any, Literal

from ..errors import SolverError, UsageError
from .dialects import DIALECTS, MEANING
from .matrix import MatrixProgram
from .processes import Worker, give_back, lend_worker, start_worker, stop_worker

if TYPE_CHECKING:
    from numpy.typing import NDArray

Status = Literal["optimal", "feasible", "infeasible", "no_incumbent", "error"]

#: Called with a solver's incumbent (inf: none yet) and bound (-inf: none yet), in seconds of a training step.
Watch = Callable[[float, float], None]

#: Largest violation of a row, after rounding, that counts as floating-point error. In the rows' own units: 1 for logic
#: rows, 1/8192 of the budget for memory rows. The simulator then counts in whole bytes.
TOLERANCE = 1e-4
#: Seconds by which CBC exceeds its own time limit for each coefficient of the program, above one or two that it exceeds
#: it by on a busy machine (measured: 2.3 s on DenseNet-121's 700,000).
CUTS_SECONDS = 6e-6
#: Seconds between two questions whether to stop.
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Solution:
    """The result of one solve.

    Attributes:
        status: ``optimal`` (proven to the gap asked for), ``feasible`` (a checked incumbent), ``infeasible``
            (proven, according to the solver), ``no_incumbent`` (out of time), ``error``.
        x: the checked 0/1 point, or None.
        objective_seconds: its objective.
        bound_seconds: no point of this program is below it; -inf if nothing is known.
        gap: ``(objective - bound) / objective``; inf without an incumbent.
        message: the solver's own words.
    """

    status: Status
    x: NDArray[Any] | None
    objective_seconds: float
    bound_seconds: float
    gap: float
    message: str = ""


def installed_solvers() -> tuple[str, ...]:
    """Names of the installed solvers that handle 0/1 programs; none is imported to find out.

    (cvxpy imports every solver's package, and HiGHS's and OR-Tools' cannot both be loaded into one process: a user's
    process must stay free of either.)
    """
    through_cvxpy = find_spec("cvxpy") is not None
    return tuple(
        sorted(
            name
            for name, dialect in DIALECTS.items()
            if find_spec(dialect.package) is not None and (through_cvxpy or dialect.options is None)
        )
    )


def check_solver(name: str) -> str:
    """The solver's name as cvxpy spells it.

    Raises:
        UsageError: no such solver.
        SolverError: known, but not installed.
    """
    upper = name.upper()
    installed = installed_solvers()
    if upper in installed:
        return upper
    listing = ", ".join(installed) or "none"
    if upper in DIALECTS:
        package = DIALECTS[upper].package
        raise SolverError(f"solver {name} is not installed here (pip install {package}); installed: {listing}")
    raise UsageError(f"unknown solver {name!r}; installed: {listing}")


def solve(
    problem: MatrixProgram,
    solver: str = "CBC",
    *,
    time_limit_seconds: float = 60.0,
    gap: float = 0.01,
    start: NDArray[Any] | None = None,
    watch: Watch | None = None,
    threads: int = 1,
    options: dict[str, Any] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Solution:
    """Minimise ``problem``.

    Args:
        solver: a name that `check_solver` accepts.
        time_limit_seconds: wall seconds in all; then the solver is stopped.
        gap: relative gap at which it may stop.
        start: a feasible point. HiGHS and CBC start from it; for all solvers it is the result where they find none.
        watch: called with news of the solver (CBC and HiGHS).
        threads: for solvers that use several.
        options: further options in the solver's own names.
        stop: called several times a second; if it returns True the solver ends as at the time limit.

    Raises:
        UsageError, SolverError: see `check_solver`.
    """
    import numpy as np

    name = check_solver(solver)
    ends = time.monotonic() + time_limit_seconds
    if problem.contradiction:
        return Solution("infeasible", None, float("inf"), float("inf"), float("inf"), "a row cannot hold")
    if problem.columns == 0:
        return _judge(problem, {"status": "optimal", "x": np.zeros(0)}, problem.offset, gap)
    reserved = 0.5 + 0.03 * time_limit_seconds
    if name == "CBC":  # it looks at the clock only between two rounds of cuts, which take longer in larger programs
        reserved = min(0.5 + 0.15 * time_limit_seconds, 3.0 + CUTS_SECONDS * problem.matrix.nnz)
    limit = max(time_limit_seconds - reserved, 0.7 * min(time_limit_seconds, 2.0))
    job = job_for(problem, name, limit, gap, threads) | {"start": start, "options": options or {}}
    job["log"] = watch is not None
    log = _Log(problem, watch)
    with TemporaryDirectory(prefix="monet_like_") if name == "CBC" else nullcontext("") as folder:
        answer = _run_child(job | {"folder": folder}, ends, log, stop)
    bound = answer.get("bound")
    bound = max(log.bound, bound if bound is not None and np.isfinite(bound) else -np.inf)
    if answer.get("x") is None and start is not None and MEANING.get(answer["status"]) == "limit":
        answer["x"] = start
    return _judge(problem, answer, bound + problem.offset, gap)


def job_for(problem: MatrixProgram, solver: str, limit: float, gap: float, threads: int = 1) -> dict[str, Any]:
    """The message to the worker for one solve: plain arrays, because SciPy takes longer to import than HiGHS."""
    matrix = problem.matrix.tocsr()
    return {
        "solver": solver,
        "shape": matrix.shape,
        "coefficients": (matrix.data, matrix.indices, matrix.indptr),  # compressed sparse rows
        "lower": problem.lower,
        "upper": problem.upper,
        "cost": problem.cost,
        "offset": problem.offset,
        "integral": problem.integral,
        "limit": limit,
        "sent": time.time(),
        "gap": gap,
        "threads": threads,
        "start": None,
        "options": {},
        "log": False,
        "folder": "",
    }


def _judge(problem: MatrixProgram, answer: dict[str, Any], bound: float, gap: float) -> Solution:
    """Check a worker's answer: the only place where a status and values become a `Solution`."""
    import numpy as np

    meaning = MEANING.get(answer["status"], "error")
    x = answer.get("x")
    if x is not None:
        rounded = np.where(problem.integral, np.round(x), np.clip(x, 0.0, 1.0))
        distance = float(np.abs(rounded - x)[problem.integral].max(initial=0.0))
        x = rounded if distance < 1e-3 and problem.violation(rounded) < TOLERANCE else None
    message, unit = str(answer.get("message") or answer["status"]), problem.seconds_per_unit
    if x is None:
        without: dict[str, Status] = {"infeasible": "infeasible", "limit": "no_incumbent"}
        return Solution(without.get(meaning, "error"), None, float("inf"), bound * unit, float("inf"), message)
    objective = float(problem.cost @ x + problem.offset)
    if (
        meaning == "optimal" and answer.get("bound") is None
    ):  # it stopped at the gap, which it measures without the offset
        bound = max(bound, objective - gap * abs(objective - problem.offset))
    bound = min(bound, objective)
    reached = (objective - bound) / abs(objective) if objective else 0.0
    proven = meaning == "optimal" or reached <= gap
    return Solution("optimal" if proven else "feasible", x, objective * unit, bound * unit, reached, message)


class _Log:
    """Reads incumbents and bounds from a solver's output: the worker's ``progress`` lines and CBC's log."""

    _NUMBER = r"(-?(?:[0-9.]+(?:e[+-]?[0-9]+)?|inf))"
    _INCUMBENT = re.compile(rf"(?:Integer solution of|^progress) *{_NUMBER}|{_NUMBER} best solution, best possible")
    _BOUND = re.compile(rf"(?:best possible|Lower bound:|Continuous objective value is|^progress \S+) *{_NUMBER}")

    def __init__(self, problem: MatrixProgram, watch: Watch | None) -> None:
        self.problem, self.watch = problem, watch
        self.incumbent, self.bound = float("inf"), float("-inf")

    def read(self, stream: IO[bytes]) -> None:
        """Read lines until the stream ends."""
        for raw in stream:
            self.line(raw.decode(errors="replace").rstrip())

    def line(self, line: str) -> None:
        """Read one line; its incumbent and bound count from here on."""
        before = self.incumbent, self.bound
        offset = self.problem.offset  # CBC and HiGHS know it
        if match := self._INCUMBENT.search(line):
            value = float(match.group(1) or match.group(2)) - offset
            self.incumbent = min(self.incumbent, value if abs(value) < 1e40 else float("inf"))
        if match := self._BOUND.search(line):
            value = float(match.group(1))
            if not line.startswith("progress"):  # CBC's, rounded up or down
                value -= (5e-8 if "best possible" in line else 5e-6) * abs(value)
            value -= offset
            self.bound = max(self.bound, value if abs(value) < 1e40 else float("-inf"))
        if self.watch is not None and before != (self.incumbent, self.bound):
            unit, offset = self.problem.seconds_per_unit, self.problem.offset
            self.watch((self.incumbent + offset) * unit, (self.bound + offset) * unit)


def _run_child(job: dict[str, Any], deadline: float, log: _Log, stop: Callable[[], bool]) -> dict[str, Any]:
    """Run a worker until it answers, but no longer than to the deadline; none is left at work."""
    # HiGHS's process is kept for the next solve. Other solvers have one for each: what they print belongs to one solve.
    is_kept = job["solver"] == "HIGHS"
    lent = lend_worker(job["threads"]) if is_kept else start_worker(job["threads"], subprocess.PIPE)
    answers: list[dict[str, Any]] = []
    ended = threading.Event()
    threads = [threading.Thread(target=_converse, args=(lent, job, log, answers, ended), daemon=True)]
    if lent.child.stdout is not None:
        threads.append(threading.Thread(target=log.read, args=(lent.child.stdout,), daemon=True))
    try:
        for thread in threads:
            thread.start()
        while time.monotonic() < deadline and not stop():
            if ended.wait(min(POLL_SECONDS, max(0.01, deadline - time.monotonic()))):
                break
    finally:
        late = not ended.is_set()
        if is_kept and not late:
            give_back(lent)
        else:
            stop_worker(lent)
        for thread in threads:
            if thread.ident is not None:
                thread.join(5)
    if answers:
        return answers[0]
    if late:
        return {"status": "killed", "message": "stopped at the time limit"}
    return {"status": "error", "message": f"the solver's process ended with code {lent.child.returncode}"}


def _converse(
    lent: Worker, job: dict[str, Any], log: _Log, answers: list[dict[str, Any]], ended: threading.Event
) -> None:
    """Send a program and read until the answer comes or the process ends."""
    try:
        lent.send(job)
        while isinstance(message := lent.receive(), str):
            log.line(message)
        answers.append(message)
    except (EOFError, OSError, ValueError):  # it ended early, or was ended
        with suppress(subprocess.TimeoutExpired):
            lent.child.wait(1.0)  # for its exit code
    finally:
        ended.set()
