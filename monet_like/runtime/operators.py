"""Resolves the operator names in a program's calls to the functions that run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from ..errors import CaptureError
from ..ir.program import Call, Ref
from ..ops import convolution
from ..ops.recurrent import onednn_layer
from ..ops.registry import CUDNN, NAMESPACE
from . import batch_norm, offload
from .questions import ASK, SIZED, ask, sized

#: Operators that cuDNN may refuse, and what csrc/cudnn says then.
BY_ALGORITHM = frozenset(f"{NAMESPACE}.{name}.default" for name in CUDNN)
_REFUSAL = "is not to be had for these shapes"
#: What operators call the group that they communicate in, which is a name or an object; ``group_norm`` has a number.
_GROUPS = ("group_name", "group", "process_group")


def get_rng_state(device: str) -> torch.Tensor:
    """The state of the device's default generator; for CUDA it is kept on the host and needs no synchronisation."""
    if device == "cpu":
        return torch.get_rng_state()
    return torch.cuda.get_rng_state(torch.device(device))


def set_rng_state(device: str, state: torch.Tensor) -> None:
    """Put the device's default generator back into ``state``."""
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, torch.device(device))


_OURS: dict[str, Callable[..., Any]] = {
    "operator.getitem": operator.getitem,
    "aten.mkldnn_rnn_layer.default": onednn_layer,
    batch_norm.CUDNN: batch_norm.cudnn_batch_norm,
    batch_norm.CUDNN_BACKWARD: batch_norm.cudnn_batch_norm_backward,
    ASK: ask,
    SIZED: sized,
    "monet_like.get_rng_state": get_rng_state,
    "monet_like.set_rng_state": set_rng_state,
    **{f"monet_like.{f.__name__}": f for f in (offload.send, offload.send_start, offload.send_end)},
    **{f"monet_like.{f.__name__}": f for f in (offload.fetch, offload.fetch_start, offload.fetch_end)},
}


#: Overloads that PyTorch's Python functions of the same arguments call: about 1 us less for every call than through
#: the overload's own function, which reads its arguments by the operator's schema.
BINDINGS: dict[str, Callable[..., Any]] = {
    "aten._log_softmax.default": torch._log_softmax,
    "aten._softmax.default": torch._softmax,
    "aten.add.Tensor": torch.add,
    "aten.add_.Tensor": torch.Tensor.add_,
    "aten.addmm.default": torch.addmm,
    "aten.bmm.default": torch.bmm,
    "aten.cat.default": torch.cat,
    "aten.clone.default": torch.clone,
    "aten.convolution.default": torch.convolution,
    "aten.detach.default": torch.Tensor.detach,
    "aten.div.Tensor": torch.div,
    "aten.embedding.default": torch.embedding,
    "aten.expand.default": torch.Tensor.expand,
    "aten.gelu.default": torch._C._nn.gelu,
    "aten.mean.dim": torch.mean,
    "aten.mm.default": torch.mm,
    "aten.mul.Tensor": torch.mul,
    "aten.native_batch_norm.default": torch.native_batch_norm,
    "aten.native_dropout.default": torch.native_dropout,
    "aten.native_layer_norm.default": torch.native_layer_norm,
    "aten.permute.default": torch.Tensor.permute,
    "aten.pow.Tensor_Scalar": torch.pow,
    "aten.relu.default": torch.relu,
    "aten.relu_.default": torch.relu_,
    "aten.select.int": torch.select,
    "aten.sub.Tensor": torch.sub,
    "aten.sum.dim_IntList": torch.sum,
    "aten.t.default": torch.t,
    "aten.tanh.default": torch.tanh,
    "aten.transpose.int": torch.transpose,
    "aten.unsqueeze.default": torch.unsqueeze,
    "aten.view.default": torch.Tensor.reshape,  # a copy where a kernel lays out its result as no trace knows (``roll``)
}


@cache
def resolve(name: str) -> Callable[..., Any]:
    """The function behind a qualified operator name such as ``aten.convolution.default``.

    Raises:
        CaptureError: this PyTorch has no such operator.
    """
    if name in _OURS:
        return _OURS[name]
    op = overload(name)
    if name in BY_ALGORITHM:
        return or_pytorchs_own(op, getattr(convolution, name.split(".")[1]))
    return BINDINGS.get(name) or getattr(op, "_op", op)  # the C++ function itself: one Python frame less for every call


def results_of(call: Call, known: Mapping[Any, Any]) -> Sequence[Any]:
    """Run a call; its results, one for each of its ``outs``.

    Args:
        known: by `Ref`, what it reads.
    """
    args, kwargs = [_given(leaf, known) for leaf in call.args], {n: _given(leaf, known) for n, leaf in call.kwargs}
    result = resolve(call.op)(*args, **kwargs)
    return result if call.unpack else (result,)


def _given(leaf: Any, known: Mapping[Any, Any]) -> Any:
    if isinstance(leaf, tuple | list):
        return [_given(part, known) for part in leaf]
    return known[leaf] if isinstance(leaf, Ref) else leaf


def schema_of(name: str) -> Any:
    """The schema of an operator by its qualified name; None of a function of ours that is no operator."""
    return None if name in _OURS else overload(name)._schema


def or_pytorchs_own(op: Callable[..., torch.Tensor], twin: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that calls ``op``, or its twin if cuDNN does not have the algorithm that ``op`` names.

    That is decided when a schedule is planned; a smaller batch or another card, which may run it, is another matter.
    """

    def run(*args: Any) -> torch.Tensor:
        try:
            return op(*args)
        except RuntimeError as error:
            if _REFUSAL not in str(error):
                raise
            return twin(*args)

    return run


def without_fallback() -> dict[str, Callable[..., Any]]:
    """Functions to call instead of `resolve`'s, which fail where cuDNN does not have the algorithm."""
    return {name: overload(name) for name in BY_ALGORITHM}


def is_random(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operator of PyTorch draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or bool(given.get("dropout_p", 0.0) != 0.0)


@cache
def communicates(operator: Any) -> bool:
    """Whether other processes take part in a call: an operator of PyTorch that is given their group."""
    arguments = operator._schema.arguments if isinstance(operator, torch._ops.OpOverload) else ()
    return any(a.name in _GROUPS and not isinstance(a.type, torch.IntType) for a in arguments)


def waits(operator: Any) -> bool:
    """Whether it returns the result of a collective once that is there: in the same memory."""
    return isinstance(operator, torch._ops.OpOverload) and operator._schema.name.endswith("::wait_tensor")


def overload(name: str) -> Any:
    """The operator of a qualified name, with its schema and tags.

    Raises:
        CaptureError: this PyTorch has no such operator.
    """
    namespace, packet, kind = name.split(".")
    if namespace == "monet_like":
        from .. import ops

        ops.load()
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), kind)
    except AttributeError:
        raise CaptureError(f"operator {name} does not exist in PyTorch {torch.__version__}") from None
