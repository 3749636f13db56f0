"""Wraps a model as a function from tensors to tensors, which PyTorch's exporter can trace."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from ...errors import CaptureError
from ...nn.sync_batch_norm import is_synchronised, world
from ..annotations import InPlaceCalls, marked_modules, named_layers
from ..checks import may_have_gradient
from ..constants import constant_name
from ..guards.effects import Effects
from ..guards.holders import Attributes
from ..guards.reads import Reads
from ..guards.recorder import Recorder
from ..guards.side_effects import Generators, checkpoints_checked, is_again, keeping_tensors, saved_as_they_are
from ..guards.traversal import form_of_plain, given_containers
from ..held_tensors import ConstantsFound, HeldTensors
from ..trees import classes_in, flattened, placed, taken_apart
from .alone import observed
from .answers import Answer, Given, number_by_number, recorded_answers
from .autocast import TracedAutocast
from .autograd_kernels import AutogradKernels
from .channels_last import ChannelsLast, in_rows
from .state_objects import StateObjects, keep_attributes

#: Where a `FlatModule` keeps the tensors that the model has not registered.
HELD = "held."
#: A forward that fails is traced anew so often, each time with the constants that the last trace met as inputs.
_TRIES = 16
_T = TypeVar("_T")


class FlatModule(nn.Module):
    """The model as a function of tensors alone, as ``aot_export`` needs it; all other arguments are constants.

    Args:
        given_as_one: a tensor that is given several times is one in any case; else where it may have a gradient, as
            keys of steps have it.
        channels_last: its convolutions take their inputs in this layout; its results are row-major.

    Attributes:
        recorder: of the present trace.
        state_objects, out_spec: of the last forward.
    """

    recorder: Recorder
    state_objects: StateObjects
    out_spec: pytree.TreeSpec

    def __init__(
        self,
        model: nn.Module,
        given: tuple[tuple[Any, ...], dict[str, Any]],
        *,
        given_as_one: bool = False,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        self.autocast = TracedAutocast()
        self.training = model.training
        self.model = model
        self.given, self.leaves, self.classes = given, flattened(given)[0], classes_in(given)
        self.out_leaves: list[Any] = []
        self.out_positions: list[tuple[int, ...]] = []
        self.used = WeakTensorKeyDictionary()  # the user's tensors that operators of the last forward take
        self.effects: Effects | None = None
        self.reads: Reads | None = None
        self.answers: tuple[Answer, ...] | None = None  # of a plain forward; None: it was not asked
        self.made_to_require: set[int] = set()  # positions of inputs, see `Captured`
        self.held, self.tries = nn.Module(), _TRIES
        self.generators = Generators()
        self.aliases: list[torch.Tensor] = []  # frozen parameters as other objects hold them
        self.before: dict[str, torch.Tensor] = {}
        self.changed_without_gradient: set[int | str] = set()  # inputs and names of what is changed under no_grad alone
        self.tracing_mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        self._given_as_one, self.channels_last = given_as_one, channels_last
        own = super().named_buffers(remove_duplicate=False)
        self._trained = {name for name, buffer in own if buffer.requires_grad}
        self.buffers_made_to_require: dict[str, torch.Tensor] = {}  # by name, see `Captured`

    def is_one(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that is given several times is one in the trace."""
        return self._given_as_one or may_have_gradient(tensor)

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have the tracer take tensors that live in the user's objects for parameters and buffers."""
        for tensor in tensors:
            members = self.held._parameters if tensor.requires_grad else self.held._buffers
            members[str(len(self.held._parameters) + len(self.held._buffers))] = tensor  # type: ignore[assignment]

    def have_trained(self, buffer: torch.Tensor) -> None:
        """Take a buffer for one that requires a gradient, as the forward has it do in each call."""
        own = super().named_buffers(remove_duplicate=False)
        names = [name for name, each in own if each is buffer]
        self._trained.update(names)
        self.buffers_made_to_require.update({name.removeprefix("model."): buffer for name in names})

    @contextlib.contextmanager
    def buffers_requiring(self) -> Iterator[None]:
        """Have these buffers require a gradient during a trace."""
        try:
            for buffer in self.buffers_made_to_require.values():
                buffer.requires_grad_()
            yield
        finally:
            for buffer in self.buffers_made_to_require.values():
                buffer.requires_grad_(False)

    def tensor(self, target: str) -> tuple[str, torch.Tensor]:
        """The name of what the tracer calls ``target``, and the tensor itself."""
        owner, _, name = target.rpartition(".")
        module = self.get_submodule(owner)
        tensor = {**module._parameters, **module._buffers}[name]
        assert tensor is not None
        return (constant_name(int(name)) if module is self.held else target.removeprefix("model.")), tensor

    # The tracer puts its own tensors in the place of the model's, name by name, and takes them out in the same order.
    # In a module that has two names the second would put back the tracer's tensor that it found: only first names are
    # told. A parameter or buffer with several names is one tensor in the trace as well: its gradients add up in the
    # order of its uses, and one module reads the other's writes.

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters, each under its first name, and buffers that require a gradient."""
        buffers = super().named_buffers(*args, **kwargs)
        trained = ((name, buffer) for name, buffer in buffers if name in self._trained)
        members = chain(super().named_parameters(*args, **kwargs), trained)
        return _first_of_each(self._in_first_names(members))  # type: ignore[arg-type]

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's other buffers, each under its first name."""
        buffers = super().named_buffers(*args, **kwargs)
        others = ((name, buffer) for name, buffer in buffers if name not in self._trained)
        return _first_of_each(self._in_first_names(others))

    def _in_first_names(self, members: Iterator[tuple[str, _T]]) -> Iterator[tuple[str, _T]]:
        first = {name for name, _ in self.named_modules()}
        return ((name, member) for name, member in members if name.rpartition(".")[0] in first)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        supply = enumerate(tensors)
        given: dict[int, torch.Tensor] = {}  # a tensor that is given several times is one in the model, too
        held: dict[int, tuple[int, torch.Tensor]] = {}
        leaves = []
        for leaf in self.leaves:
            if isinstance(leaf, torch.Tensor):
                number, traced = next(supply)
                held.setdefault(id(leaf), (number, traced))
                leaf = given.setdefault(id(leaf), traced) if self.is_one(leaf) else traced
            leaves.append(leaf)
        self.recorder.begin()
        answers = Given(self.answers or ())
        asked: contextlib.AbstractContextManager[Any] = answers if self.answers else contextlib.nullcontext()
        with (
            placed(self.given, leaves) as (args, kwargs),
            self.autocast.in_forward([*self.model.parameters(), *self._leaf_inputs(tensors)]),
            self.generators.kept(f"{type(self.model).__name__}.forward"),
            keeping_tensors(self.model),
            checkpoints_checked(self.model),
            observed(),
            saved_as_they_are(),
            self.tracing_mode,
            ChannelsLast() if self.channels_last else contextlib.nullcontext(),
            InPlaceCalls(),
            AutogradKernels(),
            named_layers(self.model),
            marked_modules(),
            self.recorder.forward(self._given(tensors), given_containers(args, kwargs)),
            self._inputs_in_place(held),
            number_by_number(self.parameters()),
            asked,
        ):
            flat = self._called(args, kwargs, tensors)
            answers.check_end()
        results: dict[int, tuple[torch.Tensor, list[int]]] = {}  # one that is returned twice is one result
        for position, leaf in enumerate(flat):
            if isinstance(leaf, torch.Tensor):
                result = in_rows(leaf) if self.channels_last else leaf
                results.setdefault(id(leaf), (result, []))[1].append(position)
        self.effects = self.recorder.effects
        if self.effects is not None:
            for tensor in self.effects.tensors:
                results.setdefault(id(tensor), (tensor, []))
            places = {key: place for place, key in enumerate(results)}
            self.effects = self.effects.of_outputs([places[id(tensor)] for tensor in self.effects.tensors])
        self.out_positions = [tuple(found) for _, found in results.values()]
        if not self.out_positions:
            raise CaptureError(f"{type(self.model).__name__} returned no tensor, so there is nothing to train")
        for leaf in flat:
            if not isinstance(leaf, torch.Tensor | int | float | str) and form_of_plain(leaf) is None:
                raise CaptureError(
                    f"{type(self.model).__name__} returned a {type(leaf).__name__}, which a schedule cannot make anew; "
                    "return tensors in tuples, lists, dicts or dataclasses (for Hugging Face models: use_cache=False)"
                )
        try:
            pytree.tree_unflatten(flat, self.out_spec)
        except Exception as error:  # of the user's own classes
            raise CaptureError(
                f"{type(self.model).__name__} returned what a schedule cannot make anew ({type(error).__name__}: "
                f"{error}); return tensors in tuples, lists, dicts or dataclasses"
            ) from error
        self.out_leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
        return (*self._apart([tensor for tensor, _ in results.values()], tensors), *answers.asked)

    def _given(self, tensors: Sequence[torch.Tensor]) -> dict[int, tuple[str, Any]]:
        """What the caller gave in the place of each of the tracer's tensors, by identity, as `Effects` refers to it."""
        found: dict[int, tuple[str, Any]] = {}
        for kind, members in (("parameter", self.named_parameters()), ("buffer", self.named_buffers())):
            for name, tensor in members:
                before = self.before.get(name)
                ref = ("same", before) if name.startswith(HELD) else (kind, name.removeprefix("model."))
                found.update({id(tensor): ref, id(before): ref})
        for position, tensor in enumerate(tensors):
            found.setdefault(id(tensor), ("input", position))
        return found

    def has_values(self) -> bool:
        """Whether a plain forward can run: no tensor is without memory, and no other process has to take part."""
        if is_synchronised(self.model) and world()[1] > 1:
            return False
        held = (*self.leaves, *self.model.parameters(), *self.model.buffers())
        return not any(isinstance(t, FakeTensor) or t.is_meta for t in held if isinstance(t, torch.Tensor))

    def recorded_answers(self) -> tuple[Answer, ...]:
        """What a plain forward answers, see `answers.recorded_answers`."""
        with placed(self.given, self.leaves) as (args, kwargs):  # what it sets of arguments is undone
            return recorded_answers(self.model, args, kwargs)

    def _leaf_inputs(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of ``tensors`` whose example inputs were leaves of autograd's graph."""
        given = (leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor))
        return [tensor for tensor, example in zip(tensors, given, strict=True) if example.is_leaf]

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """The leaves of the model's result, with the tracer's tensors in the place of those in the user's objects."""
        self.used.clear()
        own = self.used = WeakTensorKeyDictionary()
        leaves = self._leaf_inputs(tensors)
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if (before := self.before.get(name)) is not None:
                own[before] = tensor
                keep_attributes(tensor, before)
                leaves += [tensor] if before.is_leaf else []
        buffers = [self.before[name] for name, _ in self.named_buffers() if name in self.before]
        mode = HeldTensors(own, self.parameters(), tensors, leaves, buffers=buffers, looking=self.tries > 0)
        attributes = [(tensor, dict(vars(tensor))) for tensor in tensors]
        self.state_objects = StateObjects(mode.replacement, self.recorder.watch)
        try:
            with self._own_in_place(own), mode, mode.in_custom_functions(self.state_objects.replaced):
                leaves, self.out_spec = pytree.tree_flatten(taken_apart(self.model(*args, **kwargs), results=True))
                result: list[Any] = mode.replaced(leaves)
        except Exception:
            if mode.found:
                raise ConstantsFound(mode.found, self.tries - 1) from None
            raise
        if mode.found:
            raise ConstantsFound(mode.found, 0)
        self.aliases = mode.aliases
        self.state_objects.hand_over()
        self.recorder.marked += _marked(attributes, result)
        keyed: list[tuple[int | str, torch.Tensor]] = [
            *enumerate(tensors),
            *self.named_parameters(),
            *self.named_buffers(),
        ]
        self.changed_without_gradient = {
            key
            for key, tensor in keyed
            if isinstance(tensor, FunctionalTensor)
            and torch._functionalize_are_all_mutations_under_no_grad_or_inference_mode(tensor.elem)
        }
        return result

    @contextlib.contextmanager
    def _own_in_place(self, traced: Mapping[Any, torch.Tensor]) -> Iterator[None]:
        """Have modules hold the user's own tensors, of which a forward may ask the class, attributes and identity; the
        tracer's come where operators take them (`HeldTensors`), and at the end.

        Tensors that consist of others, such as torchao's, are the tracer's all the time.

        Args:
            traced: the tracer's tensors by the user's.
        """
        own = {id(tensor): before for before, tensor in traced.items()}
        others: list[tuple[dict[str, Any], str, Any, Any]] = []  # where a module holds what, and holds what meanwhile
        for held in (held for module in self.model.modules() for held in (module._parameters, module._buffers)):
            for name, tensor in held.items():
                of_others = is_traceable_wrapper_subclass(own.get(id(tensor), tensor))
                other = traced.get(tensor) if of_others else own.get(id(tensor))
                others += [] if other is None else [(held, name, tensor, other)]
        for held, name, _, other in others:
            held[name] = other
        try:
            yield
        finally:
            for held, name, tensor, other in others:
                if is_again(other, now := held.get(name)):
                    held[name] = tensor
                    if now is not None and now is not other:
                        set_by_it = Attributes(now, vars(now)).difference(vars(other))  # it is another object
                        self.recorder.marked += [(other, set_by_it)] if set_by_it else []

    @contextlib.contextmanager
    def _inputs_in_place(self, traced: Mapping[int, tuple[int, torch.Tensor]]) -> Iterator[None]:
        """Have attributes of modules that are one tensor with an input hold the tracer's, as a forward may ask for it.

        Args:
            traced: numbers of inputs and the tracer's tensors, by identity of the inputs.
        """
        others: list[tuple[dict[str, Any], str, Any, torch.Tensor]] = []
        for path, module in self.model.named_modules():
            for name, value in vars(module).items():
                if id(value) in traced:
                    number, other = traced[id(value)]
                    others.append((vars(module), name, value, other))
                    self.recorder.attributes.setdefault(path, set()).add(name)
                    self.recorder.held.add((f"{f'self.{path}'.rstrip('.')}.{name}", number))
        for attributes, name, _, other in others:
            attributes[name] = other
        try:
            yield
        finally:
            for attributes, name, value, other in others:
                if attributes.get(name) is other:
                    attributes[name] = value

    def check_state_objects(self) -> None:
        """Whether custom functions have set nothing in their backward of the objects that they were given.

        Raises:
            CaptureError: they have.
        """
        for path in self.state_objects.set_since():
            raise CaptureError(
                f"a custom function of {type(self.model).__name__} sets {path} in the backward, and a schedule would "
                "not; compute it outside the model"
            )

    def _apart(self, results: list[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results, with a copy of every result with a gradient that shares its storage with another tensor.

        A tracer gives no gradient to results that are views of each other, of inputs, or of parameters.
        """
        known = {_storage_of(t) for t in (*tensors, *self.parameters(), *self.buffers())}
        uses = Counter(map(_storage_of, results))
        for position, leaf in enumerate(results):
            if leaf.requires_grad:
                if _storage_of(leaf) in known or (leaf._base is not None and uses[_storage_of(leaf)] > 1):
                    results[position] = leaf.clone()
                known.add(_storage_of(leaf))
        return results


def _marked(
    before: Sequence[tuple[torch.Tensor, dict[str, Any]]], result: Any
) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Tensors on which a forward has set attributes, and these: what it was given, and its results, which had none."""
    given = {id(tensor) for tensor, _ in before}
    made = [t for t in pytree.tree_leaves(result) if isinstance(t, FunctionalTensor) and id(t) not in given]
    for tensor, then in (*before, *((tensor, {"elem": tensor.elem}) for tensor in made)):
        if content := Attributes(tensor, vars(tensor)).difference(then):
            yield tensor, content


def _storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _first_of_each(members: Iterator[tuple[str, _T]]) -> Iterator[tuple[str, _T]]:
    """Named tensors, each under its first name alone."""
    seen: set[int] = set()
    for name, member in members:
        if id(member) not in seen:
            seen.add(id(member))
            yield name, member
