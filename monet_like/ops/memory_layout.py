"""In which order the elements of a tensor lie in memory: the packing order of packed tensors, and the layout of norms.

The packing order is the order of the elements in memory if the tensor is dense (no gaps, no overlap, dimensions in any
order), else row-major order. Bit i of byte b belongs to element 8 b + i. An argument ``stride`` is the stride of the
tensor that was packed; an empty one means that the tensor at hand has the same stride. Bits beyond the last element are
zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the strides lay the shape out without gaps and without overlap, in some order of the dimensions."""
    if any(n == 0 for n in size):
        return True
    expected = 1
    for step, extent in sorted((step, extent) for step, extent in zip(stride, size, strict=True) if extent != 1):
        if step != expected:
            return False
        expected *= extent
    return True


def empty_in_packing_order(size: Sequence[int], stride: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor whose memory order is the packing order of a tensor with this size and stride."""
    if not stride:
        return torch.empty(tuple(size), dtype=dtype, device=like.device)
    if len(stride) != len(size):
        raise ValueError(f"stride must have one entry per dimension ({len(size)}), got {len(stride)}")
    if is_dense(size, stride):
        return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device=like.device)
    return torch.empty(tuple(size), dtype=dtype, device=like.device)


def to_packing_order(t: Tensor, stride: Sequence[int] = ()) -> Tensor:
    """`t` itself, or a copy of it, in the memory order of the tensor that was packed."""
    if not stride:
        return t if is_dense(t.shape, t.stride()) else t.contiguous()
    order = empty_in_packing_order(t.shape, stride, t, t.dtype)
    same = all(n == 1 or a == b for n, a, b in zip(t.shape, t.stride(), order.stride(), strict=True))
    return t if same or t.numel() == 0 else order.copy_(t)


def flat_view(dense: Tensor) -> Tensor:
    """A dense tensor as one dimension, in the order of its elements in memory."""
    return dense.as_strided((dense.numel(),), (1,))


def image_format(t: Tensor) -> torch.memory_format:
    """Channels last if ATen judges so by the strides, else contiguous."""
    return torch._prims_common.suggest_memory_format(t)


def norm_format(x: Tensor) -> torch.memory_format:
    """The memory format that ATen chooses for batch norm's result; row-major if x is contiguous in several formats."""
    return torch.contiguous_format if x.is_contiguous() else image_format(x)
