"""Keys of a model's calls: what a captured step is of."""

from __future__ import annotations

import weakref
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ..errors import UsageError

_training = attrgetter("training")
_looks = attrgetter("shape", "dtype", "requires_grad")


def structure(model: nn.Module) -> Any:
    """A key of a model's structure: modules (weak references), their training flags, and shapes and dtypes of their tensors.

    A module that was replaced equals no other one, whatever its address was. Read in every step, so that every line is
    for speed: ``model.modules()`` and ``model.parameters()`` make names, too, and take several times as long.
    """
    modules: list[nn.Module] = [model]
    seen = {id(model)}  # all are alive while this runs
    tensors: list[torch.Tensor | None] = []
    for module in modules:
        for part in module._modules.values():
            if part is not None and id(part) not in seen:
                seen.add(id(part))
                modules.append(part)
        tensors += module._parameters.values()
        tensors += module._buffers.values()
    there = [tensor for tensor in tensors if tensor is not None]
    absent = () if len(there) == len(tensors) else tuple(tensor is None for tensor in tensors)
    first: dict[int, int] = {}
    tied = () if len(set(map(id, there))) == len(there) else tuple(first.setdefault(id(t), len(first)) for t in there)
    scattered = () if all(map(torch.Tensor.is_contiguous, there)) else tuple(tensor.stride() for tensor in there)
    looks = tuple(map(_looks, there))
    return tuple(map(weakref.ref, modules)), tuple(map(_training, modules)), absent, tied, scattered, looks


def hashable(leaf: Any) -> tuple[Any, ...]:
    """A hashable key of an argument that is not a tensor."""
    if isinstance(leaf, slice):
        return leaf.start, leaf.stop, leaf.step
    try:
        hash(leaf)
    except TypeError:
        raise UsageError(
            f"an argument of type {type(leaf).__name__} was given, whose changes cannot be followed; give tensors, numbers, "
            "strings, or tuples, lists and dicts of them"
        ) from None
    return (leaf,)
