"""What trainers do around a model: step in the backward, replace parts, use some results, set attributes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from replays import record_for
from torch import nn
from training import twin

from monet_like.auto.auto_schedule import auto_schedule
from monet_like.capture.lower.step import capture
from monet_like.plan import store_all
from monet_like.plan.random_schedules import random_schedule
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.variants import admitted

MODE = "inplace_multiway_newnode"


def wrapped(model: nn.Module, *args: torch.Tensor, drop: float = 0.5) -> ScheduleWrapper:
    """A copy of the model with a schedule that recomputes a share ``drop`` of what it could."""
    model = twin(model)
    captured = admitted(capture(model, args), MODE)
    program = captured.program
    schedule = random_schedule(program, 1, drop=drop, others=0.5) if drop else store_all(program)
    return ScheduleWrapper(
        model, record_for(captured, schedule, MODE, (model, args, {})), captured=captured, example=(args, {})
    )


class Tied(nn.Module):
    """Layers whose weights the backward reads long after their gradients are made."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.c = nn.Linear(8, 8)
        self.c.weight = self.a.weight
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.a(x).relu() * self.b(x).sigmoid())
        return self.c(x).tanh() + self.shift * self.a(x).sin()


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 5),
    )  # fmt: skip


def stepping_in_the_backward(model: nn.Module) -> None:
    """Every parameter steps as soon as its gradient has arrived, and frees it."""

    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-1e-3)
            parameter.grad.zero_()  # whoever still read it would see it
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("drop", [0.0, 0.7])
@pytest.mark.parametrize(("build", "shape"), [(Tied, (5, 8)), (convolutional, (4, 3, 12, 12))])
def test_an_optimizer_in_the_backward_ends_where_plain_pytorch_does(
    build: Callable[[], nn.Module], shape: tuple[int, ...], drop: float
) -> None:
    plain, x = build(), torch.randn(shape)
    mine = wrapped(plain, x, drop=drop)
    for model in (plain, mine):
        stepping_in_the_backward(model)
        for _ in range(4):
            model(x).square().sum().backward()
    assert all(p.isfinite().all() for p in plain.parameters())
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), mine.parameters(), strict=True))


class CountedHead(nn.Linear):
    """Each call sets an attribute of the module and one of its weight."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls, self.weight.used = self.calls + 1, True
        return super().forward(x)


@pytest.mark.slow
@pytest.mark.parametrize("head", [nn.Linear, CountedHead])
def test_replaced_parts_are_never_taken_for_what_they_replaced(head: type[nn.Linear]) -> None:
    """A new head may get the address of the old one."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model.add_module("head", head(8, 8))
    x = torch.randn(4, 8)
    mine = wrapped(model, x)
    for _ in range(12):
        mine.head = head(8, 8)
        gc.collect()
        outputs = mine(x)
        assert torch.equal(outputs, mine._model(x))
        outputs.sum().backward()
        assert mine.head.weight.grad is not None
    assert len(mine._kept) <= 2, "steps of heads that are gone are kept"


class TwoResults(nn.Module):
    """A loss, and an entropy whose gradient is infinite times what has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.own = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.norm(self.body(x)).relu()
        logits = self.head(x)
        rare = (x * 0).sqrt() + self.own(x).relu().sqrt()  # the square root's gradient at zero is infinite
        first, second = (x.exp() + logits).chunk(2, dim=1)
        return {"logits": logits + x, "entropy": rare.sum(dim=1), "first": first.sin(), "second": second.cos()}


@pytest.mark.parametrize("drop", [0.0, 0.7])
def test_what_the_loss_does_not_use_has_no_part_in_the_gradients(drop: float) -> None:
    torch.manual_seed(4)
    plain, x = TwoResults(), torch.randn(7, 6, requires_grad=True)
    mine, y = wrapped(plain, x, drop=drop), x.detach().clone().requires_grad_()
    names = dict(mine.named_parameters())
    for used in (("logits",), ("first",), ("second", "logits"), ("entropy",), ("logits", "first", "second")):
        for model, given in ((plain, x), (mine, y)):
            given.grad = None
            model.zero_grad()
            results = model(given)
            sum(results[name].square().sum() for name in used).backward()
        assert torch.equal(x.grad, y.grad) or used == ("entropy",)
        for name, parameter in plain.named_parameters():
            other = names[name].grad
            assert (parameter.grad is None) == (other is None), (used, name)
            if other is not None:
                torch.testing.assert_close(other, parameter.grad, rtol=0, atol=0, equal_nan=True, msg=f"{used} {name}")


def test_the_unused_part_of_a_backward_is_not_computed() -> None:
    plain, x = TwoResults(), torch.randn(7, 6)
    mine = wrapped(plain, x, drop=0.0)
    (step,) = (each.step for each in mine._kept)
    mine(x)["logits"].sum().backward()
    (partial,) = step._partial.values()
    assert partial.__doc__.count("op_") < step.backward.__doc__.count("op_") - 5


class Sampled(nn.Module):
    """`torch.normal` gives its mean zeros as a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = self.mean(x)
        return torch.normal(mean, 0.1) * self.scale, mean


class SampledOfAMultiple(Sampled):
    """The zeros are multiplied, also by parameters, on their way to where another gradient is missing."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = self.mean(x)
        return torch.normal(mean.sin() * self.scale * torch.arange(4), 0.1) * self.scale, mean


@pytest.mark.parametrize("kind", [Sampled, SampledOfAMultiple])
def test_zeros_are_a_gradient_where_another_is_missing(kind: type[nn.Module]) -> None:
    plain, x = kind(), torch.randn(3, 4)
    mine = wrapped(plain, x, drop=0.7)
    for model in (plain, mine):
        model(x)[0].sum().backward()
    for parameter, other in zip(plain.mean.parameters(), mine.mean.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, other.grad)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature = nn.Linear(4, 4), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) / self.temperature


def test_attributes_set_on_the_wrapper_are_the_models() -> None:
    plain, x = Scaled(), torch.randn(3, 4)
    mine = wrapped(plain, x)
    for model in (plain, mine):
        model.temperature *= 0.5
        model.note = "kept"
    assert mine._model.temperature == 1.0 and mine._model.note == mine.note == "kept"
    assert torch.equal(plain(x), mine(x))
    plain.eval(), mine.eval()
    assert torch.equal(plain(x), mine(x))
    del mine.note
    assert not hasattr(mine._model, "note") and not hasattr(mine, "note")


def test_the_training_flag_is_the_models_too() -> None:
    mine = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), torch.randn(3, 4))
    mine.training = False
    assert not mine._model.training and mine._model.get_submodule("1").training
    mine.train()
    assert mine._model.training


def test_the_wrappers_own_attributes_stay_its_own() -> None:
    mine = wrapped(Scaled(), torch.randn(3, 4))
    mine.backend = "eager"
    mine._library_note = 1
    calls: list[int] = []
    forward = mine.forward
    mine.forward = lambda *args: (calls.append(1), forward(*args))[1]  # as Accelerate does
    mine(torch.randn(3, 4))
    assert calls == [1]
    assert not {"backend", "_library_note", "forward"} & set(mine._model.__dict__)
    again = copy.deepcopy(mine)
    again.temperature = 7.0
    assert (again._model.temperature, mine._model.temperature) == (7.0, 2.0)


def test_a_model_moved_to_another_precision_is_not_trained_in_the_old_one() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    tokens = torch.randint(0, 10, (3, 5))
    mine = auto_schedule(model, tokens, memory_budget="250%")  # the bytes must do for float64, too
    mine(tokens).sum().backward()
    mine.zero_grad()
    mine.to(torch.float64)
    with pytest.warns(UserWarning, match="anew"):
        result: Any = mine(tokens)
    result.sum().backward()
    assert result.dtype == torch.float64
    assert all(p.grad.dtype == torch.float64 for p in mine.parameters())
