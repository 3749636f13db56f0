"""Blocks whose Python code asks for values of tensors: each branch is planned within the block's share of memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from block_models import EXACT, Decoder, Short, assert_same_step, loss_of, measured_peak, tokens
from torch import nn

import monet_like
from monet_like.auto.block import blocks_of
from monet_like.auto.block_calls import plans_of


class Asking(Short):
    """A block that asks its own buffer how to go on; ``wide``: the other way needs more memory."""

    wide = False

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("warm", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.warm > 0:
            return super().forward(x)
        mixed = torch.sigmoid(self.up(x))
        if self.wide:
            mixed = torch.cat([mixed, mixed.sin(), mixed.exp()], -1).reshape(*mixed.shape, 3).cumsum(1).prod(-1)
        return x + self.dropout(self.down(mixed))


class Wide(Asking):
    wide = True


def planned(block: type[nn.Module]) -> tuple[nn.Module, Any]:
    plain = Decoder(block)
    options: dict[str, Any] = {"blocks": "layers.*", "memory_budget": "80%", "mode": EXACT, "effort": "quick"}
    mine = monet_like.auto_schedule(copy.deepcopy(plain), tokens(), loss=loss_of, **options)
    return plain, mine


def answer(models: tuple[nn.Module, ...], warm: int) -> None:
    for model in models:
        for layer in model.layers:  # type: ignore[union-attr]
            layer.warm.fill_(warm)


def test_each_branch_of_a_block_is_planned() -> None:
    """A call that ran as plain PyTorch would be an error here, see pyproject.toml."""
    plain, mine = planned(Asking)
    for warm in (1, 0, 0, 1, 0):
        answer((plain, mine), warm)
        assert_same_step(plain, mine, tokens())
    plans: Any = plans_of(mine)
    for warm in (0, 1):
        answer((mine,), warm)
        assert measured_peak(mine, tokens()) <= plans.plans[0].plan.budget_bytes
    assert all(len(block._kept) == 2 and not block._kept.plain for block in blocks_of(mine))


def test_a_branch_without_a_plan_leaves_the_others_theirs() -> None:
    plain, mine = planned(Wide)
    assert_same_step(plain, mine, tokens())
    answer((plain, mine), 0)
    with pytest.warns(UserWarning, match="no schedule for .* fits what the plan of the whole step leaves to the block"):
        assert_same_step(plain, mine, tokens())
    answer((plain, mine), 1)
    assert_same_step(plain, mine, tokens())
    plans: Any = plans_of(mine)
    assert measured_peak(mine, tokens()) == plans.plans[0].plan.peak_bytes
