"""As a user: solve, check, inspect on a real model; and one line of Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision
from training import run, twin

import monet_like
from monet_like.errors import InfeasibleError, UsageError
from monet_like.measure import allocated_peak
from monet_like.schedule_file import ScheduleRecord

ROOT = Path(__file__).parents[1]
PROBLEM = ["torchvision.models.resnet18()", "16", "0.14", "inplace_conv_multiway_newnode", "CBC"]
SMALL = ["--input-shape", "3,112,112"]


def call(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / script), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_solve_check_and_inspect(tmp_path: Path) -> None:
    first = call(tmp_path, "solve.py", *PROBLEM, *SMALL, "--time-limit", "30")
    assert first.returncode == 0, first.stderr
    for word in ("plain PyTorch (predicted)", "columns", "rows", "bound, gap", "capture", "kept for the backward"):
        assert word in first.stdout
    path = tmp_path / "solutions" / "solution_resnet18_16_inplace_conv_multiway_newnode_0.14.pkl"
    record = ScheduleRecord.load(path)
    assert record.peak_bytes <= record.budget_bytes == int(0.14 * 2**30)
    assert record.peak_bytes < record.plain_peak_bytes
    (profile,) = (tmp_path / "solutions" / "profiles").iterdir()
    content = profile.read_bytes()

    again = call(tmp_path, "solve.py", *PROBLEM, *SMALL, "--time-limit", "30")
    assert again.returncode == 0, again.stderr
    assert profile.read_bytes() == content  # reused, not measured anew

    checked = call(
        tmp_path, "scripts/schedule.py", *PROBLEM, *SMALL, "--solution_file", str(path), "--check_diff", "--run-bs"
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "check_diff: passed" in checked.stdout
    assert "run_bs: fitted" in checked.stdout

    timed = call(tmp_path, "scripts/schedule.py", *PROBLEM, *SMALL, "--check_runtime", "--steps", "2")
    assert timed.returncode == 0, timed.stderr
    assert "medians of 2 alternating steps" in timed.stdout

    shown = subprocess.run(
        [sys.executable, "-c", "from monet_like.cli import main; main()", "inspect", str(path), "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(shown.stdout)["mode"] == "inplace_conv_multiway_newnode"


def test_a_smaller_profile_batch_is_scaled_and_said(tmp_path: Path) -> None:
    options = ("--profile-batch", "2", "--time-limit", "20", "--out", "small.pkl")
    done = call(tmp_path, "solve.py", *PROBLEM, *SMALL, *options)
    assert done.returncode == 0, done.stderr
    assert "measured at batch 2, scaled to 16" in done.stdout
    assert (tmp_path / "small.pkl").exists()


def test_ablation_recomputes_nothing(tmp_path: Path) -> None:
    problem = [*PROBLEM[:2], "0.16", *PROBLEM[3:]]
    done = call(tmp_path, "solve.py", *problem, *SMALL, "--ablation", "--profile", "roofline:cpu", "--out", "a.pkl")
    assert done.returncode == 0, done.stderr
    assert ScheduleRecord.load(tmp_path / "a.pkl").schedule.rerun_count == 0


def test_auto_schedule_is_exact_fits_and_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = torchvision.models.resnet18().train(), torch.randn(16, 3, 112, 112)
    plain = run(twin(model), (x,), {})
    wrapped = monet_like.auto_schedule(twin(model), x, memory_budget="88%", mode="inplace", time_limit_seconds=10)
    assert max(plain.differences(run(wrapped, (x,), {})).values()) == 0.0
    record = wrapped.record
    assert record.peak_bytes <= record.budget_bytes == int(0.88 * record.plain_peak_bytes)
    wrapped.zero_grad()
    resident = sum(t.untyped_storage().nbytes() for t in (*wrapped.parameters(), *wrapped.buffers(), x))
    measured = resident + allocated_peak(lambda: run(wrapped, (x,), {}), torch.device("cpu"))
    assert measured <= record.budget_bytes + 1024
    monkeypatch.setattr("monet_like.api.compile_schedule", None)  # a second call must not come here
    again = monet_like.auto_schedule(twin(model), x, memory_budget="88%", mode="inplace", time_limit_seconds=10)
    assert again.record == record


@pytest.mark.parametrize("budget", [0, -5, True, 1.5, "0%", "many"])
def test_bad_budgets(budget: object) -> None:
    with pytest.raises(UsageError, match="memory"):
        monet_like.auto_schedule(torch.nn.Linear(2, 2), torch.randn(2, 2), memory_budget=budget)  # type: ignore[arg-type]


def test_infeasible_budget_names_one_that_would_do() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    with pytest.raises(InfeasibleError, match="is known to do") as caught:
        monet_like.auto_schedule(model, torch.randn(32, 64), memory_budget=20_000)
    assert caught.value.smallest_bytes is not None
    wrapped = monet_like.auto_schedule(model, torch.randn(32, 64), memory_budget=caught.value.smallest_bytes)
    assert wrapped.record.peak_bytes <= caught.value.smallest_bytes


def test_eval_mode_is_refused() -> None:
    with pytest.raises(UsageError, match=r"call model\.train\(\)"):
        monet_like.auto_schedule(torch.nn.Linear(2, 2).eval(), torch.randn(2, 2))
