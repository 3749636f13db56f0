"""Packed masks and half bytes against ATen and against their plain-torch references, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_inputs import FLOATS, SHAPES, assert_bits, layouts, special

import monet_like.ops
from monet_like.ops import masks, memory_layout

monet_like.ops.load()
aten = torch.ops.aten

#: ATen's 1 / 6 in hardsigmoid's gradient, a float32 whatever the dtype.
SIXTH = torch.tensor(1 / 6, dtype=torch.float32).item()


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


@pytest.mark.parametrize("dtype", FLOATS)
def test_masked_scale_is_dropout(impl: Any, dtype: torch.dtype) -> None:
    scale = 1 / 0.7
    for x in layouts((3, 5, 7, 3), dtype).values():
        mask = torch.rand(x.shape) < 0.7
        packed = impl("pack_bool")(mask)
        actual = impl("masked_scale")(x, packed, scale, mask.stride())
        assert_bits(actual, x.mul(mask).mul(scale))
        assert_bits(actual, aten.native_dropout_backward(x, mask, scale))
