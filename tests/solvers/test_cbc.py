"""CBC through PuLP: its start, its log, its end, and what it leaves behind."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from planning import hard_problem

from monet_like.solvers import worker
from monet_like.solvers.interface import installed_solvers, job_for, solve
from monet_like.solvers.matrix import MatrixProgram

pulp = pytest.importorskip("pulp")


def good_start(problem: MatrixProgram) -> np.ndarray:
    """Columns taken in their order as long as every row holds."""
    x = np.zeros(problem.columns)
    for column in range(problem.columns):
        x[column] = 1.0
        if problem.violation(x) > 0:
            x[column] = 0.0
    return x


def job(problem: MatrixProgram, folder: Path, **fields: object) -> dict[str, object]:
    return job_for(problem, "CBC", 5.0, 0.5) | {"folder": str(folder)} | fields


def test_cbc_starts_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # it changes the folder
    problem = hard_problem()
    start = good_start(problem)
    answer = worker.run_cbc(job(problem, tmp_path, start=start))
    value = problem.cost @ start + problem.offset
    assert f"MIPStart provided solution with cost {value:.6g}" in capfd.readouterr().out
    assert problem.cost @ answer["x"] <= problem.cost @ start + 1e-6


def test_incumbent_is_never_worse_than_the_start_and_the_bound_is_in_the_log() -> None:
    problem = hard_problem(60, 600)
    start = good_start(problem)
    found = solve(problem, "CBC", time_limit_seconds=5.0, gap=0.0, start=start)
    assert found.status == "feasible"
    assert found.x is not None
    assert found.objective_seconds <= (problem.cost @ start + problem.offset) * problem.seconds_per_unit + 1e-9
    assert 0 < found.bound_seconds < found.objective_seconds


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """A program in CBC's place."""
    path = folder / "cbc"
    path.write_text(f"#!/usr/bin/env python3\nimport os, sys\n{code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", str(path))
    monkeypatch.chdir(folder)


def test_log_of_a_cbc_that_crashes_is_read_to_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Version 2.10.3 may end by a fault of memory where its time is up, and to a pipe it writes late."""
    line = "Cbc0010I After 0 nodes, 1 on tree, 12 best solution, best possible 11.5"
    stand_in(tmp_path, monkeypatch, f"out = open(1, 'w'); print('{line}', file=out); os.kill(os.getpid(), 11)")
    problem = hard_problem()
    answer = worker.run_cbc(job(problem, tmp_path, start=good_start(problem)))
    assert answer == {"status": "user_limit", "x": None, "bound": None, "message": "CBC ended with an error"}
    assert capfd.readouterr().out.splitlines() == [line]
    assert worker.run_cbc(job(problem, tmp_path))["status"] == "solver_error"  # no start: there is nothing to return
    os.write(1, b"this is standard output again\n")
    assert capfd.readouterr().out.splitlines() == [line, "this is standard output again"]


def test_cbc_that_cannot_be_run_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "")
    (tmp_path / "cbc").unlink()
    problem = hard_problem()
    answer = worker.run_cbc(job(problem, tmp_path, start=good_start(problem)))
    assert answer["status"] == "solver_error"
    assert answer["message"] == f"cannot execute {tmp_path}/cbc"


def test_settings_reach_cbc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    stand_in(tmp_path, monkeypatch, "print(*sys.argv[1:]); sys.exit(1)")
    worker.run_cbc(job(hard_problem(), tmp_path, gap=0.125, threads=3, options={"maxNodes": 7}))
    told = capfd.readouterr().out
    for words in (
        "-timeMode elapsed",
        "-ratio 0.125",
        "-threads 3",
        "-randomSeed 1",
        "-randomCbcSeed 1",
        "-maxNodes 7",
    ):
        assert words in told
    assert 0 < float(told.split("-sec ")[1].split()[0]) <= 5.0
    assert "-mips" not in told
    worker.run_cbc(job(hard_problem(), tmp_path, threads=1, start=np.zeros(400)))
    told = capfd.readouterr().out
    assert "-mips" in told
    assert "-threads" not in told


def running(mark: str) -> list[str]:
    """The command lines of processes that have these letters in them."""
    commands = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return [command for command in commands if mark in command]


def test_stopped_cbc_leaves_no_process_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mark = f"{123456 + os.getpid()}"  # in CBC's own command line
    seen: list[str] = []
    stopped = threading.Event()

    def stop() -> bool:
        seen.extend(running(mark))
        if seen:
            stopped.set()
        return stopped.is_set()

    began = time.monotonic()
    found = solve(hard_problem(), "CBC", time_limit_seconds=60.0, options={"maxNodes": mark}, stop=stop, gap=0.0)
    assert found.status == "no_incumbent"
    assert seen
    assert time.monotonic() - began < 50
    assert running(mark) == []
    assert list(tmp_path.iterdir()) == []


def test_cbc_needs_no_cvxpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monet_like.solvers.interface.find_spec", lambda name: None if name == "cvxpy" else name)
    assert installed_solvers() == ("CBC", "HIGHS")
