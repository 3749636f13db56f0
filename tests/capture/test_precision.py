"""Autocast, 16-bit models and channels-last: exact too, and never mixed up without a word."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torchvision
from click.testing import CliRunner
from replays import record_for
from torch import nn
from training import run, twin

from monet_like import auto_schedule
from monet_like.capture.precision import autocast_as, layout_of
from monet_like.cli.group import main
from monet_like.compiler.request import Request, captured_for
from monet_like.errors import ScheduleFileError
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.plan.random_schedules import random_schedule
from monet_like.replay.wrapper import ScheduleWrapper

CPU = torch.device("cpu")
EXACT = "inplace_multiway_newnode"


class Words(nn.Module):
    """Embedding, attention, a gated layer, dropout and a head: what autocast treats in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, activation="gelu", batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens))).log_softmax(-1)


def words() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Words().train(), (torch.randint(0, 50, (3, 11)),)


def pictures() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The first stages of MobileNetV2: 16-bit depthwise convolutions take long on a CPU."""
    stages = [[1, 16, 1, 1], [6, 24, 2, 2]]
    model = torchvision.models.MobileNetV2(num_classes=10, inverted_residual_setting=stages)
    return model.train(), (torch.randn(4, 3, 16, 16),)


def record_of(model: nn.Module, args: tuple[torch.Tensor, ...], autocast: str = "") -> ScheduleRecord:
    """A schedule that runs half of what it can again."""
    captured = captured_for(Request(model, (args, {}), EXACT, autocast=autocast), (args, {}))
    schedule = random_schedule(captured.program, 2, drop=0.5)
    return replace(record_for(captured, schedule, EXACT, (model, args, {})), autocast=autocast)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize(("make", "autocast"), [(words, "bfloat16"), (pictures, "float16")])
def test_autocast_is_replayed_to_the_bit(
    make: Callable[[], tuple[nn.Module, tuple[torch.Tensor, ...]]], autocast: str
) -> None:
    model, args = make()
    record = record_of(model, args, autocast)
    wrapped = ScheduleWrapper(twin(model), record)  # as from a file: outside of autocast
    plain_model = twin(model)
    for module in (plain_model, wrapped):  # the forward alone, as PyTorch advises: not the backward
        module.forward = torch.autocast("cpu", getattr(torch, autocast))(module.forward)
    plain, ours = run(plain_model, args, {}), run(wrapped, args, {})
    assert plain.outputs[0].dtype in (torch.float32, getattr(torch, autocast))
    assert max(plain.differences(ours).values()) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_last_is_replayed_to_the_bit_and_stays(dtype: torch.dtype) -> None:
    model, (x,) = pictures()
    model.to(dtype, memory_format=torch.channels_last)
    x = x.to(dtype, memory_format=torch.channels_last)
    wrapped = ScheduleWrapper(twin(model), record_of(model, (x,)))
    plain = twin(model)
    assert max(run(plain, (x,), {}).differences(run(wrapped, (x,), {})).values()) == 0.0
    for one, other in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert layout_of(one.grad) == layout_of(other.grad)


@pytest.mark.slow
def test_what_a_schedule_was_not_solved_for_is_refused() -> None:
    model, (x,) = pictures()
    wrapped = ScheduleWrapper(model, record_of(model, (x,)))
    said = "solved without autocast, the model was called under autocast to bfloat16"
    with autocast_as("bfloat16", CPU), pytest.raises(ScheduleFileError, match=said):
        wrapped(x)
    with pytest.raises(ScheduleFileError, match=r"called with float32\[4, 3, 16, 16\] channels_last"):
        wrapped(x.to(memory_format=torch.channels_last))
    model.to(memory_format=torch.channels_last)
    with pytest.raises(ScheduleFileError, match=r"in the default layout, .* called with weights in channels_last"):
        ScheduleWrapper(model, wrapped.record)
    half = record_of(*pictures(), autocast="bfloat16")
    fresh, _ = pictures()
    with pytest.raises(ScheduleFileError, match="solved under autocast to bfloat16, the model was called without"):
        ScheduleWrapper(fresh, half)(x)
    with pytest.raises(ScheduleFileError, match="autocast is 'float8', which this version does not know"):
        ScheduleWrapper(fresh, replace(half, autocast="float8"))
    with pytest.raises(ScheduleFileError, match="layout 'blocked', which this version does not know"):
        ScheduleWrapper(fresh, replace(half, inputs=(replace(half.inputs[0], layout="blocked"),)))


@pytest.mark.slow
def test_gradient_scaling_skips_and_takes_the_same_steps() -> None:
    """float16 with a scale that overflows at first: the same steps are skipped, the same weights come out."""
    model, (x,) = pictures()
    record = record_of(model, (x,), "float16")
    losses, weights = [], []
    for candidate in (twin(model), ScheduleWrapper(twin(model), record)):
        optimizer = torch.optim.SGD(candidate.parameters(), lr=0.05, momentum=0.9, foreach=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        seen, scales = [], []
        torch.manual_seed(3)
        for _ in range(12):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = candidate(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(candidate.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            seen.append(float(loss.detach()))
            scales.append(scaler.get_scale())
        assert scales[0] < 2.0**40 and len(set(seen)) > 2
        losses.append((seen, scales))
        weights.append([p.detach().clone() for p in candidate.parameters()])
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.slow
def test_plans_are_kept_apart_by_autocast_and_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONET_LIKE_CACHE", str(tmp_path))
    x = torch.randn(4, 3, 16, 16)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))

    def plan(autocast: str, layout: torch.memory_format) -> ScheduleRecord:
        with autocast_as(autocast, CPU):
            return auto_schedule(
                copy.deepcopy(model).to(memory_format=layout), x.to(memory_format=layout), memory_budget="100%"
            ).record

    found = [plan(a, b) for a in ("", "bfloat16") for b in (torch.contiguous_format, torch.channels_last)]
    assert [(r.autocast, r.layout, r.inputs[0].layout) for r in found] == [
        ("", "", ""), ("", "channels_last", "channels_last"), ("bfloat16", "", ""), ("bfloat16", "channels_last",
        "channels_last"),
    ]  # fmt: skip
    assert len(list(tmp_path.glob("plan_*.json"))) == 4


@pytest.mark.slow
def test_the_command_line_plans_and_checks_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(
        "from torch import nn\n\ndef make():\n"
        "    layers = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), "
        "nn.Conv2d(16, 4, 3))\n    return nn.Sequential(*layers)\n"
    )
    words = ["net.py:make", "16", "0.5", EXACT, "HIGHS"]
    options = ["--input-shape", "3,32,32", "--autocast", "bfloat16", "--channels-last"]
    result = CliRunner().invoke(main, ["solve", *words, *options, "--strategy", "heuristic"])
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.glob("*.json")
    assert path.name == "solution_net_make_16_inplace_multiway_newnode_0.50_channels_last_autocast_bfloat16.json"
    result = CliRunner().invoke(main, ["schedule", *words, *options, "--check-diff"])
    assert result.exit_code == 0 and "check_diff: passed" in result.output, result.output
    result = CliRunner().invoke(main, ["solve", *words, "--autocast", "int8"])
    assert result.exit_code == 2 and "--autocast 'int8' is unknown; give bfloat16 or float16" in result.output


def test_a_backward_inside_autocast_is_warned_of() -> None:
    model, args = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).train(), (torch.randn(3, 4),)
    wrapped = ScheduleWrapper(model, record_of(model, args, "bfloat16"))
    with torch.autocast("cpu", torch.bfloat16):
        loss = wrapped(*args).float().square().mean()
        with pytest.warns(UserWarning, match=r"call backward\(\) outside"):
            loss.backward()
