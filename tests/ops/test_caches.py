"""Lossy caches against their plain-torch references, and their products against float64."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from kernel_inputs import FLOATS, assert_bits, layouts, special, strides
from torch import Tensor

import monet_like.ops
from monet_like.ops import available, caches, memory_layout, status

monet_like.ops.load()
registered = torch.ops.monet_like

BLOCK = caches.LARGEST_BLOCK


#: Kept of a block: one, a few by their places, a tenth, half, all.
KEEPS = [1, 1000, 1639, BLOCK // 2, BLOCK]


def magnitudes(flat: Tensor) -> Tensor:
    """What the largest are chosen by: NaN above infinity."""
    return flat.double().abs().nan_to_num(nan=math.inf) + flat.isnan()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("shape", [(), (0,), (2053,), (2, 3, 5, 7), (3, 5, 47, 61), (2 * BLOCK + 3,)])
def test_the_largest_come_back(impl: Any, shape: tuple[int, ...], keep: int, dtype: torch.dtype) -> None:
    for layout, x in (
        layouts(shape, dtype).items() if len(shape) < 4 or shape[-1] < 10 else [("", special(shape, dtype))]
    ):
        packed = impl("pack_largest")(x, keep)
        kept = x.numel() // BLOCK * keep + math.ceil(x.numel() % BLOCK * keep / BLOCK)
        index = 2 * kept if keep < BLOCK / 16 else (x.numel() + 7) // 8
        assert packed.dtype == torch.uint8 and packed.shape == (kept * dtype.itemsize + index,), layout
        assert_bits(packed, caches.pack_largest(x, keep))
        back = impl("unpack_largest")(packed, keep, x.shape, dtype, x.stride())
        if memory_layout.is_dense(x.shape, x.stride()):
            assert strides(back) == strides(x)
        flat, found = (memory_layout.flat_view(memory_layout.to_packing_order(t, x.stride())) for t in (x, back))
        sizes = magnitudes(flat)
        for start in range(0, x.numel(), BLOCK):  # against sorting
            ours, theirs = found[start : start + BLOCK], flat[start : start + BLOCK]
            order = sizes[start : start + BLOCK].sort(descending=True, stable=True).indices
            expected = torch.zeros_like(theirs)
            chosen = order[: math.ceil(len(theirs) * keep / BLOCK)]
            expected[chosen] = theirs[chosen]
            assert_bits(ours, expected)


@pytest.mark.usefixtures("three_threads")
def test_caches_in_parallel(impl: Any) -> None:
    x = torch.randn(300_001)
    assert_bits(impl("pack_largest")(x, 1639), caches.pack_largest(x, 1639))
    assert_bits(impl("pack_int8")(x), caches.pack_int8(x))
    assert_bits(impl("unpack_int8")(caches.pack_int8(x), x.shape, x.dtype), x_of_int8(x))
    back = impl("unpack_largest")(caches.pack_largest(x, 1639), 1639, x.shape, x.dtype)
    assert int((back != 0).sum()) == 18 * 1639 + math.ceil((300_001 - 18 * BLOCK) * 1639 / BLOCK)


def x_of_int8(x: Tensor) -> Tensor:
    return caches.unpack_int8(caches.pack_int8(x), x.shape, x.dtype)


def test_all_of_equal_elements_are_the_first_ones(impl: Any) -> None:
    x = torch.tensor([2.0, -1.0, 1.0, -1.0, 1.0, 0.0])
    back = impl("unpack_largest")(impl("pack_largest")(x, BLOCK // 2), BLOCK // 2, [6], x.dtype)
    assert back.tolist() == [2.0, -1.0, 1.0, 0.0, 0.0, 0.0]


#: Rows, columns and outs: rows that end inside blocks, several groups of rows, one column, tiles that are not full,
#: nothing.
PRODUCTS = [(37, 5, 9), (300, 1000, 70), (1, 7, 3), (2000, 1, 65), (1100, 33, 130), (0, 4, 3), (4, 0, 3), (4, 3, 0)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", PRODUCTS)
def test_products_with_the_largest(impl: Any, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Against float64, as near as the dtype: the sums are in float32 at least."""
    rows, columns, outs = shape
    summing = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    error = 2 * torch.finfo(dtype).eps + math.sqrt(rows) * summing
    for keep in (1000, 1639, BLOCK):
        x, wide = torch.randn(rows, columns).to(dtype), torch.randn(rows, 2 * outs).to(dtype)
        packed = caches.pack_largest(x, keep)
        left = caches.unpack_largest(packed, keep, x.shape, dtype).double()
        grads = (wide[:, :outs].contiguous(), wide[:, ::2], wide[:, outs:].t().contiguous().t())
        for grad, transposed in product(grads, (False, True)):
            got = impl("mm_largest")(grad, packed, keep, columns, transposed)
            exact = left.t() @ grad.double() if transposed else grad.double().t() @ left
            assert got.shape == exact.shape and got.dtype == dtype
            if exact.numel() and rows:
                assert (got.double() - exact).abs().max() <= error * exact.abs().max()


@pytest.mark.usefixtures("three_threads")
def test_products_in_parallel() -> None:
    if not available("cpu"):
        pytest.skip(status())
    for outs in (40, 500):  # fewer tiles than threads, and more
        x, grad = torch.randn(700, 90), torch.randn(700, outs)
        packed = caches.pack_largest(x, 1639)
        got = registered.mm_largest(grad, packed, 1639, 90)
        torch.set_num_threads(1)
        assert torch.equal(got, registered.mm_largest(grad, packed, 1639, 90))
        torch.set_num_threads(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_more_than_is_dense_at_a_time(dtype: torch.dtype, transposed: bool) -> None:
    """Half is kept, so that x is made dense: here, two times some rows of it, the first ones ending within a block."""
    if not available("cpu"):
        pytest.skip(status())
    x, grad = torch.randn(4700, 1001).to(dtype), torch.randn(4700, 67).to(dtype)
    packed = registered.pack_largest(x, BLOCK // 2)
    left = registered.unpack_largest(packed, BLOCK // 2, x.shape, dtype).float()
    exact = left.t() @ grad.float() if transposed else grad.float().t() @ left
    got = registered.mm_largest(grad, packed, BLOCK // 2, 1001, transposed)
    assert (got.float() - exact).abs().max() <= max(1e-5, 2 * torch.finfo(dtype).eps) * exact.abs().max()


@pytest.mark.parametrize("keep", [1000, BLOCK // 2])
def test_corrupt_caches_touch_nothing_else(keep: int) -> None:
    packed = torch.full((caches.largest_bytes(20, keep, 4),), 255, dtype=torch.uint8)
    if not available("cpu"):
        pytest.skip(status())
    assert registered.unpack_largest(packed, keep, [20], torch.float32).count_nonzero() <= caches.largest_kept(20, keep)
    assert registered.mm_largest(torch.ones(5, 3), packed, keep, 4).shape == (3, 4)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (3, 0, 2), (129,), (2053,), (2, 3, 5, 7), (3, 5, 47, 61)])
def test_eight_bits_are_near(impl: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Within half a unit, a 127th of the block's largest; below half a unit within one, and never of another sign."""
    for x in layouts(shape, dtype, lambda s, d: torch.randn(s).mul(3).to(d)).values():
        packed = impl("pack_int8")(x)
        assert packed.dtype == torch.uint8 and packed.shape == (x.numel() + 4 * math.ceil(x.numel() / 256),)
        assert_bits(packed, caches.pack_int8(x))
        back = impl("unpack_int8")(packed, x.shape, dtype, x.stride())
        assert_bits(back, caches.unpack_int8(packed, x.shape, dtype, x.stride()))
        flat, found = (
            memory_layout.flat_view(memory_layout.to_packing_order(t, x.stride())).double() for t in (x, back)
        )
        assert torch.equal(flat.sign(), found.sign())
        for start in range(0, x.numel(), 256):
            ours, theirs = found[start : start + 256], flat[start : start + 256]
            unit = theirs.abs().max() / 127
            rounding = 2 * torch.finfo(dtype).eps * theirs.abs().max() + 1e-6 * unit  # of the scale and of the result
            assert ((ours - theirs).abs() <= torch.where(theirs.abs() < unit / 2, unit, unit / 2) + rounding).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_eight_bits_of_what_is_not_finite_or_tiny(impl: Any, dtype: torch.dtype) -> None:
    x = torch.zeros(4, 256, dtype=dtype)
    x[0, 3], x[1, 255], x[2, 7], x[2, 9] = math.inf, math.nan, torch.finfo(dtype).tiny, -torch.finfo(dtype).tiny
    back = impl("unpack_int8")(impl("pack_int8")(x), x.shape, dtype)
    assert back[:2].isnan().all() and not back[3].any()
    assert torch.equal(back[2].sign(), x[2].sign())
    assert_bits(impl("pack_int8")(x), caches.pack_int8(x))


@pytest.mark.parametrize("dtype", FLOATS)
def test_caches_at_odd_offsets_are_refused(impl: Any, dtype: torch.dtype) -> None:
    x = torch.randn(300).to(dtype)

    def moved(packed: Tensor, by: int) -> Tensor:
        return torch.cat([packed.new_zeros(by), packed])[by:]

    largest, scaled = impl("pack_largest")(x, 2000), impl("pack_int8")(x)
    for unpack, packed, least in (
        (lambda cache: impl("unpack_largest")(cache, 2000, x.shape, dtype), largest, dtype.itemsize),
        (lambda cache: impl("mm_largest")(x.view(300, 1), cache, 2000, 1), largest, dtype.itemsize),
        (lambda cache: impl("unpack_int8")(cache, x.shape, dtype), scaled, 4),
    ):
        assert_bits(unpack(moved(packed, 8)), unpack(packed))
        message = (
            rf"must start at a multiple of {least} bytes in memory, got a view that starts at byte 1 of its storage"
        )
        with pytest.raises((ValueError, RuntimeError), match=message):
            unpack(moved(packed, 1))
