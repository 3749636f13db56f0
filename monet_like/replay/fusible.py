"""Which tasks TorchInductor may fuse, and the operators that it is given for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from ..capture.captured import Captured
from ..ir.program import Call, Ref, Task, refs
from ..ops.registry import NAMESPACE
from ..ops.rms_norm import rms_norm, rms_norm_apply, rms_norm_backward
from ..ops.swiglu import swiglu, swiglu_backward
from ..runtime.batch_norm import CUDNN, CUDNN_BACKWARD, NATIVE, NATIVE_BACKWARD, backward_of
from ..runtime.operators import overload
from .branches import written_values

#: Besides all that PyTorch tags as elementwise.
_FUSIBLE = frozenset(
    f"aten.{name}"
    for name in (
        "_log_softmax.default", "_log_softmax_backward_data.default", "_native_batch_norm_legit.no_stats",
        "_safe_softmax.default", "_softmax.default",
        "_softmax_backward_data.default", "_to_copy.default", "amax.default", "amin.default", "arange.default",
        "cat.default", "elu_backward.default", "hardswish_backward.default", "hardtanh_backward.default",
        "leaky_relu_backward.default", "mean.dim", "native_batch_norm_backward.default",
        "native_group_norm.default", "native_group_norm_backward.default", "native_layer_norm.default",
        "native_layer_norm_backward.default", "new_ones.default", "new_zeros.default",
        "nll_loss_backward.default", "nll_loss_forward.default", "ones.default", "scalar_tensor.default",
        "select_backward.default", "slice_backward.default", "sum.dim_IntList", "tril.default",
        "var_mean.correction",
    )
)  # fmt: skip

#: This package's operators of which Inductor is given the plain-torch twin, so that what stands beside them is fused
#: with them, by name.
INLINED: dict[str, Callable[..., Any]] = {
    f"{NAMESPACE}.{twin.__name__}.default": twin
    for twin in (rms_norm, rms_norm_apply, rms_norm_backward, swiglu, swiglu_backward)
}


def is_fusible(task: Task) -> bool:
    """Whether Inductor may fuse all calls of a task; not those that write into a value through a view of it."""
    return all(map(_may_be_fused, task.calls)) and not writes_into_views(task)


def writes_into_views(task: Task) -> bool:
    """Whether a task writes into views that it has made, and so into values that it only reads by name."""
    views = {out.name for call in task.calls if is_view(call) for out in call.outs if out is not None}
    return not views.isdisjoint(written_values([task]))


def is_view(call: Call) -> bool:
    """Whether a call computes nothing."""
    return call.op == "operator.getitem" or (call.op.startswith("aten.") and overload(call.op).is_view)


def _may_be_fused(call: Call) -> bool:
    if call.op == "operator.getitem" or call.op in INLINED:
        return True
    if call.op == NATIVE:
        *_, mean, var, training, _, _ = call.args
        return bool(training and mean is not None and var is not None)
    if not call.op.startswith("aten."):
        return False
    operator = overload(call.op)
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return False
    if not operator._schema.is_mutable:
        return operator.is_view or call.op in _FUSIBLE or torch.Tag.pointwise in operator.tags
    target, (out, *more) = target_of(call), call.outs or (None,)
    if target is None or out is None or more or (isinstance(target.name, int) and not isinstance(out.name, int)):
        return False
    _, packet, kind = call.op.split(".")
    pure = f"aten.{packet[:-1]}.{kind}" if packet.endswith("_") else f"aten.{packet}.default"
    return _may_be_fused(replace(call, op=pure))


def target_of(call: Call) -> Ref | None:
    """What a call writes its result into; None: it makes a new tensor, or writes into others besides."""
    if not call.op.startswith("aten."):
        return None
    names = [a.name for a in overload(call.op)._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    target = dict(call.kwargs).get(names[0], next(iter(call.args), None)) if len(names) == 1 else None
    return target if isinstance(target, Ref) else None


def declared(call: Call) -> Call:
    """The call by an operator whose schema says what it writes into: batch norm's statistics."""
    return replace(call, op="aten._native_batch_norm_legit.default") if call.op == NATIVE else call


def operators_of(task: Task) -> int:
    """Number of calls of a task, views not counted."""
    return sum(not is_view(call) for call in task.calls)


def without_cudnn(captured: Captured, tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Replace cuDNN's batch norm by ATen's own, which Inductor can fuse; the reserve becomes zeros."""
    return tuple(_by_aten(captured, task) for task in tasks)


def _by_aten(captured: Captured, task: Task) -> Task:
    if not any(call.op in (CUDNN, CUDNN_BACKWARD) for call in task.calls):
        return task
    calls: list[Call] = []
    for call in task.calls:
        if call.op == CUDNN:
            x, *others = call.args
            *outs, reserve = call.outs
            op, args = NATIVE, call.args
            if others[2] is None:
                op, args = "aten._native_batch_norm_legit.no_stats", (x, *others[:2], *others[4:])
            calls.append(replace(call, op=op, args=args, outs=tuple(outs)))
            if reserve is not None:
                meta = captured.metas[cast(int, reserve.name)]
                calls.append(Call("aten.new_zeros.default", (x, meta.shape), (("dtype", meta.dtype),), (reserve,)))
        elif (backward := backward_of(call)) is not None and backward.cudnn:
            calls.append(replace(call, op=NATIVE_BACKWARD, args=backward.native))
        else:
            calls.append(call)
    read = {ref.name for call in calls for ref in refs(call)}
    return replace(task, calls=tuple(calls), reads=tuple(v for v in task.reads if v in read))
