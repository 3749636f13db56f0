"""Models planned with their convolutions in channels-last layout, where that is taken to be faster."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from monet_like import auto_schedule
from monet_like.auto import whole_plan
from monet_like.compiler import layouts
from monet_like.compiler.request import Request
from monet_like.errors import ProfileError


class Net(nn.Module):
    """A convolution, tokens of its images, with dropout among them if ``drops``, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.drops = nn.Conv2d(3, 4, 3), False

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[N, 3, H, W] to [N, 4]."""
        tokens = self.convolution(images).flatten(2).transpose(1, 2)
        if self.drops:
            tokens = nn.functional.dropout(tokens, 0.5)
        return tokens.square().mean(1)


@pytest.fixture(autouse=True)
def _faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels-last is tried on this device, too, and always faster."""
    monkeypatch.setattr(layouts, "_may_gain", lambda *_: True)
    monkeypatch.setattr(layouts, "WORTH", math.inf)


def step(model: nn.Module, own: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """The result and the gradients of a step with seeded random numbers."""
    own.zero_grad()
    torch.manual_seed(2)
    result = model(images)
    result.sum().backward()
    return [result.detach(), *(parameter.grad.clone() for parameter in own.parameters() if parameter.grad is not None)]


def test_a_run_goes_on_where_a_call_cannot_be_in_the_layout() -> None:
    net, images = Net().double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    wrapped = auto_schedule(net, images, memory_budget="1 GB", effort="quick")
    for drops, larger in ((False, 0), (True, 0), (False, 1), (True, 1), (False, 0)):
        net.drops, given = drops, torch.cat([images, *[images] * larger])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a call is planned anew
            ours = step(wrapped, net, given)
        torch.testing.assert_close(ours, step(net, net, given))
        assert wrapped.record is not None
    assert [record.mode.endswith("_nhwc") for record in wrapped.records] == [True, False, True, False]


def test_what_cannot_be_measured_in_the_layout_is_planned_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = whole_plan.compile_prepared

    def fails(request: Request, *args: Any, **options: Any) -> Any:
        if request.mode.endswith("_nhwc"):
            raise ProfileError("no memory")
        return compiled(request, *args, **options)

    monkeypatch.setattr(whole_plan, "compile_prepared", fails)
    net, images = Net().double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    wrapped = auto_schedule(net, images, memory_budget="1 GB", effort="quick")
    assert wrapped.record is not None and not wrapped.record.mode.endswith("_nhwc")
