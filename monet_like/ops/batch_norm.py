"""Training-mode batch norm fused with an addition and an activation, also of tensors joined along the channels.

F is float32, float64, float16 or bfloat16; P is F or float32. "like x" means laid out as ATen lays out batch norm's
result. Arguments named weight, bias, running_* and residual may be None.

| operator | reads | returns |
|---|---|---|
| batch_norm_apply | x, residual: F[N,C,...]; weight, bias, mean, invstd: P[C] | like x |
| batch_norm_train | x, residual: F[N,C,...]; weight, bias, running_*: P[C] | y: like x; mean, invstd: P[C] |
| batch_norm_activation_backward | grad, x, residual: F[N,C,...]; weight, bias, mean, invstd: P[C] | like x; P[C]; P[C] |
| batch_norm_…_joined | as these three; parts: F[N,C_i,...], together x | as these three |

All take ``activation``, ``lo`` and ``hi``: "clamp" to lo and hi, "leaky_relu" of slope lo, "hardswish" or "silu".
"""  # noqa: E501  (a table)

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .memory_layout import norm_format
from .registry import fake, operator

aten = torch.ops.aten


_NORM = "Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd"


@operator(f"(Tensor x, {_NORM}, Tensor? residual, str activation, float lo, float hi) -> Tensor")
def batch_norm_apply(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    residual: Tensor | None,
    activation: str,
    lo: float,
    hi: float,
) -> Tensor:
    """Recomputes training-mode batch norm from saved statistics, adds the residual and applies the activation.

    Each step rounds as ATen's operator does.
    """
    y = _normalised(x, weight, bias, mean, invstd)
    return _finished(y, residual, activation, lo, hi)


@fake(batch_norm_apply)
def _like_x(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=norm_format(x))


def _finished(y: Tensor, residual: Tensor | None, activation: str, lo: float, hi: float) -> Tensor:
    """Add the residual to y and apply the activation, both in place."""
    if residual is not None:
        y.add_(residual)
    if activation == "clamp":
        return y.clamp_(lo, hi)
    if activation == "leaky_relu":
        return torch.nn.functional.leaky_relu_(y, lo)
    if activation == "hardswish":
        return torch.nn.functional.hardswish(y, inplace=True)
    if activation == "silu":
        return torch.nn.functional.silu(y, inplace=True)
    raise ValueError(f"activation must be clamp, leaky_relu, hardswish or silu, got {activation}")


def _normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> Tensor:
    """The result of training-mode batch norm from its saved statistics, bit for bit as ATen computes it on the device.

    On CUDA ATen has an operator for it. On the CPU ATen's dense kernel computes x * alpha + beta with alpha = invstd *
    weight and beta = bias - mean * alpha; whether product and sum are fused depends on ATen's compiler. Inference mode
    with variance 1, eps 0 and weight alpha runs the same kernel on the same constants: the same bits.
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    half_parameters = mean.dtype == torch.float16
    mean, invstd = mean.to(compute), invstd.to(compute)
    weight = torch.ones_like(mean) if weight is None else weight.to(compute)
    bias = torch.zeros_like(mean) if bias is None else bias.to(compute)
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=norm_format(x))
    if x.is_cuda:
        y = aten.batch_norm_elemt(x, weight, bias, mean, invstd, 0.0)
        return y.contiguous(memory_format=norm_format(x))
    if not x.is_contiguous(memory_format=norm_format(x)):  # ATen's formula for strided tensors
        m, s, w, b = (t.view((1, -1) + (1,) * (x.dim() - 2)) for t in (mean, invstd, weight, bias))
        y = ((x.to(compute) - m) * s) * w + b
        return y.to(x.dtype).contiguous(memory_format=norm_format(x))
    alpha = invstd * weight
    if half_parameters:  # ATen does not fuse beta's product into its sum then: compute it apart
        mean, bias = torch.zeros_like(mean), bias - mean * alpha
    result: Tensor = aten.native_batch_norm(x, alpha, bias, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]
    return result


@operator(
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "float momentum, float eps, Tensor? residual, str activation, float lo, float hi, bool exact) "
    "-> (Tensor, Tensor, Tensor)"
)
def batch_norm_train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    residual: Tensor | None,
    activation: str,
    lo: float,
    hi: float,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Training-mode batch norm, addition and activation; returns y, mean and invstd, updates the running statistics.

    Without ``exact`` a kernel may compute the statistics its own way, equal to ATen's up to rounding. The reference
    always uses ATen's.
    """
    y, mean, invstd = aten.native_batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return _finished(y, residual, activation, lo, hi), mean, invstd


@fake(batch_norm_train)
def _trained(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    # Half-precision inputs keep their statistics in the dtype of the parameters, and on CUDA always in float32.
    given = [t for t in (weight, bias, running_mean, running_var) if t is not None]
    half = x.dtype in (torch.float16, torch.bfloat16)
    wide = half and (x.is_cuda or any(t.dtype == torch.float32 for t in given))
    dtype = torch.float32 if wide else x.dtype
    mean, invstd = (torch.empty((x.shape[1],), dtype=dtype, device=x.device) for _ in range(2))
    return _like_x(x), mean, invstd


@operator(
    f"(Tensor grad, Tensor x, {_NORM}, str activation, float lo, float hi, bool[3] mask, Tensor? residual=None) "
    "-> (Tensor, Tensor, Tensor)"
)
def batch_norm_activation_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    activation: str,
    lo: float,
    hi: float,
    mask: Sequence[bool],
    residual: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of an activated training-mode batch norm for x, weight and bias; None where ``mask`` is false.

    It needs x but not the result y, which is recomputed from the saved statistics. ``residual`` is another gradient of
    x and is added.
    """
    y = _normalised(x, weight, bias, mean, invstd)
    through = _through(grad, y, activation, lo, hi).contiguous(memory_format=norm_format(x))
    dense = x.contiguous(memory_format=norm_format(x))
    parameter = mean if weight is None else weight
    affine = torch.ones_like(parameter) if weight is None else weight
    if x.numel() == 0:
        zeros = torch.zeros_like(parameter)
        made: tuple[Tensor, ...] = (torch.empty_like(dense), zeros, zeros.clone())
    else:
        made = aten.native_batch_norm_backward(
            through, dense, affine, None, None, mean, invstd, True, 0.0, [True, True, True]
        )
    grad_input, grad_weight, grad_bias = made
    if residual is not None:
        grad_input += residual
    return (
        grad_input if mask[0] else None,
        grad_weight.to(parameter.dtype) if mask[1] else None,
        grad_bias.to(parameter.dtype) if mask[2] else None,
    )


@fake(batch_norm_activation_backward)
def _gradients(
    x: Tensor, weight: Tensor | None, mean: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dtype = (mean if weight is None else weight).dtype
    of_weight, of_bias = (
        torch.empty((x.shape[1],), dtype=dtype, device=x.device) if wanted else None for wanted in mask[1:]
    )
    return _like_x(x) if mask[0] else None, of_weight, of_bias


@operator(f"(Tensor[] parts, {_NORM}, str activation, float lo, float hi) -> Tensor")
def batch_norm_apply_joined(
    parts: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    activation: str,
    lo: float,
    hi: float,
) -> Tensor:
    """`batch_norm_apply` of tensors joined along the channels, without a residual."""
    return batch_norm_apply(torch.cat([*parts], 1), weight, bias, mean, invstd, None, activation, lo, hi)


@fake(batch_norm_apply_joined)
def _(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([*parts], 1)


@operator(
    "(Tensor[] parts, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "float momentum, float eps, str activation, float lo, float hi, bool exact) -> (Tensor, Tensor, Tensor)"
)
def batch_norm_train_joined(
    parts: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    activation: str,
    lo: float,
    hi: float,
    exact: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`batch_norm_train` of tensors joined along the channels, without a residual."""
    parameters = (weight, bias, running_mean, running_var)
    return batch_norm_train(torch.cat([*parts], 1), *parameters, momentum, eps, None, activation, lo, hi, exact)


@fake(batch_norm_train_joined)
def _(
    parts: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _trained(torch.cat([*parts], 1), weight, bias, running_mean, running_var)


@operator(
    f"(Tensor grad, Tensor[] parts, {_NORM}, str activation, float lo, float hi, bool[3] mask, "
    "Tensor? residual=None) -> (Tensor, Tensor, Tensor)"
)
def batch_norm_activation_backward_joined(
    grad: Tensor, parts: Sequence[Tensor], *others: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`batch_norm_activation_backward` of tensors joined along the channels; the gradient of x is one tensor."""
    return batch_norm_activation_backward(grad, torch.cat([*parts], 1), *others)


@fake(batch_norm_activation_backward_joined)
def _(
    parts: Sequence[Tensor], weight: Tensor | None, mean: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return _gradients(torch.cat([*parts], 1), weight, mean, mask)


def _through(grad: Tensor, y: Tensor, activation: str, lo: float, hi: float) -> Tensor:
    """The gradient of the activation's input y from that of its result."""
    if activation == "clamp":
        y = y.float() if y.itemsize == 2 else y  # numbers are rounded to the type of what they are compared with
        stopped = y <= lo if lo > -math.inf else torch.zeros_like(y, dtype=torch.bool)
        if hi < math.inf:
            stopped |= y >= hi
        return grad.masked_fill(stopped, 0)
    if activation == "leaky_relu":
        return aten.leaky_relu_backward(grad, y, lo, False)
    if activation == "hardswish":
        return aten.hardswish_backward(grad, y)
    if activation == "silu":
        return aten.silu_backward(grad, y)
    raise ValueError(f"activation must be clamp, leaky_relu, hardswish or silu, got {activation}")
