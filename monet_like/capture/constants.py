"""Constants: tensors that a forward reads although they are not parameters, buffers or arguments of the model.

Some live in the user's objects: plain attributes, lists, dicts, globals, closures, modules that are registered nowhere.
`HeldTensors` has the tracer take these for parameters and buffers of the model, so that a step reads the very tensor
that the user's object holds, sees what is written into it, and gives it a gradient. Others are made in the forward from
numbers (``torch.tensor([0.485, 0.456])``): they stay in the graph as attributes, and `Constants` keeps them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import CaptureError
from ..ir.display import short_repr
from .annotations import changes_its_first, note_held

#: Containers nested deeper than this are not searched for constants.
_DEPTH = 4
#: A container, a key or position in it, and what was there.
Place = tuple[Any, Any, Any]
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})
_PLAIN_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer, FakeTensor)
_GRAD: Any = vars(torch._C.TensorBase)["grad"].__get__
_REQUIRES: Any = (torch.Tensor.requires_grad_, vars(torch._C.TensorBase)["requires_grad"].__set__)
_SET_GRAD: Any = vars(torch._C.TensorBase)["grad"].__set__
#: What a leaf of autograd's graph answers, which the tracer's tensor in its place is not.
_OF_LEAF: Any = {vars(torch._C.TensorBase)["is_leaf"].__get__: True, vars(torch._C.TensorBase)["grad_fn"].__get__: None}


class ConstantsFound(BaseException):
    """Ends a trace that met tensors of the user's objects: the trace is made again with them as inputs.

    No ``Exception``, because a forward may catch these. ``tries`` is how often that may happen from here on.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], tries: int) -> None:
        super().__init__()
        self.tensors, self.tries = tuple(tensors), tries


def constant_name(number: int) -> str:
    """The name of a constant in a program, which no parameter or buffer can have."""
    return f"<constant {number}>"


class InputRequires(BaseException):
    """Ends a trace whose forward calls ``requires_grad_`` on an input: it is made again with that input requiring a
    gradient.
    """

    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position


class HeldTensors(TorchFunctionMode):
    """While a model is traced: puts the tracer's tensors in the place of those that live outside the trace.

    One that is met for the first time gets a tensor without its values, so that nothing can change it, and is listed.

    Args:
        replacements: the tracer's tensors by those outside; new ones are added.
        parameters, inputs: the tracer's, which live for longer than this.
        leaves: those among all of them that stand for leaves of autograd's graph.
        looking: whether to replace new ones, too.

    Attributes:
        found: the new ones.
        aliases: those that are a frozen parameter in another object.
    """

    def __init__(
        self,
        replacements: WeakTensorKeyDictionary,
        parameters: Iterable[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        leaves: Iterable[torch.Tensor],
        *,
        looking: bool,
    ) -> None:
        super().__init__()
        self.replacements, self.looking = replacements, looking
        self._inputs = {id(tensor): position for position, tensor in enumerate(inputs)}
        self._given = frozenset((*map(id, parameters), *self._inputs))
        self._leaves = frozenset(map(id, leaves))
        self.found: list[torch.Tensor] = []
        self.aliases: list[torch.Tensor] = []
        self._frozen = {
            _memory_of(own): traced
            for own, traced in replacements.items()
            if isinstance(own, nn.Parameter) and not own.requires_grad and not is_traceable_wrapper_subclass(own)
        }
        self._depth = 0

    def __enter__(self) -> HeldTensors:
        self._depth = _dispatch_depth()
        super().__enter__()
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = (args, dict(kwargs or {}))
        if func in _OF_LEAF and _dispatch_depth() >= self._depth and id(args[0]) in self._leaves:
            return _OF_LEAF[func]
        if func == _GRAD and _dispatch_depth() >= self._depth and (_outside(args[0]) or id(args[0]) in self._given):
            raise CaptureError(
                "the forward reads .grad of a parameter or an input, which changes with every step, and a schedule "
                "would not see it; give it as an argument, or copy it into a buffer before the call"
            )
        if func == _SET_GRAD and _dispatch_depth() >= self._depth and (_outside(args[0]) or id(args[0]) in self._given):
            raise CaptureError(
                "the forward sets .grad of a parameter or an input, and a schedule would not; set it before or after "
                "the call"
            )
        if func in _REQUIRES and _dispatch_depth() >= self._depth and (_outside(args[0]) or id(args[0]) in self._given):
            self._check_requires(args[0], (*args[1:], *(kwargs or {}).values(), True)[0])
            return args[0]
        args, kwargs = self.replaced(given)
        if not self.looking and args and _outside(args[0]) and self._changes(func, kwargs):
            raise foreign_memory()
        result = func(*args, **kwargs)
        if args and result is args[0] and args[0] is not given[0][0]:
            return given[0][0]  # changed in place: ``self.count += 1`` leaves the attribute as it is
        return result

    def _check_requires(self, leaf: torch.Tensor, wanted: bool) -> None:
        """Check that an input or a parameter can require a gradient, or none, from here on.

        Raises:
            InputRequires: an input will, in the next trace.
            CaptureError: a schedule would not do it.
        """
        if leaf.requires_grad == wanted:
            return
        if wanted and id(leaf) in self._inputs and leaf.grad_fn is None:
            raise InputRequires(self._inputs[id(leaf)])
        raise CaptureError(
            f"the forward sets requires_grad of {'an input' if id(leaf) in self._inputs else 'a parameter or buffer'} "
            f"to {wanted}, and a schedule would not; set it before the call"
        )

    def _changes(self, func: Any, kwargs: Mapping[str, Any]) -> bool:
        changes = changes_its_first(func, kwargs) or getattr(func, "__name__", "") == "__setitem__"
        return changes and _dispatch_depth() >= self._depth

    def replaced(self, tree: Any) -> Any:
        """``tree`` with the tracer's tensors."""
        # Below that depth the tracer's own code calls functions, on tensors that are none of the forward's.
        if not any(map(_outside, pytree.tree_leaves(tree))) or _dispatch_depth() < self._depth:
            return tree
        return pytree.tree_map(self.replacement, tree)

    def replacement(self, leaf: Any) -> Any:
        """The tracer's tensor for one from outside; all else is returned as it is."""
        if not _outside(leaf):
            return leaf
        if leaf not in self.replacements and not leaf.requires_grad and _memory_of(leaf) in self._frozen:
            self.replacements[leaf] = self._frozen[_memory_of(leaf)]
            self.aliases.append(leaf)
        if leaf not in self.replacements and self.looking:
            like = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
            self.replacements[leaf] = like.requires_grad_(leaf.requires_grad)
            self.found.append(leaf)
        return self.replacements.get(leaf, leaf)

    @contextlib.contextmanager
    def in_custom_functions(self, replaced: Callable[[Any], Any]) -> Iterator[None]:
        """Replace the arguments of ``torch.autograd.Function.apply``, which is no function that modes see."""
        own = torch.autograd.Function.__dict__["apply"]

        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            if _dispatch_depth() >= self._depth:
                args, kwargs = replaced((args, kwargs))
            result = own.__get__(None, function)(*args, **kwargs)
            for leaf in pytree.tree_leaves(result):
                note_held(getattr(leaf, "grad_fn", None))
            return result

        torch.autograd.Function.apply = classmethod(apply)
        try:
            yield
        finally:
            torch.autograd.Function.apply = own


def foreign_memory() -> CaptureError:
    """The error for a forward that writes into memory of another library, which a schedule would not do."""
    return CaptureError(
        "the forward makes a tensor of memory that is not PyTorch's, such as a NumPy array, and changes it in place; "
        "change a clone of it"
    )


def _dispatch_depth() -> int:
    return len(_get_current_dispatch_mode_stack())


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The identity of a tensor's memory and how it lies there."""
    place = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *place, tensor.shape, tensor.stride(), tensor.dtype


def _outside(leaf: Any) -> bool:
    """Whether an object is a tensor from outside the trace: the trace's own are `FunctionalTensor`, or within one, as
    for ``tolist``.
    """
    return (
        type(leaf) in _PLAIN_TYPES
        and not isinstance(leaf, FunctionalTensor)
        and not torch._is_functional_tensor(leaf)
        and not torch._C._functorch.is_functorch_wrapped_tensor(leaf)
    )


@dataclass(frozen=True, repr=False)
class Constants:
    """The constants that a program reads, by name.

    Attributes:
        tensors: by the name that the program has for them.
        places: (container, key, what was there) on the way from the model's attributes to tensors among them.
        described: layout, dtype, device and whether it requires a gradient, of every tensor at capture.
    """

    __repr__ = short_repr

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    places: tuple[Place, ...] = ()
    described: tuple[Any, ...] = ()

    @staticmethod
    def of(
        tensors: Mapping[str, torch.Tensor],
        model: nn.Module,
        arguments: Iterable[Any],
        aliases: Sequence[torch.Tensor] = (),
    ) -> Constants:
        """The constants of a program that was just captured from ``model``, called with ``arguments``.

        Args:
            aliases: frozen parameters as other objects hold them.
        """
        if not tensors:
            return Constants()
        places = tuple(_places(model, arguments, (*tensors.values(), *aliases)))
        return Constants(dict(tensors), places, _described(tensors.values()))

    @property
    def bytes(self) -> int:
        """Bytes of the storages of all constants."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())

    def hold(self) -> bool:
        """Whether the model's attributes still hold the tensors that the program was captured with."""
        if not self.tensors:
            return True
        try:
            return (
                all(container[key] is then for container, key, then in self.places)
                and _described(self.tensors.values()) == self.described
            )
        except (LookupError, TypeError):  # one was removed
            return False


def _described(tensors: Any) -> tuple[Any, ...]:
    return tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)


class _Search:
    """Looks for places where objects hold one of some tensors."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.wanted = WeakTensorKeyDictionary()
        for tensor in tensors:
            self.wanted[tensor] = True
        self.places: list[Place] = []
        self.known: dict[int, bool] = {}  # whether a container, which is alive until the search ends, holds any

    def within(self, container: Any, depth: int = _DEPTH, without: frozenset[str] = frozenset()) -> bool:
        """Whether a container holds any, itself or in what it holds; the places are listed."""
        if id(container) in self.known or not depth:
            return self.known.get(id(container), False)
        self.known[id(container)] = False
        members = container.items() if isinstance(container, dict) else enumerate(container)
        for key, member in list(members):
            if key in without:
                continue
            inner = members_of(member)
            holds = (
                member in self.wanted if isinstance(member, torch.Tensor) else inner and self.within(inner, depth - 1)
            )
            if holds:
                self.places.append((container, key, member))
                self.known[id(container)] = True
        return self.known[id(container)]


def members_of(member: Any) -> Any:
    """The members of an object: itself if it is a dict, list or tuple, else its attributes; None for opaque objects."""
    if isinstance(member, dict | list | tuple):
        return member
    if isinstance(member, torch.Tensor | type | ModuleType | FunctionType | MethodType):
        return None
    attributes = getattr(member, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


def _places(model: nn.Module, arguments: Iterable[Any], tensors: Iterable[torch.Tensor]) -> list[Place]:
    """Where attributes of the model's modules, and of other objects that the model is given, hold one of
    ``tensors``.
    """
    search = _Search(tensors)
    for module in model.modules():
        search.within(module.__dict__, without=_REGISTERED)
        for name, parameter in module._parameters.items():  # the scales of a quantised one
            parts = getattr(parameter, "__dict__", {})
            if search.within(parts):
                search.places.append((module._parameters, name, parameter))
    for argument in arguments:
        if (inner := members_of(argument)) is not None:
            search.within(inner)
    return search.places
