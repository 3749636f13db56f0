"""Results that do not lie in rows, with gradients in rows or as the results lie: sums have plain PyTorch's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_schedule import assert_as_plain
from torch import nn

TURNED: dict[str, Callable[[torch.Tensor], Any]] = {
    "transposed": lambda x: x.transpose(0, 1).sin(),
    "rotated": lambda x: torch.rot90(x).sin() * 1.5,
    "permuted": lambda x: x.view(5, 67, 3, 3).permute(2, 0, 3, 1).exp(),
    "two": lambda x: (x.t().sin(), torch.sigmoid(x).mul(0.3).movedim(0, 1)),
    "beside one in rows": lambda x: (x.t().tanh(), x.cos()),
}


class _Scaled(nn.Module):
    """A factor, whose gradient is one sum over all elements; that of the input is ready at another time."""

    def __init__(self, turned: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.scale, self.turned = nn.Parameter(torch.ones(())), turned

    def forward(self, x: torch.Tensor) -> Any:
        return self.turned(x * self.scale)


def in_rows(result: torch.Tensor) -> torch.Tensor:
    return (result * torch.cos(torch.arange(result.numel()).reshape(result.shape) * 1.0)).sum()


def as_results(result: torch.Tensor) -> torch.Tensor:
    return result.square().mul(0.7).sum()


@pytest.mark.slow(but=["rotated-in_rows", "transposed-as_results"])
@pytest.mark.parametrize("loss", [in_rows, as_results], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("kind", TURNED)
def test_gradients_of_turned_results_have_plain_pytorchs_bits(
    kind: str, loss: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def script(called: nn.Module, model: nn.Module, note: Callable[..., None]) -> None:
        x = torch.randn(5, 67 * 9, generator=torch.Generator().manual_seed(1), requires_grad=True)
        for _ in range(2):
            results = called(x)
            each = results if isinstance(results, tuple) else (results,)
            torch.stack([loss(result) for result in each]).sum().backward()
            note(x.grad, model.scale.grad)

    for seed in range(3):
        assert_as_plain(lambda: _Scaled(TURNED[kind]), script, captures=1, seed=seed)
