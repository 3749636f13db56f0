"""A model under ``torch.compile`` within a plan: its graphs run operator by operator, or by the code of Inductor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from later import Later
from torch import nn

import monet_like
from benchmarks.unrun_kernels import unrun_kernels
from monet_like.export.graph_plans import _run_as_it_is
from monet_like.inductor.planned_graph import PlannedGraph
from monet_like.replay.verify.steps import step_peak, train_step

inductor = Later("torch._inductor.compile_fx")
CPU = torch.device("cpu")
#: Bytes of the loss and its gradient, which no plan counts.
SCALARS = 64


def uncompiled(options: Mapping[str, Any], run: Callable[..., Any] = _run_as_it_is) -> Callable[..., Any]:
    """A backend for ``torch.compile`` with these options of Inductor, which generates no code.

    Args:
        run: makes a function of each graph.
    """
    return partial(inductor.compile_fx, inner_compile=run, config_patches=dict(options))


def planned(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], budget: str | int = "100%"
) -> tuple[PlannedGraph, list[torch.Tensor]]:
    """The plan of a model's graph, and the gradients of `train_step` when it runs operator by operator."""
    options = monet_like.compile_options(budget, quick=True, measured=False)
    torch._dynamo.reset()
    function = torch.compile(model, backend=uncompiled(options), dynamic=False)
    return trained(model, function, inputs, options)


def trained(
    model: nn.Module, function: Any, inputs: tuple[torch.Tensor, ...], options: Mapping[str, Any]
) -> tuple[PlannedGraph, list[torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    train_step(function, (inputs, {}))
    (graph,) = options["custom_partitioner_fn"].graphs
    return graph, [p.grad for p in model.parameters() if p.grad is not None]


def peaks(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], budget: str, measured: bool, **changed: Any
) -> tuple[int, PlannedGraph]:
    """The peak of a step under a plan, by the code of Inductor without its kernels, and the plan.

    Args:
        measured: measure the costs of kernels.
        changed: options in place of ours.
    """
    options = monet_like.compile_options(budget, quick=True, measured=measured)
    torch._dynamo.reset()
    function: Any = torch.compile(model, options={**options, **changed}, dynamic=False)
    with unrun_kernels():
        graph, _ = trained(model, function, inputs, options)
    return step_peak(function, (inputs, {}), CPU), graph
