"""Results of operators as eager PyTorch's kernels make them: layouts, dtypes and storages that fakes do not have."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._prims_common import suggest_memory_format

from ...ir.program import Ref
from ...ops.meta_functions import (
    bags,
    batch_norm_gradient,
    batch_norm_result,
    convolved,
    elementwise_result,
    group_norm_layout,
    rolled,
    unfolded,
)
from ...ops.recurrent import ONEDNN_LAYER, with_workspace
from ...runtime.batch_norm import NATIVE_BACKWARD, by_cudnn
from ..annotations import fills_with_noise
from .values import Values, args_of, operator_of

_ATEN = torch.ops.aten
_FAKE_QUANTIZE = _ATEN._fused_moving_avg_obs_fq_helper_functional.default
_NORMALISATIONS = (
    _ATEN.native_layer_norm.default,
    _ATEN.native_group_norm.default,
    _ATEN.native_batch_norm.default,
    _ATEN._native_batch_norm_legit.no_stats,
    _ATEN._native_batch_norm_legit_no_training.default,
)
_BATCH_NORM_OPERATORS = (_ATEN._native_batch_norm_legit_functional.default, *_NORMALISATIONS[2:])
#: For each operator of batch norm: the positions of ``torch.batch_norm``'s arguments x, weight, bias, running mean,
#: running variance, momentum and eps among its own (None: it has none), and whether it computes statistics, as in
#: training.
BATCH_NORM_NODES = {
    _ATEN._native_batch_norm_legit_functional.default: ((0, 1, 2, 3, 4, 6, 7), True),
    _ATEN._native_batch_norm_legit.no_stats: ((0, 1, 2, None, None, 4, 5), True),
    _ATEN._native_batch_norm_legit_no_training.default: ((0, 1, 2, 3, 4, 5, 6), False),
}
SYNC_BATCH_NORM_GATHER = "monet_like.sync_batch_norm_gather_functional.default"
#: Operators that begin with memory of their input's size, whatever the size of their result.
_UNFOLDING = (_ATEN.im2col.default, _ATEN.col2im.default)


def eager_result(lowering: Values, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The fake result of a call, as eager PyTorch's kernel makes it.

    Args:
        args, kwargs: fake tensors and literals.
    """
    op, on_cpu = operator_of(node), bool(args) and isinstance(args[0], torch.Tensor) and args[0].device.type == "cpu"
    result: Any
    if lowering.is_needless_clone(node) or lowering.is_needless_cast(node) or lowering.is_needless_copy(node):
        result = args[0]
    elif fills_in_memory_order(lowering, node):
        result = torch.empty_like(args[0])
    elif op is _ATEN.roll.default and on_cpu:
        result = rolled(*args, **kwargs)
    elif (result := lowering.traced_result(node)) is None:
        result = op(*args, **kwargs)
    if isinstance(result, torch.Tensor) and result.device.type == "cpu":
        result = elementwise_result(op, args, result)
    if op in _UNFOLDING:
        return unfolded(args[0], result)
    if op is _ATEN._embedding_bag.default and on_cpu:
        return bags(result)
    if op is _ATEN.convolution.default:
        return convolved(args, result)
    if op is _ATEN.glu_backward.default:  # in rows; its fake lies as the input does
        return torch.empty_like(args[1], memory_format=torch.contiguous_format)
    if op is ONEDNN_LAYER:
        return with_workspace(args, result)
    if op is _ATEN.native_batch_norm_backward.default:
        return _batch_norm_backward_result(lowering, node, args, result)
    if op is _ATEN.native_group_norm_backward.default and result[0] is not None:
        return torch.empty_like(args[1], memory_format=group_norm_layout(args[1])), *result[1:]
    if op in _NORMALISATIONS:
        result = _normalisation_result(op, args, result)
    # Buffers that an operator updates in place, as in eager mode, are its results.
    if op is _ATEN._native_batch_norm_legit_functional.default:
        result = _normalisation_result(op, args, result)
        if lowering.is_buffer_node(args_of(node)[3]):
            result = (*result[:3], args[3], args[4])
    elif observes_in_place(lowering, node):
        result = (*result[:2], *args[3:7])  # in eager mode the observer even resizes them
    elif str(op) == SYNC_BATCH_NORM_GATHER and all(map(lowering.is_buffer_tensor, args[1:3])):
        result = (*result[:3], args[1], args[2])
    if op in BATCH_NORM_NODES and _is_by_cudnn(op, args):
        result = (_like_cudnns(args[0]), *result[1:])
        lowering.by_cudnn[node] = None
    return result


def _batch_norm_backward_result(lowering: Values, node: fx.Node, args: Sequence[Any], result: tuple[Any, ...]) -> Any:
    """The gradients of a batch norm: that of its input lies as the kernel makes it."""
    of_input = result[0]
    if of_input is not None and args[1].device.type == "cpu":
        of_input = batch_norm_gradient(*args[:2])
    elif of_input is not None and reserve_of(lowering, node) is not None:
        of_input = _like_cudnns(args[1])
    return of_input, *result[1:]


def _normalisation_result(op: Any, args: Sequence[Any], result: tuple[Any, ...]) -> tuple[Any, ...]:
    """The results of a normalisation as a CPU's kernels make them.

    Statistics have the dtype of the parameters; fake ones have the input's, which differs where 16-bit inputs meet
    float32 parameters. Batch norm gives up its input's layout where that is neither in rows nor channels-last; its fake
    result has it.
    """
    x, parameters = args[0], [t for t in args[1:5] if isinstance(t, torch.Tensor)]
    if x.device.type != "cpu":
        return result
    if op in _BATCH_NORM_OPERATORS:
        result = (batch_norm_result(x).to(result[0].dtype), *result[1:])
    wide = parameters and parameters[0].dtype != x.dtype
    return (result[0], *(t.to(parameters[0].dtype) for t in result[1:3]), *result[3:]) if wide else result


def _like_cudnns(x: torch.Tensor) -> torch.Tensor:
    """A tensor laid out as cuDNN lays out its batch norm of ``x``, and the gradient of ``x``."""
    return torch.empty_like(x, memory_format=suggest_memory_format(x))


def _is_by_cudnn(op: Any, args: Sequence[Any]) -> bool:
    """Whether PyTorch computes this batch norm by cuDNN."""
    places, training = BATCH_NORM_NODES[op]
    x, weight, bias, mean, var, _, eps = [cast(Any, None if place is None else args[place]) for place in places]
    return by_cudnn(x.device, x, weight, bias, mean, var, training, eps)


def reserve_of(lowering: Values, node: fx.Node) -> Ref | None:
    """The reserve that a node reads if it is the gradient of a batch norm by cuDNN; else None."""
    if str(node.target) != NATIVE_BACKWARD or not args_of(node)[7]:
        return None
    mean = args_of(node)[5]
    made = isinstance(mean, fx.Node) and mean.target is operator.getitem
    return lowering.by_cudnn.get(args_of(mean)[0]) if made else None


def observes_in_place(lowering: Values, node: fx.Node) -> bool:
    """Whether a node is a fake quantisation whose observer updates buffers in place."""
    return node.target is _FAKE_QUANTIZE and all(lowering.is_buffer_node(arg) for arg in args_of(node)[3:7])


def fills_in_memory_order(lowering: Values, node: fx.Node) -> bool:
    """Whether a node is ``bernoulli_`` on a tensor that is not in row-major order: it draws in memory order."""
    return fills_with_noise(node) and not lowering.result_of(args_of(node)[0]).is_contiguous()


def can_view(tensor: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether a tensor of another shape can share its memory."""
    try:
        tensor.view(shape)
    except (RuntimeError, ValueError):
        return False
    return True
