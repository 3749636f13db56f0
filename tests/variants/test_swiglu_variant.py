"""SwiGLU in one pass: where it is found, and that schedules with it are bit-equal to plain PyTorch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from taking import error_of, taking
from torch import nn
from torch.nn.functional import silu

from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.ir.schedule import Schedule
from monet_like.ir.simulate import Free, simulate
from monet_like.profile.work import touched_bytes
from monet_like.variants import admitted

MODE = "conv_multiway"
WIDE, NARROW = 48, 5  # what is between the layers is more than four times the input, or less: a tiled MLP, or none


class Mlp(nn.Module):
    def __init__(self, inner: int, *, swapped: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.gate, self.up, self.down = nn.Linear(8, inner), nn.Linear(8, inner, bias=False), nn.Linear(inner, 8)
        self.swapped = swapped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        gate, up = silu(self.gate(x)), self.up(x)
        return self.down(up * gate if self.swapped else gate * up)


def built(inner: int, dtype: torch.dtype = torch.float32, **options: bool) -> tuple[nn.Module, tuple[Any, ...], Any]:
    torch.manual_seed(0)
    return Mlp(inner, **options).to(dtype).train(), (torch.randn(2, 7, 8, dtype=dtype, requires_grad=True),), {}


def found(captured: Captured) -> Counter[str]:
    return Counter(task.variant for task in captured.program.every_task() if task.variant.startswith("swiglu"))


def with_swiglu(captured: Captured) -> Schedule:
    """Plain PyTorch's schedule with the fused tasks in place of its own, forward and backward."""
    return taking(captured, "swiglu", "swiglu.up", "swiglu.backward")


@pytest.mark.parametrize("inner", [NARROW, WIDE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("swapped", [False, True])
def test_steps_are_bit_equal(inner: int, dtype: torch.dtype, swapped: bool) -> None:
    example = built(inner, dtype, swapped=swapped)
    captured = admitted(capture(*example), MODE)
    assert found(captured) == {"swiglu": 1, "swiglu.backward" if inner == WIDE else "swiglu.up": 1}
    schedule = with_swiglu(captured)
    silus = [place for place, task in enumerate(captured.program.tasks) if "silu" in task.name]
    assert silus and not set(silus) & set(schedule.forward)  # silu(gate) is never in memory
    simulate(captured.program, schedule, Free())
    assert error_of(example, captured, schedule, MODE) == 0.0


def test_without_multiway_the_forward_alone_is_fused() -> None:
    example = built(NARROW)
    captured = admitted(capture(*example), "normal")
    assert found(captured) == {"swiglu": 1}
    assert error_of(example, captured, with_swiglu(captured), "normal") == 0.0


def test_it_reads_and_writes_fewer_tensors() -> None:
    for inner in (NARROW, WIDE):
        captured = admitted(capture(*built(inner)), MODE)
        one = 2 * 7 * inner * 4
        by_variant = {task.variant: task for task in captured.program.every_task()}
        assert touched_bytes(captured, by_variant["swiglu"]) == 3 * one
        if inner == NARROW:
            assert touched_bytes(captured, by_variant["swiglu.up"]) == 3 * one
        else:
            (plain,) = (ways[0] for ways in captured.program.slots if by_variant["swiglu.backward"] in ways)
            spared = touched_bytes(captured, plain) - touched_bytes(captured, by_variant["swiglu.backward"])
            assert spared == 4 * one


class Told(Mlp):
    """Others read silu(gate)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = silu(self.gate(x))
        return self.down(gate * self.up(x)).sum() + gate.mean()


class Broadcast(Mlp):
    """One number for each row is gated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu(self.gate(x)) * self.up(x).sum(-1, keepdim=True))


@pytest.mark.parametrize("kind", [Told, Broadcast])
def test_where_it_is_not_offered(kind: type[Mlp]) -> None:
    torch.manual_seed(0)
    captured = admitted(capture(kind(NARROW).train(), (torch.randn(2, 7, 8),)), MODE)
    assert not found(captured)


class GatedHeads(Mlp):
    """As Qwen3-Next's gated norm: the product is made of heads in rows, and its gradient comes as a view of a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (layer(x).reshape(-1, 2) for layer in (self.gate, self.up))
        return self.down((silu(gate) * up).reshape(14, -1, 2).reshape(2, 7, -1))


def test_gradients_may_be_views_of_views() -> None:
    torch.manual_seed(0)
    example = GatedHeads(4).train(), (torch.randn(2, 7, 8, requires_grad=True),), {}
    captured = admitted(capture(*example), MODE)
    assert found(captured) == {"swiglu": 1, "swiglu.up": 1}
    assert error_of(example, captured, with_swiglu(captured), MODE) == 0.0
