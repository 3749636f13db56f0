"""What a plan of blocks with ``backend="inductor"`` launches on a GPU, counted on the fake one.

`counted` answers ``NAME:SHARE`` about three layers in a row, of a kind of `layers.LAYERS`: each compiled by
``torch.compile`` with this ``activation_memory_budget``, and planned as blocks within the peak of the former.
``NAME:SHARE in TIMES`` has the plan in so many times that peak, and with ``MODE`` after it in a mode of variants.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
from lowered import Counts, lowered, on_gpu, step_bytes, timed_by_rates
from torch import nn

import monet_like
from monet_like.auto import offloaded
from monet_like.auto.block import blocks_of

#: Layers in a row.
COUNT = 3
#: Bytes a second of the link to the host, each way.
HOST_RATE = 50e9


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
    share, _, wanted = what.partition(" in ")
    times, _, mode = wanted.partition(" ")
    model, (x, *others) = _made(name)
    torch._dynamo.reset()
    with lowered() as found, functorch_config.patch(activation_memory_budget=float(share)):
        for layer in model.layers:
            layer.compile(dynamic=False)
        compiled = _counts(found, model, (x, *others))
    budget = int(float(times or 1.0) * compiled.peak_bytes)
    torch._dynamo.reset()
    model, args = _made(name)
    with lowered() as found, timed_by_rates(), mock.patch.object(offloaded, "host_rate", return_value=HOST_RATE):
        planned = monet_like.auto_schedule(
            model, args, memory_budget=budget, blocks=list(model.layers), backend="inductor", effort="quick",
            **({"mode": mode} if mode else {}),
        )  # fmt: skip
        counts = _counts(found, planned, args)
    calls = {step.compiled for block in blocks_of(planned) for step in (kept.step for kept in block._kept)}
    assert None not in calls
    plan = blocks_of(planned)[0]._block_plan
    assert plan is not None
    return {
        "compiled": asdict(compiled), "planned": asdict(counts), "budget_bytes": budget,
        "predicted_bytes": plan.peak_bytes, "offloaded": [point.offloaded_bytes for point in plan.points],
        "seconds": plan.seconds, "pinned_bytes": torch.cuda.host_memory_stats()["active_bytes.peak"],
        "ways": [graph.share for call in calls for graph in call.graphs],
    }  # fmt: skip


def _made(name: str) -> tuple[Stack, tuple[Any, ...]]:
    made = [on_gpu(name) for _ in range(COUNT)]
    return Stack([layer for layer, _ in made]), made[0][1]


def _counts(found: Any, model: nn.Module, args: tuple[Any, ...]) -> Counts:
    peak, saved = step_bytes(model, args)
    return Counts(found.calls, found.kernels, found.moved_bytes, saved, peak, tuple(found.names))
