"""A model that has parts with schedules is captured as the plain model that it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import rows
from torch import nn

from monet_like import auto_schedule
from monet_like.capture.lower.step import capture
from monet_like.errors import UsageError

OPTIONS: dict[str, Any] = {"memory_budget": "100%", "mode": "inplace_multiway_newnode", "effort": "quick"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.drop = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.drop(self.narrow(self.wide(x).tanh()))


class Model(nn.Module):
    """Asks for a value, so that a plain forward is run before each capture."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return -x if bool((x > 1e3).any()) else x


def planned(make: Callable[[Model], Any]) -> tuple[nn.Module, nn.Module]:
    """A plain model, and one whose parts have schedules that were run once."""
    torch.manual_seed(0)
    plain = Model()
    model = make(copy.deepcopy(plain))
    model(rows(16, 8)).square().mean().backward()
    model.zero_grad()
    return plain, model


def with_a_part(model: Model) -> Model:
    model.layers[0] = auto_schedule(model.layers[0], **OPTIONS)
    return model


WITHIN: dict[str, Callable[[Model], Any]] = {
    "blocks": lambda model: auto_schedule(model, blocks=model.layers, **OPTIONS),
    "a part": with_a_part,
    "blocks that wait": lambda model: model,
}


@pytest.mark.parametrize("within", WITHIN)
def test_a_capture_is_that_of_the_plain_model(within: str) -> None:
    plain, model = planned(WITHIN[within])
    if within == "blocks that wait":
        model = auto_schedule(model, blocks=model.layers, **OPTIONS)
    for count in (16, 12, 24):  # as planned, fewer, more
        wanted, found = capture(plain, (rows(count, 8),)), capture(model, (rows(count, 8),))
        assert found.program == wanted.program
        assert not found.constants.tensors


@pytest.mark.parametrize("within", ["blocks", "a part"])
def test_a_schedule_for_the_whole_takes_their_place(within: str, recwarn: pytest.WarningsRecorder) -> None:
    plain, model = planned(WITHIN[within])
    whole = auto_schedule(model, **OPTIONS)
    results = []
    for called, own in ((plain, plain), (whole, model)):
        torch.manual_seed(1)
        result = called(rows(24, 8))
        result.square().mean().backward()
        results.append([result, *(parameter.grad for parameter in own.parameters())])
    assert all(map(torch.equal, *results))  # type: ignore[arg-type]
    assert whole.record is not None
    assert not [each for each in recwarn if "plan" in str(each.message)]  # nothing was planned within on the way


def test_blocks_of_a_model_that_has_a_schedule_are_refused() -> None:
    model = auto_schedule(Model(), rows(16, 8), **OPTIONS)
    with pytest.raises(UsageError, match=r"has a schedule already, .* take it off first: monet_like\.unwrap"):
        auto_schedule(model, blocks=model.layers, **OPTIONS)
