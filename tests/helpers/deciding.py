"""A module whose forward decides by values of tensors, and inputs by which it decides otherwise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Forward = Callable[..., torch.Tensor]


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


def inputs(count: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs by which the branches above flip, at the third call and again."""
    drawn = [(torch.randn(8, 6), torch.randn(8, 6)) for _ in range(count)]
    return [(x, t.abs() if number % 3 == 2 else t - t.mean() - 0.01) for number, (x, t) in enumerate(drawn)]
