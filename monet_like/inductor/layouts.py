"""Gradients in the layouts of their parameters.

Autograd copies a gradient that has other strides than its parameter (``AccumulateGrad``), after the backward, where no
plan sees it: that of a convolution's weight where images are channels-last and weights are not. So a planned backward
converts it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._inductor import inductor_prims

_CONVERSION = inductor_prims.force_stride_order


def convert_gradients(graph: fx.Graph, forward_count: int, static: Collection[int]) -> None:
    """Give gradients the strides of their parameters.

    Args:
        graph: a joint graph.
        forward_count: how many of its results the forward returns; the others are gradients of its inputs, in order.
        static: places of the inputs that are parameters or buffers.
    """
    inputs = graph.find_nodes(op="placeholder")
    end = graph.output_node()
    results, spec = pytree.tree_flatten(end.args)
    for place in static:
        gradient = results[forward_count + place] if forward_count + place < len(results) else None
        if not isinstance(gradient, fx.Node):
            continue
        parameter, found = inputs[place].meta["val"], gradient.meta["val"]
        dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
        strides = (parameter if dense else parameter.contiguous()).stride()
        if any(size != 1 and a != b for size, a, b in zip(found.shape, found.stride(), strides, strict=True)):
            with graph.inserting_after(gradient):
                made = graph.call_function(_CONVERSION, (gradient, tuple(strides)))
            made.meta["val"] = found.new_empty_strided(found.shape, strides)
            results[forward_count + place] = made
    end.args = pytree.tree_unflatten(results, spec)


def is_conversion(node: fx.Node) -> bool:
    """Whether it gives a gradient the strides of its parameter."""
    return node.target is _CONVERSION
