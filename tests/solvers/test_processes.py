"""The solvers' processes: one serves solve after solve; none outlives its use or its parent, and none is believed
twice.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest
import scipy.sparse as sp
from planning import ROOT, hard_problem

from monet_like.solvers import processes
from monet_like.solvers.interface import solve
from monet_like.solvers.matrix import MatrixProgram
from monet_like.solvers.pool import WORKERS, Pool
from monet_like.solvers.processes import give_back, lend_worker, stop_waiting


@pytest.fixture(autouse=True)
def _none_waits() -> Iterator[None]:
    stop_waiting()
    yield
    stop_waiting()


def knapsack(seed: int) -> MatrixProgram:
    """A program that is solved in a moment."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(10, 60, (1, 20)).astype(float)
    cost = -rng.integers(5, 40, 20).astype(float)
    return MatrixProgram(
        sp.csr_matrix(weights), np.array([-np.inf]), weights.sum(axis=1) / 2, cost, np.ones(20, bool), 0.0, 1.0
    )


def waiting() -> list[int]:
    """Process ids of the workers that wait."""
    return [one.child.pid for one in processes._waiting]


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def test_one_process_serves_solve_after_solve_and_answers_as_a_new_one_does() -> None:
    kept, fresh, seen = [], [], set()
    for seed in range(3):
        kept.append(solve(knapsack(seed), "HIGHS", gap=0.0))
        seen.update(waiting())
    assert len(seen) == 1
    for seed in range(3):
        stop_waiting()
        fresh.append(solve(knapsack(seed), "HIGHS", gap=0.0))
        assert not seen & set(waiting())
    for one, other in zip(kept, fresh, strict=True):
        assert one.status == other.status == "optimal"
        assert one.x is not None
        assert other.x is not None
        assert np.array_equal(one.x, other.x)
        assert (one.objective_seconds, one.bound_seconds) == (other.objective_seconds, other.bound_seconds)


def test_a_pool_takes_the_process_of_a_solve_and_leaves_its_own_for_the_next() -> None:
    solve(knapsack(0), "HIGHS")
    first = waiting()
    with Pool() as pool:
        answers = pool.solve([knapsack(seed) for seed in range(4)], 10.0, 0.0, lambda: 10.0)
        used = {lent.child.pid for lent in pool.workers}
        assert set(first) < used
        assert len(used) == WORKERS
        assert waiting() == []
    assert [answer is not None and answer["status"] for answer in answers] == ["kOptimal"] * 4
    assert set(waiting()) == used
    solve(knapsack(0), "HIGHS")
    assert set(waiting()) == used


def test_an_interrupted_pool_leaves_no_process() -> None:
    def interrupted() -> None:
        with Pool() as pool:
            pool.solve([knapsack(0)], 10.0, 0.0, lambda: 10.0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert waiting() == []
    assert not processes._running


def test_progress_of_each_solve_goes_to_its_own_watch() -> None:
    heard: list[list[tuple[float, float]]] = [[], []]
    for news in heard:
        solve(hard_problem(15, 200), "HIGHS", time_limit_seconds=30.0, gap=0.05, watch=lambda *pair: news.append(pair))  # noqa: B023
    assert len(heard[0]) > 0
    assert heard[0] == heard[1]


def test_a_process_that_was_stopped_is_not_lent_again() -> None:
    solve(knapsack(0), "HIGHS")
    (first,) = waiting()
    late = solve(hard_problem(), "HIGHS", time_limit_seconds=30.0, gap=0.0, stop=lambda: True)
    assert late.status == "no_incumbent"
    assert waiting() == []
    assert not psutil.pid_exists(first)
    assert solve(knapsack(0), "HIGHS").status == "optimal"


def test_a_process_that_died_while_it_waited_is_replaced() -> None:
    solve(knapsack(0), "HIGHS")
    (first,) = waiting()
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)  # until it has ended; its exit code is still to be asked for
    assert solve(knapsack(0), "HIGHS").status == "optimal"
    assert waiting()[0] != first
    assert not psutil.pid_exists(first)


def test_a_process_that_dies_at_work_is_an_error_with_its_exit_code() -> None:
    def kill() -> bool:
        (one,) = processes._running
        one.child.kill()
        return False

    found = solve(hard_problem(), "HIGHS", time_limit_seconds=30.0, gap=0.0, stop=kill)
    assert (found.status, found.message) == ("error", "the solver's process ended with code -9")
    assert not processes._running


def test_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while, at once by a process that holds much, and by those above the number that is kept."""
    solve(knapsack(0), "HIGHS")
    lent = lend_worker()  # the one that waits
    monkeypatch.setattr(processes, "KEPT_SECONDS", 0.2)
    give_back(lent)
    assert within(60, lambda: not psutil.pid_exists(lent.child.pid)) and waiting() == []
    monkeypatch.setattr(processes, "KEPT_BYTES", 1 << 20)
    solve(knapsack(0), "HIGHS")
    assert waiting() == []
    assert not processes._running
    monkeypatch.undo()
    several = [lend_worker() for _ in range(processes.KEPT_WORKERS + 1)]
    for lent in several:
        give_back(lent)
    assert len(waiting()) == processes.KEPT_WORKERS
    assert len(processes._running) == processes.KEPT_WORKERS


def test_processes_of_other_threads_are_not_lent() -> None:
    lent = lend_worker(threads=2)
    give_back(lent)
    other = lend_worker(threads=1)
    assert other is not lent
    give_back(other)
    assert lend_worker(threads=2) is lent
    lent.child.kill()
    give_back(lent)


def test_a_forked_process_leaves_its_parents_alone() -> None:
    solve(knapsack(0), "HIGHS")
    (one,) = waiting()
    processes._lock.acquire()  # as another thread does to keep a worker
    forked = os.fork()
    if not forked:
        signal.alarm(60)
        found = solve(knapsack(1), "HIGHS")
        processes._stop_all()
        os._exit(0 if found.status == "optimal" else 1)
    processes._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    assert solve(knapsack(1), "HIGHS").status == "optimal"
    assert waiting() == [one]


@pytest.mark.parametrize("end", ["sys.exit()", "os.kill(os.getpid(), 9)"])
def test_none_outlives_its_parent(end: str) -> None:
    script = (
        "import os, sys; sys.path[:0] = sys.argv[1:]\n"
        "from monet_like.solvers.processes import give_back, lend_worker\n"
        "lent = lend_worker(); give_back(lent); print(lent.child.pid, flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script + end, str(ROOT)], stdout=subprocess.PIPE, text=True, check=False
    )
    assert within(10, lambda: not psutil.pid_exists(int(done.stdout)))
