"""Keys of a model's calls: what a captured step is of."""

from __future__ import annotations

import weakref
from collections.abc import Container, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from ...capture.checks import acts_as_plain, attributes_of, may_have_gradient
from ...capture.guards.objects import is_small_array
from ...capture.guards.traversal import form_of_plain
from ...errors import UsageError

_training = attrgetter("training")
_looks = attrgetter("shape", "dtype", "requires_grad")


def structure(model: nn.Module) -> Any:
    """A key of a model's structure: modules (weak references), their classes, training flags, and places in each other,
    and shapes and dtypes of their tensors.

    A module that was replaced equals no other one, whatever its address was. Read in every step, so that every line is
    for speed: ``model.modules()`` and ``model.parameters()`` make names, too, and take several times as long.
    """
    modules: list[nn.Module] = [model]
    places = {id(model): 0, id(None): -1}  # all are alive while this runs
    names: list[tuple[str, ...]] = []
    again: list[tuple[int, str, int]] = []  # parts that have another name, too, and those that are None
    tensors: list[torch.Tensor | None] = []
    for module in modules:
        parts = module._modules
        for name, part in parts.items():
            if id(part) in places:
                again.append((len(names), name, places[id(part)]))
            elif part is not None:
                places[id(part)] = len(modules)
                modules.append(part)
        names.append((*parts.keys(),))  # a scripted module's parts are no dict
        tensors += module._parameters.values()
        tensors += module._buffers.values()
    there = [tensor for tensor in tensors if tensor is not None]
    absent = () if len(there) == len(tensors) else tuple(tensor is None for tensor in tensors)
    first: dict[int, int] = {}
    tied = () if len(set(map(id, there))) == len(there) else tuple(first.setdefault(id(t), len(first)) for t in there)
    scattered = () if all(map(torch.Tensor.is_contiguous, there)) else tuple(tensor.stride() for tensor in there)
    looks = tuple(map(_looks, there))
    tree = tuple(map(type, modules)), tuple(names), tuple(again)
    return tuple(map(weakref.ref, modules)), tree, tuple(map(_training, modules)), absent, tied, scattered, looks


def arguments(leaves: Sequence[Any]) -> Any:
    """A key of a call's arguments: how tensors look, which of them are one, and all others as they are.

    Of tensors of classes with rules of their own the class, and of a tensor's Python attributes the names: a forward
    that reads either is refused when it is captured.
    """
    first: dict[int, int] = {}
    described: list[Any] = []
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            described.append((type(leaf), *hashable(leaf)))
            continue
        plain = acts_as_plain(leaf)
        one = first.setdefault(id(leaf), place) if may_have_gradient(leaf) else place
        own = (one, None if plain else type(leaf), attributes_of(leaf))
        lies = leaf.stride() if leaf.layout is torch.strided and not leaf.is_nested else leaf.layout
        shape = None if leaf.is_nested else leaf.shape  # no call with nested tensors is captured
        described.append((*own, shape, leaf.dtype, leaf.device, lies, leaf.requires_grad, leaf.is_leaf))
    return tuple(described)


def without_values(key: tuple[Any, ...], places: Container[int]) -> tuple[Any, ...]:
    """A call's key without the values of some leaves that are no tensors; of what class they are stays."""
    model, leaves, *others = key
    return model, tuple(each[:1] if i in places else each for i, each in enumerate(leaves)), *others


def hashable(leaf: Any) -> tuple[Any, ...]:
    """A hashable key of an argument that is not a tensor."""
    if isinstance(leaf, slice):
        return leaf.start, leaf.stop, leaf.step
    if (form := form_of_plain(leaf)) is not None:
        return form
    if is_small_array(leaf):
        return leaf.shape, leaf.strides, str(leaf.dtype), leaf.tobytes()
    try:
        hash(leaf)
    except TypeError:
        raise UsageError(
            f"an argument of type {type(leaf).__name__} was given, whose changes cannot be followed; give tensors, "
            "numbers, strings, or tuples, lists and dicts of them"
        ) from None
    return (leaf,)
