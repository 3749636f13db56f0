"""Ctrl-C at any moment, in real processes: one line or none, no traceback, nothing half written, no solver left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from monet_like.interrupts import put_off, raised
from monet_like.ir.schedule_file import ScheduleRecord

ROOT = Path(__file__).resolve().parents[2]
LINE = "interrupted; files are as they were, or whole"

NET = """
from torch import nn
import torch
def make():
    layers = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(6):
        layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    return nn.Sequential(*layers)
def make_inputs(batch):
    return torch.zeros(batch, 3, 16, 16)
"""
COMMAND = ["net.py:make", "4", "320 KB", "inplace_conv_multiway_newnode", "HIGHS", "--gap", "0", "--time-limit", "20"]

#: Torch is imported once; then a process is forked for each moment, which runs the command and presses Ctrl-C itself.
SCRIPT = """
import atexit, os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
import torch, highspy
import monet_like.cli.solve, monet_like.solvers.processes, monet_like.plan.ilp.search, monet_like.profile.profiler
import monet_like.capture.lower.step
import monet_like.compiler.pipeline, monet_like.cli.problem, monet_like.files
from monet_like import __main__ as entry
sys.argv = ["solve.py", *sys.argv[2:]]

def press():
    os.kill(os.getpid(), signal.SIGINT)

def before(owner, name):
    real = getattr(owner, name)
    def pressed(*args, **kwargs):
        setattr(owner, name, real)
        press()
        return real(*args, **kwargs)
    setattr(owner, name, pressed)

def later(seconds):
    threading.Timer(seconds, press).start()

class Finalised:
    def __del__(self):
        press()
        time.sleep(0.01)

def in_a_finaliser(owner, name):
    real = getattr(owner, name)
    def pressed(*args, **kwargs):
        Finalised()
        return real(*args, **kwargs)
    setattr(owner, name, pressed)

def solver_at_work():
    real = monet_like.solvers.processes.start_worker
    def start(*args, **kwargs):
        found = real(*args, **kwargs)
        found.child.send_signal(signal.SIGSTOP)
        print("worker", found.child.pid, flush=True)
        for seconds in (0.3, 1.0):
            later(seconds)
        return found
    monet_like.solvers.processes.start_worker = start

def once_planned(owner, name):
    sys.argv += ["--time-limit", "1"]  # of two, the last one counts
    before(owner, name)

MOMENTS = {
    "the arguments": lambda: before(monet_like.cli.problem, "build_model"),
    "capture": lambda: before(monet_like.compiler.pipeline, "captured_for"),
    "measuring": lambda: before(monet_like.profile.profiler, "allocated_peak"),
    "a finaliser": lambda: in_a_finaliser(monet_like.profile.profiler, "allocated_peak"),
    "the solver": solver_at_work,
    "writing": lambda: once_planned(monet_like.files.os, "fsync"),
    "replacing": lambda: once_planned(monet_like.files.os, "replace"),
    "trying the folder": lambda: once_planned(monet_like.files.tempfile, "NamedTemporaryFile"),
    **{f"after {seconds} s": lambda seconds=seconds: later(seconds) for seconds in (0.01, 0.1, 0.3, 0.7, 1.5, 3.0)},
}
for number, (name, prepare) in enumerate(MOMENTS.items()):
    print("moment", name, flush=True)
    child = os.fork()
    if not child:
        folder = f"moment{number}"
        os.mkdir(folder)
        os.chdir(folder)
        os.dup2(os.open("../errors%d" % number, os.O_CREAT | os.O_WRONLY), 2)
        os.symlink("../net.py", "net.py")
        prepare()
        try:
            entry.solve_main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        atexit._run_exitfuncs()
        os._exit(code)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.slow
def test_at_every_moment_of_a_solve(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    command = [sys.executable, str(script), "-", *COMMAND, "--out", "mine.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    codes: dict[str, int] = {}
    for line in done.stdout.splitlines():
        if line.startswith("moment"):
            name = line.removeprefix("moment ")
        elif line.startswith("ended"):
            codes[name] = int(line.split()[1])
    assert len(codes) == 14
    for number, (name, code) in enumerate(codes.items()):
        errors, folder = (tmp_path / f"errors{number}").read_text(), tmp_path / f"moment{number}"
        assert "Traceback" not in errors, (name, errors)
        assert "Exception ignored" not in errors, (name, errors)
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert not any(part.startswith(".") for file in files for part in file.split("/")), (name, files)
        written = folder / "mine.json"
        if written.exists():
            ScheduleRecord.load(written)
        # A solve with its costs at hand can be done before any of the later moments; the solver ends with its best
        # plan.
        if name == "the solver" or name.startswith("after"):
            assert code in (0, 130, -signal.SIGINT), (name, code, errors)
        else:
            assert code in ((130, -signal.SIGINT) if name == "a finaliser" else (130,)), (name, code, errors)
        if code == 130:
            assert errors.strip().splitlines()[-1] == LINE, (name, errors)
        if code == 0:
            assert written.exists(), name
    left = [p for p in psutil.process_iter() if f"{tmp_path}" in " ".join(_command_of(p))]
    assert left == []
    workers = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("worker")]
    assert workers
    deadline = time.monotonic() + 60
    while any(map(psutil.pid_exists, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, workers))


def _command_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


#: Presses Ctrl-C when a module is about to be imported, then imports and runs the command.
IMPORTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
wanted = sys.argv.pop(1)
class Press:
    def find_spec(self, name, *rest):
        if name == wanted:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
from monet_like.__main__ import main
sys.meta_path.insert(0, Press())
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("module", ["monet_like.cli.commands", "monet_like.cli.solve", "numpy", "torch.nn", "torch.fx"])
def test_while_a_command_is_imported(tmp_path: Path, module: str) -> None:
    (tmp_path / "net.py").write_text(NET)
    child = subprocess.run(
        [sys.executable, "-c", IMPORTED, module, "solve", *COMMAND],
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode in (130, -signal.SIGINT), (child.stdout, child.stderr)
    assert child.stderr.strip() in ("", LINE)
    assert os.listdir(tmp_path) == ["net.py"]


def test_an_interrupt_that_is_put_off_comes_afterwards() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    done: list[bool] = []

    def work() -> None:
        with put_off():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            done.append(True)

    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert done
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with raised(), put_off():
            pass
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
