"""Whether the convolutions of a net had better compute in channels-last layout: the plain steps of both are priced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..capture.captured import Captured, TensorMeta
from ..capture.precision import layout_of
from ..capture.trees import tensors_of
from ..errors import CaptureError, InfeasibleError, ProfileError
from ..ir.mode import NHWC, parse_mode
from ..variants.calls import HALF
from .prepared import Prepared
from .request import Request, captured_for

#: The layout is changed only for a plain step that takes less than this share of the time: plans of both differ by as
#: much, and measured times, too.
WORTH = 0.97


def in_faster_layout(
    request: Request,
    ready: Prepared,
    device: torch.device,
    prepared_as: Callable[[Request, Captured], Prepared],
) -> tuple[Request, Prepared] | None:
    """The request with the mode word `NHWC`, and its program, if PyTorch's own operators are faster so; else None.

    It is tried on a GPU, for convolutions in 16 bits, which its matrix units compute in this layout, and where only
    rounding tells both apart: the mode has ``conv``, the forward draws no random numbers, and no result is laid out in
    another way. Inductor changes the layout of such nets, too.

    Args:
        prepared_as: the program with its costs.
    """
    if not _may_gain(request, ready.captured, device):
        return None
    other = replace(request, mode=f"{request.mode}_{NHWC}")
    try:
        captured = captured_for(other, other.example)
        if _results(captured) != _results(ready.captured):
            return None
        found = prepared_as(other, captured)
    except (CaptureError, InfeasibleError, ProfileError):
        return None
    return (other, found) if found.plain.seconds < WORTH * ready.plain.seconds else None


def _may_gain(request: Request, captured: Captured, device: torch.device) -> bool:
    words = parse_mode(request.mode)
    if device.type != "cuda" or "conv" not in words or NHWC in words:
        return False
    if any(map(layout_of, (*request.model.parameters(), *tensors_of(request.example)))):
        return False  # the user has chosen
    calls = [call for task in captured.plain.tasks for call in task.calls]
    if any(call.op == "monet_like.get_rng_state" for call in calls):
        return False  # masks are drawn in the order of memory
    convolved = (ref for call in calls if call.op == "aten.convolution.default" for ref in call.outs)
    metas = (captured.metas[ref.name] for ref in convolved if ref and isinstance(ref.name, int))
    return any(meta.dtype in HALF and len(meta.shape) in (4, 5) for meta in metas)


def _results(captured: Captured) -> list[tuple[TensorMeta, TensorMeta | None]]:
    """Dtypes, shapes and layouts of the results and of their incoming gradients."""
    tangents = (None if value is None else captured.metas[value] for value in captured.tangents)
    return [(captured.metas[out.value], tangent) for out, tangent in zip(captured.outputs, tangents, strict=True)]
