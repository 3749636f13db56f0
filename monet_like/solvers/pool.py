"""Solves many small 0/1 programs with HiGHS in a few worker processes, each of which solves one after another.

They have processes of their own because HiGHS's Python package and OR-Tools cannot both be loaded into one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from .interface import job_for
from .matrix import MatrixProgram
from .processes import Worker, give_back, lend_worker, stop_worker

#: Number of processes.
WORKERS = 2


class Pool:
    """Workers, lent at the first use and given back at the end of the ``with`` block."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lent in self.workers:
            if kind is None:
                give_back(lent)
            else:  # a thread may be about to send it the next program
                stop_worker(lent)
        self.workers = []

    def solve(
        self, problems: Sequence[MatrixProgram], limit: float, gap: float, time_left: Callable[[], float]
    ) -> list[dict[str, Any] | None]:
        """Solve all problems; returns the worker's answer for each, None where time was up.

        Args:
            limit: seconds for each, if so many are left.
            gap: relative gap at which each may stop.
            time_left: seconds left for all; no problem is begun without any.
        """
        if problems and not self.workers:
            self.workers = [lend_worker() for _ in range(WORKERS)]
        answers: list[dict[str, Any] | None] = [None] * len(problems)
        todo: Iterator[int] = iter(range(len(problems)))
        lock = threading.Lock()

        def work(lent: Worker) -> None:
            while (left := time_left()) > 0:
                with lock:
                    number = next(todo, None)
                if number is None:
                    return
                try:
                    lent.send(job_for(problems[number], "HIGHS", min(limit, left), gap))
                    answers[number] = lent.receive()
                except (EOFError, OSError, ValueError):  # the worker has ended, or was ended in the middle
                    return

        threads = [threading.Thread(target=work, args=(lent,), daemon=True) for lent in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers
