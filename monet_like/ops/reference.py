"""Plain-torch twins of the kernels in csrc/: same names, same signatures, same results, more memory and time.

They run on any device, define what the kernels must compute, and stand in where the library is not built.

Shapes and dtypes (F = float32, float64, float16 or bfloat16; P = F or float32;
R = float64 for float64 and float32 for all else; ceil(n/8) bytes = one bit each)

| operator | reads | returns |
|---|---|---|
| pack_sign | x: F, any shape | uint8[ceil(numel/8)] |
| pack_range | x: F, any shape | uint8[ceil(numel/8)] |
| pack_bool | mask: bool, any shape | uint8[ceil(numel/8)] |
| keep_where(_) | x: F; mask: uint8[ceil(numel/8)] | like x |
| unpack_bool | packed: uint8[ceil(numel/8)] | bool[size] |
| masked_scale | x: F; packed: uint8[ceil(numel/8)] | like x |
| pack_nibbles | x: uint8 | uint8[ceil(numel/2)] |
| unpack_nibbles | packed: uint8[ceil(numel/2)] | uint8, the given size |
| pack_largest | x: F, any shape | uint8[largest_bytes] |
| unpack_largest | packed: uint8[largest_bytes] | F, the given size |
| mm_largest | grad: F[rows, outs]; packed: uint8[largest_bytes] | F[outs, columns], or transposed |
| pack_int8 | x: F, any shape | uint8[int8_bytes] |
| unpack_int8 | packed: uint8[int8_bytes] | F, the given size |
| max_pool2d_with_offsets | x: F[N,C,H,W] or [C,H,W] | y: like x, [.., OH, OW]; offsets: uint8[.., OH, OW] |
| max_pool2d_offsets | indices: int64[.., OH, OW] | uint8[.., OH, OW] |
| max_pool2d_offsets_to_indices | offsets: uint8[.., OH, OW] | int64[.., OH, OW] |
| max_pool2d_offsets_backward | grad: F[.., OH, OW]; offsets: uint8[.., OH, OW] | F[input_size] |
| batch_norm_apply | x, residual: F[N,C,...]; weight, bias, mean, invstd: P[C] | like x |
| batch_norm_train | x, residual: F[N,C,...]; weight, bias, running_*: P[C] | y: like x; mean, invstd: P[C] |
| batch_norm_activation_backward | grad, x, residual: F[N,C,...]; weight, bias, mean, invstd: P[C] | like x; P[C]; P[C] |
| batch_norm_…_joined | as these three; parts: F[N,C_i,...], together x | as these three |
| rms_norm | x: F[..., *D]; weight: any F[D] | y: x's shape, the given dtype; rstd: R[..., 1] |
| rms_norm_apply | the same; rstd: R[..., 1] | y |
| rms_norm_backward | grad, residual: any F[..., *D]; x, weight, rstd as above | like x; like weight |
| cudnn_convolution | x: F[N,C,H,W]; weight: F[K,C/groups,R,S]; bias: F[K] | F[N,K,OH,OW] |
| cudnn_convolution_backward_input | grad: F[N,K,OH,OW]; weight: F[K,C/groups,R,S] | F[input_size] |
| cudnn_convolution_backward_weight | grad: F[N,K,OH,OW]; x: F[N,C,H,W] | F[weight_size] |

All three of cuDNN's then take ``settings``: stride, padding and dilation: two extents each; groups; channels_last, whether
the result is laid out so; the algorithm's name.

Order of packed bits: the order of the elements in memory if the tensor is dense (no gaps, no overlap, dimensions in
any order), else row-major order. Bit i of byte b is element 8 b + i. `stride` is the stride of the tensor that was
packed; an empty one means that the tensor at hand has the same stride. Bits beyond the last element are zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


# ---- layout ----


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


def _flat(dense: Tensor) -> Tensor:
    return dense.as_strided((dense.numel(),), (1,))


# ---- bits ----


def _pack(flags: Tensor) -> Tensor:
    n = flags.numel()
    padded = torch.zeros(-(-n // 8) * 8, dtype=torch.uint8, device=flags.device)
    padded[:n] = flags
    place = torch.arange(8, dtype=torch.uint8, device=flags.device)
    return (padded.view(-1, 8) << place).sum(1, dtype=torch.uint8)


def _unpack(packed: Tensor, n: int) -> Tensor:
    if packed.dtype != torch.uint8 or packed.shape != (-(-n // 8),):
        raise ValueError(f"a mask of {n} bits is uint8[{-(-n // 8)}], got {packed.dtype}{list(packed.shape)}")
    place = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.view(-1, 1) >> place) & 1).bool().view(-1)[:n]


def pack_sign(x: Tensor) -> Tensor:
    """Bit = not (x <= 0), the elements whose gradient aten.threshold_backward lets through (a NaN is one)."""
    return _pack(~(_flat(to_packing_order(x)) <= 0))


def pack_range(x: Tensor, lo: float, hi: float) -> Tensor:
    """Bit = lo < x < hi, the elements whose gradient aten.hardtanh_backward lets through.

    For NaN the answer follows ATen as far as ATen has one: let through on CUDA; on the CPU ATen's vector code blocks
    it and its scalar tail lets it through, and here it is always blocked. float16 and bfloat16 compare in float32.
    """
    flat = _flat(to_packing_order(x))
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    bounds = torch.tensor([lo, hi], dtype=flat.dtype, device=flat.device)
    if flat.is_cuda:
        return _pack(~((flat <= bounds[0]) | (flat >= bounds[1])))
    return _pack((flat > bounds[0]) & (flat < bounds[1]))


def pack_bool(mask: Tensor) -> Tensor:
    """Eight booleans to the byte."""
    if mask.dtype != torch.bool:
        raise TypeError(f"pack_bool packs bool tensors, got {mask.dtype}")
    return _pack(_flat(to_packing_order(mask)))


def keep_where(x: Tensor, mask: Tensor, stride: Sequence[int] = ()) -> Tensor:
    """x where the bit is set, else 0, in the layout of the packed tensor: the gradient of ReLU and hardtanh."""
    dense = to_packing_order(x, stride)
    keep = unpack_bool(mask, dense.shape, dense.stride())
    out = torch.empty_strided(dense.shape, dense.stride(), dtype=x.dtype, device=x.device)
    return out.copy_(dense).masked_fill_(~keep, 0)


def keep_where_(x: Tensor, mask: Tensor, stride: Sequence[int] = ()) -> Tensor:
    """The same, into x."""
    return x.copy_(keep_where(x, mask, stride))


def unpack_bool(packed: Tensor, size: Sequence[int], stride: Sequence[int] = ()) -> Tensor:
    """The inverse of pack_bool; contiguous if no stride is given."""
    out = empty_in_packing_order(size, stride, packed, torch.bool)
    _flat(out).copy_(_unpack(packed, out.numel()))
    return out


def masked_scale(x: Tensor, packed: Tensor, scale: float, stride: Sequence[int] = (), otherwise: float = 0.0) -> Tensor:
    """x * (scale where the bit is set, else otherwise), computed in at least float32 and rounded once.

    (x * mask) * scale, aten.native_dropout's forward and its backward; the gradient of leaky ReLU.
    """
    dense = to_packing_order(x, stride)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    yes, no = (torch.tensor(value, dtype=compute, device=x.device) for value in (scale, otherwise))
    factor: Tensor = torch.where(unpack_bool(packed, dense.shape, dense.stride()), yes, no)
    out = torch.empty_strided(dense.shape, dense.stride(), dtype=x.dtype, device=x.device)
    return out.copy_(dense.to(compute) * factor)


def pack_nibbles(x: Tensor) -> Tensor:
    """Two numbers below 16 to the byte, in packing order, the first one in the low half."""
    if x.dtype != torch.uint8:
        raise TypeError(f"pack_nibbles packs uint8 tensors, got {x.dtype}")
    flat = _flat(to_packing_order(x))
    padded = torch.zeros(-(-flat.numel() // 2) * 2, dtype=torch.uint8, device=x.device)
    padded[: flat.numel()] = flat
    return (padded[0::2] & 15) | (padded[1::2] << 4)


def unpack_nibbles(packed: Tensor, size: Sequence[int], stride: Sequence[int] = ()) -> Tensor:
    """The inverse of pack_nibbles; contiguous if no stride is given."""
    out = empty_in_packing_order(size, stride, packed, torch.uint8)
    if packed.dtype != torch.uint8 or packed.shape != (-(-out.numel() // 2),):
        raise ValueError(
            f"{out.numel()} half bytes are uint8[{-(-out.numel() // 2)}], got {packed.dtype}{list(packed.shape)}"
        )
    _flat(out).copy_(torch.stack((packed & 15, packed >> 4), 1).flatten()[: out.numel()])
    return out


# ---- lossy caches ----

#: Elements among which the largest are chosen.
LARGEST_BLOCK = 16384
#: Elements that share a scale.
INT8_BLOCK = 256

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def largest_kept(numel: int, keep: int) -> int:
    """How many of ``numel`` elements are kept, of the last block in proportion and rounded up."""
    return numel // LARGEST_BLOCK * keep + (numel % LARGEST_BLOCK * keep + LARGEST_BLOCK - 1) // LARGEST_BLOCK


def largest_bytes(numel: int, keep: int, itemsize: int) -> int:
    """Bytes of a cache of the largest elements: the values, and a bit for each element or two bytes for each kept."""
    kept = largest_kept(numel, keep)
    return kept * itemsize + (2 * kept if 16 * keep < LARGEST_BLOCK else (numel + 7) // 8)


def int8_bytes(numel: int) -> int:
    """Bytes of a cache of 8 bits an element: the float32 scales, then a byte for each."""
    return (numel + INT8_BLOCK - 1) // INT8_BLOCK * 4 + numel


def _check_cache(packed: Tensor, size: int, alignment: int) -> None:
    """``alignment``: bytes of the elements that are read from the cache's first byte on."""
    if packed.dtype != torch.uint8 or packed.shape != (size,) or not packed.is_contiguous():
        raise ValueError(f"the cache of such a tensor is uint8[{size}], got {packed.dtype}{list(packed.shape)}")
    if packed.storage_offset() % alignment:
        raise ValueError(
            f"the cache must start at a multiple of {alignment} bytes in memory, got a view that starts at byte "
            f"{packed.storage_offset()} of its storage; pass packed.clone()"
        )


def _check_keep(keep: int) -> None:
    if not 0 < keep <= LARGEST_BLOCK:
        raise ValueError(f"keep is of {LARGEST_BLOCK} elements and between 1 and that, got {keep}")


def _largest(flat: Tensor, keep: int) -> Tensor:
    """Which elements are kept: of equal magnitudes the first; a NaN is larger than infinity."""
    bits = flat.view(_BITS[flat.element_size()]) & torch.iinfo(_BITS[flat.element_size()]).max
    whole = flat.numel() // LARGEST_BLOCK * LARGEST_BLOCK
    flags = torch.zeros_like(bits, dtype=torch.bool)
    for rows, chosen in ((bits[:whole].view(-1, LARGEST_BLOCK), flags[:whole]), (bits[None, whole:], flags[whole:])):
        if rows.numel():
            order = rows.sort(dim=1, descending=True, stable=True).indices[:, : largest_kept(rows.shape[1], keep)]
            chosen.view(rows.shape).scatter_(1, order, True)
    return flags


def pack_largest(x: Tensor, keep: int) -> Tensor:
    """The ``keep`` elements of largest magnitude of every 16,384 in packing order: their values, then which they are.

    That is a bit for every element, or their 16-bit places in the block where fewer than a 16th are kept.
    """
    _check_keep(keep)
    flat = _flat(to_packing_order(x))
    flags = _largest(flat, keep)
    places = (flags.nonzero()[:, 0] % LARGEST_BLOCK).to(torch.int16)
    index = places.view(torch.uint8) if 16 * keep < LARGEST_BLOCK else _pack(flags)
    return torch.cat((flat[flags].view(torch.uint8), index))


def unpack_largest(
    packed: Tensor, keep: int, size: Sequence[int], dtype: torch.dtype, stride: Sequence[int] = ()
) -> Tensor:
    """The tensor whose largest elements were packed, with zeros for the others; contiguous if no stride is given."""
    _check_keep(keep)
    out = empty_in_packing_order(size, stride, packed, dtype)
    count = out.numel()
    _check_cache(packed, largest_bytes(count, keep, dtype.itemsize), dtype.itemsize)
    kept = largest_kept(count, keep)
    values, index = packed[: kept * dtype.itemsize].view(dtype), packed[kept * dtype.itemsize :]
    flat = _flat(out).zero_()
    if 16 * keep < LARGEST_BLOCK:
        block = torch.arange(kept, device=packed.device) // keep
        flat[index.view(torch.int16).long() + block * LARGEST_BLOCK] = values
    else:
        flat[_unpack(index, count)] = values
    return out


def mm_largest(grad: Tensor, packed: Tensor, keep: int, columns: int, transposed: bool = False) -> Tensor:
    """``grad.t() @ x`` for an x of shape [rows of grad, columns], contiguous, whose largest elements were packed.

    With ``transposed`` ``x.t() @ grad``. The kernels have at most some 4 million elements of x at a time. On a CPU with
    fast products of 16-bit floats they make these dense, for such floats, as for all where more than a sixth is kept; so
    does a GPU. Of more elements the sums are rounded in between. Otherwise a CPU multiplies what is kept alone: sums are
    in at least float32, and an element that is not kept adds nothing even to a gradient that is not finite.
    """
    if grad.dim() != 2:
        raise ValueError(f"grad must have two dimensions, got shape {list(grad.shape)}")
    x = unpack_largest(packed, keep, (grad.shape[0], columns), grad.dtype)
    return x.t() @ grad if transposed else grad.t() @ x


def pack_int8(x: Tensor) -> Tensor:
    """Every element in units of its block's largest magnitude / 127, to the nearest; nothing but zero becomes zero.

    Blocks are of 256 elements in packing order. One with an infinity or a NaN comes back as NaN. Computed in at least
    float32.
    """
    flat = _flat(to_packing_order(x))
    wide = flat if flat.dtype == torch.float64 else flat.float()
    padded = wide.new_zeros(-(-flat.numel() // INT8_BLOCK) * INT8_BLOCK)
    padded[: flat.numel()] = wide
    rows = padded.view(-1, INT8_BLOCK)
    scales = (rows.abs().amax(1) / 127).float() if rows.numel() else rows.new_zeros(0, dtype=torch.float32)
    scales = torch.where(scales.isfinite(), scales.clamp_min(torch.finfo(torch.float32).tiny), torch.nan)
    units = (rows / scales[:, None].to(rows.dtype)).round()
    units = torch.where(units == 0, rows.sign(), units).nan_to_num(0.0)
    return torch.cat((scales.view(torch.uint8), units.to(torch.int8).view(-1)[: flat.numel()].view(torch.uint8)))


def unpack_int8(packed: Tensor, size: Sequence[int], dtype: torch.dtype, stride: Sequence[int] = ()) -> Tensor:
    """The inverse of pack_int8 but for rounding; contiguous if no stride is given."""
    out = empty_in_packing_order(size, stride, packed, dtype)
    count = out.numel()
    _check_cache(packed, int8_bytes(count), torch.float32.itemsize)
    start = packed.numel() - count
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scales = packed[:start].view(torch.float32).to(wide).repeat_interleave(INT8_BLOCK)[:count]
    _flat(out).copy_(packed[start:].view(torch.int8).to(wide) * scales)
    return out


# ---- max pooling ----


def pooled_extent(extent: int, kernel: int, stride: int, pad: int, dilation: int, ceil_mode: bool) -> int:
    """Outputs along one axis."""
    out = (extent + 2 * pad - dilation * (kernel - 1) - 1 + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (out - 1) * stride >= extent + pad:  # the last window must start inside the image or its padding
        out -= 1
    return out


def _window_starts(
    pooled: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor]:
    step = stride or kernel
    oh = torch.arange(pooled.shape[-2], device=pooled.device).view(-1, 1)
    ow = torch.arange(pooled.shape[-1], device=pooled.device).view(1, -1)
    return oh * step[0] - padding[0], ow * step[1] - padding[1]


def _first_step(start: Tensor, dilation: int) -> Tensor:
    """First step of the kernel that is not before the image."""
    return (-start).clamp(min=0).add(dilation - 1).div(dilation, rounding_mode="floor")


def max_pool2d_offsets(
    indices: Tensor,
    input_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """aten.max_pool2d_with_indices' int64 indices as cells of their windows: kernel row * kernel width + column."""
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


def max_pool2d_offsets_to_indices(
    offsets: Tensor,
    input_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """The inverse of max_pool2d_offsets."""
    start_h, start_w = _window_starts(offsets, kernel, stride, padding)
    cell = offsets.long()
    h = start_h + cell.div(kernel[1], rounding_mode="floor") * dilation[0]
    w = start_w + cell % kernel[1] * dilation[1]
    return h * input_size[-1] + w


def max_pool2d_offsets_backward(
    grad: Tensor,
    offsets: Tensor,
    input_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """aten.max_pool2d_with_indices_backward from offsets; the result has the offsets' memory format."""
    memory_format = _format(offsets)
    indices = max_pool2d_offsets_to_indices(offsets, input_size, kernel, stride, padding, dilation)
    step = stride or kernel
    ceil_mode = any(
        offsets.shape[axis - 2]
        != pooled_extent(input_size[axis - 2], kernel[axis], step[axis], padding[axis], dilation[axis], False)
        for axis in (0, 1)
    )
    # ATen wants the input, but only for its shape and layout.
    shape_only = torch.empty(tuple(input_size), dtype=grad.dtype, device=grad.device, memory_format=memory_format)
    grad_input: Tensor = aten.max_pool2d_with_indices_backward(
        grad, shape_only, kernel, stride, padding, dilation, ceil_mode, indices
    )
    return grad_input.contiguous(memory_format=memory_format)


def max_pool2d_with_offsets(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[Tensor, Tensor]:
    """y and offsets; of equal maxima the first cell wins, of NaNs the last, as in ATen."""
    if kernel[0] * kernel[1] > 256:
        raise ValueError(f"a window may have at most 256 cells, got {kernel[0] * kernel[1]}")
    y, indices = aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil_mode)
    return y, max_pool2d_offsets(indices, x.shape, kernel, stride, padding, dilation)


def _format(t: Tensor) -> torch.memory_format:
    """Channels last if ATen would say so, judged by the strides."""
    return torch._prims_common.suggest_memory_format(t)


# ---- batch norm ----


def norm_format(x: Tensor) -> torch.memory_format:
    """ATen's choice for batch norm's output: contiguous in several formats counts as row-major."""
    return torch.contiguous_format if x.is_contiguous() else _format(x)


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
    """Training-mode batch norm from its saved statistics, plus the residual, activated; each step rounds as ATen's.

    ``activation`` is ``clamp`` to lo and hi, ``leaky_relu`` of slope lo, ``hardswish`` or ``silu``.
    """
    y = _normalised(x, weight, bias, mean, invstd)
    return _finished(y, residual, activation, lo, hi)


def _finished(y: Tensor, residual: Tensor | None, activation: str, lo: float, hi: float) -> Tensor:
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
    """The y of training-mode batch norm from its saved statistics, with the bits of ATen's on the same device.

    On CUDA ATen has an operator for it. On the CPU its dense kernel computes x * alpha + beta with
    alpha = invstd * weight and beta = bias - mean * alpha, fused or not as its compiler liked. In inference mode with
    variance 1, eps 0 and weight alpha it runs the same kernel on the same constants: the same bits.
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
    """Batch norm in training mode, plus the residual, activated; with its mean and invstd. Moves the running statistics.

    Without ``exact`` a kernel may take statistics of its own, which agree with ATen's to rounding; these are ATen's.
    """
    y, mean, invstd = aten.native_batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return _finished(y, residual, activation, lo, hi), mean, invstd


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
    """Gradients of an activated batch norm in training mode by x, weight and bias; what `mask` leaves out is None.

    Reads x, not y: y is recomputed from the saved statistics. ``residual``, another gradient of x, is added to its own.
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
    """`batch_norm_apply` without a residual, of tensors joined along the channels."""
    return batch_norm_apply(torch.cat([*parts], 1), weight, bias, mean, invstd, None, activation, lo, hi)


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
    """`batch_norm_train` without a residual, of tensors joined along the channels."""
    parameters = (weight, bias, running_mean, running_var)
    return batch_norm_train(torch.cat([*parts], 1), *parameters, momentum, eps, None, activation, lo, hi, exact)


def batch_norm_activation_backward_joined(
    grad: Tensor, parts: Sequence[Tensor], *others: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`batch_norm_activation_backward` of tensors joined along the channels; the gradient of x in one piece."""
    return batch_norm_activation_backward(grad, torch.cat([*parts], 1), *others)


def _through(grad: Tensor, y: Tensor, activation: str, lo: float, hi: float) -> Tensor:
    """The gradient through an activation of y."""
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


# ---- RMS norm ----


def row_statistic(x: Tensor) -> torch.dtype:
    """The dtype of the reciprocal roots of tensors like ``x``, in which they are computed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rms_norm(
    x: Tensor, weight: Tensor | None, dims: int, eps: float, rounded: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """RMS norm (Zhang and Sennrich, 2019) over the last ``dims`` dimensions, and 1 / sqrt(mean of squares + eps).

    Args:
        rounded: the normalised rows are rounded to the dtype of ``x`` before they are multiplied by the weight, as
            Hugging Face's models do; torch.nn.RMSNorm rounds the product alone.
        dtype: of the result.
    """
    rstd = x.to(row_statistic(x)).square().mean(tuple(range(-dims, 0)), keepdim=True).add_(eps).rsqrt_()
    return rms_norm_apply(x, weight, rstd, dims, rounded, dtype), rstd


def rms_norm_apply(
    x: Tensor, weight: Tensor | None, rstd: Tensor, dims: int, rounded: bool, dtype: torch.dtype
) -> Tensor:
    """The same from saved reciprocal roots."""
    y = x.to(rstd.dtype) * rstd
    y = y.to(x.dtype).to(rstd.dtype) if rounded else y
    return (y if weight is None else y * weight.to(rstd.dtype)).to(dtype).contiguous()


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, residual: Tensor | None, dims: int
) -> tuple[Tensor, Tensor | None]:
    """Gradients of input, to which ``residual`` is added, and weight."""
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


# ---- convolutions by cuDNN's algorithms ----

#: cuDNN's names of its algorithms; of the gradients' some are numbers.
FORWARD_ALGORITHMS = (
    "implicit_gemm",
    "implicit_precomp_gemm",
    "gemm",
    "fft",
    "fft_tiling",
    "winograd",
    "winograd_nonfused",
)
INPUT_ALGORITHMS = ("0", "1", "fft", "fft_tiling", "winograd", "winograd_nonfused")
WEIGHT_ALGORITHMS = ("0", "1", "3", "fft", "fft_tiling", "winograd_nonfused")


def _aten_settings(
    op: str,
    known: Sequence[str],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    channels_last: bool,
    algorithm: str,
) -> tuple[tuple[Any, ...], bool]:
    """ATen's arguments of a convolution after the tensors, and ``channels_last``; all three end with the same settings."""
    if algorithm not in known:
        raise ValueError(f"{op}: there is no algorithm {algorithm!r}; choose one of {', '.join(known)}")
    return (list(stride), list(padding), list(dilation), False, [0, 0], groups), channels_last


def _laid_out(t: Tensor, channels_last: bool) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def cudnn_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """aten.convolution of images; ``algorithm`` is one of `FORWARD_ALGORITHMS` and here changes nothing."""
    plain, channels_last = _aten_settings("cudnn_convolution", FORWARD_ALGORITHMS, *settings)
    return _laid_out(torch.convolution(x, weight, bias, *plain), channels_last)


def cudnn_convolution_backward_input(grad: Tensor, weight: Tensor, input_size: Sequence[int], *settings: Any) -> Tensor:
    """Its gradient for x, which has ``input_size``; ``algorithm`` is one of `INPUT_ALGORITHMS`."""
    plain, channels_last = _aten_settings("cudnn_convolution_backward_input", INPUT_ALGORITHMS, *settings)
    x = grad.new_empty((1,)).expand(tuple(input_size))  # read for its shape alone
    return _laid_out(aten.convolution_backward(grad, x, weight, None, *plain, [True, False, False])[0], channels_last)


def cudnn_convolution_backward_weight(grad: Tensor, x: Tensor, weight_size: Sequence[int], *settings: Any) -> Tensor:
    """Its gradient for the weight, which has ``weight_size``; ``algorithm`` is one of `WEIGHT_ALGORITHMS`."""
    plain, channels_last = _aten_settings("cudnn_convolution_backward_weight", WEIGHT_ALGORITHMS, *settings)
    weight = grad.new_empty((1,)).expand(tuple(weight_size))  # read for its shape alone
    return _laid_out(aten.convolution_backward(grad, x, weight, None, *plain, [False, True, False])[1], channels_last)
