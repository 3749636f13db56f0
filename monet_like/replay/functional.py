"""Functional forms of operator calls: which ones TorchInductor may fuse, and those of calls in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from ..capture.captured import Captured
from ..ir.program import Call, Ref, Task, refs
from ..runtime.batch_norm import CUDNN, CUDNN_BACKWARD, NATIVE, NATIVE_BACKWARD, backward_of
from ..runtime.codegen import Block
from ..runtime.operators import overload

#: Besides all that PyTorch tags as elementwise.
_FUSIBLE = frozenset(
    f"aten.{name}"
    for name in (
        "_log_softmax.default", "_log_softmax_backward_data.default", "_native_batch_norm_legit.no_stats",
        "_native_batch_norm_legit_functional.default", "_safe_softmax.default", "_softmax.default",
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


@dataclass(frozen=True)
class Functional:
    """The functional form of a call: without side effects.

    Attributes:
        call: it.
        target: the value that the other writes its result into.
        updates: (value, what the other writes into it besides).
    """

    call: Call
    target: int | None = None
    updates: tuple[tuple[int, Ref], ...] = ()


def functional(call: Call, place: int) -> Functional | None:
    """The functional form of ``call``; None: Inductor may not fuse it. ``place`` makes names unique within a piece."""
    if call.op == "operator.getitem":
        return Functional(call)
    if call.op == NATIVE:
        return _batch_norm(call, place)
    if not call.op.startswith("aten."):
        return None
    operator = overload(call.op)
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return None
    if not operator._schema.is_mutable:
        fusible = operator.is_view or call.op in _FUSIBLE or torch.Tag.pointwise in operator.tags
        return Functional(call) if fusible else None
    written = [a.name for a in operator._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    keyword = dict(call.kwargs).get(written[0])
    target = call.args[0] if keyword is None else keyword
    (out,) = call.outs or (None,)
    if len(written) != 1 or not all(isinstance(ref, Ref) and isinstance(ref.name, int) for ref in (target, out)):
        return None
    kwargs = tuple((name, leaf) for name, leaf in call.kwargs if name != written[0])
    _, packet, kind = call.op.split(".")
    op = f"aten.{packet}.default" if keyword is not None else f"aten.{packet[:-1]}.{kind}"
    pure = functional(replace(call, op=op, kwargs=kwargs), place)
    return pure and replace(pure, target=target.name)


def _batch_norm(call: Call, place: int) -> Functional | None:
    """Batch norm in training mode with the updated statistics as two more results."""
    x, weight, bias, mean, var, training, momentum, eps = call.args
    if not training or mean is None or var is None:
        return None
    news = tuple(Ref(f"{name}_{place}") for name in ("new_mean", "new_var"))
    op = "aten._native_batch_norm_legit_functional.default"
    functional = Call(op, (x, weight, bias, mean, var, True, momentum, eps), (), (*call.outs, *news), True)
    return Functional(functional, updates=tuple(zip((mean.name, var.name), news, strict=True)))


def operators_of(task: Task) -> int:
    """Number of calls of a task, views not counted."""
    return sum(
        call.op != "operator.getitem" and not (call.op.startswith("aten.") and overload(call.op).is_view)
        for call in task.calls
    )


def without_cudnn(captured: Captured, blocks: Sequence[Block]) -> list[Block]:
    """Replace cuDNN's batch norm by ATen's own, which Inductor can fuse; the reserve becomes zeros."""
    return [replace(block, tasks=tuple(_by_aten(captured, task) for task in block.tasks)) for block in blocks]


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
