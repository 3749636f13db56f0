"""Max pooling with byte offsets against ATen, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_inputs import FLOATS, assert_bits, layouts
from torch import Tensor

import monet_like.ops
from monet_like.ops import available, status

monet_like.ops.load()
registered = torch.ops.monet_like
aten = torch.ops.aten

POOLS = [  # kernel, stride, padding, dilation
    ([3, 3], [2, 2], [1, 1], [1, 1]),
    ([2, 2], [2, 2], [0, 0], [1, 1]),
    ([3, 2], [1, 3], [1, 0], [2, 1]),
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


def check_forward(impl: Any, x: Tensor, pool: tuple[Any, ...], ceil_mode: bool) -> tuple[Tensor, Tensor, Tensor]:
    """ATen's results and indices, and offsets that say the same."""
    y, indices = aten.max_pool2d_with_indices(x, *pool, ceil_mode)
    got, offsets = impl("max_pool2d_with_offsets")(x, *pool, ceil_mode)
    assert_bits(got, y)
    assert offsets.dtype == torch.uint8 and got.stride() == y.stride() == offsets.stride()
    assert_bits(impl("max_pool2d_offsets")(indices, x.shape, *pool), offsets)
    assert_bits(impl("max_pool2d_offsets_to_indices")(offsets, x.shape, *pool), indices)
    return y, indices, offsets


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("pool", POOLS)
def test_max_pool_equals_aten(impl: Any, pool: tuple[Any, ...], ceil_mode: bool, dtype: torch.dtype) -> None:
    for shape in [(2, 5, 17, 21), (1, 83, 9, 12), (3, 8, 40)]:
        for x in layouts(shape, dtype, ties).values():
            if x.shape != shape:
                continue
            y, indices, offsets = check_forward(impl, x, pool, ceil_mode)
            grad = torch.randn(y.shape, dtype=dtype)
            for g in (grad, grad.to(memory_format=torch.channels_last) if grad.dim() == 4 else grad):
                expected = aten.max_pool2d_with_indices_backward(g, x, *pool, ceil_mode, indices)
                actual = impl("max_pool2d_offsets_backward")(g, offsets, x.shape, *pool)
                assert_bits(actual, expected)


def test_max_pool_window_wholly_in_the_padding(impl: Any) -> None:
    # One pixel, two steps of dilation 2 around it: no cell lies inside. ATen answers -inf and its first step.
    pool = ([2, 2], [1, 1], [1, 1], [2, 2])
    check_forward(impl, torch.ones(1, 1, 1, 1), pool, False)


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
    grad = registered.max_pool2d_offsets_backward(
        torch.ones(1, 2, 4, 4), offsets, [1, 2, 8, 8], [3, 3], [2, 2], [1, 1], [1, 1]
    )
    assert_bits(grad, torch.zeros(1, 2, 8, 8))


def test_max_pool_refuses_foreign_indices(impl: Any) -> None:
    indices = torch.zeros(1, 1, 4, 4, dtype=torch.int64)
    with pytest.raises((ValueError, RuntimeError), match="outside its window"):
        impl("max_pool2d_offsets")(indices, [1, 1, 8, 8], [2, 2], [2, 2], [0, 0], [1, 1])


def test_max_pool_refuses_windows_that_do_not_fit_a_byte(impl: Any) -> None:
    with pytest.raises((ValueError, RuntimeError), match="at most 256 cells"):
        impl("max_pool2d_with_offsets")(torch.zeros(1, 1, 20, 20), [17, 17], [1, 1], [0, 0], [1, 1], False)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("shape", [(5, 11, 37, 41), (1, 70, 40, 40), (2, 3, 130, 70)])
def test_max_pool_in_parallel(impl: Any, shape: tuple[int, ...]) -> None:
    pool = ([3, 3], [2, 2], [1, 1], [1, 1])
    random = torch.randn(shape).mul(3).add(1)
    for x in (random, random.to(memory_format=torch.channels_last)):
        y, indices, offsets = check_forward(impl, x, pool, False)
        expected = aten.max_pool2d_with_indices_backward(y, x, *pool, False, indices)
        assert_bits(impl("max_pool2d_offsets_backward")(y, offsets, x.shape, *pool), expected)
