"""Liger's kernels on a GPU: their twins' results, and whole steps of the memory that is predicted.

`test_liger_cuda` runs this in a process of its own, where programs have Liger's ways.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from liger_decoders import by_liger, small_decoder
from replays import FULL, record_for
from torch import Tensor
from training import run, twin

import monet_like.ops
from monet_like.capture.lower.step import capture
from monet_like.compiler.costs import measured_costs
from monet_like.compiler.request import Request
from monet_like.ir.simulate import simulate
from monet_like.ops import liger, runs_here
from monet_like.profile.devices import device_name
from monet_like.replay.verify.steps import step_peak
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.variants import admitted

monet_like.ops.load()
registered = torch.ops.monet_like
CUDA = torch.device("cuda", 0)
# Largest error allowed, as a fraction of the largest element of the result.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def test_liger_runs_here() -> None:
    names = [name for name in monet_like.ops.python_operators() if name.startswith("liger_")]
    assert len(names) == 6 and all(runs_here(f"monet_like.{name}.default", "cuda") for name in names)


def assert_twins(found: Any, expected: Any, terms: float = 1e-6) -> None:
    """``terms``: the largest of what is summed up, where sums cancel."""
    for mine, other in zip(found, expected, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (other.dtype, other.shape, other.stride())
        scale = max(float(other.double().abs().max()), terms)
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
        terms = float(grad.abs().max() * made[1].abs().max())  # of a row of one element nothing is left
        assert_twins(registered.liger_rms_norm_backward(grad, *given), expected, terms)
        assert_twins(registered.liger_rms_norm_backward_(grad.clone(), *given), expected, terms)
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
    record = replace(
        record_for(captured, schedule, FULL, (model, args, kwargs)),
        device=device_name(CUDA),
        versions={liger.PACKAGE: liger.version()},
    )
    scheduled = ScheduleWrapper(twin(model), record, example=(args, kwargs), captured=captured)
    differences = run(twin(model), args, kwargs).differences(run(scheduled, args, kwargs))
    assert 0.0 < max(differences.values()) <= 1e-4
    predicted = simulate(captured.program, schedule, costs).peak_bytes
    assert abs(step_peak(scheduled, (args, kwargs), CUDA) - predicted) <= 0.01 * predicted
