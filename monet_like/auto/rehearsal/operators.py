"""What an operator of a step on fake tensors takes and makes, measured on real tensors like its arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...capture.captured import TensorMeta
from ...ops.recurrent import ONEDNN_LAYER, onednn_layer
from ...profile.measure import allocated_peak
from ...runtime.out_of_memory import silent
from ...runtime.questions import Look, made_like

#: Bytes of arguments from which on an operator on a CPU is measured only where it could reach the peak of a stretch.
SMALL_BYTES = 2**24


class NotOnFakes(Exception):
    """Fake tensors do not tell what this step does: it has to be run on real ones."""


@dataclass(frozen=True)
class _Drawn:
    """A generator of random numbers."""

    device: torch.device


@dataclass(frozen=True)
class Operator:
    """An operator on arguments of some sizes, without the arguments.

    Attributes:
        leaves: its arguments, one after the other; a `TensorMeta` in the place of a tensor, `_Drawn` in that of a
            generator.
    """

    func: Any
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    device: torch.device

    @staticmethod
    def of(func: Any, args: Any, kwargs: Any, device: torch.device) -> Operator:
        """The operator of a call on fake tensors."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        return Operator(func, spec, tuple(map(_described, leaves)), device)

    @cached_property
    def touched_bytes(self) -> int:
        """Of the tensors among its arguments."""
        tensors = (each for each in self.leaves if isinstance(each, TensorMeta))
        return sum(math.prod(each.shape) * each.dtype.itemsize for each in tensors)

    @property
    def is_small(self) -> bool:
        """Whether it is measured at once, so that its results lie as real ones do.

        On a GPU all are, which takes milliseconds. Of oneDNN's layers, however large, a fake tensor does not know the
        workspace, which the backward reads.
        """
        return self.device.type != "cpu" or self.touched_bytes < SMALL_BYTES or self.func is ONEDNN_LAYER

    def measured(self) -> Measured:
        """What it takes and makes on real tensors; it runs only the first time."""
        # 1 and 1.0 are equal, and so are 0.0 and -0.0, which does not matter here
        key = (self, torch.get_num_threads(), tuple(map(type, self.leaves)))
        if key not in _measured:
            looks: list[Any] = []
            call = onednn_layer if self.func is ONEDNN_LAYER and torch.is_grad_enabled() else self.func
            with _unobserved(), silent(), torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
                given, named = pytree.tree_unflatten([*map(_alike, self.leaves)], self.spec)
                rise = allocated_peak(lambda: looks.append(looks_of(call(*given, **named))), self.device)
            _measured[key] = Measured(rise, looks[0])
        return _measured[key]


@dataclass(frozen=True)
class Measured:
    """An operator on tensors of some sizes.

    Attributes:
        rise: by how much memory rises while it runs, at most, its results included.
        results: how its results lie.
    """

    rise: int
    results: tuple[Look, ...]


def looks_of(result: Any) -> tuple[Look, ...]:
    tensors = (leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
    return tuple((tuple(t.shape), t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in tensors)


def relaid(func: Any, result: Any, looks: Sequence[Look]) -> Any:
    """Results that lie as those of real tensors do."""
    leaves, spec = pytree.tree_flatten(result)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if len(places) != len(looks) or any(each.alias_info for each in func._schema.returns):
        raise NotOnFakes(f"the results of {func} lie otherwise")
    for place, made in zip(places, made_like(looks, leaves[places[0]]), strict=True):
        leaves[place] = made
    return pytree.tree_unflatten(leaves, spec)


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return TensorMeta.of(leaf)
    return _Drawn(leaf.device) if isinstance(leaf, torch.Generator) else leaf


def _alike(leaf: Any) -> Any:
    """Something of the same kind and size that an operator may read and change."""
    if isinstance(leaf, _Drawn):
        return torch.Generator(leaf.device)
    return made_as(leaf, torch.zeros) if isinstance(leaf, TensorMeta) else leaf


def made_as(meta: TensorMeta, make: Callable[..., torch.Tensor] = torch.empty) -> torch.Tensor:
    """A tensor that lies so, alone in a storage of that size."""
    whole = make(meta.storage_bytes // meta.dtype.itemsize, dtype=meta.dtype, device=meta.device)
    return whole.as_strided(meta.shape, meta.stride, meta.offset)


@contextmanager
def _unobserved() -> Iterator[None]:
    """Run operators for real while a step is counted."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


_measured: dict[Any, Measured] = {}
