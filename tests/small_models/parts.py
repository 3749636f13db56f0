"""Custom functions, hooks and result classes that the code of small models imports."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

__all__ = [
    "Cubed", "Doubled", "F", "Halves", "Named", "Noisy", "NoisyBackward", "Record", "Reversed", "SimpleNamespace",
    "Straight", "add_tenth", "halve_output", "nn", "random", "scale_gradient", "shift_input", "torch",
]  # fmt: skip


class Named(NamedTuple):
    """A result with two names."""

    first: Any
    second: Any


@dataclass
class Record:
    """A result that PyTorch's pytree does not know."""

    first: Any
    second: Any = None


class Cubed(torch.autograd.Function):
    """x³, with its input and a number saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * (3 * ctx.factor) * x * x, None


class Halves(torch.autograd.Function):
    """Two results, the second of them saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = x.tanh(), x.sigmoid()
        ctx.save_for_backward(low, high)
        return low, high

    @staticmethod
    def backward(ctx: Any, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        low, high = ctx.saved_tensors
        return one * (1 - low * low) + other * high * (1 - high)


class Noisy(torch.autograd.Function):
    """Noise drawn in the forward and used in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand_like(x)
        ctx.save_for_backward(noise)
        return x * noise

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0]


class NoisyBackward(torch.autograd.Function):
    """Noise drawn in the backward and used twice there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        noise = torch.rand_like(gradient) + 0.5
        return gradient * y * noise, gradient * x * noise


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is reversed and scaled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return -ctx.factor * gradient, None


class Straight(torch.autograd.Function):
    """Rounding with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Doubled(torch.autograd.Function):
    """Doubles its input in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


def shift_input(module: nn.Module, args: Any) -> Any:
    """A forward pre-hook."""
    return (args[0] + 0.125, *args[1:])


def halve_output(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook."""
    return output * 0.5


def scale_gradient(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    """A full backward hook."""
    return tuple(None if g is None else g * 0.75 for g in grad_input)


def add_tenth(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A hook of a tensor or a parameter; a schedule calls it with None where no gradient arrives."""
    return None if gradient is None else gradient + 0.1 * gradient.abs()
