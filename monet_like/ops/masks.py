"""Masks of one bit an element and numbers of four bits an element: packing, unpacking, applying.

F is float32, float64, float16 or bfloat16; ceil(n/8) bytes hold one bit for each of n elements, in the packing order of
`memory_layout`.

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
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .memory_layout import empty_in_packing_order, flat_view, to_packing_order
from .registry import fake, operator


def pack_bits(flags: Tensor) -> Tensor:
    """One dimension of booleans as uint8[ceil(n/8)]."""
    n = flags.numel()
    padded = torch.zeros(-(-n // 8) * 8, dtype=torch.uint8, device=flags.device)
    padded[:n] = flags
    place = torch.arange(8, dtype=torch.uint8, device=flags.device)
    return (padded.view(-1, 8) << place).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    """The inverse of `pack_bits`: bool[n].

    Raises:
        ValueError: ``packed`` is not a mask of n bits.
    """
    if packed.dtype != torch.uint8 or packed.shape != (-(-n // 8),):
        raise ValueError(f"a mask of {n} bits is uint8[{-(-n // 8)}], got {packed.dtype}{list(packed.shape)}")
    place = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.view(-1, 1) >> place) & 1).bool().view(-1)[:n]


@operator("(Tensor x) -> Tensor")
def pack_sign(x: Tensor) -> Tensor:
    """The mask of ReLU's gradient: bit = not (x <= 0), where aten.threshold_backward passes the gradient (NaN: 1)."""
    return pack_bits(~(flat_view(to_packing_order(x)) <= 0))


@operator("(Tensor x, float lo, float hi) -> Tensor")
def pack_range(x: Tensor, lo: float, hi: float) -> Tensor:
    """The mask of hardtanh's gradient: bit = lo < x < hi, where aten.hardtanh_backward lets the gradient pass.

    The bit of a NaN is 1 on CUDA, as in ATen, and 0 on the CPU, where ATen's vector code stops the gradient and its
    scalar code for the last elements lets it pass. float16 and bfloat16 are compared in float32.
    """
    flat = flat_view(to_packing_order(x))
    if flat.dtype in (torch.float16, torch.bfloat16):
        flat = flat.float()
    bounds = torch.tensor([lo, hi], dtype=flat.dtype, device=flat.device)
    if flat.is_cuda:
        return pack_bits(~((flat <= bounds[0]) | (flat >= bounds[1])))
    return pack_bits((flat > bounds[0]) & (flat < bounds[1]))


@fake(pack_sign, pack_range)
def _(x: Tensor) -> Tensor:
    return torch.empty(((x.numel() + 7) // 8,), dtype=torch.uint8, device=x.device)


@operator("(Tensor mask) -> Tensor")
def pack_bool(mask: Tensor) -> Tensor:
    """Packs a bool tensor, eight elements to the byte.

    Raises:
        TypeError: ``mask`` is not bool.
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"pack_bool packs bool tensors, got {mask.dtype}")
    return pack_bits(flat_view(to_packing_order(mask)))


@fake(pack_bool)
def _(mask: Tensor) -> Tensor:
    return torch.empty(((mask.numel() + 7) // 8,), dtype=torch.uint8, device=mask.device)


@operator("(Tensor x, Tensor mask, int[] stride=[]) -> Tensor")
def keep_where(x: Tensor, mask: Tensor, stride: Sequence[int] = ()) -> Tensor:
    """The gradient of ReLU and hardtanh: x where the bit is set, else 0, in the layout of the packed tensor."""
    dense = to_packing_order(x, stride)
    keep = unpack_bool(mask, dense.shape, dense.stride())
    out = torch.empty_strided(dense.shape, dense.stride(), dtype=x.dtype, device=x.device)
    return out.copy_(dense).masked_fill_(~keep, 0)


@operator("(Tensor(a!) x, Tensor mask, int[] stride=[]) -> Tensor(a!)")
def keep_where_(x: Tensor, mask: Tensor, stride: Sequence[int] = ()) -> Tensor:
    """`keep_where` in place: overwrites x."""
    return x.copy_(keep_where(x, mask, stride))


@fake(keep_where_)
def _(x: Tensor) -> Tensor:
    return x


@operator("(Tensor packed, SymInt[] size, SymInt[] stride=[]) -> Tensor")
def unpack_bool(packed: Tensor, size: Sequence[int], stride: Sequence[int] = ()) -> Tensor:
    """The inverse of `pack_bool`; the result is contiguous if no stride is given."""
    out = empty_in_packing_order(size, stride, packed, torch.bool)
    flat_view(out).copy_(unpack_bits(packed, out.numel()))
    return out


@fake(unpack_bool)
def _(packed: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    return empty_in_packing_order(size, stride, packed, torch.bool)


@operator("(Tensor x, Tensor packed, float scale, int[] stride=[], float otherwise=0.0) -> Tensor")
def masked_scale(x: Tensor, packed: Tensor, scale: float, stride: Sequence[int] = (), otherwise: float = 0.0) -> Tensor:
    """x * (``scale`` where the bit is set, else ``otherwise``), computed in at least float32 and rounded once.

    This is the forward and the backward of aten.native_dropout, (x * mask) * scale, and the gradient of leaky ReLU.
    """
    dense = to_packing_order(x, stride)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    yes, no = (torch.tensor(value, dtype=compute, device=x.device) for value in (scale, otherwise))
    factor: Tensor = torch.where(unpack_bool(packed, dense.shape, dense.stride()), yes, no)
    out = torch.empty_strided(dense.shape, dense.stride(), dtype=x.dtype, device=x.device)
    return out.copy_(dense.to(compute) * factor)


@fake(keep_where, masked_scale)
def _(x: Tensor, stride: Sequence[int]) -> Tensor:
    return empty_in_packing_order(x.shape, stride or x.stride(), x, x.dtype)


@operator("(Tensor x) -> Tensor")
def pack_nibbles(x: Tensor) -> Tensor:
    """Packs numbers below 16, two to the byte, in packing order and the first one in the low half.

    Raises:
        TypeError: ``x`` is not uint8.
    """
    if x.dtype != torch.uint8:
        raise TypeError(f"pack_nibbles packs uint8 tensors, got {x.dtype}")
    flat = flat_view(to_packing_order(x))
    padded = torch.zeros(-(-flat.numel() // 2) * 2, dtype=torch.uint8, device=x.device)
    padded[: flat.numel()] = flat
    return (padded[0::2] & 15) | (padded[1::2] << 4)


@fake(pack_nibbles)
def _(x: Tensor) -> Tensor:
    return torch.empty(((x.numel() + 1) // 2,), dtype=torch.uint8, device=x.device)


@operator("(Tensor packed, SymInt[] size, SymInt[] stride=[]) -> Tensor")
def unpack_nibbles(packed: Tensor, size: Sequence[int], stride: Sequence[int] = ()) -> Tensor:
    """The inverse of `pack_nibbles`; the result is contiguous if no stride is given.

    Raises:
        ValueError: ``packed`` has not the bytes of such a tensor.
    """
    out = empty_in_packing_order(size, stride, packed, torch.uint8)
    if packed.dtype != torch.uint8 or packed.shape != (-(-out.numel() // 2),):
        raise ValueError(
            f"{out.numel()} half bytes are uint8[{-(-out.numel() // 2)}], got {packed.dtype}{list(packed.shape)}"
        )
    flat_view(out).copy_(torch.stack((packed & 15, packed >> 4), 1).flatten()[: out.numel()])
    return out


@fake(unpack_nibbles)
def _(packed: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    return empty_in_packing_order(size, stride, packed, torch.uint8)
