"""What people see while `auto_schedule` plans: a line at the end, for programs through logging, or nothing."""

from __future__ import annotations

import logging
import os
import pty
import re
import sys
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import monet_like
from monet_like.compiler.pipeline import QUICK_SECONDS
from monet_like.compiler.progress import Progress
from monet_like.export.graph_plans import _run_as_it_is


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every call of `Progress.at`, by name."""
    found: list[dict[str, Any]] = []
    at, names = Progress.at, ("stage", "what", "done", "total", "most")

    def noted(self: Progress, *given: Any, **named: Any) -> None:
        found.append(dict(zip(names, given, strict=False)) | named)
        at(self, *given, **named)

    monkeypatch.setattr(Progress, "at", noted)
    return found


def test_one_line_says_what_was_planned_and_where_it_is_kept(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(16, 32)
    caplog.set_level(logging.INFO, "monet_like")
    promise = r"Sequential: peak [\d.]+ KB instead of [\d.]+ KB, step \S+ \S+ instead of \S+ \S+ \(predicted\).*; "
    monet_like.auto_schedule(net(), x, memory_budget="100%", mode="normal", verbose=True)
    line = capsys.readouterr().err
    quickly = r"\(quickly; all is measured and refined at the next start, or now with effort='full'\)"
    costs = r"costs: \d+ of \d+ operators timed quickly at batch 16(, the others estimated)?"
    kept = rf"planned in \S+ \S+ {quickly}, kept in \S+plan_\w+_quick\.json; {costs}"
    assert re.search(f"^monet_like: {promise}{kept}$", line, re.M), line
    monet_like.auto_schedule(net(), x, memory_budget="100%", mode="normal", verbose=True)
    line = capsys.readouterr().err
    kept = rf"reused, planned on [\d-]+, from \S+plan_\w+_quick\.json; {costs}"
    assert re.search(f"^monet_like: {promise}{kept}$", line, re.M), line
    assert [record.levelname for record in caplog.records if record.name == "monet_like"] == ["INFO", "INFO"]


def test_where_nobody_looks_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    for verbose in (None, False):
        monet_like.auto_schedule(net(), torch.randn(8, 32), memory_budget="100%", mode="normal", verbose=verbose)
    assert capfd.readouterr() == ("", "")


def test_a_terminal_sees_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bars that `auto_schedule` and the commands show."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with Progress() as progress:
        progress.profiling("aten.mm", 3, 9)
        progress.planning("incumbent 3 ms")
        stages = [(task.description, task.completed, task.total) for task in progress.bar.tasks]
    assert stages[:2] == [("capture", 1, 1), ("profile", 1, 1)] and stages[2][0] == "plan"
    assert not progress.bar.disable


def test_of_blocks_a_terminal_sees_the_rehearsal_and_the_choice_too(seen: list[dict[str, Any]]) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3)))
    monet_like.auto_schedule(model, torch.randn(8, 32), memory_budget="100%", blocks="*", effort="quick")
    assert list(dict.fromkeys(call["stage"] for call in seen)) == ["rehearse", "profile", "plan", "choose"]
    assert ("choose", "a point for each of 3 blocks") in [(call["stage"], call.get("what")) for call in seen]


def test_every_plan_of_a_job_says_how_long_it_takes_at_most(seen: list[dict[str, Any]]) -> None:
    job = monet_like.problem(net(), torch.randn(16, 32), device="roofline:cpu")
    job.plan("100%", time_limit_seconds=7)
    job.plan("100%", quick=True)
    job.smallest(time_limit_seconds=3)
    assert [call["most"] for call in seen if call["stage"] == "plan" and "most" in call] == [7, QUICK_SECONDS, 3]


def test_a_stage_that_comes_again_has_one_bar() -> None:
    with Progress(quiet=True, first="rehearse") as progress:
        for _ in range(2):
            progress.profiling("aten.mm", 3, 9)
            progress.at("plan", "Block", 1, 2)
        assert [task.description for task in progress.bar.tasks] == ["rehearse", "profile", "plan"]
        assert progress.bar.tasks[2].completed == 1 and progress.bar.tasks[2].total == 2
        progress.profiling("aten.mm", 9, 9)
        progress.planning("again, nobody knows how often")
        assert not progress.bar.tasks[2].finished


@pytest.mark.parametrize("blocks", [None, "*"])
def test_what_inductor_compiles_is_a_stage(
    blocks: str | None, seen: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monet_like.inductor.compiled_call._without_donations", _run_as_it_is)
    x = torch.randn(16, 32)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Tanh()) for _ in range(2)))
    wrapped = monet_like.auto_schedule(
        model, x, memory_budget="100%", backend="inductor", verbose=True, effort="quick", blocks=blocks
    )
    wrapped(x).sum().backward()
    compiled = [call for call in seen if call["stage"] == "compile"]
    assert {call["what"] for call in compiled if "what" in call} == {"Sequential"}
    wrapped(x).sum().backward()
    assert [call for call in seen if call["stage"] == "compile"] == compiled  # the first time alone
    asked = [call["what"] for call in seen if "Inductor" in str(call.get("what"))]
    assert bool(asked) == bool(blocks)


SHOWN = """
import torch, monet_like
from torch import nn
from monet_like.compiler.progress import Progress
with Progress() as progress:
    progress.profiling("aten.convolution_backward.default of a very long name", 120, 340)
    progress.bar.refresh()
    progress.at("rehearse", "the whole model", most=3700)
    with Progress(first="plan") as inner:
        inner.at("plan", "milp: incumbent 98.8 ms, bound 98.3 ms, gap 0.50 %, 5 s", most=59.9)
        print("a print of the model")
        progress.bar.refresh()
monet_like.auto_schedule(nn.Linear(32, 8), torch.randn(8, 32), memory_budget="100%", mode="normal", effort="quick")
"""


def test_a_terminal_of_80_columns_shows_stage_count_and_time_left() -> None:
    lines = drawn(80, sys.executable, "-c", SHOWN)
    bars = [line for line in lines if "━" in line]
    assert bars and max(map(len, bars)) <= 80
    assert any(re.search(r"profile +━+╸?━+ 120/340 0:00 ", line) for line in bars), bars
    assert any(re.search(r" plan +━+ +0:00, ≤ 0:59 left milp: incumbent 98\.8 ms", line) for line in bars), bars
    assert {line.split()[1] for line in bars} >= {"rehearse", "profile", "plan"}
    assert sum("monet_like: Linear" in line for line in lines) == 1  # the line at the end stays


def drawn(columns: int, *command: str) -> list[str]:
    """The lines that a command writes to a terminal, in order, without colours."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(columns))
        os.execvp(command[0], command)
    written = b""
    with suppress(OSError):  # its end
        while part := os.read(terminal, 65536):
            written += part
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, written.decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())
    return [line.rstrip() for line in re.split(r"[\r\n]+", plain)]


def test_a_cell_of_a_notebook_shows_the_newest_state_and_nothing_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """By IPython alone, without control characters of a terminal."""
    display, shown = pytest.importorskip("IPython.display"), []

    class Handle:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            shown.append(data["text/plain"])

    monkeypatch.setattr(display, "display", lambda *_, **__: Handle())
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with Progress(first="capture") as progress:
        progress.at("plan", "a bound")
        progress.bar.refresh()
        with Progress(first="compile") as inner:
            assert inner is progress
    assert any("✓ capture" in frame and "plan" in frame and "a bound" in frame for frame in shown)
    assert shown[-1] == "" and not any("\x1b" in frame for frame in shown)
