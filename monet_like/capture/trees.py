"""Arguments and results as trees of tensors: PyTorch's pytree, and objects that hold tensors, such as dataclasses.

An object of a class that pytree does not know counts as a node if it holds a tensor: in its attributes, in slots, or as
a dict or list of a class of its own. A user's class is never registered in PyTorch's pytree, where it would stay a node
for everybody.
"""

from __future__ import annotations

import contextlib
import enum
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

#: In an object that is made of more parts than this, tensors are not searched for.
_SEARCHED = 2000
_ABSENT = object()
_WRITTEN_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE
_ATOMS = (
    torch.Tensor,
    nn.Module,
    enum.Enum,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
)
_PLAIN = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size})


@dataclass(frozen=True, slots=True)
class _Fields:
    """The parts of an object, as PyTorch's pytree sees them in the place of the object."""

    kind: type
    fields: dict[Any, Any]


@dataclass(frozen=True)
class _Again:
    """An object that occurs earlier in the tree, too: the ``number``-th of those taken apart."""

    number: int


def _apart(found: _Fields) -> tuple[list[Any], tuple[type, tuple[Any, ...]]]:
    return list(found.fields.values()), (found.kind, tuple(found.fields))


def _bare(kind: Any) -> Any:
    """An object of a class, on which no ``__init__`` ran."""
    base: Any = next(base for base in kind.__mro__ if not base.__flags__ & _WRITTEN_IN_PYTHON)
    return base.__new__(kind)


def _together(values: Any, context: tuple[type, tuple[Any, ...]]) -> Any:
    """An object with these parts; its class's own ``__init__`` and ``__post_init__`` ran when the forward made it."""
    kind, labels = context
    parts = dict(zip(labels, values, strict=True))
    if issubclass(kind, tuple):
        items = [parts.pop(label) for label in labels if label[0] == "item"]
        made: Any = tuple.__new__(kind, items)
    else:
        made = _bare(kind)
    for label, value in parts.items():
        _put(made, label, value)
    return made


pytree.register_pytree_node(_Fields, _apart, _together, serialized_type_name="monet_like.capture.trees.fields")


def is_written_in_python(kind: type) -> bool:
    """Whether a class and its bases were made by ``class`` statements, so that only Python code reads their objects."""
    return all(base.__flags__ & _WRITTEN_IN_PYTHON and not base.__flags__ & _IMMUTABLE for base in kind.__mro__[:-1])


def _attributes(owner: Any) -> dict[str, Any]:
    return object.__getattribute__(owner, "__dict__") if getattr(type(owner), "__dictoffset__", 0) else {}


def _put(owner: Any, label: Any, value: Any) -> None:
    kind, name = label
    if kind == "attribute":
        _attributes(owner)[name] = value
    elif kind == "slot":
        object.__setattr__(owner, name, value)
    elif isinstance(owner, dict):
        dict.__setitem__(owner, name, value)
    elif name < len(owner):
        list.__setitem__(owner, name, value)
    else:
        list.append(owner, value)


def _remove(owner: Any, label: Any) -> None:
    kind, name = label
    if kind == "attribute":
        del _attributes(owner)[name]
    elif kind == "slot":
        object.__delattr__(owner, name)
    elif isinstance(owner, dict):
        dict.__delitem__(owner, name)
    else:
        list.pop(owner)


def _parts(owner: Any) -> dict[Any, Any]:
    """The parts of an object by label: ``attribute``, ``slot`` or ``item``, and its name."""
    found: dict[Any, Any] = {}
    if isinstance(owner, dict):
        found.update((("item", key), dict.__getitem__(owner, key)) for key in dict.__iter__(owner))
    elif isinstance(owner, list | tuple):
        found.update((("item", place), value) for place, value in enumerate(iter(owner)))
    found.update((("attribute", name), value) for name, value in _attributes(owner).items())
    for base in type(owner).__mro__:
        for name, member in vars(base).items() if "__slots__" in vars(base) else ():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # it is not set
                    found["slot", name] = member.__get__(owner)
    # What an object refers to weakly, such as the object that it is a part of, is no part of it.
    return {label: value for label, value in found.items() if not isinstance(value, weakref.ref)}


def _is_node(value: Any) -> bool:
    return pytree._get_node_type(value) in pytree.SUPPORTED_NODES


def _children(value: Any) -> list[Any]:
    return list(pytree.SUPPORTED_NODES[pytree._get_node_type(value)].flatten_fn(value)[0])


def _is_object(value: Any) -> bool:
    """Whether a leaf of pytree is an object that may be taken apart."""
    return type(value) not in _PLAIN and not isinstance(value, _ATOMS)


def _holds_tensors(value: Any) -> bool:
    """Whether an object has a tensor among its parts, or among theirs, or is a container, which may be empty."""
    if isinstance(value, dict | list | tuple):
        return True
    level, seen = [value], {id(value)}
    while level and len(seen) < _SEARCHED:
        below: list[Any] = []
        for owner in level:
            for part in _children(owner) if _is_node(owner) else _parts(owner).values():
                if isinstance(part, torch.Tensor):
                    return True
                if _is_object(part) and id(part) not in seen:
                    seen.add(id(part))
                    below.append(part)
        level = below
    return False


def taken_apart(tree: Any, *, results: bool = False) -> Any:
    """The tree with `_Fields` for every object that holds tensors.

    Args:
        results: the tree is of results, which are made anew in each call: instances of dataclasses without tensors are
            taken apart, too, and objects that others refer to weakly are not.
    """
    seen: dict[int, int] = {}

    def replaced(leaf: Any) -> Any:
        if not _is_object(leaf):
            return leaf
        if id(leaf) in seen:
            return _Again(seen[id(leaf)])
        made_of_fields = results and hasattr(type(leaf), "__dataclass_fields__")
        if not made_of_fields and not _holds_tensors(leaf):
            return leaf
        if results and any(isinstance(part, weakref.ref) for part in _attributes(leaf).values()):
            return leaf
        seen[id(leaf)] = len(seen)
        return _Fields(type(leaf), {label: pytree.tree_map(replaced, part) for label, part in _parts(leaf).items()})

    return pytree.tree_map(replaced, tree)


def flattened(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of arguments, and how they are nested."""
    leaves, spec = pytree.tree_flatten(tree)
    return pytree.tree_flatten(taken_apart(tree)) if any(map(_is_object, leaves)) else (leaves, spec)


def children_of(value: Any) -> list[Any] | None:
    """The parts of a node of arguments; None for a leaf."""
    if _is_node(value):
        return _children(value)
    return [*_parts(value).values()] if _is_object(value) and _holds_tensors(value) else None


def classes_in(tree: Any) -> list[type]:
    """The classes of the objects that `flattened` takes apart: code may read what they hold, too."""
    found: dict[type, None] = {}

    def look(value: Any) -> None:
        if isinstance(value, _Fields):
            found[value.kind] = None
        for child in _children(value) if _is_node(value) else ():
            look(child)

    look(taken_apart(tree))
    return [*found]


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors among arguments, in the order of their leaves."""
    return [leaf for leaf in flattened(tree)[0] if isinstance(leaf, torch.Tensor)]


def map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """A copy of arguments with other tensors; a tensor that is given several times is changed once."""
    made: dict[int, Any] = {}
    copied: list[tuple[Any, Any]] = []

    def changed(value: Any) -> Any:
        if id(value) not in made and isinstance(value, torch.Tensor):
            made[id(value)] = change(value)
        if id(value) in made or not _is_object(value):
            return made.get(id(value), value)
        if _is_node(value):
            return _rebuilt(value, changed)
        if not _holds_tensors(value):
            return value
        parts = _parts(value)
        if isinstance(value, tuple):
            return _together(map(changed, parts.values()), (type(value), tuple(parts)))
        new = made[id(value)] = _bare(type(value))
        copied.append((value, new))
        for label, part in parts.items():
            _put(new, label, changed(part))
        return new

    result = changed(tree)
    for owner, new in copied:  # a copy refers to copies of what the object refers to weakly
        for name, value in _attributes(owner).items():
            if isinstance(value, weakref.ref):
                _attributes(new)[name] = weakref.ref(made[id(value())]) if id(value()) in made else value
    return result


def _rebuilt(node: Any, change: Callable[[Any], Any]) -> Any:
    """A node of pytree with changed children."""
    known = pytree.SUPPORTED_NODES[pytree._get_node_type(node)]
    children, context = known.flatten_fn(node)
    return known.unflatten_fn([change(child) for child in children], context)


@contextlib.contextmanager
def placed(tree: Any, leaves: list[Any] | None, watch: Any = None) -> Iterator[Any]:
    """Arguments with other leaves, in the order of `flattened`.

    Objects are the caller's own, and hold them until this ends.

    Args:
        leaves: None: their own.
        watch: a `trace.taken.Watch`, whose dicts take the place of dicts.
    """
    supply = None if leaves is None else iter(leaves)
    before: dict[int, tuple[Any, dict[Any, Any]]] = {}

    def put(value: Any) -> Any:
        if _is_node(value):
            return watch.dict_of(value, put) if watch is not None and type(value) is dict else _rebuilt(value, put)
        if id(value) in before or not _is_object(value) or not _holds_tensors(value):
            if watch is not None:
                watch.leaf()
            leaf = value if supply is None else next(supply)
            return value if id(value) in before else leaf
        parts = _parts(value)
        if isinstance(value, tuple):  # it cannot be changed
            return _together([put(part) for part in parts.values()], (type(value), tuple(parts)))
        before[id(value)] = value, parts
        for label, part in parts.items():
            if (new := put(part) if watch is None else watch.part(value, label, put, part)) is not part:
                _put(value, label, new)
        return value

    try:
        yield put(tree)
    finally:
        for owner, parts in before.values():
            for label in reversed([label for label in _parts(owner) if label not in parts]):
                _remove(owner, label)
            for label, value in parts.items():
                _put(owner, label, value)
