"""Models of blocks, and a training step of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from brief import be_brief
from torch import nn

from monet_like.auto import block_menus, block_plan, blocks
from monet_like.auto.promise import BlockPlan
from monet_like.capture.precision import autocast_as
from monet_like.compiler import quick
from monet_like.plan.bound import prices as block_bound
from monet_like.plan.ilp import lowest_peak
from monet_like.plan.step import menus as block_points
from monet_like.profile.measure import allocated_peak, have_workspaces
from monet_like.replay.verify.steps import resident_bytes

CPU = torch.device("cpu")
#: Without the words whose variants sum in another order.
EXACT = "inplace_multiway_newnode"
#: Of the shares of `block_points` those that `plan_briefly` leaves.
CARRIED_SHARES = (0.0, 0.5)


class Layer(nn.Module):
    """A decoder layer with causal attention and dropout."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.out(mixed))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Short(nn.Module):
    """A small block with dropout and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


class Decoder(nn.Module):
    """An embedding, blocks and a head.

    Args:
        between: called with what goes from one block to the next.
    """

    def __init__(
        self, block: Callable[[int], nn.Module] = Short, blocks: int = 3, width: int = 32, words: int = 50,
        between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(words, width), nn.LayerNorm(width), nn.Linear(width, words)
        self.layers = nn.ModuleList(block(width) for _ in range(blocks))
        self.between = between

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = self.between(layer(x))
        return self.head(self.norm(x))


def tokens(batch: int = 16, length: int = 32, words: int = 50) -> torch.Tensor:
    return torch.randint(0, words, (batch, length), generator=torch.Generator().manual_seed(3))


def loss_of(result: torch.Tensor) -> torch.Tensor:
    return result.float().square().mean()


def plan_of(model: nn.Module) -> BlockPlan:
    """The plan of a model's blocks, which there is."""
    plan = blocks.block_plan(model)
    assert plan is not None
    return plan


def train(model: nn.Module, x: torch.Tensor, seed: int = 1, autocast: str = "") -> torch.Tensor:
    """One step; the result is held until the backward has ended, as a training loop does.

    Args:
        autocast: the dtype of the forward's; "": as it is where this is called.
    """
    torch.manual_seed(seed)
    with autocast_as(autocast, x.device) if autocast else nullcontext():
        result = model(x)
    loss_of(result).backward()
    return result


def trained(
    model: nn.Module, batches: Iterable[Any], loss: Callable[[Any], torch.Tensor] = lambda result: result
) -> list[torch.Tensor]:
    """Losses, gradients, parameters and buffers of a loop; a batch is the model's only argument, or keywords of it."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    found: list[torch.Tensor] = []
    for batch in batches:
        optimizer.zero_grad()
        value = loss(model(**copy.deepcopy(batch)) if isinstance(batch, dict) else model(batch))
        value.backward()
        optimizer.step()
        found += [value.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return [*found, *(p.detach() for p in model.parameters()), *model.buffers()]


def measured_peak(model: nn.Module, x: torch.Tensor, autocast: str = "") -> int:
    """Bytes that a step needs at most, by the allocator's events; the step before it has captured everything."""
    train(model, x, autocast=autocast)
    model.zero_grad()
    have_workspaces(x.device)
    return resident_bytes(model, ((x,), {})) + allocated_peak(lambda: train(model, x, autocast=autocast), x.device)


def assert_same_step(plain: nn.Module, mine: nn.Module, x: torch.Tensor, seed: int = 1) -> None:
    """Results, gradients and buffers of a step are equal bit by bit."""
    for model in (plain, mine):
        model.zero_grad()
    assert torch.equal(train(plain, x, seed), train(mine, x, seed))
    theirs = dict(plain.named_parameters())
    for name, parameter in mine.named_parameters():
        expected = theirs[name].grad
        assert (parameter.grad is None) == (expected is None), name
        assert expected is None or torch.equal(parameter.grad, expected), name
    for (name, one), other in zip(plain.named_buffers(), mine.buffers(), strict=True):
        assert torch.equal(one, other), name


def plan_briefly(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let this process measure costs and make menus in a second instead of ten.

    Args:
        replace: such as ``monkeypatch.setattr``, which undoes it when a test has ended.
    """
    replace(block_points, "CARRIED_SHARES", CARRIED_SHARES)  # counts, so that a slow machine makes the same menus
    for name, count in (("ROUNDS", 3), ("PARTS", 2)):
        replace(block_bound, name, count)
    replace(lowest_peak, "MOST_COLUMNS", 500)  # of larger programs it takes seconds to find the lowest peak
    for module, name in ((block_menus, "QUICK_SECONDS"), (block_plan, "QUICK_BOUND_SECONDS")):
        replace(module, name, 600.0)
    be_brief(replace)
    for name in ("ALLOWANCE_SECONDS", "LEAST_SECONDS", "RUN_SECONDS"):
        replace(quick, name, 0.1)
