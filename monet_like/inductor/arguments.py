"""Which inputs of a joint graph are parts of one tensor, and which of its results are an input's gradient.

A parameter of DTensor is two inputs: its local tensor, and its mesh of devices. Where AOTAutograd says which arguments
are parameters, it counts tensors, not their parts; and all parts of a tensor that has no gradient have one result.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch.utils._pytree as pytree
from torch import fx


def inputs_of(graph: fx.Graph, arguments: Collection[int]) -> list[int]:
    """The places of the inputs that are parts of these arguments."""
    number: dict[Any, int] = {}
    tensors = [(place, tensor) for place, (tensor, *_) in enumerate(_inputs(graph)) if not _is_token(tensor)]
    return [place for place, tensor in tensors if number.setdefault(tensor, len(number)) in arguments]


def gradients_of(graph: fx.Graph, forward_count: int) -> dict[int, int]:
    """By the place of an input, the place of its gradient among the results.

    Args:
        forward_count: how many results the forward returns; the others are gradients.
    """
    end = graph.output_node()
    count = len(pytree.arg_tree_leaves(*end.args))
    made = pytree.arg_tree_leaves(*end.meta.get("desc", range(-forward_count, count - forward_count)))
    place_of = {_part(described): place for place, described in enumerate(made) if place >= forward_count}
    return {place: place_of[part] for place, part in enumerate(_inputs(graph)) if part in place_of}


def _inputs(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Of each input the tensor that it is a part of, and which part; if nothing describes it, it is its place."""
    inputs = graph.find_nodes(op="placeholder")
    return [_part(node.meta.get("desc", place)) for place, node in enumerate(inputs)]


def _is_token(described: Any) -> bool:
    """Whether an input says only what has run: AOTAutograd does not count it among the arguments."""
    return "Token" in type(described).__name__


def _part(described: Any) -> tuple[Any, ...]:
    """An input's or a gradient's tensor and part, from what AOTAutograd says of it: alike for both."""
    if hasattr(described, "base"):  # of a subclass of tensors
        return *_part(described.base), getattr(described, "attr", None)
    return (getattr(described, "grad_of", described),)
