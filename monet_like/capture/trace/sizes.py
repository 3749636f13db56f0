"""Sizes that depend on values, as of ``nonzero``, ``masked_select``, ``x[mask]`` and ``unique``: answers, see
`answers`.

A trace is given the sizes of a plain forward. Where they depend on what is learned they are others in nearly every
step, and the operator stays one that cannot be traced.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from ...ir.program import Ref
from ...runtime.questions import Look, made_like
from .undone import written_places

#: Operators of which not all tensors decide the size: the arguments that do.
_DECIDING = {
    "aten.index.Tensor": ("indices",),
    "aten.masked_select.default": ("mask",),
    "aten._ctc_loss.Tensor": ("input_lengths", "target_lengths"),
}

#: Such operators that PyTorch does not tag so; the second only with PyTorch 2.11.
_UNTAGGED = ("aten._ctc_loss.Tensor", "aten._unique.default")

_MASKS = (torch.bool, torch.uint8)
_WRITING = ("__setitem__", "index_put", "index_put_")


@cache
def may_decide(func: Any) -> bool:
    """Whether values may decide the size of an operator's result."""
    return torch.Tag.dynamic_output_shape in getattr(func, "tags", ()) or str(func) in _UNTAGGED


def deciding(func: Any, given: Mapping[str, Any]) -> list[torch.Tensor]:
    """The arguments whose values decide the size of the result of an operator of `may_decide`; empty where none do.

    Args:
        given: its arguments by name.
    """
    if given.get("output_size") is not None:
        return []
    leaves = pytree.tree_leaves([given.get(name) for name in _DECIDING.get(str(func), given)])
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [each for each in tensors if each.dtype in _MASKS] if str(func) == "aten.index.Tensor" else tensors


def with_numbers(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a function; of one that writes what has a gradient by masks, with numbers in their place."""
    if getattr(func, "__name__", "") not in _WRITING or len(args) < 3:
        return args
    tensor, index, value, *rest = args
    if not (isinstance(value, torch.Tensor) and value.requires_grad):
        return args
    places: list[Any] = []
    for each in index if isinstance(index, tuple | list) else (index,):
        is_mask = isinstance(each, torch.Tensor) and each.dtype in _MASKS and each.dim() > 0
        places += each.nonzero(as_tuple=True) if is_mask else (each,)
    return tensor, tuple(places), value, *rest


def look_of(tensor: torch.Tensor) -> Look:
    """How a result lies in memory."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes()


def kept(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on the host."""
    with _disable_current_modes(), torch.no_grad():
        return tensor.detach().to("cpu", copy=True)


_library = torch.library.Library("monet_like_trace", "FRAGMENT")  # lives as long as this module
_library.define("sized(Tensor[] tensors, int number, str looks) -> Tensor[]")


def _made(tensors: Sequence[torch.Tensor], number: int, looks: str) -> list[torch.Tensor]:
    found = [(*layout, getattr(torch, dtype), count) for *layout, dtype, count in ast.literal_eval(looks)]
    return made_like(found, tensors[0])


_library.impl("sized", _made, "CompositeExplicitAutograd")
torch.library.register_fake("monet_like_trace::sized", _made, lib=_library)
#: What an operator whose sizes are answers is in a traced graph, with the number of the answer.
SIZED = torch.ops.monet_like_trace.sized.default


def traced(tensors: Sequence[torch.Tensor], number: int, looks: Sequence[Look]) -> list[torch.Tensor]:
    """The results of an operator in a trace."""
    named = [(tuple(shape), tuple(stride), str(dtype).split(".")[1], count) for shape, stride, dtype, count in looks]
    found: list[torch.Tensor] = SIZED(tensors, number, repr(named))
    return found


def numbered(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """An operator's arguments with a `Ref` of its number in the place of each tensor, and the tensors."""
    tensors: list[torch.Tensor] = []

    def place(leaf: Any) -> Any:
        if isinstance(leaf, tuple | list):
            return tuple(map(place, leaf))
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return Ref(len(tensors) - 1)

    return place(tree), tensors


def with_tensors(tree: Any, refs: Sequence[Ref]) -> Any:
    """What `numbered` has taken apart, with ``refs`` in the place of the tensors."""
    if isinstance(tree, tuple):
        return tuple(with_tensors(part, refs) for part in tree)
    return refs[int(tree.name)] if isinstance(tree, Ref) else tree


class Learned:
    """Which tensors of a forward are computed from parameters, or from what requires a gradient."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._storages: dict[int, StorageWeakRef] = {}  # referred to, so that no other has their addresses
        for parameter in parameters:
            self._note(parameter)

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = StorageWeakRef(storage)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is computed so; one without strides counts as such."""
        strided = tensor.layout is torch.strided
        return tensor.requires_grad or not strided or tensor.untyped_storage()._cdata in self._storages

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Follow an operator that was called."""
        read = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not any(map(self.has, read)):
            return
        places = written_places(str(func), getattr(func, "_schema", None))
        written = [args[place] for place in places if place < len(args)]
        for leaf in pytree.tree_leaves((written, list(kwargs.values()) if places else [], result)):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf)
