"""Blocks with an operator that has a workspace: whether its gradient is delayed, against what the allocator counts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from block_models import EXACT, assert_same_step, loss_of, measured_peak
from torch import nn

import monet_like
from monet_like.auto.block import blocks_of

SIDE = 1024
#: Bytes of the workspace of `weight_gradient`, by the sign of its last argument.
WORKSPACE = 12 << 20


@torch.library.custom_op("workspaces::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor, large: bool) -> torch.Tensor:
    return x @ weight.t()


@product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, large: bool) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("workspaces::weight_gradient", mutates_args=())
def weight_gradient(gradient: torch.Tensor, x: torch.Tensor, large: bool) -> torch.Tensor:
    scratch = torch.ones(WORKSPACE if large else 4, dtype=torch.uint8)
    return (gradient.t() @ x).mul_(scratch[0])


@weight_gradient.register_fake
def _(gradient: torch.Tensor, x: torch.Tensor, large: bool) -> torch.Tensor:
    return x.new_empty(gradient.shape[1], x.shape[1])


def _save(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor, bool], output: torch.Tensor) -> None:
    x, weight, ctx.large = inputs
    ctx.save_for_backward(x, weight)


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    x, weight = ctx.saved_tensors
    return gradient @ weight, weight_gradient(gradient, x, ctx.large), None


product.register_autograd(_gradients, setup_context=_save)


class Wide(nn.Module):
    """A small linear layer that is called twice, and a larger one, whose gradient alone can be delayed."""

    def __init__(self, large: bool) -> None:
        super().__init__()
        self.first, self.features = nn.Linear(512, 512), nn.Sequential(nn.Conv2d(2, 64, 3, padding=1), nn.MaxPool2d(4))
        self.second, self.back = nn.Parameter(torch.randn(SIDE, SIDE) / SIDE), nn.Linear(SIDE, 512)
        self.large = large

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.features(self.first(self.first(x)).view(-1, 2, 16, 16)).flatten(1)
        return self.back(product(wide, self.second, self.large))


class Blocks(nn.Module):
    """Blocks after a layer."""

    def __init__(self, large: bool, blocks: int = 2) -> None:
        super().__init__()
        self.inward = nn.Linear(16, 512)
        self.layers = nn.ModuleList(Wide(large) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.slow(but=["large"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_a_gradient_is_delayed_unless_its_measured_workspace_makes_that_dearer(
    large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain, x = Blocks(large), torch.randn(32, 16)
    options: dict[str, Any] = {
        "memory_budget": "100%", "blocks": "layers.*", "mode": EXACT, "loss": loss_of, "effort": "quick"
    }  # fmt: skip
    mine = monet_like.auto_schedule(copy.deepcopy(plain), x, **options)
    plan = monet_like.block_plan(mine)
    for block in blocks_of(mine):
        assert block.record.made_last == (() if large else ("second",))
        call = block._block_call
        assert call.captured.made_last == ("second",) and call.undelayed.made_last == ()
        for name in ("inputs", "tangents", "outputs"):
            assert getattr(call.captured, name) == getattr(call.undelayed, name)
    assert_same_step(plain, mine, x)
    assert measured_peak(mine, x) == pytest.approx(plan.peak_bytes, rel=0.01)
    assert measured_peak(mine, x) <= plan.budget_bytes
    again = monet_like.auto_schedule(copy.deepcopy(plain), x, **options)  # from the cache
    assert [block.record for block in blocks_of(again)] == [block.record for block in blocks_of(mine)]
    assert_same_step(plain, again, x)
    assert_same_step(plain, again, x[:9])  # captured anew, in the same order
