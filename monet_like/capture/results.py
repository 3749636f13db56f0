"""Dataclasses among a model's results: takes them apart for PyTorch's pytree, and puts them together again."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.utils._pytree as pytree


@dataclasses.dataclass(frozen=True, slots=True)
class _Fields:
    """The fields of a dataclass's instance, as PyTorch's pytree sees them in the place of the instance.

    The user's own class is not registered there, so that it stays a leaf in the user's own pytrees.
    """

    kind: type
    fields: dict[str, Any]


def _apart(found: _Fields) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    return list(found.fields.values()), (found.kind, tuple(found.fields))


def _together(values: Any, context: tuple[type, tuple[str, ...]]) -> Any:
    """An instance with these fields; its class's own ``__init__`` and ``__post_init__`` ran when the forward made it."""
    kind, names = context
    made: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(_Fields, _apart, _together, serialized_type_name="monet_like.capture.results.fields")


def without_dataclasses(result: Any) -> Any:
    """A forward's result with `_Fields` for every instance of a dataclass that pytree does not know."""

    def replaced(leaf: Any) -> Any:
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        fields = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf) if hasattr(leaf, f.name)}
        return _Fields(type(leaf), {name: without_dataclasses(value) for name, value in fields.items()})

    return pytree.tree_map(replaced, result)
