"""Training loops that yield what each step leaves: for steps whose memory is used again by the next ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from training import tensors

#: More than a step needs before its memory is used again.
STEPS = 7


def images(model: Any, seed: int = 0, rows: int = 0) -> torch.Tensor:
    """Images of the shape that the attribute ``images`` of a model says, or fewer of them."""
    count, *shape = model.images
    return torch.randn(rows or count, *shape, generator=torch.Generator().manual_seed(seed))


def called(model: nn.Module, number: int, *, fewer: bool = False) -> Any:
    """The results of a step with random masks and images of its own; ``fewer``: of three quarters of them."""
    torch.manual_seed(number)
    return model(images(model, number, model.images[0] * 3 // 4 if fewer else 0))  # type: ignore[index]


def loss_of(results: Any) -> torch.Tensor:
    first, *others = tensors(results)
    return sum((one.sin().sum() for one in others), first.square().mean())


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def state(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def accumulated(model: nn.Module) -> Iterator[torch.Tensor]:
    for number in range(STEPS + 1):
        loss_of(called(model, number)).backward()
        yield from gradients(model)
        if number % 2:
            model.zero_grad(set_to_none=number % 4 == 1)


def everything_kept(model: nn.Module) -> Iterator[torch.Tensor]:
    """Results and gradients themselves: their places are taken when the next step wants them."""
    for number in range(STEPS):
        results = called(model, number)
        loss_of(results).backward()
        yield from (*tensors(results), *(p.grad for p in model.parameters() if p.grad is not None))
        model.zero_grad()


def two_forwards(model: nn.Module) -> Iterator[torch.Tensor]:
    for number in range(STEPS):
        loss = loss_of(called(model, number)) * loss_of(called(model, number + 1))
        loss.backward()
        yield from (loss.detach(), *gradients(model), *state(model))
        model.zero_grad()


def smaller_batches(model: nn.Module) -> Iterator[torch.Tensor]:
    for number in range(12):
        loss_of(called(model, number, fewer=number % 4 == 3)).backward()
        yield from (*gradients(model), *state(model))
        model.zero_grad()


def failing_in_between(model: nn.Module) -> Iterator[torch.Tensor]:
    def fail(grad: torch.Tensor) -> None:
        raise ValueError("in the middle of the backward")

    for number in range(STEPS + 1):
        hook = model.second.weight.register_hook(fail) if number == 4 else None  # type: ignore[union-attr, operator]
        results = called(model, number)
        yield from (result.detach().clone() for result in tensors(results))
        try:
            loss_of(results).backward()
            yield from gradients(model)
        except ValueError:  # some parameters have theirs, in an order that is each model's own
            assert hook is not None
            hook.remove()
        model.zero_grad()


#: Of every kind of model.
TRAINERS = [accumulated, everything_kept, two_forwards, smaller_batches, failing_in_between]
