"""What people see while `auto_schedule` plans: a line at the end, for programs through logging, or nothing."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import nn

import monet_like
from monet_like.compiler.progress import Progress


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))


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
    kept = rf"planned in \S+ \S+ {quickly}, kept in \S+schedule_\w+_quick\.pkl; {costs}"
    assert re.search(f"^monet_like: {promise}{kept}$", line, re.M), line
    monet_like.auto_schedule(net(), x, memory_budget="100%", mode="normal", verbose=True)
    line = capsys.readouterr().err
    assert re.search(rf"^monet_like: {promise}from \S+schedule_\w+_quick\.pkl; {costs}$", line, re.M), line
    assert [record.levelname for record in caplog.records if record.name == "monet_like"] == ["INFO", "INFO"]


@pytest.mark.slow
@pytest.mark.parametrize("verbose", [None, False])
def test_where_nobody_looks_nothing_is_printed(verbose: bool | None, capfd: pytest.CaptureFixture[str]) -> None:
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
