"""Guards: values beside tensors that a step reads, such as numbers and options, and whether they changed since capture.

While the model is traced, `recorder` finds where they are read from: attributes of modules, global variables,
arguments. `Reads.change` says before every step whether all values behind these are as they were.
"""

from __future__ import annotations

import contextlib
import operator
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from .holders import Attributes, Entries, Holder, Items, Slots, Variable, Variables, same_objects
from .objects import BufferGradients, class_holders, holders_of_tensor
from .settings import SETTINGS, settings_now
from .traversal import Place, Same, Walk, form_of_plain

MEMBERS = ("_parameters", "_buffers", "_modules")
_ABSENT = object()


class Change(NamedTuple):
    """A value that changed: the path that it is read from, such as ``self.config.alpha``, and both values as text."""

    path: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path} was {self.before}, is {self.after}"


@dataclass(frozen=True)
class Roots:
    """The places that a trace read values from.

    Attributes:
        names: that occur in the code that ran: of objects that are no modules, attributes of these names are looked at.
        attributes: by the qualified name of a module of the model, the attributes that were read.
        absent: attributes that were asked for and were not there.
        others: attributes read from modules outside the model, by identity of the module, which is kept alive.
        variables: global variables, the name of their Python module, and the names of those that were read.
        arguments: of the call, those that are no tensors.
        late_names, late_attributes: as ``names`` and ``attributes``, of code that ran in the backward.
        parts: names of the modules in which the forward puts others.
        used: tensors that an operator takes, by identity; None: all. A weak reference would be in the way of
            `torch.utils.swap_tensors`; another tensor that later has the address of one of them is only looked at.
        marked: names of parameters and buffers on which the forward sets attributes.
        held: paths of modules' attributes that were one tensor with an input, and the number of that.
        set_again: paths of what the forward sets, which is no other one when the backward reads it.
    """

    names: Set[str] = frozenset()
    attributes: Mapping[str, Set[str]] = field(default_factory=dict)
    absent: Mapping[str, Set[str]] = field(default_factory=dict)
    others: Mapping[int, tuple[nn.Module, Set[str]]] = field(default_factory=dict)
    variables: tuple[tuple[dict[str, Any], str, Set[str]], ...] = ()
    arguments: tuple[Any, ...] = ()
    late_names: Set[str] = frozenset()
    late_attributes: Mapping[str, Set[str]] = field(default_factory=dict)
    parts: Set[str] = frozenset()
    used: Set[int] | None = None
    set_again: tuple[str, ...] = ()
    marked: Set[str] = frozenset()
    held: Set[tuple[str, int]] = frozenset()

    def walk(self, model: nn.Module) -> Walk:
        """Follow all places to the values behind them, as they are now."""
        modules = dict(model.named_modules())
        known = {id(module): name for name, module in modules.items()}
        others = lambda module: self.others.get(id(module), (module, None))[1]  # noqa: E731
        walk = Walk(self.names, known, others, used=self.used)
        for name in {**self.attributes, **self.absent}:
            if (module := modules.get(name)) is None:
                continue
            path = f"self.{name}".rstrip(".")
            walk.add(Attributes(module, module.__dict__, only=self.attributes.get(name, frozenset())), path)
            if name in self.parts:
                walk.add(Entries(module._modules), f"{path}._modules")
            for holder in class_holders(type(module), self.names):
                walk.add(holder, path)
            for kind in MEMBERS[:2]:  # attributes of tensors, such as ``self.weight.scale``
                for member, tensor in module.__dict__[kind].items():
                    marked = f"{name}.{member}".lstrip(".") in self.marked
                    for holder in holders_of_tensor(tensor, self.names) if tensor is not None else ():
                        if marked or holder.contents(self.names):
                            walk.add(holder, f"{path}.{member}")
            if "grad" in self.names and module._buffers:
                gradients = BufferGradients(module._buffers)
                walk.add(gradients, f"{path}.<buffers>.grad")
                walk.forms[f"{path}.<buffers>.grad"] = gradients.flat()
            for attribute in self.absent.get(name, ()):
                members = (module.__dict__, *(module.__dict__[kind] for kind in MEMBERS))
                walk.forms[f"{path}.{attribute}"] = any(attribute in found for found in members)
        for mapping, python_module, names in self.variables:
            walk.add(Variables(mapping, mapping, python_module, names), python_module)
        for position, argument in enumerate(self.arguments):
            walk.forms[f"argument {position}"] = walk.form(argument, f"argument {position}")
        walk.run()
        walk.forms.update(zip(SETTINGS, settings_now(), strict=True))
        return walk

    def is_late(self, place: Place, label: Any) -> bool:
        """Whether code of the backward may read it; members of a container count by the container's own place."""
        holder = place.holder
        path = place.path if label is None else holder.part(place.path, label)
        if any(path == known or path.startswith(tuple(f"{known}{end}" for end in ".[(")) for known in self.set_again):
            return False
        if isinstance(holder, Attributes) and isinstance(holder.held, nn.Module):
            return label in self.late_attributes.get(place.path.partition(".")[2], ())
        if isinstance(holder, Attributes):
            return label in self.late_names
        if isinstance(holder, Variable):
            return place.path.partition("(variable ")[2].partition(")")[0] in self.late_names
        return not self.late_names.isdisjoint(re.findall(r"\w+", place.path))


class Reads:
    """The values behind `Roots`, as they were in ``model`` when it was traced.

    Args:
        forms: those values by path, if this is another model than was traced; default: as they are now.

    Attributes:
        holders: of these values, by the key of their place; since the last call of `change` that found none.
    """

    def __init__(self, roots: Roots, model: nn.Module, forms: Mapping[str, Any] | None = None) -> None:
        self.roots, self.model = roots, weakref.ref(model)
        walk = roots.walk(model)
        self.forms = walk.forms if forms is None else forms
        self.holders = {place.key: _unowned(place.holder) for place in walk.places}
        late = bool(roots.late_names or roots.late_attributes)
        self._all = _Compared(walk.places, roots.names, lambda place, label: True)
        self._late = _Compared(walk.places if late else [], roots.names, roots.is_late)
        self._known = forms is None or forms == walk.forms
        self._settings = tuple(self.forms[name] for name in SETTINGS)

    @property
    def has_late(self) -> bool:
        """Whether Python code that runs in the backward may read some of them."""
        return bool(self._late.paths)

    def of(self, model: nn.Module) -> Reads:
        """The same values of another model, such as a copy."""
        return self if self.model() is model else Reads(self.roots, model, self.forms)

    def change(self) -> Change | None:
        """The first value or setting of PyTorch that changed since the capture; None if none did."""
        if (settings := settings_now()) != self._settings:
            changes = map(Change, SETTINGS, map(repr, self._settings), map(repr, settings))
            return next(change for change in changes if change.before != change.after)
        return self._change(self._all, self.forms)

    def holds_others(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether other attributes than in the trace are one tensor with an input, of which a forward may ask."""
        return self._all.holding(inputs) != self.roots.held

    def late_change(self) -> Change | None:
        """The first value that the backward reads and that changed; None if none did."""
        return self._change(self._late, self._late.paths)

    def as_then(self) -> contextlib.AbstractContextManager[None]:
        """Have the values be those of the capture, for a forward that is repeated."""
        return self._all.as_then()

    def _change(self, compared: _Compared, paths: Iterable[str]) -> Change | None:
        found = compared.look()
        if isinstance(found, Change):
            return found
        model = self.model()
        if (found and self._known) or model is None:
            return None
        now = Reads(self.roots, model)  # other objects, perhaps of equal values
        for path in dict.fromkeys((*paths, *(now.forms if compared is self._all else ()))):
            before, after = self.forms.get(path, _ABSENT), now.forms.get(path, _ABSENT)
            if before != after:
                return Change(path, _text(before), _text(after))
        if compared is self._all:
            self._all, self._late, self._known, self.holders = now._all, now._late, True, now.holders
        return None


class _Compared:
    """Compares the contents of places with those at its creation, fast if all are the same objects, as nearly always.

    Args:
        names: see `Roots`.
        has: whether what a place holds under a label is compared.

    Attributes:
        paths: of what is compared.
    """

    def __init__(self, places: Sequence[Place], names: Set[str], has: Callable[[Place, Any], bool]) -> None:
        self.paths: dict[str, None] = {}
        self._attributes: list[tuple[Callable[[Any], tuple[Any, ...]], Any]] = []
        self._holders: list[tuple[Attributes, list[str], int]] = []  # of these, and where their values begin
        self._values: list[Any] = []  # of these attributes, one after the other
        self._value_paths: list[str] = []
        self._mappings: list[Any] = []
        self._names: list[list[str]] = []  # of all attributes in each of these mappings
        self._weak: list[tuple[Any, str, Same]] = []
        self._tensors: list[tuple[Any, str, str]] = []  # mapping, label and path of those of them that are tensors
        self._empty: list[Any] = []
        self._emptied: list[Holder] = []  # of these
        self._others: list[tuple[Holder, tuple[Any, ...]]] = []
        for place in places:
            if not isinstance(place.holder, Attributes) and not has(place, None):
                continue
            labels = [label for label in place.holder.contents(names) if has(place, label)]
            self.paths.update(dict.fromkeys([place.holder.part(place.path, label) for label in labels]))
            if labels or not isinstance(place.holder, Attributes):
                self.paths.update(dict.fromkeys((f"{place.path}.keys()", f"len({place.path})")))
            if isinstance(place.holder, Attributes) and not isinstance(place.holder, Slots):
                self._add_attributes(place.holder, place.path, labels)
            elif place.holder.compared and isinstance(place.holder, Entries | Items) and not place.holder.held:
                self._empty.append(place.holder.held)
                self._emptied.append(place.holder)
            elif place.holder.compared:
                self._others.append((place.holder, tuple(map(_kept, place.holder.flat()))))

    def _add_attributes(self, holder: Attributes, path: str, labels: list[str]) -> None:
        mapping = holder.mapping
        strong = [label for label in labels if not isinstance(mapping[label], torch.Tensor | nn.Module)]
        self._weak += [(mapping, label, Same(mapping[label])) for label in labels if label not in strong]
        tensors = (label for label in labels if isinstance(mapping[label], torch.Tensor))
        self._tensors += [(mapping, label, holder.part(path, label)) for label in tensors]
        if strong:
            get = itemgetter(*strong) if len(strong) > 1 else itemgetter(*strong, *strong)
            self._attributes.append((get, mapping))
            self._holders.append((_unowned(holder), strong, len(self._values)))
            self._values += get(mapping)
            self._value_paths += [holder.part(path, label) for label in strong] * (2 if len(strong) == 1 else 1)
        if not (isinstance(holder, Variables) and isinstance(holder.held, dict)):
            self._mappings.append(mapping)
            self._names.append(list(mapping))

    def look(self) -> bool | Change:
        """True if all are the same objects; a change that is plain to see; False if values must be compared."""
        if any(self._empty):
            return False
        try:
            values = [value for get, mapping in self._attributes for value in get(mapping)]
        except KeyError:  # one was deleted
            return False
        if not all(map(operator.is_, values, self._values)):
            for index, (value, before) in enumerate(zip(values, self._values, strict=True)):
                if value is before:
                    continue
                was, now = form_of_plain(before), form_of_plain(value)
                if was is None or now is None:
                    return False
                if was != now:
                    return Change(self._value_paths[index], _text(was), _text(now))
                self._values[index] = value
        if not all(map(operator.eq, map(list, self._mappings), self._names)):
            return False
        if any(mapping.get(name) is not same.of() for mapping, name, same in self._weak):
            return False
        return all(map(_as_before, self._others))

    def holding(self, inputs: Sequence[torch.Tensor]) -> Set[tuple[str, int]]:
        """See `Roots.held`, of a call with these inputs."""
        if not self._tensors:
            return frozenset()
        numbers = {id(tensor): number for number, tensor in reversed([*enumerate(inputs)])}
        there = ((path, numbers.get(id(mapping.get(label)))) for mapping, label, path in self._tensors)
        return {(path, number) for path, number in there if number is not None}

    @contextlib.contextmanager
    def as_then(self) -> Iterator[None]:
        """Have the contents be those of the creation, as far as these are alive."""
        with contextlib.ExitStack() as stack:
            for holder, labels, start in self._holders:
                then = dict(zip(labels, self._values[start:], strict=False))
                _exchange(stack, holder, {**holder.now(), **then})
            for mapping, label, same in self._weak:
                if (tensor := same.of()) is not None and mapping.get(label) is not tensor:
                    stack.callback(mapping.__setitem__, label, mapping[label]) if label in mapping else None
                    mapping[label] = tensor
            for emptied in self._emptied:
                _exchange(stack, emptied, ())
            for other, values in self._others:
                kept = tuple(value.of() if isinstance(value, Same) else value for value in values)
                _exchange(stack, other, dict(zip(other.slots, kept, strict=True)) if isinstance(other, Slots) else kept)
            yield


class _Unowned(Attributes):
    """The attributes of a module or a tensor that is not kept alive: they are in a dict of their own."""

    @property
    def held(self) -> Any:
        return self._of()

    @held.setter
    def held(self, held: Any) -> None:
        self._of = weakref.ref(held)


def _exchange(stack: contextlib.ExitStack, holder: Holder, then: Any) -> None:
    """Have a holder's contents be ``then``, until the stack ends."""
    stack.callback(holder.put_back, holder.copy())
    holder.put_back(then)


def _unowned(holder: Holder) -> Any:
    """To set something there later; tensors and modules are not kept alive."""
    if type(holder) is Attributes and isinstance(holder.held, torch.Tensor | nn.Module):
        return _Unowned(holder.held, holder.mapping, holder.own_path, holder.only)
    return holder


def _kept(value: Any) -> Any:
    """To compare it with later; tensors and modules are not kept alive."""
    return Same(value) if isinstance(value, torch.Tensor | nn.Module) else value


def _as_before(other: tuple[Holder, tuple[Any, ...]]) -> bool:
    holder, before = other
    now = holder.flat()
    return same_objects(now, before) or (
        len(now) == len(before)
        and all(value is (was.of() if isinstance(was, Same) else was) for value, was in zip(now, before, strict=True))
    )


def _text(form: Any) -> str:
    """A form as text for messages."""
    if form is _ABSENT:
        return "not there"
    if isinstance(form, Same):
        named = getattr(form.of(), "__name__", None)
        return f"a {type(form.of()).__name__}" + (f" ({named})" if named else "")
    kind, value = form[:2] if isinstance(form, tuple) and len(form) > 1 else (None, form)
    if isinstance(kind, Same):
        return f"a {getattr(kind.of(), '__name__', 'value')}"
    if kind == "function":
        return f"a function ({value.co_name})"
    text = value if kind in (float, complex) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
