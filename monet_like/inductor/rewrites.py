"""A joint graph as a plan needs it: gradients by two calls, not made from shapes, and laid out as their parameters.

Autograd copies a gradient that has other strides than its parameter (``AccumulateGrad``), after the backward, where no
plan sees it: that of a convolution's weight where images are channels-last and weights are not. So a planned backward
converts it.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._inductor import inductor_prims

from .arguments import gradients_of
from .written import copied_operator

_CONVOLUTION = torch.ops.aten.convolution_backward.default
_CONVERSION = inductor_prims.force_stride_order
#: The results of a convolution's backward: gradients of the input, the weight and the bias.
_INPUT, _WEIGHT = 0, 1
#: On a CPU, the share in all convolutions' inputs and weights from which on a convolution's gradients are two calls.
LARGE = 0.02


def split_convolutions(graph: fx.Graph) -> None:
    """Make the gradients of a convolution's weight and of its input two calls, in this order.

    The first one reads the convolution's input, which can be freed before the gradient of it is made: both often are
    among a step's largest tensors. Libraries compute the two by two kernels in any case, so results are the same bits.
    On a CPU a second call prepares its operands again, a tenth of a millisecond and more: small convolutions keep their
    one call.
    """
    nodes = graph.find_nodes(op="call_function", target=_CONVOLUTION)
    read = {node: sum(given.meta["val"].nbytes for given in node.args[1:3]) for node in nodes}
    least = LARGE * sum(read.values())
    for node in nodes:
        if read[node] < least and node.args[1].meta["val"].device.type == "cpu":
            continue
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem and user.users}
        if {_INPUT, _WEIGHT} <= parts.keys():
            with graph.inserting_before(node):
                weight = _only(graph, node, [False, True, bool(node.args[-1][2])])
                given = _only(graph, node, [True, False, False])
            for place, part in parts.items():
                part.replace_input_with(node, given if place == _INPUT else weight)


def without_shapes(graph: fx.Graph) -> None:
    """Give gradients of average pooling a tensor without memory for the pooled one, whose shape alone they take.

    Inductor's code holds an argument that it never reads until it ends.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.avg_pool2d_backward.default):
        pooled = node.args[1].meta["val"]
        with graph.inserting_before(node):
            zero = graph.call_function(
                torch.ops.aten.full.default, ([], 0), {"dtype": pooled.dtype, "device": pooled.device}
            )
            shape = graph.call_function(torch.ops.aten.expand.default, (zero, [*pooled.shape]))
        zero.meta["val"] = pooled.new_empty(())
        shape.meta["val"] = zero.meta["val"].expand(pooled.shape)
        node.replace_input_with(node.args[1], shape)


def convert_gradients(graph: fx.Graph, forward_count: int, static: Collection[int]) -> None:
    """Give gradients the strides of their parameters.

    Args:
        graph: a joint graph.
        forward_count: how many of its results the forward returns; the others are gradients of its inputs.
        static: places of the inputs that are parameters or buffers.
    """
    inputs = graph.find_nodes(op="placeholder")
    end = graph.output_node()
    results, spec = pytree.tree_flatten(end.args)
    for place, made_at in gradients_of(graph, forward_count).items():
        gradient = results[made_at]
        if place not in static or not isinstance(gradient, fx.Node):
            continue
        parameter, found = inputs[place].meta["val"], gradient.meta.get("val")
        # Of a parameter of DTensor this may be the mesh, or it may be sharded otherwise.
        if not isinstance(found, torch.Tensor) or found.shape != parameter.shape:
            continue
        dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
        strides = (parameter if dense else parameter.contiguous()).stride()
        if any(size != 1 and a != b for size, a, b in zip(found.shape, found.stride(), strides, strict=True)):
            with graph.inserting_after(gradient):
                made = graph.call_function(_CONVERSION, (gradient, tuple(strides)))
            made.meta["val"] = found.new_empty_strided(found.shape, strides)
            results[made_at] = made
    end.args = pytree.tree_unflatten(results, spec)


def keep_before_changes(given: fx.Node) -> None:
    """Have all that reads an input which the forward overwrites read a copy of it.

    PyTorch's own partition saves the input for the backward, which then reads what was written into it: with PyTorch
    2.14.1 gradients are wrong.
    """
    graph, value = given.graph, given.meta["val"]
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        made = graph.call_function(copied_operator(), (given,))
    made.meta["val"] = torch.empty_like(value)
    given.replace_all_uses_with(made, lambda user: user is not made and user.target is not torch.ops.aten.copy_.default)


def is_conversion(node: fx.Node) -> bool:
    """Whether it gives a gradient the strides of its parameter."""
    return node.target is _CONVERSION


def _only(graph: fx.Graph, node: fx.Node, wanted: list[bool]) -> fx.Node:
    """The call for some of its results."""
    made = graph.call_function(_CONVOLUTION, (*node.args[:-1], wanted), dict(node.kwargs))
    made.meta = copy.copy(node.meta)
    results: tuple[Any, ...] = node.meta["val"]
    made.meta["val"] = tuple(result if is_wanted else None for result, is_wanted in zip(results, wanted, strict=True))
    return made
