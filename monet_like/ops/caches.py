"""Lossy caches of activations, which keep the elements of largest magnitude or eight bits of each; products with them.

F is float32, float64, float16 or bfloat16. `largest_bytes` and `int8_bytes` are functions of the number of elements.

| operator | reads | returns |
|---|---|---|
| pack_largest | x: F, any shape | uint8[largest_bytes] |
| unpack_largest | packed: uint8[largest_bytes] | F, the given size |
| mm_largest | grad: F[rows, outs]; packed: uint8[largest_bytes] | F[outs, columns], or transposed |
| pack_int8 | x: F, any shape | uint8[int8_bytes] |
| unpack_int8 | packed: uint8[int8_bytes] | F, the given size |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .masks import pack_bits, unpack_bits
from .memory_layout import empty_in_packing_order, flat_view, to_packing_order
from .registry import fake, operator

#: Elements of a block; the largest of each block are kept.
LARGEST_BLOCK = 16384
#: Elements of an 8-bit cache that share one scale.
INT8_BLOCK = 256

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def kept_of_block(share: float) -> int:
    """How many elements of a whole block are kept if ``share`` of them is dropped; at least one."""
    return max(1, LARGEST_BLOCK - round(share * LARGEST_BLOCK))


def largest_kept(numel: int, keep: int) -> int:
    """How many of ``numel`` elements are kept: ``keep`` of each block, of a shorter one the same share, rounded up."""
    return numel // LARGEST_BLOCK * keep + (numel % LARGEST_BLOCK * keep + LARGEST_BLOCK - 1) // LARGEST_BLOCK


def largest_bytes(numel: int, keep: int, itemsize: int) -> int:
    """Bytes of a cache of the largest elements: the values, then two bytes for each value or a bit for each element."""
    kept = largest_kept(numel, keep)
    return kept * itemsize + (2 * kept if 16 * keep < LARGEST_BLOCK else (numel + 7) // 8)


def int8_bytes(numel: int) -> int:
    """Bytes of a cache of 8 bits an element: the float32 scales of the blocks, then a byte for each element."""
    return (numel + INT8_BLOCK - 1) // INT8_BLOCK * 4 + numel


def _check_cache(packed: Tensor, size: int, alignment: int) -> None:
    """Raise ValueError unless ``packed`` is uint8[size] and starts at a multiple of ``alignment`` bytes."""
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
    """bool[n]: which elements are kept; of equal magnitudes the first; a NaN is larger than infinity."""
    bits = flat.view(_BITS[flat.element_size()]) & torch.iinfo(_BITS[flat.element_size()]).max
    whole = flat.numel() // LARGEST_BLOCK * LARGEST_BLOCK
    flags = torch.zeros_like(bits, dtype=torch.bool)
    for rows, chosen in ((bits[:whole].view(-1, LARGEST_BLOCK), flags[:whole]), (bits[None, whole:], flags[whole:])):
        if rows.numel():
            order = rows.sort(dim=1, descending=True, stable=True).indices[:, : largest_kept(rows.shape[1], keep)]
            chosen.view(rows.shape).scatter_(1, order, True)
    return flags


@operator("(Tensor x, int keep) -> Tensor")
def pack_largest(x: Tensor, keep: int) -> Tensor:
    """Keeps the ``keep`` elements of largest magnitude of every 16,384 in packing order: first values, then places.

    Places are a bit for every element, or 16-bit indices within the block where fewer than a 16th are kept.
    """
    _check_keep(keep)
    flat = flat_view(to_packing_order(x))
    flags = _largest(flat, keep)
    places = (flags.nonzero()[:, 0] % LARGEST_BLOCK).to(torch.int16)
    index = places.view(torch.uint8) if 16 * keep < LARGEST_BLOCK else pack_bits(flags)
    return torch.cat((flat[flags].view(torch.uint8), index))


@fake(pack_largest)
def _(x: Tensor, keep: int) -> Tensor:
    size = largest_bytes(x.numel(), keep, x.element_size())
    return torch.empty((size,), dtype=torch.uint8, device=x.device)


@operator("(Tensor packed, int keep, SymInt[] size, ScalarType dtype, SymInt[] stride=[]) -> Tensor")
def unpack_largest(
    packed: Tensor, keep: int, size: Sequence[int], dtype: torch.dtype, stride: Sequence[int] = ()
) -> Tensor:
    """The inverse of `pack_largest` with zeros for the other elements; contiguous if no stride is given."""
    _check_keep(keep)
    out = empty_in_packing_order(size, stride, packed, dtype)
    count = out.numel()
    _check_cache(packed, largest_bytes(count, keep, dtype.itemsize), dtype.itemsize)
    kept = largest_kept(count, keep)
    values, index = packed[: kept * dtype.itemsize].view(dtype), packed[kept * dtype.itemsize :]
    flat = flat_view(out).zero_()
    if 16 * keep < LARGEST_BLOCK:
        block = torch.arange(kept, device=packed.device) // keep
        flat[index.view(torch.int16).long() + block * LARGEST_BLOCK] = values
    else:
        flat[unpack_bits(index, count)] = values
    return out


@operator("(Tensor grad, Tensor packed, int keep, SymInt columns, bool transposed=False) -> Tensor")
def mm_largest(grad: Tensor, packed: Tensor, keep: int, columns: int, transposed: bool = False) -> Tensor:
    """The product ``grad.t() @ x`` with a contiguous x[rows of grad, columns] whose largest elements were packed.

    With ``transposed`` it is ``x.t() @ grad``. A GPU unpacks x, at most some 4 million elements at a time, and so does
    a CPU where more than a sixth of the elements is kept, or for 16-bit floats if it multiplies these fast. With more
    elements than that the sums are rounded in between. Otherwise a CPU multiplies only the elements that are kept: sums
    are in at least float32, and an element that is not kept adds nothing even if the gradient is not finite.
    """
    if grad.dim() != 2:
        raise ValueError(f"grad must have two dimensions, got shape {list(grad.shape)}")
    x = unpack_largest(packed, keep, (grad.shape[0], columns), grad.dtype)
    return x.t() @ grad if transposed else grad.t() @ x


@fake(mm_largest)
def _(grad: Tensor, columns: int, transposed: bool) -> Tensor:
    outs = grad.shape[1]
    return grad.new_empty((columns, outs) if transposed else (outs, columns))


@operator("(Tensor x) -> Tensor")
def pack_int8(x: Tensor) -> Tensor:
    """Rounds every element to a multiple of its block's largest magnitude / 127; only zero becomes zero.

    Blocks have 256 elements in packing order. A block with an infinity or a NaN is unpacked as NaN. Computed in at
    least float32.
    """
    flat = flat_view(to_packing_order(x))
    wide = flat if flat.dtype == torch.float64 else flat.float()
    padded = wide.new_zeros(-(-flat.numel() // INT8_BLOCK) * INT8_BLOCK)
    padded[: flat.numel()] = wide
    rows = padded.view(-1, INT8_BLOCK)
    scales = (rows.abs().amax(1) / 127).float() if rows.numel() else rows.new_zeros(0, dtype=torch.float32)
    scales = torch.where(scales.isfinite(), scales.clamp_min(torch.finfo(torch.float32).tiny), torch.nan)
    units = (rows * (1 / scales)[:, None].to(rows.dtype)).round()
    units = torch.where(units == 0, rows.sign(), units).nan_to_num(0.0)
    return torch.cat((scales.view(torch.uint8), units.to(torch.int8).view(-1)[: flat.numel()].view(torch.uint8)))


@fake(pack_int8)
def _(x: Tensor) -> Tensor:
    return torch.empty((int8_bytes(x.numel()),), dtype=torch.uint8, device=x.device)


@operator("(Tensor packed, SymInt[] size, ScalarType dtype, SymInt[] stride=[]) -> Tensor")
def unpack_int8(packed: Tensor, size: Sequence[int], dtype: torch.dtype, stride: Sequence[int] = ()) -> Tensor:
    """The inverse of `pack_int8` up to rounding; the result is contiguous if no stride is given."""
    out = empty_in_packing_order(size, stride, packed, dtype)
    count = out.numel()
    _check_cache(packed, int8_bytes(count), torch.float32.itemsize)
    start = packed.numel() - count
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scales = packed[:start].view(torch.float32).to(wide).repeat_interleave(INT8_BLOCK)[:count]
    flat_view(out).copy_(packed[start:].view(torch.int8).to(wide) * scales)
    return out


@fake(unpack_largest, unpack_int8)
def _(packed: Tensor, size: Sequence[int], dtype: torch.dtype, stride: Sequence[int]) -> Tensor:
    return empty_in_packing_order(size, stride, packed, dtype)
