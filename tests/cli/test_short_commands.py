"""The shortest commands: three arguments are enough; one grammar of budgets, one default solver."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pandas
import pytest
from commands import run_command

from monet_like import cli
from monet_like.auto.planning import Settings
from monet_like.cli.group import main
from monet_like.compiler.request import Request
from monet_like.ir.defaults import MODE, SOLVER
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.ir.units import Budget, parse_budget, parse_budgets
from monet_like.plan import plan

NET = """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        pairs = ((nn.Conv2d(3, 3, 3, padding=1), nn.Tanh(), nn.ReLU()) for _ in range(4))
        self.layers = nn.Sequential(*(layer for pair in pairs for layer in pair))

    def forward(self, images):
        return self.layers(images).mean()


def make_inputs(batch):
    return torch.randn(batch, 3, 32, 32)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a model file."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    return tmp_path


def test_three_arguments_are_enough() -> None:
    """And the schedule command, asked with the same three, finds the file and checks it."""
    told = run_command("solve", "net.py:Net", "8", "80%").stdout
    record = ScheduleRecord.load(Path(f"solution_net_Net_8_{MODE}_80percent.json"))
    assert (record.mode, record.model, record.solver.split()[0]) == (MODE, "net.py:Net", SOLVER)
    assert record.budget_bytes == int(0.8 * record.plain_peak_bytes) >= record.peak_bytes
    assert f"wrote solution_net_Net_8_{MODE}_80percent.json" in told
    checked = run_command("schedule", "net.py:Net", "8", "80%", "--run-bs", "--json").stdout
    assert json.loads(checked)["run_bs"]["fitted"] is True


def test_the_budget_of_other_commands() -> None:
    assert parse_budgets("10, 565 MB,60%") == [Budget(10 * 2**30), Budget(565 * 2**20), Budget(share=0.6)]
    assert parse_budget(565) == parse_budget("565 B") == Budget(565)
    for command in ("largest-batch", "tune"):
        for budget, what in (
            ("60 %", "a share of plain PyTorch's peak"),
            ("card", "what is free on the card for one step"),
        ):
            stderr = run_command(command, "net.py:Net", budget, exit_code=2).stderr
            assert stderr.startswith(f"error: budget {budget} is {what}, which differs from batch to batch;")
    assert not list(Path().glob("solutions/profiles/*"))


def test_one_default_solver_and_it_is_said() -> None:
    commands = [command for command in main.commands.values() if any(p.name == "solver" for p in command.params)]
    assert len(commands) >= 7
    for command in commands:
        (solver,) = (parameter for parameter in command.params if parameter.name == "solver")
        (mode,) = (parameter for parameter in command.params if parameter.name == "mode")
        assert (solver.default, mode.default) == (SOLVER, MODE), command.name
    assert f"SOLVER is {SOLVER} (the default)" in " ".join(run_command("solve", "--help").stdout.split())
    assert inspect.signature(plan).parameters["solver"].default == SOLVER
    assert (Settings.solver, Settings.mode) == (SOLVER, MODE)  # of auto_schedule
    assert Request.solver == SOLVER
    assert cli.solve_command in commands


@pytest.mark.slow
def test_the_front_speaks_of_ten_percent_more_memory() -> None:
    words = ("pareto", "net.py:Net", "8", "--profile", "roofline:cpu", "--time-limit", "2")
    told = run_command(*words, "--points", "3", "--csv", "front.csv").stdout
    assert "10 % more memory saves" in told and "GB more saves" not in told
    saved = pandas.read_csv("front.csv").percent_saved
    assert saved.isna().tolist() == [False, False, True]
    assert f"{saved[0]:.1f} %" in told
    (point,) = json.loads(run_command(*words, "--budgets", "100%", "--json").stdout)["points"]
    assert point["percent_saved_by_tenth"] is point["seconds_saved_per_gigabyte"] is None
