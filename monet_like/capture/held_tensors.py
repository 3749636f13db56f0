"""`HeldTensors`: while a model is traced, puts the tracer's tensors in the place of those that the user's objects hold:
plain attributes, lists, dicts, globals, closures, modules that are registered nowhere.

So a step reads the very tensor that the user's object holds, sees what is written into it, and gives it a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._functorch import eager_transforms, vmap
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import CaptureError
from .annotations import changes_its_first, note_held
from .guards.objects import has_gradient
from .replaced import replaced
from .trace.alone import in_this_thread

_GRAD: Any = vars(torch._C.TensorBase)["grad"].__get__
_REQUIRES: Any = {torch.Tensor.requires_grad_, vars(torch._C.TensorBase)["requires_grad"].__set__}
_SET_GRAD: Any = vars(torch._C.TensorBase)["grad"].__set__
_OF_TENSORS: Any = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
_DISABLED: Any = torch._C._disabled_torch_function_impl
#: Functions that take tensors and that modes do not see.
_UNSEEN: Any = (
    (vmap, "_add_batch_dim"),
    (eager_transforms, "_wrap_tensor_for_grad"),
    (torch._C.ScriptFunction, "__call__"),
)
#: Why functions are refused that read of the caller's own tensors what changes, or set what a schedule would not set.
_REFUSED: Any = {
    _GRAD: (
        "the forward reads .grad of a parameter or an input, which changes with every step, and a schedule "
        "would not see it; give it as an argument, or copy it into a buffer before the call"
    ),
    _SET_GRAD: (
        "the forward sets .grad of a parameter or an input, and a schedule would not; set it before or after the call"
    ),
    **dict.fromkeys(
        (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook),
        "the forward registers a hook on a parameter or an input, which has one more after each call, and a "
        "schedule would not register it; do it once in the training loop, or hook what the forward computes",
    ),
}
#: What a leaf of autograd's graph answers, which the tracer's tensor in its place is not.
_OF_LEAF: Any = {vars(torch._C.TensorBase)["is_leaf"].__get__: True, vars(torch._C.TensorBase)["grad_fn"].__get__: None}


class ConstantsFound(BaseException):
    """Ends a trace that met tensors of the user's objects: the trace is made again with them as inputs.

    No ``Exception``, because a forward may catch these. ``tries`` is how often that may happen from here on.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], tries: int) -> None:
        super().__init__()
        self.tensors, self.tries = tuple(tensors), tries


class InputRequires(BaseException):
    """Ends a trace whose forward calls ``requires_grad_`` on an input: it is made again with one that requires it."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position


class BufferRequires(BaseException):
    """As `InputRequires`, for a buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.buffer = buffer


class HeldTensors(TorchFunctionMode):
    """While a model is traced: puts the tracer's tensors in the place of those that live outside the trace.

    One that is met for the first time gets a tensor without its values, so that nothing can change it, and is listed.

    Args:
        replacements: the tracer's tensors by those outside; new ones are added.
        parameters, inputs: the tracer's, which live for longer than this.
        leaves: those among all of them that stand for leaves of autograd's graph.
        buffers: the user's own.
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
        buffers: Iterable[torch.Tensor],
        looking: bool,
    ) -> None:
        super().__init__()
        self.replacements, self.looking = replacements, looking
        self._inputs = {id(tensor): position for position, tensor in enumerate(inputs)}
        self._given = frozenset((*map(id, parameters), *self._inputs))
        self._leaves = frozenset(map(id, leaves))
        self._without_gradient = frozenset(id(buffer) for buffer in buffers if not has_gradient(buffer))
        self.found: list[torch.Tensor] = []
        self.aliases: list[torch.Tensor] = []
        self._frozen = {
            memory_of(own): traced
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
        if func in _OF_LEAF and self._is_forwards() and self._is_leaf(args[0]):
            return _OF_LEAF[func]
        if (func in _REFUSED or func in _REQUIRES) and self._is_forwards() and self._is_callers(args[0]):
            if func == _GRAD and id(args[0]) in self._without_gradient:
                return None
            if func in _REFUSED:
                raise CaptureError(_REFUSED[func])
            self._check_requires(args[0], (*args[1:], *(kwargs or {}).values(), True)[0])
            return args[0]
        if func == torch.Tensor.retain_grad and self._is_forwards():
            if self._is_leaf(args[0]):
                return None
            raise CaptureError(
                "the forward calls retain_grad(), and a schedule would leave that tensor's .grad None; take it off, "
                "return the tensor from a part of the model, or plan the parts without it: auto_schedule(model, "
                "blocks=[...])"
            )
        kind = _deciding(types, given) if torch._C._is_torch_function_enabled() and self._is_forwards() else None
        if kind is not None and getattr(kind.__torch_function__, "__func__", None) is not _OF_TENSORS:
            with self._again():
                return kind.__torch_function__(func, types, *given)
        args, kwargs = self.replaced(given)
        if not self.looking and args and is_outside(args[0]) and self._changes(func, kwargs):
            raise foreign_memory()
        result = func(*args, **kwargs)
        if kind is not None and any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            raise CaptureError(
                f"{getattr(func, '__name__', func)} of a {kind.__name__} makes tensors of that class, which a schedule "
                "does not; register it.as_subclass(torch.Tensor), or derive the class from nn.Parameter"
            )
        if args and result is args[0] and args[0] is not given[0][0]:
            return given[0][0]  # changed in place: ``self.count += 1`` leaves the attribute as it is
        return result

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        """Act within a function of PyTorch's, too."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def _is_forwards(self) -> bool:
        """Whether it is the forward that calls a function, and not the tracer's own code, at a lower depth."""
        return _dispatch_depth() >= self._depth

    def _is_callers(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter, a buffer or an input, or stands for one."""
        return is_outside(tensor) or id(tensor) in self._given

    def _is_leaf(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a leaf of autograd's graph in plain PyTorch."""
        return id(tensor) in self._leaves or (is_outside(tensor) and tensor.is_leaf)

    def _check_requires(self, leaf: torch.Tensor, wanted: bool) -> None:
        """Check that an input or a parameter can require a gradient, or none, from here on.

        Raises:
            InputRequires, BufferRequires: it will, in the next trace.
            CaptureError: a schedule would not do it.
        """
        if leaf.requires_grad == wanted:
            return
        if wanted and id(leaf) in self._inputs and leaf.grad_fn is None:
            raise InputRequires(self._inputs[id(leaf)])
        if wanted and id(leaf) in self._without_gradient:
            raise BufferRequires(leaf)
        raise CaptureError(
            f"the forward sets requires_grad of {'an input' if id(leaf) in self._inputs else 'a parameter or buffer'} "
            f"to {wanted}, and a schedule would not; set it before the call"
        )

    def _changes(self, func: Any, kwargs: Mapping[str, Any]) -> bool:
        return changes_its_first(func, kwargs) and self._is_forwards()

    def replaced(self, tree: Any) -> Any:
        """``tree`` with the tracer's tensors."""
        # Below that depth the tracer's own code calls functions, on tensors that are none of the forward's.
        if not any(map(is_outside, pytree.tree_leaves(tree))) or not self._is_forwards():
            return tree
        return pytree.tree_map(self.replacement, tree)

    def replacement(self, leaf: Any) -> Any:
        """The tracer's tensor for one from outside; all else is returned as it is."""
        if not is_outside(leaf):
            return leaf
        if leaf not in self.replacements and not leaf.requires_grad and memory_of(leaf) in self._frozen:
            self.replacements[leaf] = self._frozen[memory_of(leaf)]
            self.aliases.append(leaf)
        if leaf not in self.replacements and self.looking:
            like = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
            self.replacements[leaf] = like.requires_grad_(leaf.requires_grad)
            self.found.append(leaf)
        return self.replacements.get(leaf, leaf)

    @contextlib.contextmanager
    def in_custom_functions(self, replace: Callable[[Any], Any]) -> Iterator[None]:
        """Replace the arguments of what takes tensors and is no function that modes see: custom functions,
        transforms, functions in TorchScript.
        """
        own = torch.autograd.Function.__dict__["apply"]

        def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_forwards():
                args, kwargs = replace((args, kwargs))
            result = own.__get__(None, function)(*args, **kwargs)
            for leaf in pytree.tree_leaves(result):
                note_held(getattr(leaf, "grad_fn", None))
            return result

        def taking_ours(function: Callable[..., Any]) -> Callable[..., Any]:
            return in_this_thread(
                lambda *args, **named: function(*self.replaced(args), **self.replaced(named)), function
            )

        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(torch.autograd.Function, apply=classmethod(apply)))
            for holder, name in _UNSEEN:
                stack.enter_context(replaced(holder, **{name: taking_ours(getattr(holder, name))}))
            yield


def foreign_memory() -> CaptureError:
    """The error for a forward that writes into memory of another library, which a schedule would not do."""
    return CaptureError(
        "the forward makes a tensor of memory that is not PyTorch's, such as a NumPy array, and changes it in place; "
        "change a clone of it"
    )


def _dispatch_depth() -> int:
    return len(_get_current_dispatch_mode_stack())


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The identity of a tensor's memory and how it lies there."""
    place = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *place, tensor.shape, tensor.stride(), tensor.dtype


def _deciding(types: Iterable[Any], given: Any) -> Any:
    """The class of a tensor from outside among the arguments that decides what functions compute; None: none does."""
    found = {type(leaf) for leaf in pytree.tree_leaves(given) if is_outside(leaf)}
    deciding = (kind for kind in types if kind in found and kind.__torch_function__ is not _DISABLED)
    return next((kind for kind in deciding if kind.__module__.partition(".")[0] != "torch"), None)


def is_outside(leaf: Any) -> bool:
    """Whether an object is a tensor from outside the trace: the trace's own are `FunctionalTensor`, or within one, as
    for ``tolist``, or consist of such.
    """
    return (
        isinstance(leaf, torch.Tensor)
        and not isinstance(leaf, FunctionalTensor)
        and not is_traceable_wrapper_subclass(leaf)
        and not torch._is_functional_tensor(leaf)
        and not torch._C._functorch.is_functorch_wrapped_tensor(leaf)
    )
