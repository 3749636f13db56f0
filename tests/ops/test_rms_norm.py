"""Fused RMS norm against float64 and against its plain-torch reference."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from kernel_inputs import FLOATS
from torch import Tensor

import monet_like.ops
from monet_like.ops import rms_norm

monet_like.ops.load()
registered = torch.ops.monet_like


# Largest error allowed, as a fraction of the largest element of the exact result: a few roundings of the dtype.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}


EPS = 1e-5


#: Shape and how many dimensions a row has: odd, empty, one element, more than one flush of the sums, several
#: dimensions.
SHAPES = [((3, 5, 17), 1), ((2, 3, 4), 2), ((7,), 1), ((1, 1), 1), ((0, 4), 1), ((150, 33), 1), ((2, 4099), 1)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
    yield torch.randn(shape).to(dtype)
    yield torch.randn((*shape[:-1], 2 * shape[-1] + 1)).to(dtype)[..., 1::2]
    yield torch.randn(shape[::-1]).to(dtype).permute(tuple(reversed(range(len(shape)))))


def exact(x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
    """By autograd in float64."""
    over = tuple(range(-dims, 0))
    y = x.double() * (x.double().square().mean(over, keepdim=True) + EPS).rsqrt()
    return y if weight is None else y * weight.double()


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, summands: float = 1e-2) -> None:
    """Sums lose what cancels in them: their scale is at least that of their ``summands``."""
    assert actual.shape == expected.shape
    if expected.numel():
        scale = max(float(expected.detach().abs().max()), summands)
        assert float((actual.double() - expected.detach()).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("shape", "dims"), SHAPES)
def test_kernels_are_accurate(impl: Any, shape: tuple[int, ...], dims: int, dtype: torch.dtype) -> None:
    for x, affine in product(inputs(shape, dtype), ("none", "same", "float32")):
        weights = dtype if affine == "same" else torch.float32
        weight = None if affine == "none" else torch.randn(shape[-dims:]).to(weights)
        for rounded in (False, True):
            out = torch.float32 if affine == "float32" and dtype != torch.float64 else dtype
            y, rstd = impl("rms_norm")(x, weight, dims, EPS, rounded, out)
            assert y.dtype == out and rstd.dtype == rms_norm.row_statistic(x)
            assert y.is_contiguous() and rstd.shape == (*shape[: len(shape) - dims], *[1] * dims)
            assert torch.equal(impl("rms_norm_apply")(x, weight, rstd, dims, rounded, out), y)
            wide = x.double().clone().requires_grad_()
            parameter = None if weight is None else weight.double().clone().requires_grad_()
            expected = exact(wide, parameter, dims)
            assert_near(y, expected, TOLERANCE[dtype])
        grad, residual = torch.randn(shape).to(out), torch.randn(shape).to(dtype)
        wanted = [wide, *([] if parameter is None else [parameter])]
        terms = (
            float((grad.abs().max() * rstd.max() * (1 if weight is None else weight.abs().max())).nan_to_num())
            if x.numel()
            else 0.0
        )
        of_x, *of_weight = torch.autograd.grad(expected, wanted, grad.double())
        for before in (None, residual):
            got = impl("rms_norm_backward")(grad, x, weight, rstd, before, dims)
            assert got[0].dtype == dtype and got[0].is_contiguous()
            assert_near(got[0], of_x if before is None else of_x + before.double(), TOLERANCE[dtype], terms)
            if weight is None:
                assert got[1] is None
            else:
                assert got[1].dtype == weight.dtype
                assert_near(got[1], of_weight[0], 4 * TOLERANCE[torch.float32] + TOLERANCE[weight.dtype])


def test_rows_in_parallel(impl: Any) -> None:
    x, w, grad = torch.randn(1300, 130), torch.randn(130), torch.randn(1300, 130)
    found = []
    for count in (1, 3):
        torch.set_num_threads(count)
        y, rstd = impl("rms_norm")(x, w, 1, EPS, False, x.dtype)
        found.append((y, rstd, *impl("rms_norm_backward")(grad, x, w, rstd, None, 1)))
    for one, three in zip(*found, strict=True):
        assert_near(three, one.double(), 2e-6)


def test_what_is_not_finite_stays_in_its_row(impl: Any) -> None:
    x = torch.ones(3, 5)
    x[1, 2] = torch.inf
    y, rstd = impl("rms_norm")(x, None, 1, EPS, False, x.dtype)
    assert rstd[1].item() == 0.0 and y[1].isnan().tolist() == [False, False, True, False, False]
    assert torch.allclose(y[::2], torch.ones(2, 5))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        y, rstd = registered.rms_norm(x, weight, 1, EPS, False, x.dtype)
        ctx.save_for_backward(x, weight, rstd)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        return registered.rms_norm_backward(grad, x, weight, rstd, None, 1)


def test_gradcheck() -> None:
    x, w = torch.randn(4, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    assert torch.autograd.gradcheck(_Fused.apply, (x.requires_grad_(), w.requires_grad_()))
