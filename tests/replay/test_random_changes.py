"""A model that is changed at random between its calls: what a user sees is what plain PyTorch does."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_schedule import assert_as_plain
from nets import linear, rows
from torch import nn
from torch.nn.utils import parametrize, prune


class Model(nn.Module):
    """Layers with buffers, noise, shared weights, branches, numbers, and constants that are not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = linear(), linear(), nn.BatchNorm1d(8)
        self.drop, self.branches = nn.Dropout(0.3), nn.ModuleList([nn.Tanh(), linear()])
        self.tail = nn.Sequential(linear(), nn.Sigmoid(), linear())
        self.register_buffer("mean", torch.zeros(8))
        self.scale, self.table, self.constant = 1.5, {"power": 1}, torch.linspace(-1, 1, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor, shift: float = 0.0) -> dict[str, Any]:
        h = self.drop(self.norm(self.first(x))) - self.mean
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        for number, branch in enumerate(self.branches):
            h = h + branch(h).tanh() * (number + self.scale)
        h = self.second(h) * self.constant + (y if x is y else self.first(y)) + shift
        kept = h.detach().abs().sum(1).topk(2).indices
        return {"result": self.tail(h) ** self.table["power"], "kept": kept, "rows": len(h)}


def replace_weight(model: Model, rng: random.Random) -> None:
    model.second.weight = nn.Parameter(torch.full((8, 8), rng.random()))


def toggle_hook(model: Model, rng: random.Random) -> None:
    hooks = model.first._forward_hooks
    if hooks:
        hooks.clear()
    else:
        model.first.register_forward_hook(lambda module, args, result: result * 1.5)


def toggle_parametrization(model: Model, rng: random.Random) -> None:
    if parametrize.is_parametrized(model.tail[0]):
        parametrize.remove_parametrizations(model.tail[0], "weight")
    else:
        nn.utils.parametrizations.weight_norm(model.tail[0])


def toggle_mask(model: Model, rng: random.Random) -> None:
    if prune.is_pruned(model.tail[2]):
        prune.remove(model.tail[2], "bias")
    else:
        prune.l1_unstructured(model.tail[2], "bias", 3)


def swap_branches(model: Model, rng: random.Random) -> None:
    model.branches[0], model.branches[1] = model.branches[1], model.branches[0]


def tie(model: Model, rng: random.Random) -> None:
    tied = model.second.weight is model.first.weight
    model.second.weight = nn.Parameter(model.first.weight.detach().clone()) if tied else model.first.weight


def load(model: Model, rng: random.Random) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=rng.random() < 0.5)


def freeze(model: Model, rng: random.Random) -> None:
    parameter = rng.choice([*model.parameters()])
    parameter.requires_grad_(not parameter.requires_grad)
    if not any(p.requires_grad for p in model.parameters()):
        parameter.requires_grad_(True)


def turn(model: Model, rng: random.Random) -> None:
    module = rng.choice([*model.modules()][1:])
    module.train(not module.training)


CHANGES: list[Callable[[Model, random.Random], Any]] = [
    freeze, turn, load, tie, swap_branches, toggle_mask, toggle_parametrization, toggle_hook, replace_weight,
    lambda model, rng: setattr(model, "scale", rng.choice([0.5, 2, 2.0, -0.0])),
    lambda model, rng: model.table.update(power=rng.choice([1, 2, 3])),
    lambda model, rng: setattr(model.drop, "p", rng.choice([0.0, 0.3, 1.0])),
    lambda model, rng: setattr(model, "mean", torch.full((8,), rng.random())),
    lambda model, rng: setattr(model, "constant", torch.full((8,), rng.random())),
    lambda model, rng: model.constant.mul_(rng.random()),
    lambda model, rng: setattr(model.norm, "momentum", rng.choice([0.1, 0.9, 1.0])),
    lambda model, rng: setattr(model.tail, "1", rng.choice([nn.ReLU(), nn.Sigmoid(), model.branches[0]])),
    lambda model, rng: setattr(model.branches, "1", model.second),
    lambda model, rng: model.branches.append(model.tail[0]) if len(model.branches) < 4 else model.branches.pop(-1),
]  # fmt: skip


def train(called: nn.Module, rng: random.Random, note: Callable[..., None]) -> None:
    """One or two calls, and their backward in one of the ways in which users run it."""
    x = rows(rng.choice([4, 6]), 8).requires_grad_(rng.random() < 0.3)
    y = x if rng.random() < 0.3 else rows(len(x), 8) * 2
    given = called(x, y, *rng.choice([(), (0.5,)]))
    other = called(y, x)["result"] if rng.random() < 0.2 else None
    note(given["kept"], given["result"], given["rows"])
    loss = given["result"].square().sum()
    if other is not None:  # the later call's backward comes first
        other.square().sum().backward()
    if rng.random() < 0.2:
        torch.manual_seed(rng.randrange(100))
    way = rng.random()
    parameters = [p for p in called.parameters() if p.requires_grad]
    if way < 0.2:
        note(torch.autograd.grad(loss, rng.sample(parameters, 1), allow_unused=True))
    else:
        loss.backward(retain_graph=way < 0.4, inputs=parameters if way > 0.8 else None)
        if way < 0.4:
            (loss * 2).backward()
    note(x.grad, torch.rand(1))
    if rng.random() < 0.3:
        with torch.no_grad():
            note(called(x, y)["result"])


def random_script(seed: int, changes: int) -> Callable[..., None]:
    """A script that changes a model at random, and trains it after each change."""

    def script(called: nn.Module, model: Any, note: Callable[..., None]) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        for _ in range(changes):
            train(called, rng, note)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=1e-3)
            if rng.random() < 0.6:
                model.zero_grad(set_to_none=rng.random() < 0.5)
            rng.choice(CHANGES)(model, rng)
        train(called, rng, note)

    return script


#: Orders of changes that are tried.
SEEDS = int(os.environ.get("MONET_LIKE_RANDOM_CHANGES", "4"))


@pytest.mark.slow(but=["0"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_model_that_changes_between_its_calls(seed: int) -> None:
    assert_as_plain(Model, random_script(seed, 2 if seed == 0 else 8), seed=seed)
