"""A module whose forward decides by values of tensors, and inputs by which it decides otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from any_schedule import OrPlain, assert_as_plain, step
from torch import nn

Forward = Callable[..., torch.Tensor]
Given = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Body(nn.Module):
    """Layers with noise, running statistics and a buffer, and a function of them and inputs that decides by values."""

    def __init__(self, decide: Forward) -> None:
        super().__init__()
        self.decide = decide
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.register_buffer("average", torch.zeros(6))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.first(x)))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.decide(self, x, t)


def inputs(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs by which branches flip at every call."""
    drawn = [(torch.randn(8, 6), torch.randn(8, 6)) for _ in range(count)]
    return [(x, t.abs() if number % 2 else t - t.mean() - 0.01) for number, (x, t) in enumerate(drawn)]


def trained(called: nn.Module, model: nn.Module, note: Callable[..., None], given: Given | None = None) -> None:
    """A script of `any_schedule`: steps of SGD, and everything that each changes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for x, t in inputs() if given is None else given:
        optimizer.zero_grad(set_to_none=True)
        note(step(called, x, t), x, t, *(p.grad for p in model.parameters()), *model.buffers())
        optimizer.step()


def said_of_new_answers(decide: Forward, given: Callable[[], Given]) -> str:
    """The one warning of a form that has another answer in every call: a few are captured, then it runs as the plain
    model, and stays exact.
    """

    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        for each in given():
            note(step(called, *each))

    (said,) = assert_as_plain(lambda: Body(decide), script, captures=1 + 8, wrap=OrPlain)
    return said
