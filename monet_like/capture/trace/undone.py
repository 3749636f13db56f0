"""Runs code and undoes what it changed: tensors that existed before, and random generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..guards.side_effects import generators_restored


class Contents:
    """The contents and version counters of some tensors, and the states of random generators, to be restored."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by storage: all its bytes, and a copy
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep a tensor as it is now, unless it is kept already."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._storages[storage._cdata] = whole, whole.clone()
        self._versions.setdefault(id(tensor), (tensor, tensor._version))

    def keep_generator(self, generator: torch.Generator) -> None:
        """Keep a random generator's state, unless it is kept already."""
        self._generators.setdefault(id(generator), (generator, generator.get_state()))

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of a tensor is kept."""
        return tensor.untyped_storage()._cdata in self._storages

    def restore(self) -> None:
        """Restore everything, version counters too: autograd shall not take a tensor for changed."""
        for whole, copy in self._storages.values():
            whole.copy_(copy)
        for tensor, version in self._versions.values():
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        for generator, state in self._generators.values():
            generator.set_state(state)


class Undone(TorchDispatchMode):
    """Undoes at its end what operators have written into tensors that existed at its beginning, and what was drawn.

    A tensor is copied when it is first written, so that only what changes takes memory.

    Args:
        device: whose generator may be drawn from.
        tensors: leaves of autograd's graph among them stay such leaves.
    """

    def __init__(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._device = device
        self._leaves = [(tensor, tensor.requires_grad) for tensor in tensors if tensor.is_leaf]
        self._contents = Contents()
        self._made: dict[int, None] = {}  # storages that operators have made since

    def __enter__(self) -> Undone:
        self._generators = generators_restored(self._device)
        self._generators.__enter__()
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        with torch.no_grad():
            self._contents.restore()
        for leaf, wanted in self._leaves:
            if leaf.requires_grad is not wanted and leaf.is_leaf:
                leaf.requires_grad_(wanted)
        self._generators.__exit__(None, None, None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        with _disable_current_modes(), torch.no_grad():
            for tensor in _written_by(func, args, kwargs):
                if not self._contents.knows(tensor) and tensor.untyped_storage()._cdata not in self._made:
                    self._contents.keep(tensor)
        for given in (*args, *kwargs.values()):
            if isinstance(given, torch.Generator):
                self._contents.keep_generator(given)
        result = func(*args, **kwargs)
        read = {_storage(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (storage := _storage(leaf)) not in read:
                self._made[storage] = None
        return result


def _storage(tensor: torch.Tensor) -> int:
    return 0 if tensor.layout is not torch.strided else tensor.untyped_storage()._cdata


#: Arguments that a batch norm writes into although its schema does not say so.
_STATISTICS = frozenset({"running_mean", "running_var"})


def written_places(name: str, schema: Any) -> list[int]:
    """Positions of the arguments that an operator writes into. ``schema``: its, or None for one that has none."""
    norm = "batch_norm" in name
    if schema is None:
        return [3, 4] if norm else []  # as `native_batch_norm`
    arguments = enumerate(schema.arguments)
    return [
        place
        for place, argument in arguments
        if (argument.alias_info is not None and argument.alias_info.is_write) or (norm and argument.name in _STATISTICS)
    ]


def _written_by(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments that it writes into."""
    schema: Any = getattr(op, "_schema", None)
    found: list[torch.Tensor] = []
    for place in written_places(schema.name, schema) if schema is not None else ():
        given = args[place] if place < len(args) else kwargs.get(schema.arguments[place].name)
        found += [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    return found
