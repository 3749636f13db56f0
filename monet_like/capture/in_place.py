"""Which operators a model calls in place: its trace has none, but plain PyTorch's step writes one tensor fewer for each."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
import torch.fx.traceback
from torch import fx
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import CaptureError
from ..ir.program import Call, Program, Ref, Task, refs

if TYPE_CHECKING:
    from .lowering import TensorMeta

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_KEY = "monet_like_in_place"
_LAYOUTS = "monet_like_layouts"
#: Functions that write in place into parts of a tensor which are no views of it (``unsafe_chunk``).
_OVERLAPPING = frozenset({"gru", "gru_cell"})
_NOISE = "monet_like_noise"
#: Functions that fill a tensor which lies like their argument with noise.
_NOISY = frozenset({"alpha_dropout"})
#: Operators of which every element is rounded alike, wherever it lies.
_EXACT = frozenset({"add", "sub", "mul", "clone"})
_AUGMENTED = frozenset(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "pow", "and", "or", "xor"))


class InPlaceCalls(TorchFunctionMode):
    """Nodes traced in a call that changes its first argument, such as ``x += y`` or ``relu(x, inplace=True)``, tell so."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == _SET_DATA:
            raise CaptureError(
                "the forward assigns a tensor's .data, and a schedule cannot; write into it: tensor.copy_(...)"
            )
        if func is torch.bilinear and torch.is_autocast_enabled(args[0].device.type):
            raise CaptureError(
                "the forward calls bilinear under autocast, which acts inside that operator, and a schedule cannot; call it inside "
                "torch.autocast(device_type, enabled=False), on float32 inputs"
            )
        if getattr(func, "__name__", "") in _OVERLAPPING:
            with _Layouts():
                return func(*args, **kwargs)
        if getattr(func, "__name__", "") in _NOISY:
            with torch.fx.traceback.annotate({_NOISE: True}):
                return func(*args, **kwargs)
        if not changes_its_first(func, kwargs):
            return func(*args, **kwargs)
        with torch.fx.traceback.annotate({_KEY: True}):
            return func(*args, **kwargs)


class _Layouts(TorchDispatchMode):
    """Nodes that read a tensor which plain PyTorch has in another layout, since it wrote into a part of another, tell so.

    Elementwise operators take a tensor without gaps as one row, and round the ends of rows in another way than the rest.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        layouts = {i: a.stride() for i, a in enumerate(args) if isinstance(a, FunctionalTensor) and _laid_out_anew(a)}
        with torch.fx.traceback.annotate({_LAYOUTS: layouts}) if layouts else contextlib.nullcontext():
            return func(*args, **(kwargs or {}))


def _laid_out_anew(tensor: FunctionalTensor) -> bool:
    """Whether the trace has a tensor, after it was changed, in another layout."""
    torch._sync(tensor)
    return bool(torch._from_functional_tensor(tensor.elem).stride() != tensor.stride())


def eager_layouts(node: fx.Node) -> dict[int, tuple[int, ...]]:
    """The strides that some arguments of a node have in plain PyTorch and not in the trace, by position."""
    found = (node.meta.get("custom") or {}).get(_LAYOUTS, {})
    return found if str(node.target).split(".")[1] not in _EXACT else {}


def changes_its_first(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of this function changes its first argument: ``relu_``, ``__iadd__``, ``relu(inplace=True)``."""
    name = getattr(func, "__name__", "")
    return (name in _AUGMENTED if name.endswith("__") else name.endswith("_")) or kwargs.get("inplace") is True


def called_in_place(node: fx.Node) -> bool:
    """Whether a node was traced in such a call."""
    return bool((node.meta.get("custom") or {}).get(_KEY))


def fills_with_noise(node: fx.Node) -> bool:
    """Whether a node stands for ``bernoulli_(p)``, which draws in the order in which a tensor lies, as its trace does not."""
    return node.target is torch.ops.aten.bernoulli.p and (
        called_in_place(node) or bool((node.meta.get("custom") or {}).get(_NOISE))
    )


def in_place_form(
    program: Program, task: Task, metas: Sequence[TensorMeta], saved: Set[int], readers: Mapping[int, int]
) -> tuple[tuple[Call, ...], int | None] | None:
    """The calls of a forward ``task`` as a model makes them in place, and the value that they overwrite.

    Some operators are in place only by name: autograd first copies what their gradient needs (``hardtanh_``).

    Args:
        metas: for every value, its own tensor.
        saved: values copied by such calls.
        readers: how many tasks read a value.

    Returns:
        None where PyTorch has no such form, or where something else reads the argument, as it was, too: then the trace
        does not show what the model's call overwrites.
    """
    *views, call = task.calls
    if not (call.args and len(call.outs) == 1 and _has_in_place_form(call.op)):
        return None
    (first, *others), (out,) = call.args, call.outs
    if not (isinstance(first, Ref) and isinstance(first.name, int) and out is not None and isinstance(out.name, int)):
        return None
    if program.values[first.name].kind != "forward" or metas[first.name] != metas[out.name]:
        return None
    packet, name, overload = call.op.split(".")
    form = f"{packet}.{name}_.{overload}"
    if first.name in saved:
        copy = Call("aten.clone.default", (first,), (), (out,))
        return (*views, copy, Call(form, (out, *others), call.kwargs, ())), None
    once = readers[first.name] == 1 == sum(first == ref for other in task.calls for ref in refs(other))
    if not once or first.name in program.outputs or out.name in program.outputs:
        return None
    return (*views, Call(form, call.args, call.kwargs, call.outs)), first.name


def _has_in_place_form(op: str) -> bool:
    packet, name, overload = op.split(".")
    form = getattr(getattr(torch.ops, packet), f"{name}_", None)
    return form is not None and overload in form.overloads()
