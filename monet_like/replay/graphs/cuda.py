"""`cuda_graphs`: has the training steps of a model replayed as CUDA graphs."""

from __future__ import annotations

import torch
from torch import nn

from ...errors import UsageError
from ..wrapper import ScheduleWrapper
from .model import ModelGraphs
from .recorder import CudaRecorder, Recorder


def cuda_graphs(model: nn.Module) -> None:
    """Have a model's training steps replayed as CUDA graphs: one for the forward, one for each segment of the backward.

    For steps that are bound by the host, which needs about 5 us for each kernel: small models, small batches.
    Gradients, buffers and random masks do not change. The first two calls of a form run as usual, and the third is
    captured. Calls of another form run as usual, and so does every call that graphs cannot serve (docs/faq.md, CUDA
    graphs).

    The graphs keep a pool of memory as large as the step needs, between the steps, too. Inputs and incoming gradients
    are copied in; results and gradients are copied out, and lie beside the pool. Not yet run on a real GPU.

    Args:
        model: a `ScheduleWrapper`, or what `monet_like.auto_schedule` returns without ``blocks``; on a CUDA device.

    Raises:
        UsageError: another model, one on another device, or one whose memory is placed (`monet_like.place_memory`).
    """
    if not isinstance(model, ScheduleWrapper) or not model.plans_its_memory:
        raise UsageError(
            f"cuda_graphs was given a {type(model).__name__}; it takes a ScheduleWrapper, or a model of auto_schedule "
            "without blocks"
        )
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    if device.type != "cuda":
        raise UsageError(f"cuda_graphs was given a model on {device}; move it to a CUDA device before")
    if model._arena is not None:
        raise UsageError("cuda_graphs was given a model after place_memory; graphs have a place for each tensor anyway")
    if model._graphs is None:
        model._graphs = ModelGraphs(_recorder)


def _recorder(device: torch.device) -> Recorder | None:
    return CudaRecorder(device) if device.type == "cuda" else None
