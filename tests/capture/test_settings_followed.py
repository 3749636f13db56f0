"""Settings by which PyTorch chooses operators: a change between steps means another capture, never another result."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cudnn_setting import cudnn_enabled
from fake_gpu import build
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize

from monet_like import auto_schedule
from monet_like.capture.guards.settings import SETTINGS
from monet_like.capture.lower.step import capture
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.runtime.batch_norm import CUDNN, NATIVE


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(*heads)
        return self.out(attended.transpose(1, 2).flatten(2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(32, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


class Table(nn.Module):
    """Multiplied by numbers that the forward makes, of the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * torch.tensor([0.1, 0.2, 0.3, 0.4])


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


#: A model, the length of its sequences, a setting, and what it is called. Without oneDNN each place takes some twenty
#: operators.
CASES: dict[str, tuple[Callable[[], nn.Module], int, Callable[[], AbstractContextManager[Any]], str]] = {
    "attention": (Attention, 64, lambda: sdpa_kernel(SDPBackend.MATH), r"torch\.backends\.cuda\.flash_sdp_enabled\(\)"),
    "oneDNN": (Recurrent, 6, lambda: torch.backends.mkldnn.flags(enabled=False), r"torch\.backends\.mkldnn\.enabled"),
    "default dtype": (Table, 64, default_dtype, r"torch\.get_default_dtype\(\)"),
}


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    result = model(x)
    result.square().sum().backward()
    return [result.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def same(model: nn.Module, wrapped: ScheduleWrapper, x: torch.Tensor) -> bool:
    pairs = list(zip(step(model, x), step(wrapped, x), strict=True))
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("case", CASES)
def test_a_setting_that_changes_is_followed(case: str) -> None:
    make, length, changed, name = CASES[case]
    torch.manual_seed(0)
    model, x = make(), torch.randn(4, length, 32)
    wrapped = auto_schedule(model, (x,), memory_budget="300%", time_limit_seconds=1)
    assert same(model, wrapped, x)
    before = step(model, x)
    with changed():
        assert not all(map(torch.equal, before, step(model, x)))  # it does change something
        with pytest.warns(UserWarning, match=f"planning {make.__name__} anew: {name} was .*, is "):
            assert same(model, wrapped, x)
    assert same(model, wrapped, x)


@contextmanager
def switched(setting: Callable[[bool], Any], on: bool) -> Iterator[None]:
    setting(on)
    yield
    setting(not on)


#: Ways to change each of the settings.
CHANGES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch.backends.cudnn.enabled": lambda: torch.backends.cudnn.flags(enabled=False),
    "torch.backends.mkldnn.enabled": lambda: torch.backends.mkldnn.flags(enabled=False),
    "torch.backends.cuda.flash_sdp_enabled()": lambda: switched(torch.backends.cuda.enable_flash_sdp, False),
    "torch.backends.cuda.mem_efficient_sdp_enabled()": lambda: switched(
        torch.backends.cuda.enable_mem_efficient_sdp, False
    ),
    "torch.backends.cuda.cudnn_sdp_enabled()": lambda: switched(torch.backends.cuda.enable_cudnn_sdp, False),
    "torch.backends.cuda.math_sdp_enabled()": lambda: switched(torch.backends.cuda.enable_math_sdp, False),
    "the order of sdpa_kernel(..., set_priority=True)": lambda: sdpa_kernel(
        [SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION],
        set_priority=True,
    ),
    "torch.backends.opt_einsum": lambda: mock.patch.object(torch.backends.opt_einsum, "enabled", False),
    "torch.are_deterministic_algorithms_enabled()": lambda: switched(torch.use_deterministic_algorithms, True),
    "torch.get_default_dtype()": default_dtype,
    "the default device, or a TorchFunctionMode": lambda: torch.device("meta"),
    "torch.nn.utils.parametrize.cached()": parametrize.cached,
    "hooks on all modules": lambda: register_module_forward_hook(lambda *_: None),
}


def test_each_setting_is_compared() -> None:
    reads = capture(nn.Linear(2, 2), (torch.randn(2, 2),)).reads
    assert reads is not None and CHANGES.keys() == SETTINGS.keys()
    for name, change in CHANGES.items():
        if name == "torch.backends.opt_einsum" and not torch.backends.opt_einsum.is_available():
            continue  # a package of its own
        with change():
            found = reads.change()
            assert found is not None and found.path == name
        assert reads.change() is None


def test_a_capture_knows_whether_cudnn_was_on() -> None:
    """Of a GPU that is not here: batch norm is cuDNN's with it, ATen's own without."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()

    def captured(enabled: bool) -> set[str]:
        with cudnn_enabled(enabled):
            found = capture(model, (torch.randn(2, 3, 8, 8),), target=torch.device("cuda", 0))
        assert found.reads is not None
        with cudnn_enabled(enabled):
            assert found.reads.change() is None
        with cudnn_enabled(not enabled):
            change = found.reads.change()
            assert str(change) == f"torch.backends.cudnn.enabled was {enabled}, is {not enabled}"
            assert found.reads.of(nn.Sequential(*model)).change() == change  # of a copy as well
        return {call.op for task in found.program.every_task() for call in task.calls}

    assert CUDNN in captured(True)
    assert CUDNN not in (without := captured(False))
    assert NATIVE in without


@pytest.mark.slow
def test_a_step_without_cudnn_does_not_run_its_batch_norm(fake_gpu_library: Path) -> None:
    """On the fake GPU: the program without cuDNN is another one, so the schedule is refused."""
    command = [sys.executable, str(build.HERE / "settings.py")]
    done = build.run(fake_gpu_library, command)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["by cudnn"]
    assert "does not match the model" in found["new wrapper"]
    assert found["next step"].endswith("; since the last step, torch.backends.cudnn.enabled was True, is False")
