"""Fused SwiGLU and its gradients: the bits of PyTorch's operators one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_inputs import FLOATS
from torch import Tensor
from torch.nn.functional import silu

#: Odd, empty, one element; ATen's vectors begin anew where a thread's elements do, of which 32,768 are the fewest.
SHAPES = [(3, 5, 17), (0, 4), (1,), (32768,), (32769,), (3, 33000)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[list[Tensor]]:
    """Gradient, gate and up: contiguous, of another order, and with gaps."""
    drawn = [torch.randn(shape).mul(scale).to(dtype) for scale in (1, 5, 2)]
    yield drawn
    yield [each.t().contiguous().t() if each.dim() == 2 else each.flip(0) for each in drawn]
    yield [torch.stack((each, each), -1)[..., 1] for each in drawn]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_all_results_are_pytorchs_bit_for_bit(
    impl: Any, shape: tuple[int, ...], dtype: torch.dtype, threads: int
) -> None:
    torch.set_num_threads(threads)
    for grad, gate, up in inputs(shape, dtype):
        gate, up = (each.detach().contiguous().requires_grad_() for each in (gate, up))
        expected = silu(gate) * up
        wanted = torch.autograd.grad(expected, (gate, up), grad.contiguous())
        with torch.no_grad():
            assert torch.equal(impl("swiglu")(gate, up), expected)
            found = impl("swiglu_backward")(grad, gate, up)
        assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(found, wanted, strict=True))


def test_infinities_and_nan_are_pytorchs(impl: Any) -> None:
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e38, -1e38, 1e-40, 88.8, -88.8])
    gate, up = (each.flatten().contiguous() for each in torch.meshgrid(special, special, indexing="ij"))
    expected = silu(gate) * up
    assert torch.equal(impl("swiglu")(gate, up).view(torch.int32), expected.view(torch.int32))
    of_gate, of_up = impl("swiglu_backward")(torch.ones_like(gate), gate, up)
    assert torch.equal(of_up.view(torch.int32), silu(gate).view(torch.int32))
    wanted = torch.ops.aten.silu_backward(up, gate)
    assert torch.equal(of_gate.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize(
    ("up", "words"),
    [
        (torch.zeros(3), r"swiglu: up must have gate's shape \[4\], got \[3\]"),
        (torch.zeros(4, dtype=torch.float64), "swiglu: up must be Float like gate, got Double"),
    ],
)
def test_other_tensors_are_refused(up: Tensor, words: str) -> None:
    import monet_like.ops

    monet_like.ops.load()
    with pytest.raises(RuntimeError, match=words):
        torch.ops.monet_like.swiglu(torch.zeros(4), up)
