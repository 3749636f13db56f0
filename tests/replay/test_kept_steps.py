"""What a wrapper keeps from its calls keeps no model and no result alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_schedule import AnySchedule, step
from nets import rows
from torch import nn


class Keeps(nn.Module):
    """Stores its result, with its graph, in one of several ways."""

    def __init__(self, store: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.layer, self.store, self.held = nn.Linear(8, 8), store, torch.ones(())
        self.history: list[Any] = []
        self.table: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).tanh() * self.held
        self.store(self, y)
        return y


STORES: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "attribute": lambda part, y: setattr(part, "last", y),
    "list": lambda part, y: part.history.__setitem__(slice(None), [y]),
    "dict": lambda part, y: part.table.update(last=y),
    "object": lambda part, y: setattr(part, "last", {"of": [y, part.layer.weight]}),
    "nothing": lambda part, y: None,
}


def model_with(store: str) -> nn.Sequential:
    return nn.Sequential(Keeps(STORES[store]), nn.Linear(8, 8))


@pytest.mark.parametrize("store", STORES)
def test_a_part_that_is_replaced_is_freed_with_its_results(store: str) -> None:
    model = model_with(store)
    called = AnySchedule(model)
    result = step(called, step(called, rows()).detach())
    old = [weakref.ref(each) for each in (model[0], model[0].layer.weight)]
    model[0] = Keeps(STORES[store])
    gc.collect()  # the tracer's cycles
    result = step(called, rows())
    gc.collect()
    assert [each() for each in old] == [None, None]
    assert torch.equal(result, model(rows()))


@pytest.mark.parametrize("store", STORES)
def test_a_model_is_freed_with_its_results_and_its_last_loss_can_still_be_trained(store: str) -> None:
    model = model_with(store)
    called = AnySchedule(model)
    step(called, rows())
    loss = called(rows()).sum()
    old = [weakref.ref(each) for each in (model, model[0])]
    weight, last = model[1].weight, weakref.ref(model[0].layer.weight)
    del called, model
    gc.collect()
    assert [each() for each in old] == [None, None]
    weight.grad = None
    loss.backward(retain_graph=True)
    assert weight.grad is not None
    del loss
    gc.collect()
    assert last() is None
