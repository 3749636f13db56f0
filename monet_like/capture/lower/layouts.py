"""Refuses a trace with convolutions in channels-last where that layout decides more than how sums are rounded."""

from __future__ import annotations

import torch
from torch import fx

from ...errors import CaptureError
from ..precision import layout_of
from ..trees import tensors_of
from .rules import is_random


def check_layouts(graph: fx.Graph) -> None:
    """Raise where a graph may compute something else because of its tensors' layout.

    Random numbers are drawn in the order of memory, ``as_strided`` reads by it, and operators from outside PyTorch may.
    Images that are flattened or permuted have no layout with a name, and may be row-major where plain PyTorch's are
    not: only matrices, and one number for each channel, are taken to lie as in plain PyTorch.

    Raises:
        CaptureError: it names the operator.
    """
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        tensors = tensors_of([each.meta.get("val") for each in (*node.all_input_nodes, node)])
        decides = is_random(node) and not all(map(_lies_as_ever, tensors))
        if node.target is torch.ops.aten.as_strided.default or node.target.namespace != "aten":
            decides = decides or any(map(layout_of, tensors))
        if decides:
            raise CaptureError(
                f"{node.target} depends on the order of a tensor's elements in memory, which the mode word nhwc changes"
            )


def _lies_as_ever(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and all(extent == 1 for extent in tensor.shape[2:])
