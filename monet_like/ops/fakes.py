"""Shapes, dtypes and layouts of every operator without its computation, for fake tensors and tracing.

What these do not depend on has no name here; `reference` has all the signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import reference
from .registry import NAMESPACE

_FAKES: dict[str, Callable[..., Any]] = {}


def _fake(function: Callable[..., Any]) -> Callable[..., Any]:
    _FAKES[function.__name__] = function
    return function


def register() -> None:
    """Register all of them; once per process, after the operators exist."""
    for name, function in _FAKES.items():
        torch.library.register_fake(f"{NAMESPACE}::{name}", function)


def _packed(t: Tensor) -> Tensor:
    return torch.empty(((t.numel() + 7) // 8,), dtype=torch.uint8, device=t.device)


def _unpacked(t: Tensor, stride: Sequence[int]) -> Tensor:
    return reference.empty_in_packing_order(t.shape, stride or t.stride(), t, t.dtype)


@_fake
def pack_sign(x: Tensor) -> Tensor:
    return _packed(x)


@_fake
def pack_range(x: Tensor, lo: float, hi: float) -> Tensor:
    return _packed(x)


@_fake
def pack_bool(mask: Tensor) -> Tensor:
    return _packed(mask)


@_fake
def keep_where(x: Tensor, mask: Tensor, stride: Sequence[int] = ()) -> Tensor:
    return _unpacked(x, stride)


@_fake
def keep_where_(x: Tensor, mask: Tensor, stride: Sequence[int] = ()) -> Tensor:
    return x


@_fake
def unpack_bool(packed: Tensor, size: Sequence[int], stride: Sequence[int] = ()) -> Tensor:
    return reference.empty_in_packing_order(size, stride, packed, torch.bool)


@_fake
def masked_scale(x: Tensor, packed: Tensor, scale: float, stride: Sequence[int] = (), otherwise: float = 0.0) -> Tensor:
    return _unpacked(x, stride)


@_fake
def pack_nibbles(x: Tensor) -> Tensor:
    return torch.empty(((x.numel() + 1) // 2,), dtype=torch.uint8, device=x.device)


@_fake
def unpack_nibbles(packed: Tensor, size: Sequence[int], stride: Sequence[int] = ()) -> Tensor:
    return reference.empty_in_packing_order(size, stride, packed, torch.uint8)


@_fake
def pack_largest(x: Tensor, keep: int) -> Tensor:
    size = reference.largest_bytes(x.numel(), keep, x.element_size())
    return torch.empty((size,), dtype=torch.uint8, device=x.device)


@_fake
def unpack_largest(
    packed: Tensor, keep: int, size: Sequence[int], dtype: torch.dtype, stride: Sequence[int] = ()
) -> Tensor:
    return reference.empty_in_packing_order(size, stride, packed, dtype)


@_fake
def mm_largest(grad: Tensor, packed: Tensor, keep: int, columns: int, transposed: bool = False) -> Tensor:
    outs = grad.shape[1]
    return grad.new_empty((columns, outs) if transposed else (outs, columns))


@_fake
def pack_int8(x: Tensor) -> Tensor:
    return torch.empty((reference.int8_bytes(x.numel()),), dtype=torch.uint8, device=x.device)


@_fake
def unpack_int8(packed: Tensor, size: Sequence[int], dtype: torch.dtype, stride: Sequence[int] = ()) -> Tensor:
    return reference.empty_in_packing_order(size, stride, packed, dtype)


@_fake
def max_pool2d_with_offsets(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[Tensor, Tensor]:
    step = stride or kernel
    out = [
        reference.pooled_extent(x.shape[axis - 2], kernel[axis], step[axis], padding[axis], dilation[axis], ceil_mode)
        for axis in (0, 1)
    ]
    size, memory_format = (*x.shape[:-2], *out), reference._format(x)
    y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=memory_format)
    return y, torch.empty(size, dtype=torch.uint8, device=x.device, memory_format=memory_format)


@_fake
def max_pool2d_offsets(indices: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(indices, dtype=torch.uint8, memory_format=reference._format(indices))


@_fake
def max_pool2d_offsets_to_indices(offsets: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(offsets, dtype=torch.int64, memory_format=reference._format(offsets))


@_fake
def max_pool2d_offsets_backward(grad: Tensor, offsets: Tensor, input_size: Sequence[int], *_: Any) -> Tensor:
    return torch.empty(
        tuple(input_size), dtype=grad.dtype, device=grad.device, memory_format=reference._format(offsets)
    )


@_fake
def batch_norm_apply(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=reference.norm_format(x))


@_fake
def batch_norm_train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    # Half-precision inputs keep their statistics in the dtype of the parameters, and on CUDA always in float32.
    given = [t for t in (weight, bias, running_mean, running_var) if t is not None]
    half = x.dtype in (torch.float16, torch.bfloat16)
    wide = half and (x.is_cuda or any(t.dtype == torch.float32 for t in given))
    dtype = torch.float32 if wide else x.dtype
    statistics = [torch.empty((x.shape[1],), dtype=dtype, device=x.device) for _ in range(2)]
    return torch.empty_like(x, memory_format=reference.norm_format(x)), statistics[0], statistics[1]


@_fake
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
    parameter = mean if weight is None else weight
    return (
        torch.empty_like(x, memory_format=reference.norm_format(x)) if mask[0] else None,
        torch.empty((x.shape[1],), dtype=parameter.dtype, device=x.device) if mask[1] else None,
        torch.empty((x.shape[1],), dtype=parameter.dtype, device=x.device) if mask[2] else None,
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([*parts], 1)


@_fake
def batch_norm_apply_joined(parts: Sequence[Tensor], *_: Any) -> Tensor:
    return _joined(parts)


@_fake
def batch_norm_train_joined(parts: Sequence[Tensor], *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return batch_norm_train(_joined(parts), *others)


@_fake
def batch_norm_activation_backward_joined(
    grad: Tensor, parts: Sequence[Tensor], *others: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return batch_norm_activation_backward(grad, _joined(parts), *others)


@_fake
def rms_norm(
    x: Tensor, weight: Tensor | None, dims: int, eps: float, rounded: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    rows = (*x.shape[: x.dim() - dims], *(1 for _ in range(dims)))
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    return y, torch.empty(rows, dtype=reference.row_statistic(x), device=x.device)


@_fake
def rms_norm_apply(
    x: Tensor, weight: Tensor | None, rstd: Tensor, dims: int, rounded: bool, dtype: torch.dtype
) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@_fake
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, residual: Tensor | None, dims: int
) -> tuple[Tensor, Tensor | None]:
    of_weight = None if weight is None else torch.empty(weight.shape, dtype=weight.dtype, device=x.device)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), of_weight


def _convolved(like: Tensor, size: Sequence[int], channels_last: bool) -> Tensor:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(tuple(size), dtype=like.dtype, device=like.device, memory_format=memory_format)


@_fake
def cudnn_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    channels_last: bool,
    algorithm: str,
) -> Tensor:
    kernel = weight.shape[2:]
    out = [
        reference.pooled_extent(x.shape[axis + 2], kernel[axis], stride[axis], padding[axis], dilation[axis], False)
        for axis in (0, 1)
    ]
    return _convolved(x, (x.shape[0], weight.shape[0], *out), channels_last)


@_fake
def cudnn_convolution_backward_input(grad: Tensor, weight: Tensor, input_size: Sequence[int], *settings: Any) -> Tensor:
    return _convolved(grad, input_size, settings[-2])


@_fake
def cudnn_convolution_backward_weight(grad: Tensor, x: Tensor, weight_size: Sequence[int], *settings: Any) -> Tensor:
    return _convolved(grad, weight_size, settings[-2])
