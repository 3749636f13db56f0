"""Every operator against its plain-torch twin, against ATen and against float64.

"bits" below means equal bit for bit, except that any NaN equals any NaN.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import monet_like.ops
from benchmarks import kernels as benchmark
from monet_like import build
from monet_like.ops import available, caches, convolution, masks, max_pool, memory_layout, operators, rms_norm, status
from monet_like.ops.registry import CUDNN, NAMESPACE

monet_like.ops.load()
ops = torch.ops.monet_like
aten = torch.ops.aten

FULL = (torch.float32, torch.float64)
FLOATS = (*FULL, torch.bfloat16, torch.float16)
INTEGER = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors on one thread: on a busy machine each parallel loop waits for a time slice of the others."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def three_threads() -> None:
    """For the tests that are about parallel loops; restored by _one_thread."""
    torch.set_num_threads(3)


def assert_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if actual.dtype.is_floating_point:
        nan = actual.isnan() & expected.isnan()
        view = INTEGER[actual.element_size()]
        differ = (actual.contiguous().view(view) != expected.contiguous().view(view)) & ~nan
    else:
        differ = actual != expected
    assert not differ.any(), f"{int(differ.sum())} of {differ.numel()} elements differ"


def strides(t: Tensor) -> list[int]:
    """Those that say anything: of the dimensions longer than one."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def special(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal numbers with zeros of both signs, infinities and NaN strewn in."""
    x = torch.randn(shape, dtype=torch.float64).mul(3).to(dtype)
    strange = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 6.0], dtype=dtype)
    pick = torch.randint(0, 30, shape)
    return torch.where(pick < 6, strange[pick.clamp(max=5)], x)


def layouts(shape: tuple[int, ...], dtype: torch.dtype, make: Callable[..., Tensor] = special) -> dict[str, Tensor]:
    """The same kind of data in several memory layouts."""
    x = make(shape, dtype)
    found = {"contiguous": x, "reversed": x.permute(tuple(reversed(range(x.dim()))))}
    if x.dim() == 4:
        found["channels_last"] = x.to(memory_format=torch.channels_last)
        wide = make((*shape[:-1], 2 * shape[-1] + 1), dtype)
        found["strided"] = wide[..., 1::2]
        found["offset"] = make((shape[0] + 1, *shape[1:]), dtype)[1:]
        found["expanded"] = x[:1].expand(shape)
    return found


#: ATen's 1 / 6 in hardsigmoid's gradient, a float32 whatever the dtype.
SIXTH = torch.tensor(1 / 6, dtype=torch.float32).item()
SHAPES = [(), (0,), (1,), (7,), (8,), (9,), (127,), (129,), (1000,), (3, 0, 2), (2, 3, 5, 7), (2, 16, 8, 8)]


# ---- packed masks ----


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_sign_mask_gives_atens_threshold_backward(impl: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for layout, x in layouts(shape, dtype).items():
        mask = impl("pack_sign")(x)
        assert mask.dtype == torch.uint8 and mask.shape == ((x.numel() + 7) // 8,), layout
        assert_bits(mask, masks.pack_sign(x))
        for grad_layout, grad in layouts(shape, dtype).items():
            if grad.shape != x.shape:
                continue
            expected = aten.threshold_backward(grad, x, 0)
            actual = impl("keep_where")(grad, mask, x.stride())
            assert_bits(actual, expected)
            assert memory_layout.is_dense(actual.shape, actual.stride()), (layout, grad_layout)
            if grad_layout != "expanded":
                twice = grad.clone(memory_format=torch.preserve_format)
                assert impl("keep_where_")(twice, mask, x.stride()) is twice
                assert_bits(twice, expected)


@pytest.mark.usefixtures("three_threads")
def test_masks_in_parallel(impl: Any) -> None:
    x, grad = torch.randn(300_001), torch.randn(300_001)
    assert_bits(impl("keep_where")(grad, impl("pack_sign")(x)), aten.threshold_backward(grad, x, 0))


def test_unused_bits_are_zero(impl: Any) -> None:
    assert impl("pack_sign")(torch.ones(3)).tolist() == [0b111]
    assert impl("pack_bool")(torch.tensor([False] * 8 + [True, False, True])).tolist() == [0, 0b101]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bounds", [(0.0, 6.0), (-1.0, 1.0), (0.1, 0.3)])
def test_range_mask_gives_atens_hardtanh_backward(impl: Any, bounds: tuple[float, float], dtype: torch.dtype) -> None:
    for x in layouts((3, 5, 7, 3), dtype).values():
        # ATen's CPU kernel treats NaN by position (vector part or tail); it is tested apart, below.
        x = x.nan_to_num(2.0)
        grad = special(tuple(x.shape), dtype)
        actual = impl("keep_where")(grad, impl("pack_range")(x, *bounds), x.stride())
        assert_bits(actual, aten.hardtanh_backward(grad, x, *bounds))


def test_range_mask_of_nan_is_zero_on_the_cpu(impl: Any) -> None:
    x = torch.full((64,), float("nan"))
    assert not impl("pack_range")(x, 0.0, 6.0).any()
    assert_bits(aten.hardtanh_backward(torch.ones(64), x, 0.0, 6.0), torch.zeros(64))  # ATen's vector part


@pytest.mark.parametrize("shape", SHAPES)
def test_bool_masks_come_back(impl: Any, shape: tuple[int, ...]) -> None:
    for mask in layouts(shape, torch.bool, lambda size, _: torch.rand(size) < 0.3).values():
        packed = impl("pack_bool")(mask)
        assert_bits(packed, masks.pack_bool(mask))
        assert_bits(impl("unpack_bool")(packed, mask.shape, mask.stride()), mask)
        dense = mask.contiguous()
        assert_bits(impl("unpack_bool")(impl("pack_bool")(dense), mask.shape), dense)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_masks_give_the_gradients_of_leaky_relu_and_hardsigmoid(
    impl: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    for x in layouts(shape, dtype, lambda s, d: torch.randn(s).mul(3).to(d)).values():
        grad, y = torch.randn(x.shape).to(dtype), torch.nn.functional.leaky_relu(x, 0.1)
        got = impl("masked_scale")(grad, impl("pack_sign")(y), 1.0, y.stride(), 0.1)
        assert_bits(got, aten.leaky_relu_backward(grad, x, 0.1, False))
        got = impl("keep_where")(grad, impl("pack_range")(x, -3.0, 3.0), x.stride())
        assert_bits(got.mul_(SIXTH), aten.hardsigmoid_backward(grad, x))


@pytest.mark.parametrize("shape", SHAPES)
def test_half_bytes_come_back(impl: Any, shape: tuple[int, ...]) -> None:
    for x in layouts(shape, torch.uint8, lambda s, d: torch.randint(0, 16, s, dtype=d)).values():
        packed = impl("pack_nibbles")(x)
        assert packed.shape == ((x.numel() + 1) // 2,)
        assert_bits(packed, masks.pack_nibbles(x))
        assert torch.equal(impl("unpack_nibbles")(packed, x.shape, x.stride()), x)


BLOCK = caches.LARGEST_BLOCK
#: Kept of a block: one, a few by their places, a tenth, half, all.
KEEPS = [1, 1000, 1639, BLOCK // 2, BLOCK]


def magnitudes(flat: Tensor) -> Tensor:
    """What the largest are chosen by: NaN above infinity."""
    return flat.double().abs().nan_to_num(nan=math.inf) + flat.isnan()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("shape", [*SHAPES, (BLOCK,), (3, 5, 47, 61), (2 * BLOCK + 3,)])
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


#: Rows, columns and outs: rows that end inside blocks, several groups of rows, one column, tiles that are not full, nothing.
PRODUCTS = [(37, 5, 9), (300, 1000, 70), (1, 7, 3), (2000, 1, 65), (1100, 33, 130), (0, 4, 3), (4, 0, 3), (4, 3, 0)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", PRODUCTS)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_with_the_largest(
    impl: Any, shape: tuple[int, int, int], dtype: torch.dtype, transposed: bool
) -> None:
    """Against float64, as near as the dtype: the sums are in float32 at least."""
    rows, columns, outs = shape
    summing = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    error = 2 * torch.finfo(dtype).eps + math.sqrt(rows) * summing
    for keep in (1, 1000, 1639, BLOCK):
        x, wide = torch.randn(rows, columns).to(dtype), torch.randn(rows, 2 * outs).to(dtype)
        packed = caches.pack_largest(x, keep)
        left = caches.unpack_largest(packed, keep, x.shape, dtype).double()
        for grad in (wide[:, :outs].contiguous(), wide[:, ::2], wide[:, outs:].t().contiguous().t()):
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
        got = ops.mm_largest(grad, packed, 1639, 90)
        torch.set_num_threads(1)
        assert torch.equal(got, ops.mm_largest(grad, packed, 1639, 90))
        torch.set_num_threads(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_more_than_is_dense_at_a_time(dtype: torch.dtype, transposed: bool) -> None:
    """Half is kept, so that x is made dense: here, two times some rows of it, the first ones ending within a block."""
    if not available("cpu"):
        pytest.skip(status())
    x, grad = torch.randn(4700, 1001).to(dtype), torch.randn(4700, 67).to(dtype)
    packed = ops.pack_largest(x, BLOCK // 2)
    left = ops.unpack_largest(packed, BLOCK // 2, x.shape, dtype).float()
    exact = left.t() @ grad.float() if transposed else grad.float().t() @ left
    got = ops.mm_largest(grad, packed, BLOCK // 2, 1001, transposed)
    assert (got.float() - exact).abs().max() <= max(1e-5, 2 * torch.finfo(dtype).eps) * exact.abs().max()


@pytest.mark.parametrize("keep", [1000, BLOCK // 2])
def test_corrupt_caches_touch_nothing_else(keep: int) -> None:
    packed = torch.full((caches.largest_bytes(20, keep, 4),), 255, dtype=torch.uint8)
    if not available("cpu"):
        pytest.skip(status())
    assert ops.unpack_largest(packed, keep, [20], torch.float32).count_nonzero() <= caches.largest_kept(20, keep)
    assert ops.mm_largest(torch.ones(5, 3), packed, keep, 4).shape == (3, 4)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 5, 47, 61)])
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
def test_masked_scale_is_dropout(impl: Any, dtype: torch.dtype) -> None:
    scale = 1 / 0.7
    for x in layouts((3, 5, 7, 3), dtype).values():
        mask = torch.rand(x.shape) < 0.7
        packed = impl("pack_bool")(mask)
        actual = impl("masked_scale")(x, packed, scale, mask.stride())
        assert_bits(actual, x.mul(mask).mul(scale))
        assert_bits(actual, aten.native_dropout_backward(x, mask, scale))


# ---- max pooling ----

POOLS = [  # kernel, stride, padding, dilation
    ([3, 3], [2, 2], [1, 1], [1, 1]),
    ([2, 2], [2, 2], [0, 0], [1, 1]),
    ([3, 2], [1, 3], [1, 0], [2, 1]),
    ([2, 3], [1, 1], [0, 1], [1, 3]),
    ([5, 5], [1, 1], [2, 2], [1, 1]),
    ([1, 1], [2, 2], [0, 0], [1, 1]),
    ([16, 16], [4, 4], [8, 8], [1, 1]),
    ([3, 3], [], [1, 1], [1, 1]),
]


def ties(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Few different values, so that windows tie; some NaN and some windows of nothing but -inf."""
    x = torch.randint(-2, 3, shape).to(dtype)
    x[torch.rand(shape) < 0.05] = float("nan")
    x[..., :4, :4] = -float("inf")
    return x


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("pool", POOLS)
def test_max_pool_equals_aten(impl: Any, pool: tuple[Any, ...], ceil_mode: bool, dtype: torch.dtype) -> None:
    for shape in [(2, 5, 17, 21), (1, 83, 9, 12), (3, 8, 40)]:
        for x in layouts(shape, dtype, ties).values():
            if x.shape != shape:
                continue
            y, indices = aten.max_pool2d_with_indices(x, *pool, ceil_mode)
            got, offsets = impl("max_pool2d_with_offsets")(x, *pool, ceil_mode)
            assert_bits(got, y)
            assert offsets.dtype == torch.uint8 and got.stride() == y.stride() == offsets.stride()
            assert_bits(impl("max_pool2d_offsets")(indices, x.shape, *pool), offsets)
            assert_bits(impl("max_pool2d_offsets_to_indices")(offsets, x.shape, *pool), indices)
            grad = torch.randn(y.shape, dtype=dtype)
            for g in (grad, grad.to(memory_format=torch.channels_last) if grad.dim() == 4 else grad):
                expected = aten.max_pool2d_with_indices_backward(g, x, *pool, ceil_mode, indices)
                actual = impl("max_pool2d_offsets_backward")(g, offsets, x.shape, *pool)
                assert_bits(actual, expected)


def test_max_pool_window_wholly_in_the_padding(impl: Any) -> None:
    # One pixel, two steps of dilation 2 around it: no cell lies inside. ATen answers -inf and its first step.
    pool = ([2, 2], [1, 1], [1, 1], [2, 2])
    x = torch.ones(1, 1, 1, 1)
    y, indices = aten.max_pool2d_with_indices(x, *pool, False)
    got, offsets = impl("max_pool2d_with_offsets")(x, *pool, False)
    assert_bits(got, y)
    assert_bits(impl("max_pool2d_offsets")(indices, x.shape, *pool), offsets)
    assert_bits(impl("max_pool2d_offsets_to_indices")(offsets, x.shape, *pool), indices)


def test_max_pool_gradient_of_a_window_wholly_in_the_padding(impl: Any) -> None:
    """ATen names the pixel below as the one such a window chose, and the gradient goes there."""
    x, pool = torch.zeros(1, 1, 11, 1), ([3, 2], [3, 2], [0, 1], [3, 2])
    y, indices = aten.max_pool2d_with_indices(x, *pool, True)
    _, offsets = impl("max_pool2d_with_offsets")(x, *pool, True)
    made = impl("max_pool2d_offsets_backward")(torch.ones_like(y), offsets, x.shape, *pool)
    assert_bits(made, aten.max_pool2d_with_indices_backward(torch.ones_like(y), x, *pool, True, indices))
    assert made.flatten().nonzero().flatten().tolist() == [1, 4, 7]


def test_max_pool_backward_survives_corrupt_offsets() -> None:
    if not available("cpu"):
        pytest.skip(status())
    offsets = torch.full((1, 2, 4, 4), 255, dtype=torch.uint8)
    grad = ops.max_pool2d_offsets_backward(
        torch.ones(1, 2, 4, 4), offsets, [1, 2, 8, 8], [3, 3], [2, 2], [1, 1], [1, 1]
    )
    assert_bits(grad, torch.zeros(1, 2, 8, 8))


def test_max_pool_refuses_foreign_indices(impl: Any) -> None:
    indices = torch.zeros(1, 1, 4, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match="outside its window"):
        impl("max_pool2d_offsets")(indices, [1, 1, 8, 8], [2, 2], [2, 2], [0, 0], [1, 1])


def test_max_pool_refuses_windows_that_do_not_fit_a_byte(impl: Any) -> None:
    with pytest.raises(ValueError, match="at most 256 cells"):
        impl("max_pool2d_with_offsets")(torch.zeros(1, 1, 20, 20), [17, 17], [1, 1], [0, 0], [1, 1], False)


# ---- batch norm ----

NORM_SHAPES = [
    (2, 3, 5, 7),
    (4, 17, 1, 1),
    (3, 64, 8, 8),
    (2, 33, 16, 3),
    (5, 1, 4, 4),
    (1, 6, 9, 31),
    (9, 13),
    (4, 5, 11),
    (2, 6, 3, 4, 5),
    (1, 130, 2, 3),
]


def norm_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
    x = torch.randn(shape, dtype=torch.float64).mul(3).add(1).to(dtype)
    found = [x]
    if x.dim() == 4:
        found.append(x.to(memory_format=torch.channels_last))
    if x.dim() == 5:
        found.append(x.to(memory_format=torch.channels_last_3d))
    weight, bias = torch.randn(shape[1]).to(dtype), torch.randn(shape[1]).to(dtype)
    for t in found:
        yield t, weight, bias
    yield x, None, None
    yield x, weight, None
    if dtype not in FULL:
        yield x, weight.float(), bias.float()


def train(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, invstd = aten.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    return y, mean, invstd


INF = math.inf
ALONE, RELU = (None, "clamp", -INF, INF), (None, "clamp", 0.0, INF)
Options = tuple[Tensor | None, str, float, float]


def followers(y: Tensor) -> Iterator[tuple[Options, Tensor]]:
    """What may follow a batch norm, as the operators' arguments, and what ATen makes of y with it, to the bit."""
    residual = special(tuple(y.shape), y.dtype)
    other = residual.to(memory_format=torch.channels_last) if y.dim() == 4 else residual
    yield ALONE, y
    yield RELU, y.relu()
    yield (None, "clamp", 0.0, 6.0), aten.hardtanh(y, 0.0, 6.0)
    yield (None, "clamp", -0.3, 0.7), aten.hardtanh(y, -0.3, 0.7)
    yield (residual, "clamp", -INF, INF), y + residual
    yield (other, "clamp", 0.0, INF), (y + residual).relu()
    yield (None, "leaky_relu", 0.1, 0.0), aten.leaky_relu(y, 0.1)
    yield (other, "leaky_relu", 0.01, 0.0), aten.leaky_relu(y + residual, 0.01)
    yield (None, "hardswish", 0.0, 0.0), aten.hardswish(y)
    yield (residual, "hardswish", 0.0, 0.0), aten.hardswish(y + residual)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", NORM_SHAPES)
def test_batch_norm_apply_has_atens_bits(impl: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Also in half precision: the kernels' constants and roundings are ATen's."""
    for x, weight, bias in norm_inputs(shape, dtype):
        y, mean, invstd = train(x, weight, bias)
        for options, expected in followers(y):
            got = impl("batch_norm_apply")(x, weight, bias, mean, invstd, *options)
            assert_bits(got, expected)
            assert got.stride() == y.stride()


@pytest.mark.parametrize("dtype", FULL)
def test_batch_norm_apply_of_strided_tensors_has_atens_bits(impl: Any, dtype: torch.dtype) -> None:
    for x in (torch.randn(4, 6, 9, 22, dtype=dtype)[..., ::2], torch.randn(6, 4, 9, 5, dtype=dtype).transpose(0, 1)):
        weight, bias = torch.randn(6, dtype=dtype), torch.randn(6, dtype=dtype)
        y, mean, invstd = train(x, weight, bias)
        for options, expected in followers(y):
            assert_bits(impl("batch_norm_apply")(x, weight, bias, mean, invstd, *options), expected)
            assert_bits(impl("batch_norm_train")(x, weight, bias, None, None, 0.1, 1e-5, *options, True)[0], expected)


def test_relu_keeps_nan_and_the_sign_of_zero(impl: Any) -> None:
    x = torch.tensor([[float("nan")], [-0.0], [0.0], [-1.0], [1.0]])
    one, zero = torch.ones(1), torch.zeros(1)
    assert_bits(impl("batch_norm_apply")(x, one, -zero, zero, one, *RELU), x.relu())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", NORM_SHAPES)
def test_batch_norm_train_has_atens_bits(impl: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for x, weight, bias in norm_inputs(shape, dtype):
        parameter = dtype if weight is None else weight.dtype
        running = [torch.randn(shape[1]).to(parameter), torch.rand(shape[1]).to(parameter)]
        moved = [t.clone() for t in running]
        y, mean, invstd = aten.native_batch_norm(x, weight, bias, *running, True, 0.2, 1e-3)
        got = impl("batch_norm_train")(x, weight, bias, *moved, 0.2, 1e-3, *RELU, True)
        for actual, expected in zip((*got, *moved), (y.relu(), mean, invstd, *running), strict=True):
            assert_bits(actual, expected)
        for options, expected in followers(y):
            got = impl("batch_norm_train")(x, weight, bias, None, None, 0.2, 1e-3, *options, True)
            assert_bits(got[0], expected)
            assert got[0].stride() == y.stride()


# Relative to the largest element: SiLU has an exponential of its own, the statistics are summed in another order.
FORWARD_TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", NORM_SHAPES)
def test_batch_norm_and_silu_agrees_with_aten(impl: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for x, weight, bias in norm_inputs(shape, dtype):
        y, mean, invstd = train(x, weight, bias)
        residual = torch.randn(shape).to(dtype)
        for added, before in ((None, y), (residual, y + residual)):
            expected = torch.nn.functional.silu(before.double())
            got = impl("batch_norm_apply")(x, weight, bias, mean, invstd, added, "silu", 0.0, 0.0)
            error = float((got.double() - expected).abs().max())
            assert error <= FORWARD_TOLERANCE[dtype] * float(expected.abs().max())
    far = torch.tensor([-1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4, INF, math.nan], dtype=dtype).view(-1, 1)
    one, zero = torch.ones(1, dtype=dtype), torch.zeros(1, dtype=dtype)
    got = impl("batch_norm_apply")(far, one, zero, zero, one, None, "silu", 0.0, 0.0)
    torch.testing.assert_close(got, torch.nn.functional.silu(far), atol=1e-5, rtol=1e-2, equal_nan=True)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [*NORM_SHAPES, (5, 11, 37, 41), (3, 70, 40, 40)])
def test_own_statistics_agree_with_float64(impl: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """And a rerun from the saved ones gives the forward's bits. The mean is far from zero: squares must not cancel."""
    for given, weight, bias in norm_inputs(shape, torch.float64):
        x = (given + 300 * (given.dtype == dtype or dtype == torch.float32)).to(dtype)
        parameters = [None if t is None else t.to(dtype) for t in (weight, bias)]
        running = [torch.randn(shape[1]).to(dtype), torch.rand(shape[1]).to(dtype)]
        moved, wanted = [t.clone() for t in running], [t.double() for t in running]
        y, mean, invstd = impl("batch_norm_train")(x, *parameters, *moved, 0.2, 1e-3, *ALONE, False)
        wide = [None if t is None else t.double() for t in parameters]
        _, exact_mean, exact_invstd = aten.native_batch_norm(x.double(), *wide, *wanted, True, 0.2, 1e-3)
        rounding = torch.finfo(dtype).eps
        for actual, expected in zip((mean, invstd, *moved), (exact_mean, exact_invstd, *wanted), strict=True):
            torch.testing.assert_close(actual.double(), expected, rtol=32 * rounding, atol=32 * rounding)
        if dtype in FULL:
            assert_bits(impl("batch_norm_apply")(x, *parameters, mean, invstd, *ALONE), y)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("shape", [(5, 11, 37, 41), (1, 70, 40, 40), (2, 3, 130, 70)])
def test_everything_in_parallel(impl: Any, shape: tuple[int, ...]) -> None:
    pool = ([3, 3], [2, 2], [1, 1], [1, 1])
    for x, weight, bias in norm_inputs(shape, torch.float32):
        y, mean, invstd = train(x, weight, bias)
        for options, expected in followers(y):
            assert_bits(impl("batch_norm_apply")(x, weight, bias, mean, invstd, *options), expected)
            assert_bits(impl("batch_norm_train")(x, weight, bias, None, None, 0.1, 1e-5, *options, True)[0], expected)
        got = impl("batch_norm_activation_backward")(x, x, weight, bias, mean, invstd, *RELU[1:], [True, True, True])
        for actual, exact in zip(got, exact_backward(x, x, y, weight, mean, invstd), strict=True):
            assert float((actual - exact).abs().max()) <= 2e-6 * max(float(exact.abs().max()), float(x.norm()))
        y, indices = aten.max_pool2d_with_indices(x, *pool, False)
        got, offsets = impl("max_pool2d_with_offsets")(x, *pool, False)
        assert_bits(got, y)
        assert_bits(impl("max_pool2d_offsets")(indices, x.shape, *pool), offsets)
        assert_bits(impl("max_pool2d_offsets_to_indices")(offsets, x.shape, *pool), indices)
        expected = aten.max_pool2d_with_indices_backward(y, x, *pool, False, indices)
        assert_bits(impl("max_pool2d_offsets_backward")(y, offsets, x.shape, *pool), expected)


# Largest error allowed, as a fraction of the largest element of the exact result.
BACKWARD_TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 2e-3}


def exact_backward(
    grad: Tensor,
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    activation: str = "clamp",
    lo: float = 0.0,
    hi: float = INF,
) -> tuple[Tensor, Tensor, Tensor]:
    """The formula in float64, activated at the given y."""
    channels = (1, -1) + (1,) * (x.dim() - 2)
    over = [d for d in range(x.dim()) if d != 1]
    at = y.double().requires_grad_()
    with torch.enable_grad():
        activate = {
            "clamp": lambda t: torch.where((t <= lo) | (t >= hi), 0.0, t),
            "leaky_relu": lambda t: torch.nn.functional.leaky_relu(t, lo),
            "hardswish": torch.nn.functional.hardswish,
            "silu": torch.nn.functional.silu,
        }
        (g,) = torch.autograd.grad(activate[activation](at), at, grad.double())
    centred = x.double() - mean.double().view(channels)
    s = invstd.double().view(channels)
    w = torch.ones_like(s) if weight is None else weight.double().view(channels)
    count = x.numel() // x.shape[1]
    sum_g, dot = g.sum(over, keepdim=True), (centred * g).sum(over, keepdim=True)
    grad_input = (g - sum_g / count - centred * s * s * dot / count) * s * w
    return grad_input, (dot * s).flatten(), sum_g.flatten()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [*NORM_SHAPES, (3, 2, 70, 71)])
def test_batch_norm_activation_backward_is_accurate(impl: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for x, weight, bias in norm_inputs(shape, dtype):
        y, mean, invstd = train(x, weight, bias)
        follows = (
            RELU[1:],
            ("clamp", -0.5, 1.0),
            ("leaky_relu", 0.1, 0.0),
            ("hardswish", 0.0, 0.0),
            ("silu", 0.0, 0.0),
        )
        for number, options in enumerate(follows):
            grad = torch.randn(shape).to(dtype) if number else torch.randn_like(x)
            got = impl("batch_norm_activation_backward")(
                grad, x, weight, bias, mean, invstd, *options, [True, True, True]
            )
            expected = exact_backward(grad, x, y, weight, mean, invstd, *options)
            for actual, exact in zip(got, expected, strict=True):
                scale = max(float(exact.abs().max()), 1e-3 * float(grad.abs().max()))
                # Sums over a channel lose what cancels in them: their scale is that of their summands.
                if exact.dim() == 1:
                    scale = max(scale, float(grad.double().square().sum().sqrt()))
                # The twin, and the kernel for SiLU, store the gradient between activation and batch norm: a rounding.
                tolerance = BACKWARD_TOLERANCE[dtype] * (2 if dtype not in FULL else 1)
                assert float((actual.double() - exact).abs().max()) <= tolerance * scale
            assert got[0].dtype == dtype and strides(got[0]) == strides(y)
            assert got[1].dtype == got[2].dtype == (mean.dtype if weight is None else weight.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("image", [False, True])
def test_bounds_are_not_rounded_to_the_elements_type(impl: Any, image: bool, dtype: torch.dtype) -> None:
    """hardtanh(-0.9, 0.7) lets the gradient of the largest bfloat16 below 0.7 through, as ATen does."""
    x = torch.arange(1 << 15).to(torch.int16).view(dtype)  # all that are positive
    x = torch.cat((x[x <= 1], -x[x <= 1])).view(1, 1, -1) if image else torch.cat((x[x <= 1], -x[x <= 1])).view(-1, 1)
    grad, one = torch.ones_like(x), torch.ones(1)
    identity = (one, 0 * one, 0 * one, one)
    expected = aten.hardtanh_backward(grad, x, -0.9, 0.7)
    got = impl("batch_norm_activation_backward")(grad, x, *identity, "clamp", -0.9, 0.7, [False, True, True])
    assert got[2] == expected.sum(dtype=torch.float32)
    y = impl("batch_norm_apply")(x, *identity, None, "clamp", -0.9, 0.7)
    assert torch.equal(y, aten.hardtanh(x, -0.9, 0.7))


def test_batch_norm_activation_backward_leaves_out_what_is_not_asked(impl: Any) -> None:
    x = torch.randn(3, 4, 5, 5)
    _, mean, invstd = train(x, None, None)
    saved = (x, x, None, None, mean, invstd, "clamp", 0.0, 6.0)
    everything = impl("batch_norm_activation_backward")(*saved, [True, True, True])
    for mask in ([True, False, False], [False, True, False], [False, False, True], [False, False, False]):
        got = impl("batch_norm_activation_backward")(*saved, mask)
        for wanted, actual, expected in zip(mask, got, everything, strict=True):
            if wanted:
                assert_bits(actual, expected)
            else:
                assert actual is None


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("follows", [RELU[1:], ("silu", 0.0, 0.0), ("hardswish", 0.0, 0.0)])
@pytest.mark.parametrize("shape", [*NORM_SHAPES, (3, 2, 70, 71)])
def test_batch_norm_activation_backward_adds_another_gradient(
    impl: Any, shape: tuple[int, ...], follows: tuple[str, float, float], dtype: torch.dtype
) -> None:
    """Of x's own layout, channels of a larger tensor, or laid out in any other way."""
    for x, weight, bias in norm_inputs(shape, dtype):
        _, mean, invstd = train(x, weight, bias)
        saved = (torch.randn_like(x), x, weight, bias, mean, invstd, *follows)
        alone = impl("batch_norm_activation_backward")(*saved, [True, True, True])
        larger = torch.randn(shape[0], shape[1] + 5, *shape[2:]).to(dtype)
        if alone[0].dim() == 4 and not alone[0].is_contiguous():
            larger = larger.to(memory_format=torch.channels_last)
        turned = torch.randn(shape[::-1]).to(dtype).permute(*reversed(range(len(shape))))
        for other in (torch.randn_like(x), larger[:, 2:-3], larger[:, :-5], larger[:1, 1:2].expand(shape), turned):
            got = impl("batch_norm_activation_backward")(*saved, [True, True, True], other)
            for actual, expected in zip(got, (alone[0] + other, *alone[1:]), strict=True):
                assert_bits(actual, expected)
            assert strides(got[0]) == strides(alone[0])
    assert impl("batch_norm_activation_backward")(*saved, [False, True, True], x)[0] is None
    with pytest.raises((ValueError, RuntimeError)):
        impl("batch_norm_activation_backward")(*saved, [True, True, True], x[:, :0])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "channels"),
    [
        ((3, 64, 8, 8), (32, 16, 15, 1)),
        ((2, 33, 16, 3), (33,)),
        ((2, 6, 70, 71), (1, 3, 2)),
        ((5, 9, 7), (4, 5)),
        ((6, 8, 1, 1), (3, 5)),
    ],
)
def test_batch_norms_of_parts_are_those_of_what_they_are_joined_to(
    impl: Any, shape: tuple[int, ...], channels: tuple[int, ...], dtype: torch.dtype
) -> None:
    for x, weight, bias in norm_inputs(shape, dtype):
        parts = [part.contiguous() if x.is_contiguous() else part for part in x.split(channels, 1)]
        joined, grad = torch.cat(parts, 1), torch.randn_like(x)
        running = [torch.rand(shape[1], dtype=(x if weight is None else weight).dtype) for _ in range(4)]
        running[2:] = [t.clone() for t in running[:2]]
        # In float64 SiLU is ATen's, which takes another exponential at the ends of what is adjacent.
        for options in (
            RELU[1:],
            ("silu" if dtype != torch.float64 else "hardswish", 0.0, 0.0),
            ("leaky_relu", 0.1, 0.0),
        ):
            for exact in (True, False):
                got = impl("batch_norm_train_joined")(parts, weight, bias, *running[:2], 0.1, 1e-5, *options, exact)
                expected = impl("batch_norm_train")(
                    joined, weight, bias, *running[2:], 0.1, 1e-5, None, *options, exact
                )
                for actual, wanted in zip((*got, *running[:2]), (*expected, *running[2:]), strict=True):
                    assert_bits(actual, wanted)
                assert strides(got[0]) == strides(expected[0])
            _, mean, invstd = expected
            saved = (weight, bias, mean, invstd, *options)
            again = impl("batch_norm_apply")(joined, *saved[:4], None, *options)
            assert_bits(impl("batch_norm_apply_joined")(parts, *saved), again)
            larger = torch.randn(shape[0], shape[1] + 2, *shape[2:]).to(dtype)[:, 1:-1]
            for mask, other in (
                ([True, True, True], None),
                ([True, False, True], larger),
                ([False, True, False], None),
            ):
                made = impl("batch_norm_activation_backward_joined")(grad, parts, *saved, mask, other)
                wanted = impl("batch_norm_activation_backward")(grad, joined, *saved, mask, other)
                for actual, one in zip(made, wanted, strict=True):
                    assert actual is None if one is None else assert_bits(actual, one) is None


def test_parts_must_be_alike(impl: Any) -> None:
    x, c = torch.randn(2, 3, 4, 4), torch.ones(6)
    for parts in ([], [x, x[:1]], [x, x[..., 1:]]):
        with pytest.raises((ValueError, RuntimeError, NotImplementedError)):
            impl("batch_norm_apply_joined")(parts, c, c, c, c, *RELU[1:])


def test_empty_batches(impl: Any) -> None:
    x, c = torch.empty(0, 4, 3, 3), torch.ones(4)
    assert impl("batch_norm_apply")(x, c, c, c, c, *RELU).shape == x.shape
    got = impl("batch_norm_activation_backward")(x, x, c, c, c, c, *RELU[1:], [True, True, True])
    assert got[0].shape == x.shape and not got[1].any() and not got[2].any()
    y, offsets = impl("max_pool2d_with_offsets")(x, [2, 2], [1, 1], [0, 0], [1, 1], False)
    assert y.shape == offsets.shape == (0, 4, 2, 2)


# ---- the operators as operators ----


def sample_arguments() -> dict[str, tuple[Any, ...]]:
    """Arguments with which opcheck exercises each operator."""
    x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    c = torch.rand(3) + 0.5
    pool = ([3, 3], [2, 2], [1, 1], [1, 1])
    y, indices = aten.max_pool2d_with_indices(x, *pool, False)
    offsets = max_pool.max_pool2d_offsets(indices, x.shape, *pool)
    mask, flags = masks.pack_sign(x), torch.rand(2, 3, 6, 6) < 0.5
    norm = (x, c, c, c, c)
    joined = tuple(torch.rand(5) + 0.5 for _ in range(4))
    rows, w = torch.randn(4, 6).to(torch.bfloat16), torch.randn(6)
    rstd = rms_norm.rms_norm(rows, w, 1, 1e-6, True, torch.float32)[1]
    filters, options = torch.randn(4, 3, 3, 3), ([2, 1], [1, 1], [1, 2], 1, True)
    convolved = convolution.cudnn_convolution(x, filters, None, *options, "gemm")
    return {
        "pack_sign": (x,),
        "keep_where": (torch.randn(2, 3, 6, 6), mask, x.stride()),
        "keep_where_": (x.clone(), mask),
        "pack_range": (x, 0.0, 6.0),
        "pack_bool": (flags,),
        "unpack_bool": (masks.pack_bool(flags), [2, 3, 6, 6]),
        "masked_scale": (x, masks.pack_bool(flags), 2.0, flags.stride()),
        "pack_largest": (x, 8192),
        "unpack_largest": (caches.pack_largest(x, 8192), 8192, x.shape, x.dtype, x.stride()),
        "mm_largest": (torch.randn(6, 5).t(), caches.pack_largest(torch.randn(5, 7), 8192), 8192, 7),
        "pack_int8": (x,),
        "unpack_int8": (caches.pack_int8(x), x.shape, x.dtype, x.stride()),
        "max_pool2d_with_offsets": (x, *pool, False),
        "max_pool2d_offsets": (indices, x.shape, *pool),
        "max_pool2d_offsets_to_indices": (offsets, x.shape, *pool),
        "max_pool2d_offsets_backward": (y, offsets, x.shape, *pool),
        "pack_nibbles": (offsets,),
        "unpack_nibbles": (masks.pack_nibbles(offsets), offsets.shape, offsets.stride()),
        "batch_norm_apply": (*norm, x, "clamp", 0.0, 6.0),
        "batch_norm_train": (x, c, c, c.clone(), c.clone(), 0.1, 1e-5, x, "silu", 0.0, 0.0, False),
        "batch_norm_activation_backward": (x, *norm, "clamp", 0.0, 6.0, [True, True, True], x.clone()),
        "batch_norm_apply_joined": ([x, x[:, :2].contiguous()], *joined, "clamp", 0.0, 6.0),
        "batch_norm_train_joined": (
            [x, x[:, :2].contiguous()],
            *joined[:2],
            joined[2].clone(),
            joined[3].clone(),
            0.1,
            1e-5,
            "silu",
            0.0,
            0.0,
            True,
        ),
        "batch_norm_activation_backward_joined": (
            torch.randn(2, 5, 6, 6),
            [x.contiguous(), x[:, :2].contiguous()],
            *joined,
            "clamp",
            0.0,
            6.0,
            [True, True, True],
        ),
        "rms_norm": (rows, w, 1, 1e-6, True, torch.float32),
        "rms_norm_apply": (rows, w, rstd, 1, True, torch.float32),
        "rms_norm_backward": (rows, rows, w, rstd, rows.clone(), 1),
        "cudnn_convolution": (x, filters, torch.randn(4), *options, "winograd"),
        "cudnn_convolution_backward_input": (convolved, filters, x.shape, *options, "1"),
        "cudnn_convolution_backward_weight": (convolved, x, filters.shape, *options, "3"),
    }


@pytest.mark.parametrize("name", list(operators()))
def test_opcheck(name: str) -> None:
    parts = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if name.endswith("_"):
        # PyTorch does not functionalise a custom operator that returns its argument. The in-place operators are for
        # code that is already functionalised; everything else about them is checked.
        parts.remove("test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(ops, name).default, sample_arguments()[name], test_utils=parts)


class _Called(TorchDispatchMode):
    """Notes the names of our operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NAMESPACE:
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def test_the_benchmark_has_a_row_for_every_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in (("SHAPES", ((2, 3, 8, 8),)), ("PRODUCTS", ((6, 5, 4),)), ("ROWS", ((3, 8),))):
        monkeypatch.setattr(benchmark, name, small)
    timed = _Called()
    for _, (_, ours, theirs) in benchmark.every_pair(["float32", "bfloat16"]):
        with timed:
            ours()
        others = _Called()
        with others:
            theirs()
        assert not others.names
    assert timed.names == set(operators()) - CUDNN  # these are for CUDA alone


@pytest.mark.parametrize("name", list(operators()))
def test_schema_is_the_same_in_cpp_and_python(name: str) -> None:
    expected = torch._C.parse_schema(f"{NAMESPACE}::{name}{operators()[name].schema}")
    assert str(getattr(ops, name).default._schema) == str(expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_fakes_know_the_dtype_of_the_statistics(dtype: torch.dtype) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.randn(4, 3, 5, 5).to(dtype)
    for parameter in {dtype, torch.float32 if dtype != torch.float64 else dtype}:
        c = torch.ones(3, dtype=parameter)
        real = ops.batch_norm_train(x, c, c, None, None, 0.1, 1e-5, *RELU, True)
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(t) for t in (x, c)]
            made = ops.batch_norm_train(fake[0], fake[1], fake[1], None, None, 0.1, 1e-5, *RELU, True)
        assert [t.dtype for t in made] == [t.dtype for t in real]


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
        with pytest.raises(ValueError, match=message):
            unpack(moved(packed, 1))


def test_wrong_arguments_are_named() -> None:
    if not available("cpu"):
        pytest.skip(status())
    x, c = torch.randn(2, 3, 4, 4), torch.ones(3)
    with pytest.raises(TypeError, match="pack_sign: x must be float32, float64, float16 or bfloat16, got Int"):
        ops.pack_sign(torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"a mask of 96 bits has shape \[12\] and is contiguous, got shape \[3\]"):
        ops.keep_where(x, torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"weight must have shape \[3\], got \[4\]"):
        ops.batch_norm_apply(x, torch.ones(4), None, c, c, *ALONE)
    with pytest.raises(ValueError, match="activation must be clamp, leaky_relu, hardswish or silu, got gelu"):
        ops.batch_norm_apply(x, c, c, c, c, None, "gelu", 0.0, 0.0)
    with pytest.raises(ValueError, match=r"9 half bytes have shape \[5\] and are contiguous, got shape \[4\]"):
        ops.unpack_nibbles(torch.zeros(4, dtype=torch.uint8), [9])
    with pytest.raises(
        ValueError, match=r"the cache of such a tensor has shape \[10\] and is contiguous, got shape \[9\]"
    ):
        ops.unpack_int8(torch.zeros(9, dtype=torch.uint8), [6], torch.float32)
    with pytest.raises(ValueError, match="keep is of 16384 elements and between 1 and that, got 0"):
        ops.pack_largest(x, 0)
    with pytest.raises(ValueError, match=r"mm_largest: grad must have two dimensions, got shape \[2, 3, 4, 4\]"):
        ops.mm_largest(x, torch.zeros(9, dtype=torch.uint8), 1, 4)
    with pytest.raises(ValueError, match=r"rms_norm: weight must have shape \[4\] on cpu, got \[3\] on cpu"):
        ops.rms_norm(x, c, 1, 1e-6, False, torch.float32)
    with pytest.raises(ValueError, match="rms_norm: dims is between 1 and those of x, 4, got 5"):
        ops.rms_norm(x, None, 5, 1e-6, False, torch.float32)
    with pytest.raises(ValueError, match=r"rstd must be Float of shape \[2, 3, 4, 1\] on cpu, got Float \[3\] on cpu"):
        ops.rms_norm_apply(x, None, c, 1, False, torch.float32)
    with pytest.raises(ValueError, match="this window does not turn"):
        ops.max_pool2d_offsets(torch.zeros(1, 1, 4, 4, dtype=torch.int64), [1, 1, 80, 80], [2, 2], [], [0, 0], [1, 1])


# ---- loading and building ----


def run_python(code: str, **environment: str) -> str:
    env = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout


def test_importing_loads_neither_torch_nor_kernels() -> None:
    print(run_python("import sys, monet_like.ops, monet_like.build; assert 'torch' not in sys.modules"))


BITS_CODE = """
import torch
from math import inf
import monet_like.ops
monet_like.ops.load()
for dtype in (torch.float32, torch.float64):
    for fmt in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(3, 37, 6, 7, dtype=dtype).contiguous(memory_format=fmt)
        w, b = torch.randn(37, dtype=dtype), torch.randn(37, dtype=dtype)
        y, m, s = torch.native_batch_norm(x, w, b, None, None, True, .1, 1e-5)
        assert torch.equal(torch.ops.monet_like.batch_norm_apply(x, w, b, m, s, None, "clamp", -inf, inf), y)
        assert torch.equal(torch.ops.monet_like.batch_norm_train(x, w, b, None, None, .1, 1e-5, x, "clamp", 0., inf, True)[0], (y + x).relu())
        mask = torch.ops.monet_like.pack_sign(y)
        expected = torch.ops.aten.threshold_backward(x, y, 0)
        assert torch.equal(torch.ops.monet_like.keep_where(x, mask, y.stride()), expected)
print(monet_like.ops.status())
"""


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_bits_hold_at_every_vector_width(capability: str) -> None:
    """ATen fuses the multiplication with the addition only from AVX2 on; the kernels follow."""
    run_python(BITS_CODE, ATEN_CPU_CAPABILITY=capability)


def test_without_the_library_the_twins_serve_under_the_same_names() -> None:
    assert "plain-torch twins in use" in run_python(BITS_CODE, MONET_LIKE_KERNELS="reference")


def test_status_says_what_runs() -> None:
    text = status()
    if available("cpu"):
        assert text.startswith("compiled kernels in use for cpu")
    else:
        assert "python -m monet_like.build" in text


def test_cuda_libraries_have_every_operator_for_both_architectures() -> None:
    library, cudnn = build.library_path("kernels_cuda"), build.library_path("kernels_cudnn")
    if not library.exists():
        pytest.skip("no nvcc, so no CUDA kernels")
    paths = [str(path) for path in (build.library_path(), library, cudnn) if path.exists()]
    code = f"""
import torch
for path in {paths}:
    torch.ops.load_library(path)
from monet_like.ops import operators
has = torch._C._dispatch_has_kernel_for_dispatch_key
print(*sorted(name for name in operators() if not has(f"monet_like::{{name}}", "CUDA")))
"""
    assert run_python(code).split() == ([] if cudnn.exists() else sorted(CUDNN))
    if not torch.cuda.is_available() and "TORCH_CUDA_ARCH_LIST" not in os.environ:
        binary = library.read_bytes()
        assert b"sm_80" in binary and b"sm_90" in binary


def test_only_the_cudnn_that_torch_runs_is_compiled_against(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDNN_HOME", str(tmp_path))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92600)
    root = Path(torch.__file__).parent
    assert build._find_cudnn(root) is None
    for folder in ("include", "lib64"):
        (tmp_path / folder).mkdir()
    (tmp_path / "include" / "cudnn_cnn.h").write_text("cudnnConvolutionBackwardFilter(cudnnHandle_t handle")
    (tmp_path / "include" / "cudnn_version.h").write_text("#define CUDNN_MAJOR 8\n")
    library = tmp_path / "lib64" / "libcudnn.so.9"
    library.touch()
    assert build._find_cudnn(root) is None
    (tmp_path / "include" / "cudnn_version.h").write_text("#define CUDNN_MAJOR 9\n")
    assert build._find_cudnn(root) == build._Cudnn(tmp_path / "include", library)
    (tmp_path / "include" / "cudnn_cnn.h").write_text("nothing but graphs")
    assert build._find_cudnn(root) is None


def test_missing_compiler_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(build.KernelBuildError, match=r"looked for g\+\+, c\+\+ on the PATH.*apt-get install g\+\+"):
        build.build()


def test_cuda_asked_for_without_nvcc_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    monkeypatch.setenv("MONET_LIKE_CUDA", "1")
    monkeypatch.setattr(build, "find_cxx", lambda: "g++")
    with pytest.raises(build.KernelBuildError, match="CUDA kernels cannot be compiled"):
        build.build()


def test_failing_compiler_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho 'internal error: out of tea' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MONET_LIKE_CUDA", "0")
    monkeypatch.setattr(build, "library_path", lambda part="kernels": tmp_path / "lib" / f"{part}.so")
    with pytest.raises(build.KernelBuildError, match=r"(?s)compiling failed.*out of tea"):
        build.build()
