"""Walks from a value to everything behind it that can change, and describes it: equal values have equal forms."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import nn

from ..trees import children_of
from .holders import Attributes, Entries, Function, Holder, Items, Variables
from .objects import holders_of

_PLAIN = frozenset(
    {bool, int, str, bytes, type(None), type(...), slice, torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_BY_TEXT = frozenset({float, complex, range})  # -0.0 is not 0.0, and NaN equals NaN
_MODULES_OF_NUMBERS = frozenset({"decimal", "fractions", "datetime", "pathlib", "numpy"})


def form_of_plain(value: Any) -> Any:
    """The form of a number, a word and the like; None for other objects."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind in _BY_TEXT or (kind.__module__ in _MODULES_OF_NUMBERS and _is_number(value)):
        return kind, repr(value)
    return None


def _is_number(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is None or not isinstance(value, numpy.ndarray)


class Same:
    """Equal to another one of the same object, which is not kept alive where Python can do without."""

    __slots__ = ("of",)

    def __init__(self, of: Any) -> None:
        try:
            self.of: Callable[[], Any] = weakref.ref(of)
        except TypeError:
            self.of = lambda: of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and (mine := self.of()) is not None and mine is other.of()

    __hash__ = None  # type: ignore[assignment]


class Place(NamedTuple):
    """A holder, and the path at which it was first found.

    Attributes:
        key: the same in the walk through an equal model.
    """

    holder: Holder
    path: str
    key: str


class Walk:
    """Follows values to everything behind them that can change.

    Args:
        names: that occur in the code that may read them; only such attributes of objects are followed.
        known: the model's modules by identity, and their names.
        others: of a module that is not in the model, the attributes that are read; None: it is not looked into.
        found: called for every place when it is found, before its contents are followed.
        used: identities of tensors that an operator takes, which are told apart, as all are if this is None; of others
            it is only told that they are tensors.

    Attributes:
        places: the values found that can change.
        forms: a comparable form of each value found, by path: equal in two walks where the values are equal.
    """

    def __init__(
        self,
        names: Set[str],
        known: Mapping[int, str],
        others: Callable[[nn.Module], Set[str] | None],
        found: Callable[[Place], None] = lambda _: None,
        used: Set[int] | None = None,
    ) -> None:
        self.names, self.known, self.others, self.found = names, known, others, found
        self.used = used
        self.places: list[Place] = []
        self.forms: dict[str, Any] = {}
        self._forms_of: dict[int, Any] = {}  # by identity of what is kept
        self._kept: list[Any] = []
        self._shared: dict[int, str] = {}  # path of a class, a Python module or a scope, by identity
        self._paths: set[str] = set()
        self._waiting: deque[Place] = deque()

    def follow(self, value: Any, path: str, *, hooks: bool = False) -> Any:
        """The form of a value; everything behind it is followed, too."""
        form = self.form(value, path, hooks=hooks)
        self.run()
        return form

    def run(self) -> None:
        """Look into all that was found."""
        while self._waiting:
            self._look_into(self._waiting.popleft())

    def form(self, value: Any, path: str, *, hooks: bool = False) -> Any:
        """The comparable form of a value; its members wait for `run`."""
        if (plain := form_of_plain(value)) is not None:
            return plain
        if isinstance(value, tuple):
            return type(value), tuple([self.form(item, f"{path}[{i}]") for i, item in enumerate(value)])
        if isinstance(value, frozenset):
            return type(value), frozenset((type(member), member) for member in value)
        if (known := self._forms_of.get(id(value))) is None:
            self._kept.append(value)
            known = self._forms_of[id(value)] = self._form_of_new(value, path, hooks)
        return known

    def _form_of_new(self, value: Any, path: str, hooks: bool) -> Any:
        if isinstance(value, nn.Module):
            if (name := self.known.get(id(value))) is not None:
                return "module", name
            if (read := self.others(value)) is not None:
                self.add(Attributes(value, value.__dict__, only=read), path)
            return Same(value)
        if isinstance(value, torch.Tensor) and self.used is not None and id(value) not in self.used:
            return "tensor", type(value)
        holders = holders_of(value, self.names, hooks=hooks)
        paths = tuple([self.add(holder, path) for holder in holders])
        if isinstance(value, type) or not holders:
            return Same(value)
        if isinstance(holders[0], Function):
            return "function", value.__code__, paths
        return Same(type(value)), paths

    def add(self, holder: Holder, path: str) -> str:
        """The path of a holder, which waits for `run` if it is new."""
        if not isinstance(holder, Variables):
            return self._added(holder, path)
        if (known := self._shared.get(id(holder.held))) is None:
            self._kept.append(holder.held)
            known = self._shared[id(holder.held)] = self._added(holder, path)
        return known

    def _added(self, holder: Holder, path: str) -> str:
        path = wanted = f"{type(holder).__name__} {holder.own_path or path}"
        number = 1
        while path in self._paths:
            number += 1
            path = f"{wanted} ({number})"
        self._paths.add(path)
        key, path = path, path.partition(" ")[2]
        place = Place(holder, path, key)
        self.places.append(place)
        self.found(place)
        self._waiting.append(place)
        return path

    def _look_into(self, place: Place) -> None:
        holder, path, _ = place
        if isinstance(holder, Entries):
            self.forms[f"{path}.keys()"] = tuple([self.form(key, path) for key in holder.own_keys()])
        elif isinstance(holder, Items):
            self.forms[f"len({path})"] = int, len(holder.held)
            if isinstance(holder.held, deque):
                self.forms[f"{path}.maxlen"] = form_of_plain(holder.held.maxlen)
        of_module = isinstance(holder.held, nn.Module)
        for label, value in holder.contents(self.names).items():
            part = holder.part(path, label)
            self.forms[part] = self.form(value, part, hooks=of_module and label.endswith("_hooks"))


def given_containers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The containers and objects among arguments that `trees` takes apart, and their paths: the model may fill them."""
    named = [(f"positional argument {place}", value) for place, value in enumerate(args)]
    named += [(f"argument {name}", value) for name, value in kwargs.items()]
    return [(path, value) for path, value in named if children_of(value) is not None]


def walk_through(containers: Sequence[tuple[str, Any]], names: Set[str]) -> Walk:
    """Everything behind containers among the arguments that code with these names may read or set."""
    walk = Walk(names, {}, lambda module: None)
    for path, value in containers:
        walk.follow(value, path)
    return walk
