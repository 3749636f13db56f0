"""Contenders in processes of their own that take turns."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from benchmarks.work import Job

ROOT = Path(__file__).resolve().parents[1]
#: Nothing that is measured here takes so long.
PATIENCE_SECONDS = 900.0
#: Turns that are always taken.
FEWEST = 3


class DiedError(Exception):
    """A contender's process ended; the message is the last that it said."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Running:
    """A `benchmarks.worker`; its first answer is `ready`.

    Args:
        job: what it measures.
        environment: of the process.
        python: the interpreter; rivals may need another environment.
        module: instead of ``benchmarks.worker``.

    Raises:
        DiedError: it never got ready.
    """

    def __init__(
        self, job: Job, environment: Mapping[str, str], python: str = sys.executable, module: str = "benchmarks.worker"
    ) -> None:
        self.job = job
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-m", module, json.dumps(asdict(job))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip
        self.ready: dict[str, Any] = self._answer()

    def ask(self, line: str) -> Any:
        """What it answers to a line.

        Raises:
            DiedError: it ends instead.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        waiting, _, _ = select.select([self._process.stdout], [], [], PATIENCE_SECONDS)
        line = self._process.stdout.readline() if waiting else ""
        if line:
            return json.loads(line)
        if not waiting:
            self._process.kill()
        code = self._process.wait()
        reason = "no answer in time" if not waiting else self._last_words(code)
        self.close()
        raise DiedError(reason)

    def _last_words(self, code: int) -> str:
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        self._errors.seek(0)
        return last_words(self._errors.read()) or f"exit code {code}"

    def close(self) -> None:
        """End it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        if self._process.poll() is None:
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._errors.close()


def job_and_answers() -> tuple[Job, TextIO]:
    """In such a process: its job, and the file for its answers, which was standard output.

    What libraries print goes to standard error from now on.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return Job(**json.loads(sys.argv[1])), answers


def last_words(errors: str) -> str:
    """The message of the exception that a traceback ends with, in one line and without this machine's paths."""
    lines = errors.strip().splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
    found = " ".join(line.strip() for line in lines[starts[-1] :] if line.strip()) if starts else "".join(lines[-1:])
    return re.sub(r"(?<![:/\w.])(/[\w.+-]+){2,}/", "", found)[:300]


def take_turns(
    runs: Sequence[Running], steps: int, most_seconds: float = float("inf")
) -> list[list[float] | DiedError]:
    """Seconds of every step of each, one step each in turn, every other turn backwards; the first turn warms up.

    Once ``most_seconds`` are over no further turn is taken, if `FEWEST` were.
    """
    found: list[list[float] | DiedError] = [[] for _ in runs]
    started = time.monotonic()
    for turn in range(steps + 1):
        if turn > FEWEST and time.monotonic() - started > most_seconds:
            break
        order = range(len(runs)) if turn % 2 == 0 else reversed(range(len(runs)))
        for index in order:
            times = found[index]
            if isinstance(times, DiedError):
                continue
            try:
                seconds = runs[index].ask("step")
            except DiedError as error:
                found[index] = error
                continue
            if turn:
                times.append(seconds)
    return found
