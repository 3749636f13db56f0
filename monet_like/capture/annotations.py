"""Notes that traced nodes carry: marks that a user sets by hand, names of layers, calls in place.

Marks say which activations must be kept, must be recomputed, or are recomputed only together.

A mark holds for all that a model's forward makes while it is active. It becomes part of the captured program: a
schedule for other marks is a schedule for another program.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.fx.traceback
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.function import BackwardCFunction
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import CaptureError, UsageError
from .replaced import replaced

#: A kind, and which of the marks of that kind it is.
Mark = tuple[str, int]
KINDS = ("keep", "recompute", "together")
#: Keys of the notes that nodes carry.
_MARK_KEY = "monet_like"
_LAYER_KEY = "monet_like_layer"
_IN_PLACE_KEY = "monet_like_in_place"
_LAYOUTS_KEY = "monet_like_layouts"
_NOISE_KEY = "monet_like_noise"
_HELD_KEY = "monet_like_held"
_ATTRIBUTE = "_monet_like_mark"
_numbers = itertools.count()

#: Functions that write in place into parts of a tensor which are no views of it (``unsafe_chunk``).
_OVERLAPPING = frozenset({"gru", "gru_cell"})
#: Functions that fill a tensor which lies like their argument with noise.
_NOISY = frozenset({"alpha_dropout"})
#: Operators of which every element is rounded alike, wherever it lies.
_EXACT = frozenset({"add", "sub", "mul", "clone"})
#: Methods that Python calls for ``+=`` and its kin, and for ``x[0] = y``.
_BY_SYNTAX = frozenset(
    (*(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "pow", "and", "or", "xor")), "__setitem__")
)
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def mark(kind: str, module: nn.Module | None = None) -> contextlib.AbstractContextManager[None]:
    """Mark the activations that are made in a ``with`` statement, or by every call of ``module``.

    ``keep``: it is made once and, where the backward needs it, kept. ``recompute``: the backward makes it anew, as with
    ``torch.utils.checkpoint``. ``together``: the activations of one ``with`` statement or call are recomputed as a
    whole or not at all. Marks do not change what a model computes. The innermost one holds. Values that cannot be
    recomputed, such as the mask of a dropout, is kept all the same.

    Args:
        kind: ``keep``, ``recompute`` or ``together``.
        module: marked for good, instead of a ``with`` statement.

    Raises:
        UsageError: an unknown kind.
    """
    if kind not in KINDS:
        raise UsageError(f"mark {kind!r} is unknown; give {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    if module is not None:
        setattr(module, _ATTRIBUTE, kind)
        return contextlib.nullcontext()
    return _active(kind)


@contextlib.contextmanager
def _active(kind: str) -> Iterator[None]:
    with torch.fx.traceback.annotate({_MARK_KEY: (kind, next(_numbers))}):
        yield


def marked_modules() -> contextlib.AbstractContextManager[None]:
    """Have calls of marked modules be marked while a model is traced."""
    return in_modules(lambda module: _active(kind) if (kind := module.__dict__.get(_ATTRIBUTE)) else None)


def _noted(meta: Mapping[str, Any], key: str) -> Any:
    """What `torch.fx.traceback.annotate` has noted of a node, or of what is being traced."""
    return (meta.get("custom") or {}).get(key)


def mark_of(node: fx.Node) -> Mark | None:
    """The mark of a traced node."""
    found: Mark | None = _noted(node.meta, _MARK_KEY)
    return found


@contextlib.contextmanager
def in_modules(context: Callable[[nn.Module], contextlib.AbstractContextManager[None] | None]) -> Iterator[None]:
    """Run every call of a module in ``context(module)``, unless that is None, while a model is traced."""
    entered: list[tuple[nn.Module, contextlib.AbstractContextManager[None]]] = []

    def enter(module: nn.Module, *_: Any) -> None:
        if (found := context(module)) is not None:
            entered.append((module, found))
            found.__enter__()

    def leave(module: nn.Module, *_: Any) -> None:
        if entered and entered[-1][0] is module:
            entered.pop()[1].__exit__(None, None, None)

    hooks = (
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def named_layers(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Note on traced nodes, those of the backward too, the name of the submodule of ``model`` that made them."""
    names = {id(module): name for name, module in model.named_modules()}

    def named(module: nn.Module) -> contextlib.AbstractContextManager[None] | None:
        name = names.get(id(module))
        return None if name is None else torch.fx.traceback.annotate({_LAYER_KEY: name})

    return in_modules(named)


def layer_of(node: fx.Node) -> str | None:
    """The name of the innermost module in whose call a node was traced; "" for the model itself, None if unknown."""
    found: str | None = _noted(node.meta, _LAYER_KEY)
    return found


class NotedInPlace(TorchFunctionMode):
    """Notes on traced nodes that they come from an in-place call, such as ``x += y`` or ``relu(x, inplace=True)``."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        mode = get_proxy_mode() if changes_its_first(func, kwargs) else None
        if mode is None:
            return func(*args, **kwargs)
        last = next(iter(reversed(mode.tracer.graph.nodes)), None)
        result = func(*args, **kwargs)
        for node in itertools.takewhile(lambda node: node is not last, reversed(mode.tracer.graph.nodes)):
            node.meta[_IN_PLACE_KEY] = True
        return result


def noted_in_custom_backwards() -> contextlib.AbstractContextManager[None]:
    """Note in-place calls in the backward of custom functions, too, while a model is traced."""
    own = BackwardCFunction.apply

    def apply(context: Any, *gradients: Any) -> Any:
        with NotedInPlace():
            return own(context, *gradients)

    return replaced(BackwardCFunction, apply=apply)


class InPlaceCalls(NotedInPlace):
    """`NotedInPlace` in a forward; refuses calls that no trace can have."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == _SET_DATA:
            if args[0] is args[1]:  # as a layer of bitsandbytes sets it in every call
                return None
            layer = _noted(torch.fx.traceback.current_meta, _LAYER_KEY)
            raise CaptureError(
                f"the forward{f' of {layer}' if layer else ''} assigns a tensor's .data, and a schedule cannot; write "
                "into it: tensor.copy_(...), or if a layer does so in its first call alone, call the model once before"
            )
        if func is torch.bilinear and torch.is_autocast_enabled(args[0].device.type):
            raise CaptureError(
                "the forward calls bilinear under autocast, which acts inside that operator, and a schedule cannot; "
                "call it inside torch.autocast(device_type, enabled=False), on float32 inputs"
            )
        if func is torch.Tensor.polygamma_:  # which no trace knows in place
            return args[0].copy_(torch.polygamma(kwargs.get("n", args[-1]), args[0].clone()))
        if getattr(func, "__name__", "") in _OVERLAPPING:
            with _Layouts():
                return func(*args, **kwargs)
        if getattr(func, "__name__", "") in _NOISY:
            with torch.fx.traceback.annotate({_NOISE_KEY: True}):
                return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


class _Layouts(TorchDispatchMode):
    """Notes on traced nodes which arguments plain PyTorch has in another layout, since it wrote into parts of another
    tensor.

    Elementwise operators take a tensor without gaps as one row, and round the ends of rows in another way than the
    rest.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        layouts = {i: a.stride() for i, a in enumerate(args) if isinstance(a, FunctionalTensor) and _laid_out_anew(a)}
        with torch.fx.traceback.annotate({_LAYOUTS_KEY: layouts}) if layouts else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))


def _laid_out_anew(tensor: FunctionalTensor) -> bool:
    """Whether a tensor that was changed has another layout in the trace than in plain PyTorch."""
    torch._sync(tensor)
    return bool(torch._from_functional_tensor(tensor.elem).stride() != tensor.stride())


def eager_layouts(node: fx.Node) -> dict[int, tuple[int, ...]]:
    """The strides that some arguments of a node have in plain PyTorch and not in the trace, by position."""
    return {} if str(node.target).split(".")[1] in _EXACT else _noted(node.meta, _LAYOUTS_KEY) or {}


def note_held(context: Any) -> None:
    """Note on traced nodes that the context of a custom function holds their tensors as attributes.

    Plain PyTorch frees them with autograd's graph, which lives as long as the loss: not when the function's backward
    has run.
    """
    for held in pytree.tree_leaves(getattr(context, "__dict__", {})):
        if (node := node_of(held)) is not None:
            node.meta[_HELD_KEY] = True


def node_of(value: Any) -> fx.Node | None:
    """The node that makes a tensor in the trace of now; None for all else."""
    mode = get_proxy_mode()
    if mode is None or not isinstance(value, FunctionalTensor):
        return None
    torch._sync(value)
    slot = get_proxy_slot(torch._from_functional_tensor(value.elem), mode.tracer, None)
    return None if slot is None else slot.proxy.node


def is_held(node: fx.Node) -> bool:
    """Whether the context of a custom function holds the tensor that a node makes until the step has ended."""
    return bool(node.meta.get(_HELD_KEY))


def changes_its_first(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of this function changes its first argument: ``relu_``, ``+=``, ``relu(inplace=True)``."""
    name = getattr(func, "__name__", "")
    return (name in _BY_SYNTAX if name.endswith("__") else name.endswith("_")) or kwargs.get("inplace") is True


def called_in_place(node: fx.Node) -> bool:
    """Whether a node was traced in an in-place call."""
    return bool(node.meta.get(_IN_PLACE_KEY))


def fills_with_noise(node: fx.Node) -> bool:
    """Whether a node is ``bernoulli_(p)`` in plain PyTorch, which draws in memory order; the traced one does not."""
    return node.target is torch.ops.aten.bernoulli.p and (called_in_place(node) or bool(_noted(node.meta, _NOISE_KEY)))
