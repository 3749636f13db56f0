"""Liger's kernels on a GPU: their twins' results, and whole steps of the memory that is predicted. Skipped without one."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from liger_decoders import by_liger, small_decoder, wrapped
from replays import FULL
from torch import Tensor
from training import run, twin

import monet_like.ops
from monet_like.capture.lowering import capture
from monet_like.compiler.costs import measured_costs
from monet_like.compiler.request import Request
from monet_like.ir.simulate import simulate
from monet_like.ops import liger
from monet_like.replay.verify import step_peak
from monet_like.variants import admitted

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)
if not liger.version():
    pytest.skip("liger-kernel 0.8 is not installed: pip install 'monet_like[liger]'", allow_module_level=True)

monet_like.ops.load()
registered = torch.ops.monet_like
CUDA = torch.device("cuda", 0)
# Largest error allowed, as a fraction of the largest element of the result.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def assert_twins(found: Any, expected: Any) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (other.dtype, other.shape, other.stride())
        scale = max(float(other.double().abs().max()), 1e-6)
        assert float((mine.double() - other.double()).abs().max()) <= ROUNDING[mine.dtype] * scale


def drawn(shape: tuple[int, ...], dtype: torch.dtype, count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, device=CUDA).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", liger.FLOATS)
@pytest.mark.parametrize("shape", [(3, 5, 37), (1, 1), (777, 4096)])
def test_kernels_are_their_twins(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, grad, residual, gate, up = drawn(shape, dtype, 5)
    weight = torch.rand(shape[-1], device=CUDA).to(dtype)
    for rounded, before in product((False, True), (None, residual)):
        made = registered.liger_rms_norm(x, weight, 1e-6, rounded)
        assert_twins(made, liger.liger_rms_norm(x, weight, 1e-6, rounded))
        given = (x, weight, made[1], before, rounded)
        expected = liger.liger_rms_norm_backward(grad, *given)
        assert_twins(registered.liger_rms_norm_backward(grad, *given), expected)
        assert_twins(registered.liger_rms_norm_backward_(grad.clone(), *given), expected)
    assert_twins([registered.liger_swiglu(gate, up)], [liger.liger_swiglu(gate, up)])
    expected = liger.liger_swiglu_backward(grad, gate, up)
    assert_twins(registered.liger_swiglu_backward(grad, gate, up), expected)
    assert_twins(registered.liger_swiglu_backward_(grad, gate, up), expected)
    assert_twins((gate, up), expected)


@pytest.mark.parametrize("of_mlp", ["liger_swiglu.backward", "liger_tiled_mlp.4"])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_step_takes_the_memory_that_is_predicted(of_mlp: str, in_place: bool) -> None:
    model, args, kwargs = small_decoder(length=128)
    model, args = model.to(CUDA), tuple(each.to(CUDA) for each in args)
    captured = admitted(capture(model, args), FULL)
    costs, _ = measured_costs(Request(model, (args, kwargs), FULL, profile_batch=10**6), captured, CUDA, timed=False)
    schedule = by_liger(captured, of_mlp, in_place=in_place)
    scheduled = wrapped((model, args, kwargs), captured, schedule, device=CUDA)
    differences = run(twin(model), args, kwargs).differences(run(scheduled, args, kwargs))
    assert 0.0 < max(differences.values()) <= 1e-4
    predicted = simulate(captured.program, schedule, costs).peak_bytes
    assert abs(step_peak(scheduled, (args, kwargs), CUDA) - predicted) <= 0.01 * predicted
