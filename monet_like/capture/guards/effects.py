"""Side effects: what a forward sets beside its results, kept so that every replayed forward sets it again.

The guards of a capture hold all values that its forward reads, so what it sets is known: Python values, tensors of the
step, and objects made of both. An object that existed before is found again by its place in a walk (`Walk`), so that a
step also serves an equal model. An object that the forward made is made anew for each call; pickle takes it apart and
puts it together.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ...errors import CaptureError, UsageError
from .holders import ABSENT, Attributes, Elements, Holder, Variable
from .objects import is_library
from .reads import Reads
from .traversal import Place, Walk, form_of_plain, given_containers, walk_through

#: Values that are the same in every call: they are kept as they are.
_FIXED: tuple[type, ...] = (
    type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.MethodDescriptorType,
    types.WrapperDescriptorType, types.MethodWrapperType, torch._ops.OpOverload, torch._ops.OpOverloadPacket,
)  # fmt: skip


class _CannotRepeat(Exception):
    """A value that cannot be set again; its text says what the value is."""


class NotRepeated(UsageError):
    """What a forward sets could not be set again in one call, after its operators have run; nothing of it is set."""


class _Ref(NamedTuple):
    """Something that a call has, in the place of what the trace had.

    Attributes:
        kind: ``result``: of the call, the tensor with number ``key``; ``input``: that of the caller at this position;
            ``parameter``, ``buffer``: the model's of this name; ``held``: the object at the place ``key``; ``content``:
            what was there under a label before the call; ``module``: by name; ``same``: ``key`` itself.
    """

    kind: str
    key: Any
    label: Any = None

    @property
    def at_place(self) -> bool:
        return self.kind in ("held", "content")


@dataclass(frozen=True, eq=False)
class Effects:
    """What one forward sets.

    Attributes:
        content: what is set at each of ``at``, then tensors and attributes that are set on them; pickled.
        at: key of each place at which something is set, and the names of the attributes that are set there, if it has
            any.
        refs: of the pickle's persistent objects.
        tensors: results of the step among them; only while it is traced.
        held: the model's own objects among them, by the key of their place; only while it is traced.
        results: of the tensors, as positions among the program's outputs.
        marks: by the name of a parameter or buffer, the attributes that are set on it.
        fills: whether some of them are in containers among the arguments.
        shared: whether another model may have it, too: nothing of it is an object of this one.
    """

    content: bytes
    at: tuple[tuple[str, tuple[str, ...]], ...]
    refs: tuple[_Ref, ...]
    tensors: tuple[torch.Tensor, ...]
    marks: Mapping[str, tuple[str, ...]]
    fills: bool
    shared: bool
    held: Mapping[str, Holder]
    results: tuple[int, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """What is set, for people."""
        found = [(key.partition(" ")[2], names) for key, names in self.at]
        found += [(f"self.{name}", names) for name, names in self.marks.items()]
        return tuple(path for held, names in found for path in ([f"{held}.{name}" for name in names] or [held]))

    def of_outputs(self, results: Sequence[int]) -> Effects:
        """The same after the trace: of its tensors only their positions among the outputs."""
        return replace(self, tensors=(), results=tuple(results))

    def check_apart(self, tensors: Iterable[torch.Tensor]) -> None:
        """Refuse NumPy arrays that the forward changes while a tensor, which operators read earlier, has their memory.

        Raises:
            CaptureError: there is one.
        """
        arrays = [it.held for key, _ in self.at if isinstance(it := self.held.get(key), Elements)]
        memory = [(a.__array_interface__["data"][0], a.nbytes) for a in arrays if not isinstance(a, bytearray)]
        for tensor in tensors if memory else ():
            if not isinstance(tensor, FakeTensor) and tensor.layout is torch.strided:
                start, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
                if any(place < start + size and start < place + extent for place, extent in memory):
                    raise CaptureError(
                        f"the forward sets {', '.join(self.paths)}, an array whose memory a tensor of the model has, "
                        "too (torch.from_numpy); change the tensor, or give it a copy of the array"
                    )

    def found_in(self, walk: Walk) -> Effects:
        """The same after the trace, with the keys that places have in its guards: what its backward reads may have
        changed them.

        Args:
            walk: of the guards, through the model as it was before the forward.
        """
        keys = {(type(place.holder), id(place.holder.held)): place.key for place in walk.places}
        now = {key: keys[type(holder), id(holder.held)] for key, holder in self.held.items()}
        refs = tuple(ref._replace(key=now.get(ref.key, ref.key)) if ref.at_place else ref for ref in self.refs)
        return replace(self, held={}, at=tuple((now.get(key, key), names) for key, names in self.at), refs=refs)

    def places(self, reads: Reads, arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> Mapping[str, Holder]:
        """Where everything can be set in a call with these arguments, by the key of the place.

        Raises:
            UsageError: an argument lacks the object in which something is to be set, or what is to be set elsewhere.
        """
        holders, names = reads.holders, reads.roots.names
        if self.fills:
            walk = walk_through(given_containers(*arguments), names)
            holders = {**holders, **{place.key: place.holder for place in walk.places}}
        needed = {*(key for key, _ in self.at), *(ref.key for ref in self.refs if ref.at_place)}
        contents = {key: holders[key].contents(names) for key in needed & holders.keys()}
        lacking = {ref.key for ref in self.refs if ref.kind == "content" and ref.label not in contents.get(ref.key, ())}
        for key in sorted({*(needed - holders.keys()), *lacking}):
            raise UsageError(
                f"the forward fills {key.partition(' ')[2]}, which is not as it was in the capture; give lists and "
                "dicts of tensors"
            )
        return holders

    def repeat(
        self,
        reads: Reads,
        holders: Mapping[str, Holder],
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        """Set everything, after a replayed forward.

        Args:
            reads: of the model, which has found no change before the forward.
            holders: of `places`, for the same arguments.
            outputs, inputs: tensors of the call.

        Raises:
            NotRepeated: it cannot be set, such as in an array that has become read-only.
        """
        before: list[tuple[Holder, Any]] = []
        try:
            for holder, content in self._loaded(reads, holders, outputs, inputs):
                before.append((holder, holder.copy()))
                holder.repeat(content)
        except Exception as error:  # of the user's own objects
            for holder, then in reversed(before):
                with contextlib.suppress(Exception):  # what could not be set is as it was
                    holder.put_back(then)
            raise NotRepeated(
                f"the forward sets {', '.join(self.paths)}, which could not be set again ({type(error).__name__}: "
                f"{error}); return it, or set it outside the model"
            ) from error

    def _loaded(
        self,
        reads: Reads,
        holders: Mapping[str, Holder],
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> list[tuple[Holder, Any]]:
        """Where something is set, and what."""
        names, model = reads.roots.names, reads.model()
        assert model is not None
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

        sets, marked = _load(self.content, lambda number: found(self.refs[number]))
        return [
            *((holders[key], content) for (key, _), content in zip(self.at, sets, strict=True)),
            *((Attributes(tensor, vars(tensor)), content) for tensor, content in marked),
        ]


def _load(content: bytes, found: Callable[[int], Any]) -> Any:
    loader = pickle.Unpickler(io.BytesIO(content))
    loader.persistent_load = found  # type: ignore[method-assign]
    return loader.load()


def _dump(content: Any, number: Callable[[Any], int | None]) -> bytes:
    file = io.BytesIO()
    dumper = pickle.Pickler(file, protocol=5)
    dumper.persistent_id = number  # type: ignore[method-assign]
    dumper.dump(content)
    return file.getvalue()


@dataclass(frozen=True)
class Before:
    """Everything that there was before a forward; made while it is as it was.

    Args:
        walks: through it: of the model, and of containers among the arguments.

    Attributes:
        modules: names of the model's.
        refs: how to find each other object in another call, by identity.
        places: by kind and identity of the object.
        among_arguments: keys of the places in the second walk.
    """

    walks: Sequence[Walk]
    refs: dict[int, _Ref] = field(default_factory=dict)
    places: dict[tuple[type, int], Place] = field(default_factory=dict)

    def __post_init__(self) -> None:
        places = [(place, walk.names) for walk in self.walks for place in walk.places]
        for place, names in places:
            self.places.setdefault((type(place.holder), id(place.holder.held)), place)
            for label, value in place.holder.contents(names).items():
                if form_of_plain(value) is None and not isinstance(value, tuple):
                    self.refs.setdefault(id(value), _Ref("content", place.key, label))
        held = [place for place, _ in reversed(places) if not isinstance(place.holder.held, nn.Module)]
        self.refs.update({id(place.holder.held): _Ref("held", place.key) for place in held})

    @property
    def modules(self) -> Mapping[int, str]:
        return self.walks[0].known

    @property
    def among_arguments(self) -> frozenset[str]:
        return frozenset(place.key for walk in self.walks[1:] for place in walk.places)


class _Numbers:
    """Numbers everything that a pickle of effects refers to.

    Args:
        given: what the caller gave, by identity of the tracer's tensors.
    """

    def __init__(self, before: Before, given: Mapping[int, tuple[str, Any]]) -> None:
        self.refs: list[_Ref] = []
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        self.kept: list[Any] = []  # what each number stands for
        self.own = False  # whether a function among it holds objects of this model
        self._given, self._before = given, before

    def number(self, value: Any) -> int | None:
        """For pickle: the number of what it refers to; None for what it is to take apart."""
        if form_of_plain(value) is not None:
            return None
        if (known := self._numbers.get(id(value))) is None:
            ref = self._ref(value)
            if ref is None:
                return None
            self.kept.append(value)
            known = self._numbers[id(value)] = len(self.refs)
            self.refs.append(ref)
        return known

    def _ref(self, value: Any) -> _Ref | None:
        if (given := self._given.get(id(value))) is not None:
            return _Ref(*given)
        if isinstance(value, FunctionalTensor):
            if isinstance(value, nn.Parameter):
                raise _CannotRepeat("a parameter that it makes")
            self.tensors.append(value)
            return _Ref("result", len(self.tensors) - 1)
        if isinstance(value, nn.Module) and (name := self._before.modules.get(id(value))) is not None:
            return _Ref("module", name)
        if (before := self._before.refs.get(id(value))) is not None:
            return before
        if isinstance(value, FakeTensor):
            raise _CannotRepeat("a tensor that is not of the step")
        if isinstance(value, types.FunctionType) and not is_library(value.__module__):
            self._check_function(value)
        if value is ABSENT or isinstance(value, (torch.Tensor, *_FIXED)):
            return _Ref("same", value)
        return None

    def _check_function(self, function: types.FunctionType) -> None:
        """Check that a function which the forward may have made holds nothing that another call's would not hold.

        Raises:
            _CannotRepeat: it does.
        """
        waiting: list[Any] = [function]
        seen: dict[int, None] = {}
        while waiting:
            held = waiting.pop()
            if id(held) in seen or form_of_plain(held) is not None:
                continue
            seen[id(held)] = None
            if id(held) in self._before.refs or id(held) in self._before.modules:
                self.own = True
            elif isinstance(held, types.FunctionType) and not is_library(held.__module__):
                cells = (each for cell in held.__closure__ or () for each in Variable(cell).flat())
                waiting += (*cells, held.__defaults__, *(held.__kwdefaults__ or {}).values(), *vars(held).values())
            elif isinstance(held, tuple):
                waiting += held
            elif isinstance(held, FunctionalTensor):
                raise _CannotRepeat("a function that holds a tensor of the step")
            elif not isinstance(held, _FIXED):
                raise _CannotRepeat(f"a function that holds a {type(held).__name__} of one call")


class Assigned(NamedTuple):
    """What a forward has set at a place: what `Holder.repeat` needs, and its paths for people."""

    place: Place
    content: Any
    paths: tuple[str, ...]


def effects_of(
    sets: Sequence[Assigned], marked: Sequence[tuple[torch.Tensor, dict[str, Any]]], before: Before,
    given: Mapping[int, tuple[str, Any]], who: str,
) -> Effects:  # fmt: skip
    """The effects of a forward.

    Args:
        sets: at places of ``before``.
        marked: tensors of the tracer, and attributes that were set on them.
        given: of the tracer's tensors, by identity: kind and key of what the caller gave.
        who: sets it, for messages.

    Raises:
        CaptureError: a value that cannot be made again.
    """
    numbers = _Numbers(before, given)
    on_tensors = [("a tensor's " + ", ".join(content), [tensor, content]) for tensor, content in marked]
    for what, value in [*((", ".join(paths), content) for _, content, paths in sets), *on_tensors]:
        try:
            alone = _Numbers(before, given)
            _load(_dump(value, alone.number), alone.kept.__getitem__)
        except Exception as error:  # whatever an object's own code for pickle raises
            why = error if isinstance(error, _CannotRepeat) else f"what cannot be copied ({error})"
            raise CaptureError(
                f"{who} sets {what} to {why}, which a schedule cannot set again; return it, or set it outside the model"
            ) from error
    pickled = _dump(([content for _, content, _ in sets], [*marked]), numbers.number)
    at = tuple((place.key, tuple(content) if isinstance(content, dict) else ()) for place, content, _ in sets)
    among = before.among_arguments
    own = numbers.own or any(ref.kind == "same" and isinstance(ref.key, torch.Tensor) for ref in numbers.refs)
    refs, tensors = tuple(numbers.refs), tuple(numbers.tensors)
    keys = {*(key for key, _ in at), *(ref.key for ref in refs if ref.at_place)}
    held = {place.key: place.holder for place in before.walks[0].places if place.key in keys}
    named = [(given.get(id(tensor), ("", "")), tuple(content)) for tensor, content in marked]
    marks = {key: names for (kind, key), names in named if kind in ("parameter", "buffer")}
    return Effects(pickled, at, refs, tensors, marks, bool(keys & among), not own, held)
