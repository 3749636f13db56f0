"""Blocks whose inputs and results are changed in place after them, as by ``x += block(x)``: plain PyTorch allows it if
it has not saved them, and a schedule may keep more.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from block_models import EXACT, Layer, assert_same_step, loss_of, measured_peak, plan_of, tokens
from torch import nn

import monet_like
from monet_like.auto import block_plan
from monet_like.auto.block import blocks_of

X = tokens(32, 64)


class Dropped(nn.Module):
    """A block that saves a mask and not its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dropout, self.layer = nn.Dropout(0.1), Layer(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(self.dropout(x))
        return y


class Leaky(nn.Sequential):
    """A block that saves what its result was made of, and not its result; a schedule may keep the result instead."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.LayerNorm(width), nn.LeakyReLU(0.1))


def residual(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x += block(x)
    return x


def in_the_result(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = block(x)
    y += x
    return y


def later(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = block(x)
    z = y.sigmoid()
    x.mul_(0.5)
    y.add_(x)
    return y + z


class Net(nn.Module):
    def __init__(self, block: Callable[[int], nn.Module], joined: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
        self.layers, self.joined = nn.ModuleList(block(32) for _ in range(3)), joined

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = self.joined(layer, x)
        return self.head(x)


@pytest.mark.slow(every=2)
@pytest.mark.parametrize(
    ("words", "block", "joined", "budget"),
    [
        ("", Dropped, residual, "85%"), ("_offload", Dropped, residual, "100%"),
        ("_offload", Leaky, in_the_result, "85%"), ("_offload", Dropped, later, "85%"),
        ("", Dropped, in_the_result, "85%"), ("", Leaky, in_the_result, "100%"), ("", Dropped, later, "100%"),
    ],
)  # fmt: skip
def test_steps_are_exact_and_need_what_is_predicted(words: str, block: Any, joined: Any, budget: str) -> None:
    plain = Net(block, joined)
    options: dict[str, Any] = {"mode": EXACT + words, "loss": loss_of, "effort": "quick", "blocks": "layers.*"}
    mine = monet_like.auto_schedule(copy.deepcopy(plain), X, memory_budget=budget, **options)
    for seed in (1, 2):
        assert_same_step(plain, mine, X, seed)
    plan = plan_of(mine)
    assert 0.97 * plan.peak_bytes <= measured_peak(mine, X) <= plan.peak_bytes


def test_a_copy_is_made_of_what_is_kept_and_changed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of inputs of all blocks with a residual connection; and none where nothing is changed."""
    kinds: list[Any] = []
    own = block_plan.kinds_of
    monkeypatch.setattr(block_plan, "kinds_of", lambda *given: kinds.append(own(*given)) or kinds[-1])
    for joined in (residual, lambda block, x: x + block(x)):
        model = monet_like.auto_schedule(
            Net(Dropped, joined), X, memory_budget="70%", mode=EXACT, loss=loss_of, effort="quick", blocks="layers.*"
        )
        changed = [block._block_changed for block in blocks_of(model)]
        assert all(each.inputs == ((0,) if joined is residual else ()) for each in changed)
        assert not any(each.results for each in changed[:-1])
    assert all(kind.changed for kind in kinds[0]) and not any(kind.changed for kind in kinds[1])
