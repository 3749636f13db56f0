"""What a plan of blocks with ``backend="inductor"`` launches on a GPU, counted on the fake one.

`counted` answers ``NAME:SHARE`` about three layers in a row, of a kind of `layers.LAYERS`: each compiled by
``torch.compile`` with this ``activation_memory_budget``, and planned as blocks within the peak of the former.
``NAME:SHARE in TIMES`` has the plan in so many times that peak.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch._functorch.config as functorch_config
from lowered import Counts, lowered, on_gpu, step_bytes
from torch import nn

import monet_like
from monet_like.auto.block import blocks_of

#: Layers in a row.
COUNT = 3


class Stack(nn.Module):
    """Layers in a row; all but the first argument go to each."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *others)
        return x


def counted(asked: str) -> dict[str, Any]:
    """Steps of such layers, counted: see above."""
    name, what = asked.split(":")
    share, _, times = what.partition(" in ")
    model, (x, *others) = _made(name)
    torch._dynamo.reset()
    with lowered() as found, functorch_config.patch(activation_memory_budget=float(share)):
        for layer in model.layers:
            layer.compile(dynamic=False)
        compiled = _counts(found, model, (x, *others))
    budget = int(float(times or 1.0) * compiled.peak_bytes)
    torch._dynamo.reset()
    model, args = _made(name)
    with lowered() as found:
        planned = monet_like.auto_schedule(
            model, args, memory_budget=budget, blocks=list(model.layers), backend="inductor", effort="quick"
        )
        counts = _counts(found, planned, args)
    calls = {step.compiled for block in blocks_of(planned) for step in (kept.step for kept in block._kept)}
    assert None not in calls
    return {
        "compiled": asdict(compiled), "planned": asdict(counts), "budget_bytes": budget,
        "predicted_bytes": blocks_of(planned)[0]._block_plan.peak_bytes,
        "ways": [graph.share for call in calls for graph in call.graphs],
    }  # fmt: skip


def _made(name: str) -> tuple[Stack, tuple[Any, ...]]:
    made = [on_gpu(name) for _ in range(COUNT)]
    return Stack([layer for layer, _ in made]), made[0][1]


def _counts(found: Any, model: nn.Module, args: tuple[Any, ...]) -> Counts:
    peak, saved = step_bytes(model, args)
    return Counts(found.calls, found.kernels, found.moved_bytes, saved, peak, tuple(found.names))
