"""Wraps a model as a function from tensors to tensors, which PyTorch's exporter can trace."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from ...errors import CaptureError
from ...nn.sync_batch_norm import is_synchronised, world
from ..annotations import InPlaceCalls, marked_modules, named_layers
from ..checks import may_have_gradient
from ..constants import ConstantsFound, HeldTensors, constant_name
from ..guards.effects import Effects, given_containers
from ..guards.holders import Attributes
from ..guards.reads import Reads
from ..guards.recorder import Recorder
from ..guards.side_effects import checkpoints_checked, keeping_generators, keeping_tensors
from ..guards.traversal import form_of_plain
from ..trees import classes_in, flattened, placed, taken_apart
from .answers import Answer, Given, number_by_number, recorded_answers
from .autocast import TracedAutocast
from .state_objects import StateObjects, keep_attributes

#: Where a `FlatModule` keeps the tensors that the model has not registered.
HELD = "held."
#: A forward that fails is traced anew so often, each time with the constants that the last trace met as inputs.
_TRIES = 16
_T = TypeVar("_T")


class FlatModule(nn.Module):
    """The model as a function of tensors alone, as ``aot_export`` needs it; all other arguments are constants."""

    def __init__(
        self, model: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]], *, tied_as_one: bool = False
    ) -> None:
        super().__init__()
        self.autocast = TracedAutocast()
        self.training = model.training
        self.model = model
        self.given, self.leaves, self.classes = given, flattened(given)[0], classes_in(given)
        self.out_leaves: list[Any] = []
        self.out_spec: pytree.TreeSpec | None = None
        self.out_positions: list[tuple[int, ...]] = []
        self.used = WeakTensorKeyDictionary()  # the user's tensors that operators of the last forward take
        self.effects: Effects | None = None
        self.reads: Reads | None = None
        self.recorder: Recorder | None = None
        self.answers: tuple[Answer, ...] | None = None  # of a plain forward; None: it was not asked
        self.made_to_require: set[int] = set()  # positions of inputs, see `Captured`
        self.held, self.tries = nn.Module(), _TRIES
        self.state_objects: StateObjects | None = None  # of the last forward
        self.aliases: list[torch.Tensor] = []  # frozen parameters as other objects hold them
        self.before: dict[str, torch.Tensor] = {}
        self.changed_without_gradient: set[int | str] = set()  # inputs and names of what is changed under no_grad alone
        self.tracing_mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        modules = [module for _, module in self.named_modules()]
        self._parameters_as_one = tied_as_one
        self._tied = _further_places([m._buffers for m in modules])
        if tied_as_one:
            self._tied += _further_places([m._parameters for m in modules])

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have the tracer take tensors that live in the user's objects for parameters and buffers."""
        for tensor in tensors:
            members = self.held._parameters if tensor.requires_grad else self.held._buffers
            members[str(len(self.held._parameters) + len(self.held._buffers))] = tensor  # type: ignore[assignment]

    def tensor(self, target: str) -> tuple[str, torch.Tensor]:
        """The name of what the tracer calls ``target``, and the tensor itself."""
        owner, _, name = target.rpartition(".")
        module = self.get_submodule(owner)
        tensor = {**module._parameters, **module._buffers}[name]
        assert tensor is not None
        return (constant_name(int(name)) if module is self.held else target.removeprefix("model.")), tensor

    # The tracer puts its own tensors in the place of the model's, name by name, and takes them out in the same order.
    # In a module that has two names the second would put back the tracer's tensor that it found: only first names are
    # told. A buffer that two modules hold is one tensor in the trace as well: one module reads the other's writes.

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters; if a module has several names, under its first."""
        members = self._in_first_names(super().named_parameters(*args, **kwargs))
        return _first_of_each(members) if self._parameters_as_one else members

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's buffers, each under its first name."""
        return _first_of_each(self._in_first_names(super().named_buffers(*args, **kwargs)))

    def _in_first_names(self, members: Iterator[tuple[str, _T]]) -> Iterator[tuple[str, _T]]:
        first = {name for name, _ in self.named_modules()}
        return ((name, member) for name, member in members if name.rpartition(".")[0] in first)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        supply = iter(tensors)
        given: dict[int, torch.Tensor] = {}  # a tensor that is given several times is one in the model, too
        leaves = []
        for leaf in self.leaves:
            if isinstance(leaf, torch.Tensor):
                traced = next(supply)
                leaf = given.setdefault(id(leaf), traced) if may_have_gradient(leaf) else traced
            leaves.append(leaf)
        if self.recorder is not None:
            self.recorder.begin()
        with contextlib.ExitStack() as stack:
            args, kwargs = stack.enter_context(placed(self.given, leaves))
            stack.enter_context(_as_one(self._tied))
            stack.enter_context(self.autocast.in_forward([*self.model.parameters(), *self._leaf_inputs(tensors)]))
            stack.enter_context(keeping_generators(f"{type(self.model).__name__}.forward"))
            stack.enter_context(keeping_tensors(self.model))
            answers = Given(self.answers or ())
            stack.enter_context(checkpoints_checked(self.model, answers.again))
            for context in (self.tracing_mode, InPlaceCalls(), named_layers(self.model), marked_modules()):
                stack.enter_context(context)
            if self.recorder is not None:
                stack.enter_context(self.recorder.forward(self._given(tensors), given_containers(args, kwargs)))
            stack.enter_context(number_by_number(self.parameters()))
            if self.answers:
                stack.enter_context(answers)
            flat = self._called(args, kwargs, tensors)
            answers.check_end()
        results: dict[int, tuple[torch.Tensor, list[int]]] = {}  # one that is returned twice is one result
        for position, leaf in enumerate(flat):
            if isinstance(leaf, torch.Tensor):
                results.setdefault(id(leaf), (leaf, []))[1].append(position)
        self.effects = self.recorder.effects if self.recorder is not None else None
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
        assert self.out_spec is not None
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
        """What the caller has given in the place of each of the tracer's tensors, by identity, as `Effects` refers to
        it.
        """
        found: dict[int, tuple[str, Any]] = {}
        for kind, members in (("parameter", self.named_parameters()), ("buffer", self.named_buffers())):
            for name, tensor in members:
                held = name.startswith(HELD)
                found[id(tensor)] = ("same", self.before.get(name)) if held else (kind, name.removeprefix("model."))
        for position, tensor in enumerate(tensors):
            found.setdefault(id(tensor), ("input", position))
        return found

    def has_values(self) -> bool:
        """Whether a plain forward can run: no tensor is without memory, and no other process would have
        to take part.
        """
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
        """The leaves of the model's result, with the tracer's tensors in the place of those that the user's objects
        hold.
        """
        own = WeakTensorKeyDictionary()
        leaves = self._leaf_inputs(tensors)
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if (before := self.before.get(name)) is not None:
                own[before] = tensor
                keep_attributes(tensor, before)
                leaves += [tensor] if before.is_leaf else []
        mode = HeldTensors(own, self.parameters(), tensors, leaves, looking=self.tries > 0)
        attributes = [(tensor, dict(vars(tensor))) for tensor in (*tensors, *self.parameters(), *self.buffers())]
        self.state_objects = StateObjects(mode.replacement, self.recorder.watch if self.recorder else lambda *_: True)
        try:
            with mode, mode.in_custom_functions(self.state_objects.replaced):
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
        if self.recorder is not None:
            self.recorder.marked = [*_marked(attributes, result)]
        self.used = WeakTensorKeyDictionary(dict.fromkeys(own, True))
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

    def check_state_objects(self) -> None:
        """Whether custom functions have set nothing in their backward of the objects that they were given.

        Raises:
            CaptureError: they have.
        """
        for path in self.state_objects.set_since() if self.state_objects is not None else ():
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
    """Tensors on which a forward has set attributes, and these: of what it was given, and of its results, which had
    none.
    """
    given = {id(tensor) for tensor, _ in before}
    made = [t for t in pytree.tree_leaves(result) if isinstance(t, FunctionalTensor) and id(t) not in given]
    for tensor, then in (*before, *((tensor, {"elem": tensor.elem}) for tensor in made)):
        if content := Attributes(tensor, vars(tensor)).difference(then):
            yield tensor, content


def _storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


#: A dict of a module's tensors and a name in it, and where the same tensor is found first.
_Place = tuple[dict[str, Any], str, dict[str, Any], str]


def _further_places(members: Iterable[dict[str, Any]]) -> list[_Place]:
    """Where modules hold tensors that an earlier place holds too."""
    first: dict[int, tuple[dict[str, Any], str]] = {}
    places: list[_Place] = []
    for held in members:
        for name, tensor in held.items():
            if tensor is not None:
                found = first.setdefault(id(tensor), (held, name))
                if found[0] is not held or found[1] != name:
                    places.append((held, name, *found))
    return places


def _first_of_each(members: Iterator[tuple[str, _T]]) -> Iterator[tuple[str, _T]]:
    """Named tensors, each under its first name alone."""
    seen: set[int] = set()
    for name, member in members:
        if id(member) not in seen:
            seen.add(id(member))
            yield name, member


@contextlib.contextmanager
def _as_one(places: Sequence[_Place]) -> Iterator[None]:
    """Put the tensor of the first place, which the tracer has put there, into all further places."""
    before = [held[name] for held, name, *_ in places]
    for held, name, first, first_name in places:
        held[name] = first[first_name]
    try:
        yield
    finally:
        for (held, name, *_), tensor in zip(places, before, strict=True):
            held[name] = tensor
