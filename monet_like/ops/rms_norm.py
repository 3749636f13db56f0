"""RMS norm (Zhang and Sennrich, 2019) in one pass, recomputed from its saved statistic, and its gradient.

F is float32, float64, float16 or bfloat16; R is float64 for float64 and float32 for the other dtypes; "any F" may be
None or have another dtype than x.

| operator | reads | returns |
|---|---|---|
| rms_norm | x: F[..., *D]; weight: any F[D] | y: x's shape, the given dtype; rstd: R[..., 1] |
| rms_norm_apply | the same; rstd: R[..., 1] | y |
| rms_norm_backward | grad, residual: any F[..., *D]; x, weight, rstd as above | like x; like weight |
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .registry import fake, operator


def row_statistic(x: Tensor) -> torch.dtype:
    """The dtype in which the norm of ``x`` is computed, and of its statistic 1 / sqrt(mean of squares + eps)."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@operator("(Tensor x, Tensor? weight, int dims, float eps, bool rounded, ScalarType dtype) -> (Tensor, Tensor)")
def rms_norm(
    x: Tensor, weight: Tensor | None, dims: int, eps: float, rounded: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """RMS norm over the last ``dims`` dimensions, and its statistic rstd = 1 / sqrt(mean of squares + eps).

    Args:
        rounded: round the normalised rows to the dtype of ``x`` before they are multiplied by the weight, as Hugging
            Face's models do; torch.nn.RMSNorm rounds only the product.
        dtype: of the result.
    """
    rstd = x.to(row_statistic(x)).square().mean(tuple(range(-dims, 0)), keepdim=True).add_(eps).rsqrt_()
    return rms_norm_apply(x, weight, rstd, dims, rounded, dtype), rstd


@fake(rms_norm)
def _(x: Tensor, dims: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows = (*x.shape[: x.dim() - dims], *(1 for _ in range(dims)))
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    return y, torch.empty(rows, dtype=row_statistic(x), device=x.device)


@operator("(Tensor x, Tensor? weight, Tensor rstd, int dims, bool rounded, ScalarType dtype) -> Tensor")
def rms_norm_apply(
    x: Tensor, weight: Tensor | None, rstd: Tensor, dims: int, rounded: bool, dtype: torch.dtype
) -> Tensor:
    """`rms_norm` recomputed from the saved rstd."""
    y = x.to(rstd.dtype) * rstd
    y = y.to(x.dtype).to(rstd.dtype) if rounded else y
    return (y if weight is None else y * weight.to(rstd.dtype)).to(dtype).contiguous()


@fake(rms_norm_apply)
def _(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@operator("(Tensor grad, Tensor x, Tensor? weight, Tensor rstd, Tensor? residual, int dims) -> (Tensor, Tensor)")
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, residual: Tensor | None, dims: int
) -> tuple[Tensor, Tensor | None]:
    """Gradients for x, to which ``residual`` is added, and for the weight."""
    wide = rstd.dtype
    g, value = grad.to(wide), x.to(wide)
    through = g if weight is None else g * weight.to(wide)
    width = math.prod(x.shape[x.dim() - dims :])
    slope = (through * value).sum(tuple(range(-dims, 0)), keepdim=True) / width * rstd**3
    grad_x = through * rstd - value * slope
    grad_x = grad_x if residual is None else grad_x + residual.to(wide)
    of_weight = None
    if weight is not None:
        rows = tuple(range(x.dim() - dims))
        of_weight = g * (value * rstd)
        of_weight = (of_weight.sum(rows) if rows else of_weight).to(weight.dtype)
    return grad_x.to(x.dtype).contiguous(), of_weight


@fake(rms_norm_backward)
def _(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    of_weight = None if weight is None else torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), of_weight
