"""Captures a training step: traces an unmodified ``nn.Module`` and lowers the graph to a `Program`.

PyTorch traces the joint forward and backward graph under fake tensors, so nothing is allocated or computed.
The graph is functional: no operator writes into its inputs. Lowering folds views onto the storage they
alias, separates the forward from the backward, and restores the few places where eager PyTorch does write
in place: batch-norm statistics, and sums of gradients.

Interpreting the captured calls one by one is bit-equal to running the model eagerly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...torch_versions import warn_if_untested
from ..absent_gpu.attention import Absent, attention_as
from ..absent_gpu.choices import convolutions
from ..captured import Captured
from ..checks import (
    check_arguments,
    check_initialized,
    check_momentum,
    check_surroundings,
    check_unscripted,
    check_unsharded,
)
from ..example_inputs import Example
from ..quantised import check_quantised, settle
from ..trace.alone import one_at_a_time
from ..trace.flat_module import FlatModule
from ..trace.graph_edits import move_graph
from ..trace.joint import trace_joint
from ..trace.meta_tensors import as_fakes
from ..trees import flattened, tensors_of
from .inputs import changes_one_given_twice
from .layouts import check_layouts
from .lowering import Lowering


@one_at_a_time
def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: torch.device | None = None,
    processes: int | None = None,
    made_last: Collection[str] | None = (),
    row_major_gradients: bool = False,
    optimizer_in_backward: bool = False,
    attention: str = "",
    capability: tuple[int, int] | None = None,
    channels_last: bool = False,
) -> Captured:
    """Trace one training step of ``model(*args, **kwargs)`` into a `Captured` program.

    The model's train/eval flags, frozen parameters and the caller's autocast state are taken as they are, and so is an
    attribute ``no_dropit`` of its modules, whose layers' inputs are then never dropped.

    Args:
        model: any module whose training step PyTorch can trace without data-dependent control flow.
        args, kwargs: example inputs, real or fake; only shapes, dtypes, layouts and ``requires_grad`` matter.
        target: device to capture for, which need not be present; default: the model's.
        processes: number of processes that share SyncBatchNorm's statistics, to plan without starting them; default:
            those of its process group. Without a group SyncBatchNorm is batch norm.
        made_last: names of the parameters whose gradients are delayed to the end of the backward, where that is
            possible; None: those for which it saves memory.
        row_major_gradients: incoming gradients have row-major layout, as most losses make them, not the results'
            layout.
        optimizer_in_backward: gradients of parameters are freed when they are handed over, by hooks that step. None is
            delayed then.
        channels_last: convolutions take their inputs in this layout, whatever layout those have; results are row-major.

    Raises:
        CaptureError: the step cannot be captured; the message names the operator or the line.
    """
    warn_if_untested()
    check_unscripted(model)
    check_unsharded(model)
    check_initialized(model, planned=target is not None)
    check_momentum(model)
    check_surroundings(model)
    check_arguments(model, flattened((args, dict(kwargs or {})))[0])
    settle(model)
    check_quantised(model, target)
    absent = None if target is None else Absent(target, capability, attention)
    with as_fakes(model, args, kwargs or {}) as given, attention_as("" if absent else attention):
        graph, mode, flat = _traced(
            model, given, absent, processes, row_major_gradients=row_major_gradients, channels_last=channels_last
        )
        if target is not None:
            move_graph(graph, mode, target)
        with convolutions(target or torch.device("cpu")):
            lowering = Lowering(flat, graph, made_last, optimizer_in_backward, moved=target is not None)
            return _without_dropit(lowering.lower(mode), model)


def _traced(
    model: nn.Module,
    given: Example,
    absent: Absent | None,
    processes: int | None,
    *,
    row_major_gradients: bool,
    channels_last: bool,
) -> tuple[fx.Graph, FakeTensorMode, FlatModule]:
    """The joint graph, the mode of its tensors, and the function that was traced."""
    tensors = tuple(tensors_of(given))
    for given_as_one in (False, True):
        flat = FlatModule(model, given, given_as_one=given_as_one, channels_last=channels_last)
        graph, mode = trace_joint(flat, tensors, absent, processes, row_major_gradients=row_major_gradients)
        if not changes_one_given_twice(graph, flat, tensors):
            break
    if channels_last:
        check_layouts(graph)
    return graph, mode, flat


def _without_dropit(captured: Captured, model: nn.Module) -> Captured:
    """``captured`` with the parameters of layers that opted out of DropIT."""
    exact = {id(p) for m in model.modules() if getattr(m, "no_dropit", False) for p in m.parameters()}
    if not exact:
        return captured
    names = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in exact}
    values = frozenset(v for name, v in captured.parameters if name in names)
    undelayed = None if captured.undelayed is None else replace(captured.undelayed, no_dropit=values)
    return replace(captured, no_dropit=values, undelayed=undelayed)
