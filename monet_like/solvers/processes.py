"""The processes that run worker.py: started, lent for solves, kept for the next solve, ended.

A plan takes several solves, and starting Python with HiGHS takes longer than most of them. So a worker that has
answered waits `KEPT_SECONDS` for the next solve. One that is stopped at a deadline, on Ctrl-C or on an error is killed
and never lent again. A worker ends with this process, however that ends.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from ..interrupts import put_off
from . import worker

#: Seconds for which a worker waits for the next solve.
KEPT_SECONDS = 10.0
#: Workers that wait at the same time; another one that is given back ends.
KEPT_WORKERS = 2
#: Memory up to which a worker is kept. The process of a large program is ended, so that its memory is free at once.
KEPT_BYTES = 1 << 28


class Worker:
    """A process that solves one program after another.

    Attributes:
        child: the process; programs go to its standard input.
        answers: its messages, as pickles.
        threads: that its solver may use.
        is_busy: whether it has been sent a program and has not answered yet.
    """

    def __init__(self, child: subprocess.Popen[bytes], answers: IO[bytes], threads: int) -> None:
        self.child, self.answers, self.threads = child, answers, threads
        self.is_busy = False
        self._timer: threading.Timer | None = None

    def send(self, job: dict[str, Any]) -> None:
        """Send one program.

        Raises:
            OSError: the process has ended.
        """
        assert self.child.stdin is not None
        self.is_busy = True
        pickle.dump(job, self.child.stdin)
        self.child.stdin.flush()

    def receive(self) -> Any:
        """Wait for the next message: a line of news, or the answer as a dict.

        Raises:
            EOFError, OSError, ValueError: the process has ended.
        """
        try:
            message = pickle.load(self.answers)
        except (EOFError, pickle.UnpicklingError) as error:  # the latter in the middle of a message
            self.answers.close()
            raise EOFError("the solver's process has ended") from error
        self.is_busy = isinstance(message, str)
        return message


#: Workers that are not ended yet. Ctrl-C may come after a worker was started, before its starter can end it.
_running: set[Worker] = set()
#: Those of them that wait for a solve, the last one given back at the end.
_waiting: list[Worker] = []
_lock = threading.Lock()


def start_worker(threads: int = 1, output: int = subprocess.DEVNULL) -> Worker:
    """Start a worker.

    Args:
        threads: that its solver may use.
        output: where its standard output goes, as for `subprocess.Popen`.
    """
    reading, writing = os.pipe()
    root = str(Path(__file__).resolve().parents[2])
    environment = dict(
        os.environ,
        OMP_NUM_THREADS=str(threads),
        PYTHONPATH=os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]),
    )
    with put_off():
        child = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", worker.__name__, str(writing)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(writing,),
            env=environment,
            start_new_session=True,  # Ctrl-C does not reach the child: its starter stops it
        )
        started = Worker(child, os.fdopen(reading, "rb"), threads)
        _running.add(started)
    os.close(writing)
    return started


def lend_worker(threads: int = 1) -> Worker:
    """A worker for HiGHS: one that waits, else a new one. Give it back with `give_back`."""
    with put_off():
        while taken := _take(threads):
            if taken.child.poll() is None:
                return taken
            stop_worker(taken)  # somebody has ended it
    return start_worker(threads)


def give_back(lent: Worker) -> None:
    """Keep a worker for the next solve, or end it: where it is still busy, has ended or holds much memory."""
    with put_off():
        if not _keep(lent):
            stop_worker(lent)


def _keep(lent: Worker) -> bool:
    if lent.is_busy or lent.child.poll() is not None:
        return False
    try:
        if psutil.Process(lent.child.pid).memory_info().rss > KEPT_BYTES:
            return False
    except psutil.Error:  # it has just ended
        return False
    lent._timer = threading.Timer(KEPT_SECONDS, _stop_waiting, (lent,))
    lent._timer.daemon = True
    with _lock:
        if len(_waiting) >= KEPT_WORKERS:
            return False
        _waiting.append(lent)
        lent._timer.start()
    return True


def _take(threads: int) -> Worker | None:
    """The worker with so many threads that has waited least, no longer among those that wait."""
    with _lock:
        found = next((one for one in reversed(_waiting) if one.threads == threads), None)
        if found is not None:
            _waiting.remove(found)
            if found._timer is not None:
                found._timer.cancel()
    return found


def _stop_waiting(kept: Worker) -> None:
    with _lock:
        if kept not in _waiting:
            return
        _waiting.remove(kept)
    stop_worker(kept)


def stop_waiting() -> None:
    """End all workers that wait for a solve."""
    for kept in list(_waiting):
        _stop_waiting(kept)


def stop_worker(ended: Worker) -> bool:
    """End a worker if it still runs; returns whether it did."""
    with put_off():
        running = ended.child.poll() is None
        if running:
            os.killpg(ended.child.pid, signal.SIGKILL)
            ended.child.wait()
        _running.discard(ended)
    with suppress(OSError):  # it may not have read everything
        if ended.child.stdin is not None:
            ended.child.stdin.close()
    if not ended.is_busy:  # else whoever waits for its answer closes this
        ended.answers.close()
    return running


@atexit.register
def _stop_all() -> None:
    for one in list(_running):
        stop_worker(one)


def _renew_lock() -> None:
    """In a forked process, where the thread that held the lock is missing.

    Workers count as ended there: they are its parent's.
    """
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
