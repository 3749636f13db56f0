"""Planning in the middle of a step leaves alone what earlier computations have kept for their own backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import monet_like


class Remembers(nn.Module):
    """Adds what an earlier call has made: an argument, an entry of a dict, or an attribute."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))])
        self.last, self.where = nn.Linear(8, 8), where
        self.earlier: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, cache: dict[str, Any], h: torch.Tensor | None = None) -> Any:
        earlier = {"argument": h, "dict": cache.get("h"), "attribute": self.earlier}[self.where]
        made = self.layers[0](x).sigmoid()
        if earlier is not None:
            made = made * earlier
        if self.where == "dict":
            cache["h"] = made
        if self.where == "attribute":
            self.earlier = made
        return self.last(made), made


def _gradients(model: Any, call: Any) -> list[torch.Tensor]:
    """Of two steps with one backward for three calls, after a layer that is not scheduled."""
    before = nn.Linear(8, 8)
    with torch.no_grad():
        before.weight.copy_(torch.eye(8))
    for step in range(2):
        cache: dict[str, Any] = {}
        model.earlier, h, loss = None, None, torch.zeros(())
        for number in range(3):
            y, h = call(
                before(torch.full((4, 8), 0.1 * step + number)), cache, h if model.where == "argument" else None
            )
            loss = loss + y.square().mean()
        loss.backward()
    parameters = [*before.parameters(), *model.parameters()]
    assert all(type(parameter.grad) is torch.Tensor for parameter in parameters)
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
@pytest.mark.parametrize("where", ["argument", "dict", "attribute"])
def test_one_backward_for_calls_that_read_each_others_results(where: str, blocks: bool) -> None:
    """Each form of the call is planned while the graphs of those before it wait for their backward."""
    plain = Remembers(where)
    mine = copy.deepcopy(plain)
    options: dict[str, Any] = {"blocks": mine.layers} if blocks else {}
    call = monet_like.auto_schedule(mine, memory_budget="1 MB", exact=True, effort="quick", **options)
    torch.manual_seed(0)
    expected = _gradients(plain, plain)
    torch.manual_seed(0)
    found = _gradients(mine, call)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
