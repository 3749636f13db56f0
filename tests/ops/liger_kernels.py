"""Liger's kernels against their twins and PyTorch, by Triton's interpreter: `test_liger` runs this in a process of its
own.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from interpreted_triton import prepare
from torch import Tensor

import monet_like.ops
from monet_like.ops import liger, runs_here
from monet_like.ops.liger import FLOATS

prepare()
monet_like.ops.load()
registered = torch.ops.monet_like
#: Odd, one element, and more columns than a power of two.
SHAPES = [(1, 3, 37), (1, 1), (7, 130)]
#: Of float32's sums in another order; results of 16 bits are the twins' to the bit.
ROUNDING = 2e-6


def assert_twins(found: Any, twin: Any) -> None:
    for mine, other in zip(found, twin, strict=True):
        if other is None:
            assert mine is None
            continue
        assert (mine.dtype, mine.shape, mine.stride()) == (other.dtype, other.shape, other.stride())
        if mine.dtype == torch.float32:
            torch.testing.assert_close(mine, other, rtol=ROUNDING, atol=ROUNDING)
        else:
            torch.testing.assert_close(mine, other, rtol=0.0, atol=1e-7)  # where two terms cancel


def drawn(shape: tuple[int, ...], dtype: torch.dtype, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(shape[0] + shape[-1])
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]


def test_liger_runs_here() -> None:
    names = [name for name in monet_like.ops.python_operators() if name.startswith("liger_")]
    assert len(names) == 6 and all(runs_here(f"monet_like.{name}.default", "cpu") for name in names)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_is_its_twin(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, grad, residual = drawn(shape, dtype, 3)
    for of_weight, rounded in product((dtype, torch.float32, None), (False, True)):
        weight = None if of_weight is None else drawn(shape[-1:], of_weight, 1)[0]
        made = registered.liger_rms_norm(x, weight, 1e-6, rounded)
        assert_twins(made, liger.liger_rms_norm(x, weight, 1e-6, rounded))
        for before in (None, residual) if weight is not None else (None,):
            given = (x, weight, made[1], before, rounded)
            expected = liger.liger_rms_norm_backward(grad, *given)
            found, over = registered.liger_rms_norm_backward(grad, *given), grad.clone()
            assert_twins(found, expected)
            assert_twins(registered.liger_rms_norm_backward_(over, *given), expected)
            assert torch.equal(over, found[0])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu_is_its_twin(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate, up, grad = drawn(shape, dtype, 3)
    kept = gate.clone(), up.clone()
    assert_twins([registered.liger_swiglu(gate, up)], [liger.liger_swiglu(gate, up)])
    expected = liger.liger_swiglu_backward(grad, gate, up)
    assert_twins(registered.liger_swiglu_backward(grad, gate, up), expected)
    assert torch.equal(gate, kept[0]) and torch.equal(up, kept[1])  # it got copies
    assert_twins(registered.liger_swiglu_backward_(grad, gate, up), expected)
    assert_twins((gate, up), expected)


def test_other_layouts_are_read_as_they_are() -> None:
    x, gate, up, grad = (each.t() for each in drawn((8, 6), torch.float32, 4))
    weight = torch.rand(8)
    y, rstd = registered.liger_rms_norm(x, weight, 1e-6, False)
    assert_twins((y, rstd), liger.liger_rms_norm(x.contiguous(), weight, 1e-6, False))
    given = (weight, rstd, None, False)
    expected = liger.liger_rms_norm_backward(grad.contiguous(), x.contiguous(), *given)
    assert_twins(registered.liger_rms_norm_backward(grad, x, *given), expected)
    expected = liger.liger_swiglu_backward(grad, gate, up)
    assert_twins(registered.liger_swiglu_backward(grad, gate, up), expected)


def test_pytorch_agrees() -> None:
    """The differences that the manual names: of 64 rows of 256 normal numbers, in units of the largest result."""
    for dtype, most in ((torch.float32, 1e-6), (torch.bfloat16, 1.6e-2), (torch.float16, 2e-3)):
        x, gate, up, grad = (each.requires_grad_() for each in drawn((64, 256), dtype, 4))
        weight = drawn((256,), dtype, 1)[0].requires_grad_()
        norm = torch.nn.functional.rms_norm(x, (256,), weight, 1e-6)
        y, rstd = registered.liger_rms_norm(x, weight, 1e-6, False)
        product = torch.nn.functional.silu(gate) * up
        with torch.no_grad():
            of_norm = registered.liger_rms_norm_backward(grad, x, weight, rstd, None, False)
            of_gate = registered.liger_swiglu_backward(grad, gate, up)
        pairs = [(y, norm), (registered.liger_swiglu(gate, up), product)]
        pairs += zip(of_norm, torch.autograd.grad(norm, (x, weight), grad), strict=True)
        pairs += zip(of_gate, torch.autograd.grad(product, (gate, up), grad), strict=True)
        for mine, theirs in pairs:
            apart = (mine.detach().float() - theirs.detach().float()).abs().max() / theirs.detach().float().abs().max()
            assert apart <= most


def test_empty_rows() -> None:
    x = torch.empty(0, 5)
    y, rstd = registered.liger_rms_norm(x, torch.rand(5), 1e-6, False)
    assert (y.shape, rstd.shape) == ((0, 5), (0, 1))
    of_x, of_weight = registered.liger_rms_norm_backward(x, x, torch.rand(5), rstd, None, False)
    assert of_x.shape == (0, 5) and torch.equal(of_weight, torch.zeros(5))
    assert all(each.shape == (0, 5) for each in registered.liger_swiglu_backward_(x, x.clone(), x.clone()))


@pytest.mark.parametrize(
    ("name", "args", "error", "words"),
    [
        ("liger_swiglu", (torch.zeros(4), torch.zeros(3)), ValueError,
        r"one shape with rows of 1 to 65536 elements, got \[4\], \[3\]"),
        ("liger_swiglu", (torch.zeros(4).double(),) * 2, TypeError,
        "float32, float16 or bfloat16, got float64, float64"),
        ("liger_swiglu", (torch.zeros(1, 65537),) * 2, ValueError, r"got \[1, 65537\], \[1, 65537\]"),
        ("liger_swiglu_backward_", (torch.zeros(4, 3), torch.zeros(3, 4).t(), torch.zeros(4, 3)), ValueError,
        "must be contiguous"),
        (
            "liger_rms_norm_backward",
            (torch.zeros(2, 3), torch.zeros(2, 3), None, torch.ones(2, 1), torch.zeros(2, 3), False),
            ValueError,
            "adds a residual's gradient only where there is a weight",
        ),
    ],
)  # fmt: skip
def test_what_the_kernels_cannot_read_is_refused(name: str, args: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        getattr(registered, name)(*args)


def test_opcheck() -> None:
    x, gate, up, grad = drawn((4, 6), torch.float32, 4)
    weight, rstd = torch.rand(6), torch.rand(4, 1)
    parts = ["test_schema", "test_autograd_registration", "test_faketensor"]
    for name, args in {
        "liger_rms_norm": (x, weight, 1e-6, True),
        "liger_rms_norm_backward": (grad, x, weight, rstd, up, True),
        "liger_rms_norm_backward_": (grad, x, weight, rstd, up, True),
        "liger_swiglu": (gate, up),
        "liger_swiglu_backward": (grad, gate, up),
        "liger_swiglu_backward_": (grad, gate, up),
    }.items():
        torch.library.opcheck(getattr(registered, name).default, args, test_utils=parts)
