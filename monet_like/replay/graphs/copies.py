"""Copies between the memory of graphs, which every replay overwrites, and tensors that callers hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ...capture.captured import TensorMeta

#: What leaves or enters a graph; None: a gradient that is not there.
Tensors = list[torch.Tensor | None]


class CopiesOut:
    """Copies of tensors at fixed places, into new memory, with the strides of the originals.

    Args:
        found: the originals.
        shared: tensors that lie in one storage do so in the copies, too: results may be written into. A gradient
            becomes a parameter's own ``.grad``, so gradients share nothing.
    """

    def __init__(self, found: Sequence[torch.Tensor | None], *, shared: bool) -> None:
        groups: dict[object, list[int]] = {}
        for place, tensor in enumerate(found):
            if tensor is not None:
                at = tensor.untyped_storage().data_ptr() if shared else 0
                groups.setdefault(at or (place,), []).append(place)
        self._count = len(found)
        self._sources: list[torch.Tensor] = []
        #: By source, the tensors in its copy: place, dtype, and offset, shape and stride. None: the copy is the tensor.
        self._parts: list[tuple[int, list[tuple[int, TensorMeta]] | None]] = []
        for places in groups.values():
            tensors = [(place, tensor) for place in places if (tensor := found[place]) is not None]
            first = tensors[0][1]
            metas = [(place, TensorMeta.of(tensor)) for place, tensor in tensors]
            alone = len(metas) == 1 and metas[0][1].covers_storage and first.nbytes == metas[0][1].storage_bytes
            whole = first if alone else torch.empty(0, dtype=torch.uint8, device=first.device)
            self._sources.append(whole if alone else whole.set_(first.untyped_storage()))
            self._parts.append((metas[0][0], None if alone else metas))
        self._alike = _by_dtype(self._sources)

    def __call__(self) -> Tensors:
        """What lies at the places now."""
        copies = [torch.empty_like(source) for source in self._sources]
        for alike in self._alike:
            torch._foreach_copy_([copies[i] for i in alike], [self._sources[i] for i in alike])
        found: Tensors = [None] * self._count
        for (first, metas), made in zip(self._parts, copies, strict=True):
            if metas is None:
                found[first] = made
                continue
            for place, meta in metas:
                part = torch.empty(0, dtype=meta.dtype, device=made.device)
                found[place] = part.set_(made.untyped_storage(), meta.offset, meta.shape, meta.stride)
        return found


def copy_in(places: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    """Copy what a call is given to where its graphs read it."""
    for alike in _by_dtype(places):
        torch._foreach_copy_([places[i] for i in alike], [given[i] for i in alike])


def _by_dtype(tensors: Iterable[torch.Tensor]) -> list[list[int]]:
    """Positions by dtype: tensors of one dtype are copied by one kernel."""
    found: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        found.setdefault(tensor.dtype, []).append(place)
    return list(found.values())
