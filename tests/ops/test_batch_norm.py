"""Fused batch norm against ATen to the bit, where it promises that, and against float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_inputs import FLOATS, FULL, assert_bits, exact_backward, special, strides
from torch import Tensor

import monet_like.ops

monet_like.ops.load()
registered = torch.ops.monet_like
aten = torch.ops.aten

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
    (5, 1100),  # rows and images of more elements than a block of 16-bit floats
    (4, 700, 3),
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
def test_batch_norm_in_parallel(impl: Any, shape: tuple[int, ...]) -> None:
    for x, weight, bias in norm_inputs(shape, torch.float32):
        y, mean, invstd = train(x, weight, bias)
        for options, expected in followers(y):
            assert_bits(impl("batch_norm_apply")(x, weight, bias, mean, invstd, *options), expected)
            assert_bits(impl("batch_norm_train")(x, weight, bias, None, None, 0.1, 1e-5, *options, True)[0], expected)
        got = impl("batch_norm_activation_backward")(x, x, weight, bias, mean, invstd, *RELU[1:], [True, True, True])
        for actual, exact in zip(got, exact_backward(x, x, y, weight, mean, invstd), strict=True):
            assert float((actual - exact).abs().max()) <= 2e-6 * max(float(exact.abs().max()), float(x.norm()))


# Largest error allowed, as a fraction of the largest element of the exact result.
BACKWARD_TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 2e-3}


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
@pytest.mark.parametrize("follows", [RELU[1:], ("silu", 0.0, 0.0)])
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


@pytest.mark.parametrize("dtype", FLOATS)
def test_fakes_know_the_dtype_of_the_statistics(dtype: torch.dtype) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.randn(4, 3, 5, 5).to(dtype)
    for parameter in {dtype, torch.float32 if dtype != torch.float64 else dtype}:
        c = torch.ones(3, dtype=parameter)
        real = registered.batch_norm_train(x, c, c, None, None, 0.1, 1e-5, *RELU, True)
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(t) for t in (x, c)]
            made = registered.batch_norm_train(fake[0], fake[1], fake[1], None, None, 0.1, 1e-5, *RELU, True)
        assert [t.dtype for t in made] == [t.dtype for t in real]
