"""Plans of the graphs that Inductor makes of a model, without generating code."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from ..capture.example_inputs import Example
from ..inductor.planned_graph import PlannedGraph
from ..replay.verify.steps import train_step


def plan_model(
    model: nn.Module, example: Example, options: dict[str, Any], precision: AbstractContextManager[Any] | None = None
) -> list[PlannedGraph]:
    """Plan the graphs of a model without generating code: one step runs, operator by operator.

    Args:
        model: keeps its parameters; its gradients are dropped.
        example: positional and keyword arguments.
        options: of `monet_like.compile_options`.
        precision: the autocast that the model trains in.
    """
    from torch._inductor.compile_fx import compile_fx

    options["custom_partitioner_fn"].compares = False
    backend = partial(compile_fx, inner_compile=_run_as_it_is, config_patches=options)
    with precision or nullcontext():
        train_step(torch.compile(model, backend=backend), example)
    for parameter in model.parameters():
        parameter.grad = None
    found: list[PlannedGraph] = options["custom_partitioner_fn"].graphs
    return found


def _run_as_it_is(graph: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
    """In the place of Inductor's code generation."""
    from torch._functorch.aot_autograd import make_boxed_func

    return make_boxed_func(graph.forward)
