"""Holders: for each kind of Python object that can change, its contents, whether they changed, how to restore them."""

from __future__ import annotations

import collections
import gc
import operator
import types
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch.utils._pytree as pytree

#: Code in which one of these names occurs may read all attributes of an object.
_READ_ALL = frozenset({"vars", "__dict__", "asdict", "astuple"})
#: In the place of an attribute that is not there.
ABSENT = object()
#: Keys that stand for themselves in a path.
_NAMED = frozenset({str, int, bool})


def same_objects(now: tuple[Any, ...], then: tuple[Any, ...]) -> bool:
    """Whether all elements are the same objects."""
    return len(now) == len(then) and all(map(operator.is_, now, then))


class Holder:
    """An object that can change.

    Attributes:
        held: the object.
        own_path: the path of what is not named after the place where it is found.
        compared: whether ``flat`` is to be compared before every step.
        drawn: every value that the forward takes from it is new.
    """

    own_path = ""
    compared = True
    drawn = False

    def __init__(self, held: Any) -> None:
        self.held = held

    def contents(self, names: Set[str]) -> Mapping[Any, Any]:
        """The contents by label; of attributes only those that code with these names may read."""
        return dict(enumerate(self.flat()))

    def flat(self) -> tuple[Any, ...]:
        """The contents as a tuple: nothing changed where all elements are the same objects as before."""
        return ()

    def part(self, path: str, label: Any) -> str:
        """The path of the content with this label."""
        return f"{path}[{label!r}]"

    def copy(self) -> Any:
        """A copy of the contents, to compare with and to restore."""
        return self.flat()

    def changed(self, path: str, then: Any) -> list[str]:
        """The paths of contents that differ from a copy."""
        return [] if same_objects(self.flat(), then) else [path]

    def put_back(self, then: Any) -> None:
        """Restore the contents from a copy."""

    def difference(self, then: Any) -> Any:
        """What `repeat` needs to make of these contents, which are as in a copy, those of now."""
        return self.copy()

    def repeat(self, difference: Any) -> None:
        """Set again what was set when ``difference`` was taken."""
        self.put_back(difference)


class Attributes(Holder):
    """The attributes of an object.

    Args:
        mapping: the object's own dict of them.
        only: the names of those that are looked at; None: those that code reads by name.
    """

    def __init__(self, held: Any, mapping: Any, own_path: str = "", only: Set[str] | None = None) -> None:
        super().__init__(held)
        self.mapping, self.own_path, self.only = mapping, own_path, only

    def now(self) -> Mapping[str, Any]:
        """All attributes that are set."""
        found: Mapping[str, Any] = self.mapping
        return found

    def contents(self, names: Set[str]) -> Mapping[Any, Any]:
        now, names = self.now(), names if self.only is None else self.only
        every = self.only is None and not names.isdisjoint(_READ_ALL)
        return {name: now[name] for name in list(now) if every or name in names}

    def part(self, path: str, label: Any) -> str:
        return f"{path}.{label}"

    def copy(self) -> Any:
        return dict(self.now())

    def changed(self, path: str, then: Any) -> list[str]:
        return [self.part(path, name) for name in self._differing(then)]

    def put_back(self, then: Any) -> None:
        for name in self._differing(then):
            self._set(name, then.get(name, ABSENT))

    def difference(self, then: Any) -> Any:
        now = self.now()
        return {name: now.get(name, ABSENT) for name in self._differing(then)}

    def repeat(self, difference: Any) -> None:
        there = self.now()
        for name, value in difference.items():
            if value is not ABSENT or name in there:
                self._set(name, value)

    def _differing(self, then: Mapping[str, Any]) -> list[str]:
        now = self.now()
        return [name for name in {**then, **now} if now.get(name, ABSENT) is not then.get(name, ABSENT)]

    def _set(self, name: str, value: Any) -> None:
        if value is ABSENT:
            del self.mapping[name]
        else:
            self.mapping[name] = value


class Variables(Attributes):
    """Global variables, or attributes of a class or a Python module; only those that the model reads are watched."""

    def _differing(self, then: Mapping[str, Any]) -> list[str]:
        imported = (type, types.ModuleType, types.FunctionType)  # by the forward, which would not import it again
        named = [name for name in super()._differing(then) if self.only is not None and name in self.only]
        return [name for name in named if not isinstance(self.mapping.get(name), imported)]

    def _set(self, name: str, value: Any) -> None:
        if not isinstance(self.held, type):
            super()._set(name, value)
        elif value is ABSENT:
            delattr(self.held, name)
        else:
            setattr(self.held, name, value)


class Slots(Attributes):
    """The attributes of an object whose class names them in ``__slots__``."""

    def __init__(self, held: Any, slots: list[str]) -> None:
        super().__init__(held, None)
        self.slots = slots

    def now(self) -> Mapping[str, Any]:
        found = {name: getattr(self.held, name, ABSENT) for name in self.slots}
        return {name: value for name, value in found.items() if value is not ABSENT}

    def flat(self) -> tuple[Any, ...]:
        return tuple(getattr(self.held, name, ABSENT) for name in self.slots)

    def _set(self, name: str, value: Any) -> None:  # as a frozen dataclass does it
        if value is ABSENT:
            object.__delattr__(self.held, name)
        else:
            object.__setattr__(self.held, name, value)


class Entries(Holder):
    """The entries of a dict; of hooks the functions alone, whose numbers are given anew at each registration."""

    def __init__(self, held: Any, *, hooks: bool = False) -> None:
        super().__init__(held)
        self.kind: Any = collections.OrderedDict if isinstance(held, collections.OrderedDict) else dict
        self.hooks = hooks

    def contents(self, names: Set[str]) -> Mapping[Any, Any]:
        if self.hooks:
            return dict(enumerate(self.kind.values(self.held)))
        items = enumerate(self.kind.items(self.held))
        return {key if type(key) in _NAMED else f"key {i}": value for i, (key, value) in items}

    def own_keys(self) -> tuple[Any, ...]:
        """Those that are more than numbers of hooks."""
        return () if self.hooks else tuple(self.kind.keys(self.held))

    def flat(self) -> tuple[Any, ...]:
        return (*self.kind.keys(self.held), *self.kind.values(self.held))

    def put_back(self, then: Any) -> None:
        if not same_objects(self.flat(), then):
            half = len(then) // 2
            self.kind.clear(self.held)
            for key, value in zip(then[:half], then[half:], strict=True):
                self.kind.__setitem__(self.held, key, value)


class ReadOnlyEntries(Holder):
    """The entries of the dict behind a mapping proxy."""

    def contents(self, names: Set[str]) -> Mapping[Any, Any]:
        return dict(self.held)

    def flat(self) -> tuple[Any, ...]:
        return (*self.held.keys(), *self.held.values())


class Items(Holder):
    """The items of a list or a deque."""

    def __init__(self, held: Any) -> None:
        super().__init__(held)
        self.kind: Any = list if isinstance(held, list) else collections.deque

    def flat(self) -> tuple[Any, ...]:
        return tuple(self.kind.__iter__(self.held))

    def put_back(self, then: Any) -> None:
        if not same_objects(self.flat(), then):
            self.kind.clear(self.held)
            self.kind.extend(self.held, then)


class Queued(Items):
    """The items of a queue, for which another thread may wait."""

    compared = False
    drawn = True


class Members(Holder):
    """The members of a set."""

    def contents(self, names: Set[str]) -> Mapping[Any, Any]:
        return {member if type(member) in _NAMED else f"member {i}": member for i, member in enumerate(self.held)}

    def flat(self) -> tuple[Any, ...]:
        return tuple(self.held)

    def put_back(self, then: Any) -> None:
        if not same_objects(self.flat(), then):
            self.held.clear()
            self.held.update(then)


class Variable(Holder):
    """A variable that functions share with the function around them."""

    def flat(self) -> tuple[Any, ...]:
        try:
            return (self.held.cell_contents,)
        except ValueError:  # not set yet
            return ()

    def part(self, path: str, label: Any) -> str:
        return path

    def put_back(self, then: Any) -> None:
        if then:
            self.held.cell_contents = then[0]
        elif self.flat():
            del self.held.cell_contents


class Context(Holder):
    """A ``ContextVar``."""

    def flat(self) -> tuple[Any, ...]:
        return (self.held.get(None),)

    def part(self, path: str, label: Any) -> str:
        return path

    def put_back(self, then: Any) -> None:
        if not same_objects(self.flat(), then):
            self.held.set(then[0])


class Function(Holder):
    """The code and the defaults of a Python function, and the variables of the functions around it."""

    def __init__(self, held: Any) -> None:
        super().__init__(held)
        self.own_path = f"{held.__module__}.{held.__qualname__}"

    def contents(self, names: Set[str]) -> Mapping[Any, Any]:
        code, defaults = self.held.__code__, self.held.__defaults__ or ()
        positional = code.co_varnames[: code.co_argcount]
        return {
            **dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=False)),
            **(self.held.__kwdefaults__ or {}),
            **{f"{name}()": cell for name, cell in zip(code.co_freevars, self.held.__closure__ or (), strict=True)},
        }

    def flat(self) -> tuple[Any, ...]:
        return (self.held.__code__, self.held.__defaults__, *(self.held.__kwdefaults__ or {}).values())

    def part(self, path: str, label: str) -> str:
        return f"{path}(variable {label[:-2]})" if label.endswith("()") else f"{path}(default of {label})"


class Parts(Holder):
    """The parts of a method, a partial or a decorated function, which cannot change."""

    compared = False

    def __init__(self, held: Any, *parts: Any) -> None:
        super().__init__(held)
        self.parts = parts

    def flat(self) -> tuple[Any, ...]:
        return self.parts


class Cache(Parts):
    """A function with an ``lru_cache``: emptied after a trace that added to it."""

    def copy(self) -> Any:
        return self.held.cache_info().misses

    def results(self) -> list[Any]:
        """What it keeps: keys, results, and what they consist of."""
        return pytree.tree_leaves(gc.get_referents(self.held))

    def changed(self, path: str, then: Any) -> list[str]:
        return []

    def put_back(self, then: Any) -> None:
        if self.held.cache_info().misses != then:
            self.held.cache_clear()


class Elements(Holder):
    """The elements of a NumPy array or a bytearray."""

    last: tuple[Any, ...] = ()

    def contents(self, names: Set[str]) -> Mapping[Any, Any]:
        return {"": self.flat()}

    def flat(self) -> tuple[Any, ...]:
        held = self.held
        now = (bytes(held),) if isinstance(held, bytearray) else (str(held.dtype), held.shape, held.tobytes())
        self.last = self.last if now == self.last else now
        return self.last

    def part(self, path: str, label: Any) -> str:
        return path

    def changed(self, path: str, then: Any) -> list[str]:
        return [] if self.flat() == then else [path]

    def put_back(self, then: Any) -> None:
        if isinstance(self.held, bytearray):
            self.held[:] = then[0]
        elif not same_objects(self.flat(), then):
            self.held.reshape(-1).view("u1")[:] = memoryview(then[2])


class Gradient(Holder):
    """The ``.grad`` of a tensor."""

    def contents(self, names: Set[str]) -> Mapping[Any, Any]:
        return {}

    def flat(self) -> tuple[Any, ...]:
        return (self.held.grad,)

    def changed(self, path: str, then: Any) -> list[str]:
        return [] if self.held.grad is then[0] else [f"{path}.grad"]

    def put_back(self, then: Any) -> None:
        if self.held.grad is not then[0]:
            self.held.grad = then[0]


class Drawn(Holder):
    """A generator, an iterator or a source of random numbers: each draw changes it.

    Args:
        restore: takes an earlier state; None: a draw changes it for good.
    """

    compared = False
    drawn = True

    def __init__(self, held: Any, state: Callable[[], Any], restore: Callable[[Any], object] | None = None) -> None:
        super().__init__(held)
        self.state, self.restore = state, restore

    def copy(self) -> Any:
        return self.state()

    def changed(self, path: str, then: Any) -> list[str]:
        return [] if self.state() == then else [path]

    def put_back(self, then: Any) -> None:
        if self.restore is not None:
            self.restore(then)
