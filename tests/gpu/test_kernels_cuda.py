"""The CUDA kernels against ATen on the same GPU, and against the CPU twins.

Skipped without a GPU, but where an emulator runs the kernels on the CPU (tests/cuda_emulator): there without large shapes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import inf, prod

import pytest
import torch
from torch import Tensor

from monet_like import ops
from monet_like.ops import caches, masks, rms_norm, swiglu

#: "cpu" where the CPU's kernels are the emulated CUDA kernels.
DEVICE = "cpu" if os.environ.get("MONET_LIKE_EMULATED") else "cuda"
if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

ops.load()
registered = torch.ops.monet_like
aten = torch.ops.aten
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Largest error allowed, as a fraction of the largest element of the result.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def shapes(*given: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Those that this device takes at most a second for."""
    return [shape for shape in given if DEVICE == "cuda" or prod(shape) <= 70_000]


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def test_the_cuda_kernels_are_compiled() -> None:
    assert ops.available(DEVICE), ops.status()


def formats(x: Tensor) -> Iterator[Tensor]:
    yield x
    if x.dim() == 4:
        yield x.to(memory_format=torch.channels_last)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    scale = max(float(expected.double().abs().max()), 1e-6)
    assert float((actual.double() - expected.double()).abs().max()) <= TOLERANCE[dtype] * scale


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", shapes((0,), (1,), (7,), (33,), (100_003,), (2, 3, 5, 7), (4, 16, 9, 9)))
def test_masks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for x in formats(torch.randn(shape, device=DEVICE).mul(3).to(dtype)):
        if x.numel() > 2:
            x[(0,) * x.dim()] = float("nan")
        mask = registered.pack_sign(x)
        assert torch.equal(mask.cpu(), masks.pack_sign(x.cpu()))
        for grad in formats(torch.randn(shape, device=DEVICE).to(dtype)):
            expected = aten.threshold_backward(grad, x, 0)
            assert torch.equal(registered.keep_where(grad, mask, x.stride()), expected)
            twice = grad.clone()
            assert torch.equal(registered.keep_where_(twice, mask, x.stride()), expected)
            bounds = registered.pack_range(x, 0.0, 2.0)
            # On a GPU as aten.hardtanh_backward; its CPU kernel treats a NaN otherwise.
            expected = torch.where((x <= 0.0) | (x >= 2.0), 0.0, grad)
            assert torch.equal(registered.keep_where(grad, bounds, x.stride()), expected)
        flags = torch.rand(shape, device=DEVICE) < 0.5
        packed = registered.pack_bool(flags)
        assert torch.equal(registered.unpack_bool(packed, flags.shape), flags)
        finite = x.nan_to_num(1.0)
        assert torch.equal(registered.masked_scale(finite, packed, 2.0, flags.stride()), finite * flags * 2.0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize(
    "pool", [([3, 3], [2, 2], [1, 1], [1, 1]), ([2, 3], [1, 1], [0, 1], [1, 3]), ([5, 5], [1, 1], [2, 2], [1, 1])]
)
def test_max_pool(pool: tuple[list[int], ...], ceil_mode: bool, dtype: torch.dtype) -> None:
    for x in formats(torch.randint(-2, 3, (3, 5, 17, 21), device=DEVICE).to(dtype)):
        y, indices = aten.max_pool2d_with_indices(x, *pool, ceil_mode)
        got, offsets = registered.max_pool2d_with_offsets(x, *pool, ceil_mode)
        assert torch.equal(got, y)
        assert torch.equal(registered.max_pool2d_offsets(indices, x.shape, *pool), offsets)
        assert torch.equal(registered.max_pool2d_offsets_to_indices(offsets, x.shape, *pool), indices)
        grad = torch.randn_like(y)
        expected = aten.max_pool2d_with_indices_backward(grad, x, *pool, ceil_mode, indices)
        assert_close(registered.max_pool2d_offsets_backward(grad, offsets, x.shape, *pool), expected, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", shapes((2, 3, 5, 7), (4, 64, 32, 32), (3, 33, 1, 1), (9, 13), (64, 5, 70, 71)))
def test_batch_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    parameter = torch.float64 if dtype == torch.float64 else torch.float32
    weight, bias = (torch.randn(shape[1], device=DEVICE, dtype=parameter) for _ in range(2))
    for x in formats(torch.randn(shape, device=DEVICE).mul(3).add(1).to(dtype)):
        running = [torch.zeros_like(weight), torch.ones_like(weight)]
        moved = [t.clone() for t in running]
        y, mean, invstd = aten.native_batch_norm(x, weight, bias, *running, True, 0.1, 1e-5)
        arguments = (x, weight, bias, mean, invstd)
        assert_close(registered.batch_norm_apply(*arguments, None, "clamp", -inf, inf), y, dtype)
        assert_close(
            registered.batch_norm_apply(*arguments, None, "clamp", 0.0, 6.0), aten.hardtanh(y, 0.0, 6.0), dtype
        )
        assert_close(registered.batch_norm_apply(*arguments, x, "clamp", 0.0, inf), (y + x).relu(), dtype)
        for name, number in (("leaky_relu", 0.1), ("hardswish", 0.0), ("silu", 0.0)):
            function = getattr(torch.nn.functional, name)
            expected = function(y, number) if number else function(y)
            if name == "hardswish" and DEVICE == "cpu":  # on a GPU ATen multiplies by a sixth of float32, always
                expected = (y.double() * (y.double() + 3).clamp(0, 6) * float(torch.tensor(1 / 6))).to(dtype)
            assert_close(registered.batch_norm_apply(*arguments, None, name, number, 0.0), expected, dtype)
        for exact in (False, True):
            mine = [stat.clone() for stat in moved]
            got = registered.batch_norm_train(x, weight, bias, *mine, 0.1, 1e-5, None, "clamp", 0.0, inf, exact)
            for actual, expected in zip((*got, *mine), (y.relu(), mean, invstd, *running), strict=True):
                assert_close(actual, expected, dtype)
        grad = torch.randn_like(x)
        arguments = (grad, x, weight, bias, mean, invstd, "clamp", 0.0, inf, [True, True, True])
        made = registered.batch_norm_activation_backward(*arguments)
        through = torch.where(got[0] <= 0, 0.0, grad.double()).to(dtype)
        expected_gradients = aten.native_batch_norm_backward(
            through.double(), x.double(), weight.double(), None, None, mean.double(), invstd.double(), True, 1e-5,
            [True, True, True],
        )  # fmt: skip
        for actual, expected in zip(made, expected_gradients, strict=True):
            sums = float(grad.double().square().sum().sqrt()) if expected.dim() == 1 else 0.0
            scale = max(float(expected.abs().max()), sums)
            assert float((actual.double() - expected).abs().max()) <= TOLERANCE[dtype] * scale
        larger = torch.randn(x.shape[0], x.shape[1] + 3, *x.shape[2:], device=DEVICE).to(dtype)
        for other in (torch.randn_like(x), *formats(larger[:, 3:])):
            assert torch.equal(registered.batch_norm_activation_backward(*arguments, other)[0], made[0] + other)
        if x.is_contiguous() and x.shape[1] > 1:
            parts = [part.contiguous() for part in x.split([1, x.shape[1] - 1], 1)]
            statistics, relu = (weight, bias, mean, invstd), ("clamp", 0.0, inf)
            for exact in (False, True):
                joined = registered.batch_norm_train_joined(parts, weight, bias, None, None, 0.1, 1e-5, *relu, exact)
                whole = registered.batch_norm_train(x, weight, bias, None, None, 0.1, 1e-5, None, *relu, exact)
                for actual, expected in zip(joined, whole, strict=True):
                    assert_close(actual, expected, dtype)
            applied = registered.batch_norm_apply_joined(parts, *statistics, *relu)
            assert torch.equal(applied, registered.batch_norm_apply(x, *statistics, None, *relu))
            for other in (None, torch.randn_like(x), larger[:, 3:]):
                apart = registered.batch_norm_activation_backward_joined(grad, parts, *arguments[2:], other)
                together = registered.batch_norm_activation_backward(*arguments, other)
                for actual, expected in zip(apart, together, strict=True):
                    assert_close(actual, expected, dtype)
        again = registered.batch_norm_activation_backward(*arguments)
        assert all(torch.equal(a, b) for a, b in zip(made, again, strict=True))  # no atomics: the same every time


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_statistics_far_from_zero(exact: bool, channels_last: bool) -> None:
    """A mean of 1,000 standard deviations: sums of squares would have lost the variance."""
    x = (torch.randn(8, 6, 9, 9, dtype=torch.float64) + 1e3).float().to(DEVICE)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    ones = torch.ones(6, device=DEVICE)
    _, mean, invstd = registered.batch_norm_train(x, ones, ones, None, None, 0.1, 0.0, None, "clamp", -inf, inf, exact)
    wide = x.double()
    assert_close(mean, wide.mean((0, 2, 3)), torch.float32)
    expected = wide.var((0, 2, 3), unbiased=False).rsqrt()
    assert float((invstd.double() / expected - 1).abs().max()) < 1e-3


def test_other_streams_and_opcheck() -> None:
    if DEVICE == "cpu":
        pytest.skip("the CPU has no streams")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.randn(1_000_003, device=DEVICE)
        mask = registered.pack_sign(x)
    stream.synchronize()
    assert torch.equal(mask.cpu(), masks.pack_sign(x.cpu()))
    torch.library.opcheck(registered.pack_sign.default, (x[:100],))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", shapes((0,), (1,), (7,), (300,), (100_003,), (4, 16, 9, 9)))
def test_lossy_caches(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for x in formats(torch.randn(shape, device=DEVICE).mul(3).to(dtype)):
        if x.numel() > 2:
            x[(0,) * x.dim()] = float("nan")
        for keep in (1, 1000, 1639, caches.LARGEST_BLOCK):
            packed = registered.pack_largest(x, keep)
            assert torch.equal(packed.cpu(), caches.pack_largest(x.cpu(), keep))
            back = registered.unpack_largest(packed, keep, x.shape, dtype, x.stride())
            expected = caches.unpack_largest(packed.cpu(), keep, x.shape, dtype, x.stride())
            assert torch.equal(back.cpu().nan_to_num(7.0), expected.nan_to_num(7.0))
        finite = x.nan_to_num(1.0)
        packed = registered.pack_int8(finite)
        assert torch.equal(packed.cpu(), caches.pack_int8(finite.cpu()))
        back = registered.unpack_int8(packed, x.shape, dtype, x.stride())
        assert torch.equal(back.cpu(), caches.unpack_int8(packed.cpu(), x.shape, dtype, x.stride()))
        poisoned = registered.unpack_int8(registered.pack_int8(x), x.shape, dtype, x.stride())
        assert x.numel() <= 2 or bool(poisoned[(0,) * x.dim()].isnan())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", shapes((37, 5, 9), (9000, 1024, 70), (300, 1000, 64), (0, 4, 3)))
def test_products_with_the_largest(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Rows made dense in several turns, in the last of them fewer; columns that fit no block."""
    rows, columns, outs = shape
    for keep in (1000, 1639):
        x, grad = (torch.randn(rows, n, device=DEVICE).to(dtype) for n in (columns, outs))
        packed = registered.pack_largest(x, keep)
        left = registered.unpack_largest(packed, keep, x.shape, dtype).double()
        for transposed in (False, True):
            got = registered.mm_largest(grad, packed, keep, columns, transposed)
            exact = left.t() @ grad.double() if transposed else grad.double().t() @ left
            assert got.shape == exact.shape and got.dtype == dtype
            # 16-bit results are rounded after every turn; float32's sums are of up to 9,000 terms.
            error = (got.double() - exact).abs().max()
            assert error <= 10 * TOLERANCE[dtype] * exact.abs().max()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "dims"), [((3, 5, 17), 1), ((2, 3, 4), 2), ((0, 4), 1), ((70, 1000), 1)])
def test_rms_norm(shape: tuple[int, ...], dims: int, dtype: torch.dtype) -> None:
    x, grad, residual = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(3))
    for weight in (None, torch.randn(shape[-dims:], device=DEVICE)):
        for rounded in (False, True):
            made = registered.rms_norm(x, weight, dims, 1e-6, rounded, dtype)
            back = registered.rms_norm_backward(grad, x, weight, made[1], residual, dims)
            expected = rms_norm.rms_norm(x, weight, dims, 1e-6, rounded, dtype)
            of_x, of_weight = rms_norm.rms_norm_backward(grad, x, weight, expected[1], residual, dims)
            if x.numel():
                assert_close(made[0], expected[0], dtype)
                assert_close(made[1], expected[1], torch.float32 if dtype != torch.float64 else dtype)
                assert_close(back[0], of_x, dtype)
                if weight is not None:
                    assert_close(back[1], of_weight, torch.float32)
            assert torch.equal(registered.rms_norm_apply(x, weight, made[1], dims, rounded, dtype), made[0])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", shapes((0,), (1,), (7,), (3, 4099), (4096, 1376)))
def test_swiglu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    grad, gate, up = (torch.randn(shape, device=DEVICE).mul(3).to(dtype) for _ in range(3))
    made = (registered.swiglu(gate, up), *registered.swiglu_backward(grad, gate, up))
    expected = (swiglu.swiglu(gate, up), *swiglu.swiglu_backward(grad, gate, up))
    for one, other in zip(made, expected, strict=True):
        if DEVICE == "cuda":
            assert torch.equal(one, other)  # with ATen's kernels
        elif prod(shape):  # the emulator's exponential function is another
            assert_close(one, other, dtype)
