"""Max pooling that keeps one byte for each maximum: its offset in the window, where PyTorch keeps an int64 index.

F is float32, float64, float16 or bfloat16. The memory format of results is that of the first tensor, channels last or
not.

| operator | reads | returns |
|---|---|---|
| max_pool2d_with_offsets | x: F[N,C,H,W] or [C,H,W] | y: like x, [.., OH, OW]; offsets: uint8[.., OH, OW] |
| max_pool2d_offsets | indices: int64[.., OH, OW] | uint8[.., OH, OW] |
| max_pool2d_offsets_to_indices | offsets: uint8[.., OH, OW] | int64[.., OH, OW] |
| max_pool2d_offsets_backward | grad: F[.., OH, OW]; offsets: uint8[.., OH, OW] | F[input_size] |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .memory_layout import image_format
from .registry import fake, operator

aten = torch.ops.aten


_POOL = "int[2] kernel, int[2] stride, int[2] padding, int[2] dilation"


def pooled_extent(extent: int, kernel: int, stride: int, pad: int, dilation: int, ceil_mode: bool) -> int:
    """The number of windows along one axis, as aten.max_pool2d counts them."""
    out = (extent + 2 * pad - dilation * (kernel - 1) - 1 + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (out - 1) * stride >= extent + pad:  # the last window must start inside the image or its padding
        out -= 1
    return out


def pooled_extents(
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> list[int]:
    """The numbers of windows along height and width of images of this size; an empty ``stride`` is the kernel."""
    axes = zip(size[-2:], kernel, stride or kernel, padding, dilation, strict=True)
    return [pooled_extent(*axis, ceil_mode) for axis in axes]


def _window_starts(
    pooled: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor]:
    step = stride or kernel
    oh = torch.arange(pooled.shape[-2], device=pooled.device).view(-1, 1)
    ow = torch.arange(pooled.shape[-1], device=pooled.device).view(1, -1)
    return oh * step[0] - padding[0], ow * step[1] - padding[1]


def pair(numbers: Sequence[int]) -> tuple[int, int]:
    """The numbers for rows and for columns, as PyTorch takes a window's arguments: a single one is for both."""
    return numbers[0], numbers[-1]


def _first_step(start: Tensor, dilation: int) -> Tensor:
    """The first row or column of the kernel that is not before the image."""
    return (-start).clamp(min=0).add(dilation - 1).div(dilation, rounding_mode="floor")


@operator(f"(Tensor indices, SymInt[] input_size, {_POOL}) -> Tensor")
def max_pool2d_offsets(
    indices: Tensor,
    input_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """The int64 indices of aten.max_pool2d_with_indices as offsets in windows: kernel row * kernel width + column.

    Raises:
        ValueError: an index lies outside its window.
    """
    width = input_size[-1]
    start_h, start_w = _window_starts(indices, kernel, stride, padding)
    # A window wholly in the padding has no cell; ATen then names its first step, which may lie outside the image.
    step_h, step_w = _first_step(start_h, dilation[0]), _first_step(start_w, dilation[1])
    first = (start_h + step_h * dilation[0]) * width + start_w + step_w * dilation[1]
    dh = indices.div(width, rounding_mode="floor") - start_h
    dw = indices.remainder(width) - start_w
    kh, kw = dh.div(dilation[0], rounding_mode="floor"), dw.div(dilation[1], rounding_mode="floor")
    inside = (dh >= 0) & (dw >= 0) & (dh % dilation[0] == 0) & (dw % dilation[1] == 0)
    inside &= (kh < kernel[0]) & (kw < kernel[1])
    is_first = indices == first
    if not bool((inside | is_first).all()):
        raise ValueError("max_pool2d_offsets: an index lies outside its window; wrong window or indices")
    return torch.where(is_first, step_h * kernel[1] + step_w, kh * kernel[1] + kw).to(torch.uint8)


@fake(max_pool2d_offsets)
def _(indices: Tensor) -> Tensor:
    return torch.empty_like(indices, dtype=torch.uint8, memory_format=image_format(indices))


@operator(f"(Tensor offsets, SymInt[] input_size, {_POOL}) -> Tensor")
def max_pool2d_offsets_to_indices(
    offsets: Tensor,
    input_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """The inverse of `max_pool2d_offsets`."""
    start_h, start_w = _window_starts(offsets, kernel, stride, padding)
    cell = offsets.long()
    h = start_h + cell.div(kernel[1], rounding_mode="floor") * dilation[0]
    w = start_w + cell % kernel[1] * dilation[1]
    return h * input_size[-1] + w


@fake(max_pool2d_offsets_to_indices)
def _(offsets: Tensor) -> Tensor:
    return torch.empty_like(offsets, dtype=torch.int64, memory_format=image_format(offsets))


@operator(f"(Tensor grad, Tensor offsets, SymInt[] input_size, {_POOL}) -> Tensor")
def max_pool2d_offsets_backward(
    grad: Tensor,
    offsets: Tensor,
    input_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """The gradient of max pooling from offsets; the result has the offsets' memory format."""
    memory_format = image_format(offsets)
    indices = max_pool2d_offsets_to_indices(offsets, input_size, kernel, stride, padding, dilation)
    floors = pooled_extents(input_size, kernel, stride, padding, dilation, False)
    ceil_mode = list(offsets.shape[-2:]) != floors
    # ATen wants the input, but only for its shape and layout.
    shape_only = torch.empty(tuple(input_size), dtype=grad.dtype, device=grad.device, memory_format=memory_format)
    grad_input: Tensor = aten.max_pool2d_with_indices_backward(
        grad, shape_only, kernel, stride, padding, dilation, ceil_mode, indices
    )
    return grad_input.contiguous(memory_format=memory_format)


@fake(max_pool2d_offsets_backward)
def _(grad: Tensor, offsets: Tensor, input_size: Sequence[int]) -> Tensor:
    return torch.empty(tuple(input_size), dtype=grad.dtype, device=grad.device, memory_format=image_format(offsets))


@operator(f"(Tensor x, {_POOL}, bool ceil_mode) -> (Tensor, Tensor)")
def max_pool2d_with_offsets(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[Tensor, Tensor]:
    """Max pooling with offsets; of equal maxima the first one in the window counts, of NaNs the last, as in ATen.

    Raises:
        ValueError: the window has more than 256 elements.
    """
    if kernel[0] * kernel[1] > 256:
        raise ValueError(f"a window may have at most 256 cells, got {kernel[0] * kernel[1]}")
    y, indices = aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil_mode)
    return y, max_pool2d_offsets(indices, x.shape, kernel, stride, padding, dilation)


@fake(max_pool2d_with_offsets)
def _(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[Tensor, Tensor]:
    size = (*x.shape[:-2], *pooled_extents(x.shape, kernel, stride, padding, dilation, ceil_mode))
    y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=image_format(x))
    return y, torch.empty_like(y, dtype=torch.uint8, memory_format=image_format(x))
