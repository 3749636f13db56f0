"""Results of operators are taken from the trace where calling them anew would make the same."""

from __future__ import annotations

from operator import attrgetter
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx, nn
from zoo import MODELS

from monet_like.capture.lower.step import capture
from monet_like.capture.lower.values import Values


class _Layouts(nn.Module):
    """A roll, whose result and what is made of it have the input's layout here and not in a trace; and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.first, self.second = nn.Conv2d(6, 4, 1), nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.roll(1, 2)
        others = self.second(self.first(x.mean((2, 3))).tanh()).sigmoid()
        return self.mixed(torch.cat([y, y.flip(1)], 1)), others


_parts = attrgetter("program", "metas", "as_called", "outputs", "parameter_gradients", "layers")


@pytest.mark.parametrize(
    "name",
    [
        "layouts",
        "two_in_two_out",
        "tied",
        "decoder",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("swin", "deeplab")),
    ],
)
def test_programs_are_those_of_operators_that_are_called_anew(name: str) -> None:
    layouts = (_Layouts().train(), (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),), {})
    model, args, kwargs = layouts if name == "layouts" else MODELS[name]()
    taken: list[fx.Node] = []
    own = Values.traced_result

    def noted(self: Values, node: fx.Node) -> Any:
        if (result := own(self, node)) is not None:
            taken.append(node)
        return result

    with mock.patch.object(Values, "traced_result", noted):
        captured = capture(model, args, kwargs)
    with mock.patch.object(Values, "traced_result", return_value=None):
        anew = capture(model, args, kwargs)
    assert _parts(captured) == _parts(anew)
    assert len(taken) > len(captured.program.tasks) / 2
