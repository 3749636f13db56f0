"""Operators of users' libraries that autograd does not know."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import monet_like
from monet_like.errors import CaptureError


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    """``scaled`` has no autograd kernel: PyTorch warns, and the gradient is that of what its kernel calls."""
    with torch.library._scoped_library("monet_like_tests", "DEF") as made:
        made.define("scaled(Tensor x) -> Tensor")
        made.impl("scaled", lambda x: 2 * x, "CPU")
        made.impl("scaled", torch.empty_like, "Meta")
        yield made


class Scales(nn.Module):
    def __init__(self, *, wants_gradient: bool) -> None:
        super().__init__()
        self.wants_gradient, self.linear = wants_gradient, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        with torch.set_grad_enabled(self.wants_gradient):
            scaled = torch.ops.monet_like_tests.scaled(hidden)
        return hidden + scaled


def test_a_gradient_through_it_is_refused(library: torch.library.Library) -> None:
    with pytest.raises(CaptureError, match=r"monet_like_tests\.scaled has no autograd kernel, and a gradient should"):
        monet_like.problem(Scales(wants_gradient=True), torch.randn(4, 8), device="roofline:cpu").plan("100%")


def test_without_a_gradient_it_is_captured(library: torch.library.Library) -> None:
    model, x = Scales(wants_gradient=False), torch.randn(4, 8)
    model(x).sum().backward()
    expected = model.linear.weight.grad
    model.zero_grad()
    wrapped = monet_like.auto_schedule(model, x, memory_budget="1 MB", exact=True, effort="quick")
    wrapped(x).sum().backward()
    assert torch.equal(model.linear.weight.grad, expected)
