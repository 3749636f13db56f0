"""Which values beside tensors a forward takes out of its arguments: of a batch it may read the tensors and not the
names.

A plain forward is watched: its dicts and the attributes of its objects note what is taken out of them. All that is in
other containers counts as taken with the container.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.utils._pytree as pytree
from torch import nn

from ..trees import children_of, is_written_in_python, placed
from .answers import watched_forward

_THERE = object()


class Watch:
    """Notes what is taken out of dicts and objects.

    Attributes:
        taken: positions of leaves of arguments, in the order of `trees.flattened`.
    """

    def __init__(self) -> None:
        self.taken: set[int] = set()
        self._count = 0
        self._found: list[list[int]] = [[]]  # leaves within the parts that are being looked into
        self._parts: dict[int, dict[Any, list[int]]] = {}  # of each container by identity: leaves within each part
        self._objects: list[Any] = []

    def leaf(self) -> None:
        """Number the next leaf."""
        self._found[-1].append(self._count)
        self._count += 1

    def part(self, owner: Any, label: Any, put: Callable[[Any], Any], value: Any) -> Any:
        """A part of an object as ``put`` replaces it."""
        kind: Any = type(owner)
        if kind.__getattribute__ is not object.__getattribute__ or not is_written_in_python(kind):
            return put(value)
        if id(owner) not in self._parts:
            self._parts[id(owner)] = {}
            self._objects.append(owner)
        return self._within(self._parts[id(owner)], label[1], put, value)

    def dict_of(self, found: Mapping[Any, Any], put: Callable[[Any], Any]) -> dict[Any, Any]:
        """A dict that notes what is taken out of it."""
        parts: dict[Any, list[int]] = {}
        made = _Noting({key: self._within(parts, key, put, value) for key, value in found.items()})
        made.note = lambda label: self._take(parts, label)
        return made

    def _within(self, parts: dict[Any, list[int]], label: Any, put: Callable[[Any], Any], value: Any) -> Any:
        self._found.append(parts.setdefault(label, []))
        try:
            return put(value)
        finally:
            self._found.pop()

    def _take(self, parts: dict[Any, list[int]], label: Any) -> None:
        """Note that the part with a label was taken; `_THERE`: all parts."""
        self.taken.update(*parts.values() if label is _THERE else [parts.get(label, ())])

    def begin(self) -> None:
        """Forget what was taken so far. Leaves that are in no dict and no object are taken in any case."""
        self.taken = {*self._found[0]}

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Notes attributes that are read of objects among the arguments."""
        before = [(kind, vars(kind).get("__getattribute__")) for kind in dict.fromkeys(map(type, self._objects))]
        for kind, _ in before:
            type.__setattr__(kind, "__getattribute__", self._noted(kind.__getattribute__))
        try:
            yield
        finally:
            for kind, own in reversed(before):
                if own is None:
                    type.__delattr__(kind, "__getattribute__")
                else:
                    type.__setattr__(kind, "__getattribute__", own)

    def _noted(self, own: Any) -> Any:
        mine, parts_of = threading.get_ident(), self._parts

        def read(owner: Any, name: str) -> Any:
            if threading.get_ident() == mine and (parts := parts_of.get(id(owner))) is not None:
                # Such as __dict__, and what copies and pickles ask for.
                of_all = name.startswith("__") and name != "__class__"
                self._take(parts, _THERE if of_all else name)
            return own(owner, name)

        return read

    def returned(self, value: Any) -> None:
        """Note that a result contains ``value``."""
        waiting, seen = [value], set[int]()
        while waiting:
            value = waiting.pop()
            if id(value) in seen or (below := children_of(value)) is None:
                continue
            seen.add(id(value))
            self._take(self._parts.get(id(value), {}), _THERE)
            waiting += below


class _Noting(dict[Any, Any]):
    """A dict that notes what is taken out of it.

    Its ``__iter__`` has C code take items by ``keys`` and ``__getitem__``, too.
    """

    note: Callable[[Any], None]

    def __iter__(self) -> Iterator[Any]:
        return dict.__iter__(self)


def _noting(name: str, *, of_all: bool) -> Callable[..., Any]:
    """A method of dicts that notes the key that it is given, or all."""
    own = getattr(dict, name)

    def method(self: _Noting, *args: Any) -> Any:
        self.note(_THERE if of_all else args[0])
        return own(self, *args)

    return method


for _name in ("__getitem__", "get", "pop", "setdefault"):
    setattr(_Noting, _name, _noting(_name, of_all=False))
for _name in (
    "values", "items", "popitem", "copy", "__or__", "__ror__", "__eq__", "__ne__", "__repr__", "__reduce_ex__",
):  # fmt: skip
    setattr(_Noting, _name, _noting(_name, of_all=True))

pytree.register_pytree_node(
    _Noting,
    lambda found: ([*found.values()], [*found.keys()]),
    lambda values, keys: dict(zip(keys, values, strict=True)),
    serialized_type_name="monet_like.capture.trace.taken",
)


def taken_leaves(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> frozenset[int] | None:
    """Positions of the leaves of arguments, as `trees.flattened` has them, that a forward of ``model`` takes; None: it
    cannot be told.

    The forward runs on the real arguments and leaves no trace.
    """
    watch = Watch()
    with (
        placed((args, [*kwargs.values()]), None, watch) as (given, named),
        contextlib.suppress(Exception),
        watch.reading(),
    ):
        answers, result = watched_forward(model, given, dict(zip(kwargs, named, strict=True)), watch.begin)
        watch.returned(result)
        return None if answers else frozenset(watch.taken)
    return None
