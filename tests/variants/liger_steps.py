"""Steps of a decoder with Liger's kernels, by Triton's interpreter: `test_liger` runs this in a process of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from interpreted_triton import prepare
from liger_decoders import by_liger, small_decoder, wrapped
from replays import CPU, FULL, LOSS_BYTES, costs_of
from torch import nn
from training import Outcome, run, twin
from zoo import Built

from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.compiler.request import Request
from monet_like.compiler.sources import Given
from monet_like.ir.program import Cost
from monet_like.ir.simulate import simulate
from monet_like.job.job import Job
from monet_like.profile.settings import settings_of
from monet_like.replay.checks.twins import twins_taken
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.variants import admitted

prepare()
MLPS = ("liger_swiglu.backward", "liger_tiled_mlp.1", "liger_tiled_mlp.4", "liger_tiled_mlp_from_products.4")


@pytest.fixture(name="priced", scope="module")
def _priced() -> tuple[Built, Captured, Mapping[str, Cost], Outcome]:
    """The decoder, its program, workspaces as measured, and plain PyTorch's step."""
    example = small_decoder()
    model, args, kwargs = example
    captured = admitted(capture(model, args), FULL)
    return example, captured, costs_of(captured, example, FULL, timed=False), run(twin(model), args, kwargs)


@pytest.mark.parametrize(("of_mlp", "in_place"), [(MLPS[0], False), *((of_mlp, True) for of_mlp in MLPS[1:])])
def test_a_step_is_pytorchs_and_takes_the_memory_that_is_predicted(
    priced: tuple[Built, Captured, Mapping[str, Cost], Outcome], of_mlp: str, in_place: bool
) -> None:
    example, captured, costs, plain = priced
    _, args, kwargs = example
    schedule = by_liger(captured, of_mlp, in_place=in_place)
    program = captured.program
    tasks = [program.tasks[place] for places in (schedule.forward, *schedule.again) for place in places]
    tasks += [ways[way] for ways, way in zip(program.slots, schedule.ways, strict=True)]
    taken = Counter(call.op.split(".")[1] for task in tasks for call in task.calls if "liger_" in call.op)
    tiles = 1 if of_mlp in MLPS[:2] else 4
    own = of_mlp.startswith("liger_tiled_mlp.")
    assert taken.pop("liger_rms_norm_backward_" if in_place else "liger_rms_norm_backward") == 3
    assert taken.pop("liger_swiglu_backward_" if own else "liger_swiglu_backward") == tiles
    assert taken.pop("liger_rms_norm") > 3  # some of them again
    assert set(taken) == {"liger_swiglu"} and not twins_taken(program, schedule, "cpu")
    scheduled = wrapped(example, captured, schedule, anew=of_mlp == MLPS[0])
    outcome = run(scheduled, args, kwargs, measured=True)
    assert 0.0 < max(plain.differences(outcome).values()) <= 1e-5
    report = simulate(program, schedule, costs)
    assert program.resident_bytes + outcome.rise_bytes - LOSS_BYTES == report.peak_bytes


def test_a_step_in_16_bits() -> None:
    example = small_decoder(torch.bfloat16)
    model, args, kwargs = example
    captured = admitted(capture(model, args), FULL)
    plain = run(twin(model), args, kwargs)
    scheduled = wrapped(example, captured, by_liger(captured, MLPS[2], in_place=True), anew=False)
    outcome = run(scheduled, args, kwargs)
    assert max(plain.differences(outcome).values()) <= 6e-2


def test_a_plan_says_which_liger_it_was_made_with() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16), nn.Linear(16, 16)).train()
    args, kwargs = (torch.randn(7, 16),), {}
    request = Request(model, (args, kwargs), FULL, strategy="heuristic")
    record = Job(request, CPU, Given(None)).plan("100%").record
    assert record.versions["liger_kernel"] == settings_of(CPU)["liger_kernel"] != ""
    scheduled = ScheduleWrapper(twin(model), record)
    assert max(run(twin(model), args, kwargs).differences(run(scheduled, args, kwargs)).values()) <= 1e-5
    without = Job(replace(request, liger=False), CPU, Given(None)).plan("100%").record
    assert "liger_kernel" not in without.versions and without.fingerprint != record.fingerprint
    scheduled = ScheduleWrapper(twin(model), without)
    assert max(run(twin(model), args, kwargs).differences(run(scheduled, args, kwargs)).values()) <= 1e-5


def test_shorter_sequences_take_the_same_ways(
    priced: tuple[Built, Captured, Mapping[str, Cost], Outcome],
) -> None:
    example, captured, _, _ = priced
    model, args, kwargs = example
    scheduled = wrapped(example, captured, by_liger(captured, MLPS[2]), anew=False)
    shorter = tuple(each[:, :5].contiguous() for each in args)
    assert max(run(twin(model), shorter, kwargs).differences(run(scheduled, shorter, kwargs)).values()) <= 1e-5
