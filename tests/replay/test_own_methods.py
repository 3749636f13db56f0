"""Methods of every module of which a model has its own form: a wrapper calls the model's, and stays a wrapper."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from any_schedule import AnySchedule
from torch import nn

import monet_like


class Own(nn.Module):
    """Its own `zero_grad`, `state_dict`, `load_state_dict`, `to` and `eval`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.cleared, self.evaluated, self.moved = 0, 0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.cleared += 1
        super().zero_grad(set_to_none)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {f"own.{name}": value for name, value in super().state_dict(*args, **options).items()}

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        return super().load_state_dict({name[4:]: value for name, value in state_dict.items()}, *args, **options)

    def to(self, *args: Any, **options: Any) -> Any:
        self.moved += 1
        return super().to(*args, **options)

    def eval(self) -> Any:
        self.evaluated += 1
        return super().eval()


@pytest.fixture
def wrapped() -> Any:
    return AnySchedule(Own().train())


def test_they_are_the_models(wrapped: Any) -> None:
    wrapped(torch.randn(4, 8)).sum().backward()
    wrapped.zero_grad()
    assert wrapped._model.cleared == 1 and all(p.grad is None for p in wrapped.parameters())
    state = wrapped.state_dict()
    assert set(state) == {f"own.{part}.{name}" for part in ("first", "second") for name in ("weight", "bias")}
    wrapped.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    assert all(not p.any() for p in wrapped._model.parameters())
    assert wrapped.eval() is wrapped and wrapped._model.evaluated == 1 and not wrapped.training


def test_what_returns_the_model_returns_the_wrapper(wrapped: Any) -> None:
    assert wrapped.to("cpu") is wrapped and wrapped._model.moved == 1
    assert wrapped.double() is wrapped and wrapped.first.weight.dtype == torch.float64


def test_those_of_an_instance_count_and_copies_have_theirs(wrapped: Any) -> None:
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        other.zero_grad()
        assert (other._model.cleared, wrapped._model.cleared) == (1, 0)
    wrapped._model.zero_grad = lambda set_to_none=True: "of the instance"
    assert wrapped.zero_grad() == "of the instance"


def test_an_lstm_makes_its_list_of_weights_again() -> None:
    net = nn.LSTM(4, 4, batch_first=True).train()
    wrapped = AnySchedule(net).double()
    assert all(mine is own for mine, own in zip(net._flat_weights, net.parameters(), strict=True))
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    assert torch.equal(wrapped(x)[0], net(x)[0])


def test_a_block_has_those_of_its_module() -> None:
    model: Any = nn.Sequential(Own(), nn.ReLU(), Own()).train()
    monet_like.auto_schedule(
        model, torch.randn(4, 8), memory_budget="200%", effort="quick", blocks=[model[0], model[2]]
    )
    model[0].zero_grad()
    assert (model[0]._model.cleared, model[2]._model.cleared) == (1, 0)
