"""Buffers that have gradients, as the zero in which vector-quantize-pytorch begins a loss, and buffers in whose
``.grad`` libraries gather what they add later.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from any_schedule import OrPlain
from torch import nn

from monet_like.capture.lower.step import capture

X = torch.linspace(-1, 1, 24).view(3, 8)


class Scaled(nn.Module):
    """A layer whose results are scaled by a buffer.

    Args:
        begins: whether the buffer requires a gradient from the beginning.
        makes: whether the forward has it require one.
        asks: for a value of a tensor, which a plain forward answers.
    """

    def __init__(self, *, begins: bool = False, makes: bool = False, asks: bool = False) -> None:
        super().__init__()
        self.layer, self.makes, self.asks = nn.Linear(8, 8), makes, asks
        self.register_buffer("scale", torch.ones(8, requires_grad=begins))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale
        if self.asks and bool((x > 100).any()):
            x = x / 100
        if self.makes:
            scale.requires_grad_()
        return (self.layer(x) * scale).tanh()


class Gathering(nn.Module):
    """A moving average, to which is added what was gathered in the ``.grad`` of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        gathered = self.mean.grad
        self.mean.lerp_(y.detach().mean(0) if gathered is None else gathered, 0.1)
        return y.tanh() - self.mean


def trained(model: nn.Module, called: nn.Module, between: Callable[[int], None]) -> list[torch.Tensor | None]:
    """Gradients of a few calls, of parameters and buffers; and the buffers."""
    found: list[torch.Tensor | None] = []
    for step in range(4):
        between(step)
        called(X + step).sum().backward()
        for tensor in (*model.parameters(), *model.buffers()):
            found += [tensor.detach().clone(), None if tensor.grad is None else tensor.grad.clone()]
    return found


def assert_trains_alike(model: nn.Module, between: Callable[[nn.Module, int], None] = lambda model, step: None) -> None:
    plain = copy.deepcopy(model)
    wanted = trained(plain, plain, lambda step: between(plain, step))
    assert any(gradient is not None for gradient in wanted[1::2])
    found = trained(model, OrPlain(model), lambda step: between(model, step))
    for ours, own in zip(found, wanted, strict=True):
        assert (ours is None) == (own is None)
        assert ours is None or torch.equal(ours, own)


@pytest.mark.parametrize("asks", [False, True], ids=["", "asks for values"])
@pytest.mark.parametrize("made", ["begins", "makes"])
def test_buffers_that_require_gradients_get_them(made: str, asks: bool) -> None:
    assert_trains_alike(Scaled(**{made: True}, asks=asks))


def test_a_buffer_that_requires_a_gradient_from_some_call_on_gets_it() -> None:
    assert_trains_alike(Scaled(), lambda model, step: model.scale.requires_grad_(step > 1))  # type: ignore[union-attr]


@pytest.mark.parametrize("asks", [False, True], ids=["", "asks for values"])
def test_a_capture_leaves_a_buffer_as_it_is(asks: bool) -> None:
    model = Scaled(makes=True, asks=asks)
    assert capture(model, (X,)).buffers_made_to_require
    assert not model.scale.requires_grad


def test_a_copy_trains_by_the_step_of_the_first() -> None:
    """A buffer requires no gradient before the first call of the copy, either."""
    called = OrPlain(Scaled(makes=True))
    twin = copy.deepcopy(called)
    called(X).sum().backward()
    called.scale.requires_grad_(False)
    called.scale.grad = None
    for each in (called, twin):
        each(X).sum().backward()
        assert each.scale.grad is not None


def test_a_buffer_without_grad_may_be_asked_for_it() -> None:
    assert_trains_alike(Gathering())


def test_a_grad_that_is_gathered_between_calls_is_seen() -> None:
    """The call is plain PyTorch's then, since what is gathered changes with every call."""

    def between(model: nn.Module, step: int) -> None:
        model.mean.grad = torch.ones(8) * step if step == 2 else None  # type: ignore[union-attr]

    with pytest.warns(UserWarning, match="Gathering runs as plain PyTorch"):
        assert_trains_alike(Gathering(), between)
