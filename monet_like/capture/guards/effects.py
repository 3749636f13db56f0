"""Side effects: what a forward sets beside its results, kept so that every replayed forward sets it again.

The guards of a capture hold all values that its forward reads, so what it sets is known: Python values, tensors of the step,
and objects made of both. An object that existed before is found again by its place in a walk (`Walk`), so that a step also
serves an equal model. An object that the forward made is made anew for each call; pickle takes it apart and puts it together.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ...errors import CaptureError
from ..trees import children_of
from .holders import ABSENT
from .objects import holders_of
from .reads import Reads
from .traversal import Place, Walk, form_of_plain

#: Values that are the same in every call: they are kept as they are.
_FIXED: tuple[type, ...] = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.ModuleType,
    types.MethodDescriptorType,
)
_FIXED += (types.WrapperDescriptorType, types.MethodWrapperType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)


class _CannotRepeat(Exception):
    """A value that cannot be set again; its text says what the value is."""


@dataclass(frozen=True)
class _Ref:
    """Something that a call has, in the place of what the trace had.

    Attributes:
        kind: ``result``: of the call, the tensor with number ``key``; ``input``: that of the caller at this position;
            ``parameter``, ``buffer``: the model's of this name; ``held``: the object at the place ``key``; ``content``: what was there under a label before the call; ``module``: by name;
            ``same``: ``key`` itself.
    """

    kind: str
    key: Any
    label: Any = None


@dataclass(frozen=True, eq=False)
class Effects:
    """What one forward sets.

    Attributes:
        content: by place, what is set there; pickled.
        refs: of the pickle's persistent objects.
        tensors: results of the step among them; only while it is traced.
        results: the same, as positions among the program's outputs.
        paths: what is set, for people.
        places: key of each place, and the label if it is an attribute, of what is set.
        shared: whether another model may have it, too: nothing of it is an object of this one.
    """

    content: bytes
    refs: tuple[_Ref, ...]
    tensors: tuple[torch.Tensor, ...]
    paths: tuple[str, ...]
    places: frozenset[tuple[str, Any]]
    shared: bool
    results: tuple[int, ...] = ()

    def of_outputs(self, results: Sequence[int]) -> Effects:
        """The same after the trace: of its tensors only their positions among the outputs."""
        return replace(self, tensors=(), results=tuple(results))

    def repeat(
        self,
        reads: Reads,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
    ) -> None:
        """Set everything, after a replayed forward.

        Args:
            reads: of the model, which has found no change before the forward.
            outputs, inputs: tensors of the call.
            arguments: positional and by keyword.
        """
        holders, names, model = reads.holders, reads.roots.names, reads.model()
        assert model is not None
        if any(key.startswith(_GIVEN) for key, _ in self.places):
            holders = {**holders, **{key: place.holder for key, place in given_containers(*arguments).items()}}
        before: dict[str, Any] = {}

        def found(ref: _Ref) -> Any:
            if ref.kind == "result":
                return outputs[self.results[ref.key]]
            if ref.kind == "input":
                return inputs[ref.key]
            if ref.kind in ("parameter", "buffer"):
                owner, _, name = ref.key.rpartition(".")
                return getattr(model.get_submodule(owner), name)
            if ref.kind == "module":
                return model.get_submodule(ref.key)
            if ref.kind == "held":
                return holders[ref.key].held
            if ref.kind == "content":
                if ref.key not in before:
                    before[ref.key] = holders[ref.key].contents(names)
                return before[ref.key][ref.label]
            return ref.key

        loader = pickle.Unpickler(io.BytesIO(self.content))
        refs = self.refs
        loader.persistent_load = lambda number: found(refs[number])  # type: ignore[method-assign]
        for key, content in loader.load():
            holders[key].repeat(content)


#: Prefix of the keys of containers among the arguments.
_GIVEN = "given "


def given_containers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Place]:
    """The lists, dicts and objects among arguments that are taken apart, see `trees`: the model may fill them."""
    found: dict[str, Place] = {}
    seen: set[int] = set()

    def look(value: Any, path: str, name: str) -> None:
        children = children_of(value)
        if children is None or id(value) in seen:
            return
        seen.add(id(value))
        own = [holder for holder in holders_of(value, frozenset(_attributes(value))) if holder.held is value]
        for number, holder in enumerate(own):
            key = f"{_GIVEN}{path}{'.' * number}"
            found[key] = Place(holder, f"argument {name}", key)
        for number, child in enumerate(children):
            look(child, f"{path} {number}", name)

    for name, value in (*enumerate(args), *kwargs.items()):
        look(value, str(name), str(name))
    return found


def _attributes(value: Any) -> Iterator[str]:
    yield from getattr(value, "__dict__", ())


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, number: Callable[[Any], int | None]) -> None:
        super().__init__(file, protocol=5)
        self._number = number

    def persistent_id(self, value: Any) -> int | None:
        return self._number(value)


class _Numbers:
    """Numbers everything that a pickle of effects refers to.

    Args:
        walk: through everything that there was before the forward.
        given: what the caller gave, by identity of the tracer's tensors and of containers.
    """

    def __init__(self, walk: Walk, given: Mapping[int, tuple[str, Any]]) -> None:
        self.refs: list[_Ref] = []
        self.tensors: list[torch.Tensor] = []
        self.known = walk.known
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []
        self._given, self._before = given, dict[int, _Ref]()
        for place in walk.places:
            for label, value in place.holder.contents(walk.names).items():
                if form_of_plain(value) is None and not isinstance(value, tuple):
                    self._before.setdefault(id(value), _Ref("content", place.key, label))
        for place in walk.places:
            if not isinstance(place.holder.held, nn.Module):
                self._before[id(place.holder.held)] = _Ref("held", place.key)

    def number(self, value: Any) -> int | None:
        """For pickle: the number of what it refers to; None for what it is to take apart."""
        if form_of_plain(value) is not None:
            return None
        if (known := self._numbers.get(id(value))) is None:
            ref = self._ref(value)
            if ref is None:
                return None
            self._kept.append(value)
            known = self._numbers[id(value)] = len(self.refs)
            self.refs.append(ref)
        return known

    def _ref(self, value: Any) -> _Ref | None:
        if (given := self._given.get(id(value))) is not None:
            return _Ref(*given)
        if isinstance(value, FunctionalTensor):
            self.tensors.append(value)
            return _Ref("result", len(self.tensors) - 1)
        if isinstance(value, nn.Module) and (name := self.known.get(id(value))) is not None:
            return _Ref("module", name)
        if (before := self._before.get(id(value))) is not None:
            return before
        if isinstance(value, FakeTensor):
            raise _CannotRepeat("a tensor that is not of the step")
        if isinstance(value, types.FunctionType) and any(map(_holds_traced, value.__closure__ or ())):
            raise _CannotRepeat("a function that holds a tensor of the step")
        if value is ABSENT or isinstance(value, (torch.Tensor, *_FIXED)):
            return _Ref("same", value)
        return None


def _holds_traced(cell: Any) -> bool:
    try:
        return isinstance(cell.cell_contents, FunctionalTensor)
    except ValueError:
        return False


class Assigned(NamedTuple):
    """What a forward has set at a place: what `Holder.repeat` needs, and its paths for people."""

    place: Place
    content: Any
    paths: tuple[str, ...]


def effects_of(sets: Sequence[Assigned], walk: Walk, given: Mapping[int, tuple[str, Any]], who: str) -> Effects:
    """The effects of a forward.

    Args:
        sets: at places of ``walk``, or of `given_containers`.
        walk: through everything as it was before the forward.
        given: of the tracer's tensors and of containers, by identity: kind and key of what the caller gave.
        who: sets it, for messages.

    Raises:
        CaptureError: a value that cannot be made again.
    """
    numbers, file = _Numbers(walk, given), io.BytesIO()
    for place, content, paths in sets:
        named = {given.get(id(value), ("",))[0] for value in content.values()} if isinstance(content, dict) else set()
        if isinstance(place.holder.held, nn.Module) and "parameter" in named:
            raise CaptureError(
                f"{who} registers a parameter again, by setting {', '.join(paths)}; register it in __init__"
            )
        try:
            _Pickler(io.BytesIO(), _Numbers(walk, given).number).dump(content)
        except Exception as error:  # whatever an object's own code for pickle raises
            raise CaptureError(
                f"{who} sets {', '.join(paths)} to {error if isinstance(error, _CannotRepeat) else f'what cannot be copied ({error})'}, "
                "which a schedule cannot set again; return it, or set it outside the model"
            ) from error
    _Pickler(file, numbers.number).dump([(place.key, content) for place, content, _ in sets])
    places = {(p.key, label) for p, content, _ in sets for label in (content if isinstance(content, dict) else (None,))}
    own = any(ref.kind == "same" and isinstance(ref.key, torch.Tensor) for ref in numbers.refs)
    paths = tuple(path for each in sets for path in each.paths)
    return Effects(file.getvalue(), tuple(numbers.refs), tuple(numbers.tensors), paths, frozenset(places), not own)
