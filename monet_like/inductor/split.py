"""Calls that make two gradients as two calls, so that a plan can free what only one of them reads."""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import fx

_CONVOLUTION = torch.ops.aten.convolution_backward.default
#: The results of a convolution's backward: gradients of the input, the weight and the bias.
_INPUT, _WEIGHT = 0, 1


def split_convolutions(graph: fx.Graph) -> None:
    """Make the gradients of a convolution's weight and of its input two calls, in this order.

    The first one reads the convolution's input, which can be freed before the gradient of it is made: both often are among a
    step's largest tensors. Libraries compute the two by two kernels in any case, so results are the same bits.
    """
    for node in graph.find_nodes(op="call_function", target=_CONVOLUTION):
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem and user.users}
        if {_INPUT, _WEIGHT} <= parts.keys():
            with graph.inserting_before(node):
                weight = _only(graph, node, [False, True, bool(node.args[-1][2])])
                given = _only(graph, node, [True, False, False])
            for place, part in parts.items():
                part.replace_input_with(node, given if place == _INPUT else weight)


def _only(graph: fx.Graph, node: fx.Node, wanted: list[bool]) -> fx.Node:
    """The call for some of its results."""
    made = graph.call_function(_CONVOLUTION, (*node.args[:-1], wanted), dict(node.kwargs))
    made.meta = copy.copy(node.meta)
    results: tuple[Any, ...] = node.meta["val"]
    made.meta["val"] = tuple(result if is_wanted else None for result, is_wanted in zip(results, wanted, strict=True))
    return made
