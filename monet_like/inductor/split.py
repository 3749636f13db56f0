"""Calls as a plan needs them: two gradients by two calls, and no tensor read for its shape alone."""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import fx

_CONVOLUTION = torch.ops.aten.convolution_backward.default
#: The results of a convolution's backward: gradients of the input, the weight and the bias.
_INPUT, _WEIGHT = 0, 1
#: On a CPU, of the inputs and weights of all convolutions, the share from which on a convolution's gradients are two
#: calls.
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
    """Give gradients of average pooling a tensor without memory in place of the pooled one, of which they take the
    shape alone.

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


def _only(graph: fx.Graph, node: fx.Node, wanted: list[bool]) -> fx.Node:
    """The call for some of its results."""
    made = graph.call_function(_CONVOLUTION, (*node.args[:-1], wanted), dict(node.kwargs))
    made.meta = copy.copy(node.meta)
    results: tuple[Any, ...] = node.meta["val"]
    made.meta["val"] = tuple(result if is_wanted else None for result, is_wanted in zip(results, wanted, strict=True))
    return made
