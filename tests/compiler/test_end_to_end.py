"""As a user: solve, check, inspect on a real model; and one line of Python."""

from __future__ import annotations

import copy
import inspect
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from commands import ROOT, call, run_command
from torch import nn
from training import run, twin

import monet_like
from monet_like.errors import InfeasibleError, UsageError
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.profile.measure import allocated_peak
from monet_like.replay.stepping import MANY_STEPS

NET = """
from torch import nn

def net():
    layers = [m for _ in range(3) for m in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16 * 16, 4))
"""


@pytest.mark.slow
def test_solve_check_and_inspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first script in a process of its own, the second in this one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    (tmp_path / "net.py").write_text(NET)
    problem = ("net.py:net", "16", "85%", "inplace_conv_multiway_newnode", "CBC", "--input-shape", "8,16,16")
    first = call(tmp_path, "solve.py", *problem, "--time-limit", "2")
    assert first.returncode == 0, first.stderr
    for word in ("plain PyTorch (predicted)", "columns", "rows", "bound, gap", "capture", "kept for the backward"):
        assert word in first.stdout
    path = tmp_path / "solution_net_net_16_inplace_conv_multiway_newnode_85percent.json"
    record = ScheduleRecord.load(path)
    assert record.peak_bytes <= record.budget_bytes == int(0.85 * record.plain_peak_bytes)
    checks = ("--check_diff", "--run-bs", "--check_runtime", "--steps", "2")
    monkeypatch.setattr("monet_like.__main__.die_silently", lambda: None)  # it changes what Ctrl-C does
    monkeypatch.setattr(sys, "argv", ["schedule.py", *problem, "--solution_file", str(path), *checks])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "scripts" / "schedule.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert not ended.value.code, said
    for word in ("check_diff: passed", "run_bs: fitted", "medians of 2 alternating steps"):
        assert word in said
    assert json.loads(run_command("inspect", str(path), "--json").stdout)["mode"] == "inplace_conv_multiway_newnode"


@pytest.mark.slow
def test_options_of_the_problem_reach_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller batch is measured, scaled and said; the ablation recomputes nothing, where a plan would."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    net, mode = ("net.py:net", "16"), ("inplace_multiway_newnode", "heuristic", "--input-shape", "8,16,16")
    said = run_command("solve", *net, "92%", *mode, "--profile-batch", "2", "--out", "a.json").stdout
    assert "measured at batch 2, scaled to 16" in said
    assert ScheduleRecord.load(tmp_path / "a.json").schedule.rerun_count > 0
    ablation = ("--ablation", "--profile", "roofline:cpu", "--out", "b.json")
    assert "no schedule fits" in run_command("solve", *net, "92%", *mode, *ablation, exit_code=2).output
    run_command("solve", *net, "99%", *mode, *ablation)
    record = ScheduleRecord.load(tmp_path / "b.json")
    assert record.ablation and record.schedule.rerun_count == 0


def test_auto_schedule_is_exact_fits_and_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [part for _ in range(4) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    model, x = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16 * 16, 4)), torch.randn(16, 8, 16, 16)
    plain = run(twin(model), (x,), {})
    wrapped = monet_like.auto_schedule(twin(model), x, memory_budget="88%", mode="inplace", time_limit_seconds=4)
    assert max(plain.differences(run(wrapped, (x,), {})).values()) == 0.0
    record = wrapped.record
    assert record.peak_bytes <= record.budget_bytes == int(0.88 * record.plain_peak_bytes)
    wrapped.zero_grad()
    resident = sum(t.untyped_storage().nbytes() for t in (*wrapped.parameters(), *wrapped.buffers(), x))
    measured = resident + allocated_peak(lambda: run(wrapped, (x,), {}), torch.device("cpu"))
    assert measured <= record.budget_bytes + 1024
    monkeypatch.setattr("monet_like.auto.whole_plan.prepare", None)  # a second call must not come here
    again = monet_like.auto_schedule(twin(model), x, memory_budget="88%", mode="inplace", time_limit_seconds=4)
    assert again.record == record


@pytest.mark.slow
def test_auto_schedule_without_inputs_plans_at_the_first_training_call() -> None:
    x = torch.randn(32, 3, 16, 16)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.LazyLinear(5)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        model(x)  # its lazy layer takes its size
    plain = twin(model)
    wrapped = monet_like.auto_schedule(model, memory_budget="120%", mode="inplace_multiway_newnode")
    assert "made at the first training call" in str(wrapped)
    assert str(inspect.signature(wrapped.forward)) == str(inspect.signature(model.forward)) == "(input)"
    wrapped.eval()(x), wrapped.train()
    assert wrapped.record is None
    for size in (32, 32, 7):
        assert max(run(plain, (x[:size],), {}).differences(run(wrapped, (x[:size],), {})).values()) == 0.0
    assert wrapped.record is not None and wrapped.records == [wrapped.record]
    assert wrapped.record.peak_bytes <= wrapped.record.budget_bytes == int(1.2 * wrapped.record.plain_peak_bytes)
    copied = copy.deepcopy(wrapped)
    more = torch.randn(40, 3, 16, 16)
    with pytest.warns(UserWarning, match=r"planning Sequential anew: planned for float32\[32, 3, 16, 16\], .*"):
        found = run(wrapped, (more,), {})
    assert max(run(plain, (more,), {}).differences(found).values()) == 0.0
    assert len(wrapped.records) == 2
    assert wrapped.record.inputs[0].shape[0] == 40
    copied(x).sum().backward()
    assert len(copied.records) == 1


def test_many_different_calls_are_warned_of() -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x).mul(factor)

    x = torch.randn(64, 9)
    wrapped = monet_like.auto_schedule(Scaled(9, 9), (x, 1.0), memory_budget="1 MB")
    for number in range(2, MANY_STEPS):
        wrapped(x, float(number))
    with pytest.warns(UserWarning, match=f"captured for {MANY_STEPS} different calls"):
        wrapped(x, 0.5)


def test_reserve_does_nothing_where_nothing_is_cached(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    record = monet_like.auto_schedule(model, torch.randn(32, 64), memory_budget="100%").record
    assert record is not None
    record.save(tmp_path / "schedule.json")
    assert monet_like.reserve(record, "cpu") == monet_like.reserve(tmp_path / "schedule.json", "cpu") == 0


@pytest.mark.parametrize("budget", [0, -5, True, 1.5, "0%", "many"])
def test_bad_budgets(budget: object) -> None:
    with pytest.raises(UsageError, match="memory"):
        monet_like.auto_schedule(torch.nn.Linear(2, 2), torch.randn(2, 2), memory_budget=budget)  # type: ignore[arg-type]


def test_infeasible_budget_names_one_that_would_do() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    with pytest.raises(InfeasibleError, match=r"fits into 19\.5 KB.*sum_2 alone needs 89\.0 KB"):
        monet_like.auto_schedule(model, torch.randn(32, 64), memory_budget=20_000)
    wrapped = monet_like.auto_schedule(model, torch.randn(32, 64), memory_budget="89.1 KB")
    assert wrapped.record.peak_bytes <= 89.1 * 1024


def test_eval_mode_is_refused() -> None:
    with pytest.raises(UsageError, match=r"call model\.train\(\)"):
        monet_like.auto_schedule(torch.nn.Linear(2, 2).eval(), torch.randn(2, 2))


@pytest.mark.slow
def test_a_wrapped_model_is_left_alone_by_torch_compile() -> None:
    """And trains as without, alone and in a compiled function."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(4, 8)
    wrapped = monet_like.auto_schedule(
        copy.deepcopy(model), x, memory_budget="100%", mode="inplace", time_limit_seconds=1
    )
    compiled = torch.compile(wrapped)
    for one in (model, compiled):
        one(x).square().mean().backward()
    for mine, theirs in zip(wrapped.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert torch.equal(compiled.eval()(x), model.eval()(x))
    inside = torch.compile(lambda x: wrapped(2 * x) + 1)
    assert torch.equal(inside(x), model(2 * x) + 1)
