"""Convolutions by cuDNN's algorithms: their plain-torch references, and what happens where cuDNN refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import monet_like.ops
from monet_like.ops import convolution
from monet_like.runtime.operators import or_pytorchs_own, without_fallback

FORMATS = (torch.contiguous_format, torch.channels_last)
monet_like.ops.load()
registered, aten = torch.ops.monet_like, torch.ops.aten


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (((2, 4, 9, 8), (6, 4, 3, 3)), ([1, 1], [1, 1], [1, 1], 1)),
        (((2, 4, 9, 8), (6, 2, 3, 2)), ([2, 1], [0, 2], [1, 2], 2)),
        (((3, 4, 7, 5), (4, 1, 5, 5)), ([2, 2], [2, 2], [1, 1], 4)),
        (((1, 1, 1, 1), (2, 1, 1, 1)), ([1, 1], [0, 0], [1, 1], 1)),
    ],
)
def test_twins_are_pytorchs_convolution(sizes: Any, options: Any, dtype: torch.dtype) -> None:
    """To the bit, laid out as asked, whatever the layout of what is given."""
    torch.manual_seed(0)
    plain = (*options[:3], False, [0, 0], options[3])
    for given in FORMATS:
        x, weight = (torch.randn(size).to(dtype).to(memory_format=given) for size in sizes)
        bias = torch.randn(sizes[1][0]).to(dtype)
        y = aten.convolution(x, weight, bias, *plain)
        grad = torch.randn_like(y)
        of_x, of_weight, _ = aten.convolution_backward(grad, x, weight, None, *plain, [True, True, False])
        for layout in FORMATS:
            rest = (*options, layout is torch.channels_last)
            for algorithm in convolution.FORWARD_ALGORITHMS:
                made = registered.cudnn_convolution(x, weight, bias, *rest, algorithm)
                assert torch.equal(made, y) and made.is_contiguous(memory_format=layout)
            made = registered.cudnn_convolution_backward_input(grad, weight, x.shape, *rest, "fft_tiling")
            assert torch.equal(made, of_x) and made.is_contiguous(memory_format=layout)
            made = registered.cudnn_convolution_backward_weight(grad, x, weight.shape, *rest, "3")
            assert torch.equal(made, of_weight) and made.is_contiguous(memory_format=layout)


def test_unknown_algorithms_are_named() -> None:
    x, weight = torch.randn(1, 1, 3, 3), torch.randn(1, 1, 3, 3)
    with pytest.raises(ValueError, match="no algorithm 'direct'; choose one of implicit_gemm, implicit_precomp_gemm"):
        registered.cudnn_convolution(x, weight, None, [1, 1], [0, 0], [1, 1], 1, False, "direct")
    with pytest.raises(ValueError, match="no algorithm 'winograd'; choose one of 0, 1, 3, fft"):
        registered.cudnn_convolution_backward_weight(x, x, [1, 1, 1, 1], [1, 1], [0, 0], [1, 1], 1, False, "winograd")


def test_what_cudnn_has_not_is_done_by_pytorch_but_not_measured() -> None:
    """A smaller batch or another card must not stop a schedule that was planned with an algorithm."""
    asked: list[str] = []

    def op(x: torch.Tensor, algorithm: str) -> torch.Tensor:
        asked.append(algorithm)
        if algorithm == "gemm":
            return x + 1
        is_refusal = algorithm == "fft"
        raise RuntimeError(f"cuDNN's algorithm fft {'is not to be had for these shapes' if is_refusal else 'broke'}")

    run = or_pytorchs_own(op, lambda x, algorithm: x + 2)
    x = torch.zeros(1)
    assert float(run(x, "gemm")) == 1 and float(run(x, "fft")) == 2
    with pytest.raises(RuntimeError, match="broke"):
        run(x, "winograd")
    assert asked == ["gemm", "fft", "winograd"]
    name = "monet_like.cudnn_convolution.default"
    assert without_fallback()[name] is registered.cudnn_convolution.default
    source = (Path(__file__).parents[2] / "csrc" / "cudnn" / "convolution.cpp").read_text()
    assert "is not to be had for these shapes" in source
