"""Optimizers that step in the backward: gradients are freed when they are handed over, and plans count that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from replays import record_for
from torch import nn
from training import twin
from zoo import Built

import monet_like
from monet_like import ScheduleWrapper
from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.cli.group import main
from monet_like.errors import InfeasibleError
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.ir.simulate import Free, simulate
from monet_like.plan.baseline import store_all
from monet_like.plan.random_schedules import random_schedule
from monet_like.profile.measure import allocated_peak
from monet_like.variants import admitted

WIDTH, LAYERS, ROWS = 128, 12, 1


class Deep(nn.Module):
    """Many weights and few activations; the first and the last layer are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()))
        )
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(x))


def stepping(model: nn.Module) -> None:
    """Plain SGD in a hook of each parameter, which frees the gradient."""

    def step(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-1e-2)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


@pytest.fixture(scope="module")
def example() -> Built:
    torch.manual_seed(0)
    return Deep().train(), (torch.randn(ROWS, WIDTH),), {}


def captured_with(example: Built) -> Captured:
    return admitted(capture(*example, optimizer_in_backward=True), "normal")


def test_one_weights_gradient_at_a_time_is_counted(example: Built) -> None:
    weight = WIDTH * WIDTH * 4
    plain = admitted(capture(*example), "normal").program
    freeing = captured_with(example).program
    peaks = [simulate(p, store_all(p), Free()).peak_bytes - p.resident_bytes for p in (plain, freeing)]
    assert peaks[0] >= LAYERS * weight
    # The tied weight's first gradient waits for its second one; beside it there is the sum, or another weight's.
    assert 2 * weight < peaks[1] < 3.5 * weight
    assert freeing.gradients == ()
    releases = [ways[0] for ways in freeing.slots if ways[0].name.startswith("release")]
    assert sorted(v for task in releases for v in task.reads) == sorted(plain.gradients)
    assert freeing.fingerprint != plain.fingerprint


@pytest.mark.slow(but=["0.8"])
@pytest.mark.parametrize("drop", [0.0, 0.8])
def test_steps_end_where_plain_pytorchs_do_within_what_is_predicted(
    example: Built, drop: float, tmp_path: Path
) -> None:
    model, args, _ = example
    captured = captured_with(example)
    schedule = random_schedule(captured.program, seed=3, drop=drop, others=0.0)
    report = simulate(captured.program, schedule, Free())
    record = record_for(captured, schedule, "normal", example)
    record = replace(record, optimizer_in_backward=True, peak_bytes=report.peak_bytes)
    record.save(tmp_path / "record.json")
    record = ScheduleRecord.load(tmp_path / "record.json")
    assert record.optimizer_in_backward
    plain, mine = twin(model), ScheduleWrapper(twin(model), record, example=example[1:])
    for candidate in (plain, mine):
        stepping(candidate)

    def step(candidate: nn.Module) -> None:
        candidate(*args).square().mean().backward()

    for _ in range(3):
        step(plain)
        step(mine)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), mine.parameters(), strict=True))
    rise = allocated_peak(lambda: step(mine), torch.device("cpu"))
    assert 0 < rise <= report.peak_bytes - captured.program.resident_bytes + 16 * ROWS * WIDTH * 4


def test_a_file_without_the_field_reads_as_before(example: Built) -> None:
    captured = admitted(capture(*example), "normal")
    record = record_for(captured, store_all(captured.program), "normal", example)
    assert "optimizer_in_backward" not in record.content()
    assert ScheduleRecord.of_content(record.content(), "here") == record


def test_auto_schedule_fits_less_than_all_gradients_and_trains_as_plain_pytorch(example: Built) -> None:
    model, args, _ = example
    gradients = WIDTH * WIDTH * 4 * LAYERS
    budget = 2 * gradients  # the weights, and less than all gradients besides what activations take
    with pytest.raises(InfeasibleError, match="no plan of Deep"):
        monet_like.auto_schedule(twin(model), args, memory_budget=budget, effort="quick")
    plain = twin(model)
    mine = monet_like.auto_schedule(
        twin(model), args, memory_budget=budget, mode="inplace_multiway_newnode", effort="quick",
        optimizer_in_backward=True, optimizer="sgd",
    )  # fmt: skip
    assert mine.record.optimizer_in_backward and mine.record.peak_bytes <= budget
    for candidate in (plain, mine):
        stepping(candidate)
        for _ in range(2):
            candidate(*args).square().mean().backward()
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), mine.parameters(), strict=True))
    assert all(p.grad is None for p in mine.parameters())


@pytest.mark.slow
def test_the_command_line_plans_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "from torch import nn\n\n"
        "def net():\n"
        "    return nn.Sequential(nn.Flatten(), *(nn.Linear(48, 48, bias=False) for _ in range(30)))\n"
    )
    words = "solve net.py:net 2 850KB normal --input-shape 3,4,4"
    options = ["--quick", "--optimizer", "adam_fused", "--optimizer-in-backward", "--out", "mine.json"]
    done = CliRunner().invoke(main, [*words.split(), *options])
    assert done.exit_code == 0, done.output
    record = ScheduleRecord.load(tmp_path / "mine.json")
    weights = 30 * 48 * 48 * 4
    assert record.optimizer_in_backward
    assert record.optimizer_bytes == 2 * weights
    assert record.peak_bytes < 3 * weights + weights // 4
