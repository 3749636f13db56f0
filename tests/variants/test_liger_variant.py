"""Liger's kernels beside ours: where they are offered, what they overwrite, their prices, and schedules without Liger.

Steps with the kernels themselves are in `liger_steps`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from liger_decoders import SHAPE, by_liger, small_decoder, wrapped
from replays import CPU, FULL, record_for
from torch import nn
from training import run, twin
from zoo import Built, decoder

from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.compiler.request import Request
from monet_like.compiler.sources import Given
from monet_like.errors import ScheduleFileError
from monet_like.ir.program import REFUSED
from monet_like.ir.simulate import simulate
from monet_like.job.job import Job
from monet_like.ops import liger
from monet_like.plan.baseline import store_all
from monet_like.profile import profiler
from monet_like.profile.devices import DEVICES
from monet_like.profile.roofline import roofline
from monet_like.profile.task_inputs import Inputs
from monet_like.profile.work import touched_bytes, works_of
from monet_like.replay.checks import twins
from monet_like.replay.checks.twins import twins_taken, warn_of_liger, warn_of_twins, workspaces_of_twins
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.runtime.codegen import Block, compile_block
from monet_like.variants import admitted

ROWS, LONG = 2 * 7, 4  # of the small decoder; bytes of float32


@pytest.fixture(name="example", scope="module")
def _example() -> Built:
    return small_decoder()


@pytest.fixture(name="plain", scope="module")
def _plain(example: Built) -> Captured:
    model, args, _ = example
    return capture(model, args)


@pytest.fixture(name="offered", scope="module")
def _offered(plain: Captured) -> Captured:
    return admitted(plain, FULL, liger=True)


def variants(captured: Captured) -> Counter[str]:
    return Counter(t.variant for t in captured.program.every_task() if t.variant.startswith("liger_"))


def test_what_is_offered(offered: Captured) -> None:
    norms, mlps = 3, 1
    assert variants(offered) == {
        "liger_rms_norm.train": norms,
        "liger_rms_norm.apply": norms,
        "liger_rms_norm.backward": norms,
        "liger_rms_norm.backward_in_place": norms,
        "liger_swiglu": mlps,
        "liger_swiglu.backward": mlps,
        "liger_tiled_mlp.1": mlps,
        **{f"liger_tiled_mlp.{tiles}": 2 * mlps for tiles in (4, 16)},  # forward and backward
        **{f"liger_tiled_mlp_from_products.{tiles}": mlps for tiles in (1, 4, 16)},
    }
    assert {t.word for t in offered.program.every_task() if t.variant.startswith("liger_")} == {"conv"}


def test_without_liger_the_program_is_as_it_was(plain: Captured, offered: Captured) -> None:
    without = admitted(plain, FULL)  # not installed, or not for this device
    assert not variants(without)
    assert without.program.fingerprint == admitted(plain, FULL, liger=False).program.fingerprint
    program = offered.program
    tasks = tuple(task for task in program.tasks if not task.variant.startswith("liger_"))
    slots = tuple(tuple(way for way in ways if not way.variant.startswith("liger_")) for ways in program.slots)
    assert replace(program, tasks=tasks, slots=slots) == without.program
    assert program.fingerprint != without.program.fingerprint


def test_words_that_admit_it(plain: Captured) -> None:
    assert not variants(admitted(plain, "inplace_multiway_newnode", liger=True))
    found = variants(admitted(plain, "conv", liger=True))
    assert found["liger_rms_norm.backward"] == 3 and not found["liger_rms_norm.backward_in_place"]


class _Narrow(nn.Module):
    """A gate whose MLP no tiles are for, and a norm of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 5), nn.Linear(8, 5), nn.Linear(5, 8)
        self.norm = nn.RMSNorm((4, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        result: torch.Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return result


def test_what_liger_cannot_do_is_left_to_ours() -> None:
    model, args = _Narrow(), (torch.randn(2, 4, 8),)
    captured = capture(model, args)
    assert variants(admitted(captured, FULL, liger=True)) == {"liger_swiglu": 1, "liger_swiglu.up": 1}
    assert variants(admitted(captured, "conv", liger=True)) == {"liger_swiglu": 1}  # .up is for multiway
    wide = capture(model.double(), (args[0].double(),))
    assert not variants(admitted(wide, FULL, liger=True))


def calls_of(captured: Captured, variant: str) -> Counter[str]:
    task = next(way for ways in captured.program.slots for way in ways if way.variant == variant)
    return Counter(call.op.split(".")[1] for call in task.calls if "liger_" in call.op)


def test_swiglu_overwrites_a_tiles_own_tensors_alone(offered: Captured) -> None:
    for tiles in (1, 4, 16):
        own = calls_of(offered, f"liger_tiled_mlp.{tiles}")
        assert own == {"liger_swiglu": tiles, "liger_swiglu_backward_": tiles}
        kept = calls_of(offered, f"liger_tiled_mlp_from_products.{tiles}")
        assert kept == {"liger_swiglu": tiles, "liger_swiglu_backward": tiles}
    assert calls_of(offered, "liger_swiglu.backward") == {"liger_swiglu_backward": 1}


def test_a_norm_overwrites_no_gradient_that_is_read_later(offered: Captured) -> None:
    program, seen = offered.program, 0
    for slot, ways in enumerate(program.slots):
        for way in ways:
            if way.variant == "liger_rms_norm.backward_in_place":
                later = {value for others in program.slots[slot + 1 :] for other in others for value in other.reads}
                assert way.overwrites is not None and way.overwrites not in later
                assert program.values[way.overwrites].bytes == program.values[way.writes[0]].bytes
                seen += 1
    assert seen == 3


class _Returning(nn.Module):
    """The gradient that comes to the norm is the step's own tangent."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.RMSNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.first(x))
        return result


def test_a_tangent_is_not_overwritten() -> None:
    found = variants(admitted(capture(_Returning(), (torch.randn(3, 8),)), FULL, liger=True))
    assert found["liger_rms_norm.backward"] == 1 and not found["liger_rms_norm.backward_in_place"]


@pytest.mark.slow
def test_prices(offered: Captured) -> None:
    """Bytes as ours, zeros that are written first, copies of gate and up; sums of every multiprocessor as workspace."""
    by_variant: dict[str, Any] = {}
    for task in offered.program.every_task():
        by_variant.setdefault(task.variant, task)
    stream, hidden = ROWS * SHAPE.width * LONG, ROWS * SHAPE.hidden * LONG
    weight, rstd = SHAPE.width * LONG, ROWS * LONG
    train, apply = by_variant["liger_rms_norm.train"], by_variant["liger_rms_norm.apply"]
    assert touched_bytes(offered, train) == 2 * stream + weight + rstd
    assert touched_bytes(offered, apply) == 2 * stream + weight  # the statistic is made, and nobody wants it
    last = by_variant["liger_rms_norm.backward"]  # the first in the backward: without a residual
    ours = touched_bytes(offered, by_variant["rms_norm.backward"])
    assert touched_bytes(offered, last) == ours + stream
    assert touched_bytes(offered, by_variant["liger_rms_norm.backward_in_place"]) == ours - stream
    assert touched_bytes(offered, by_variant["liger_swiglu"]) == 3 * hidden
    gates = touched_bytes(offered, by_variant["liger_swiglu.backward"])
    assert gates - touched_bytes(offered, by_variant["swiglu.backward"]) == 4 * hidden
    limits = DEVICES["a100"]
    costs = roofline(offered, limits)
    assert max(need.partial_sums_bytes for need in works_of(offered)[last.cost].needs) == weight
    assert costs[last.cost].workspace_bytes == (limits.multiprocessors + 1) * weight
    assert costs[train.cost].workspace_bytes == 0 < costs[train.cost].seconds


def test_where_liger_is_missing_twins_run(example: Built, offered: Captured) -> None:
    model, args, kwargs = example
    schedule = by_liger(offered, "liger_tiled_mlp.4", in_place=True)
    assert len(twins_taken(offered.program, schedule, "cpu")) == 4
    outcome = run(wrapped(example, offered, schedule), args, kwargs)
    assert 0.0 < max(run(twin(model), args, kwargs).differences(outcome).values()) <= 1e-5


@pytest.mark.slow(but=["bfloat16"])
@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
def test_both_kinds_of_norm_in_16_bits(kind: str) -> None:
    """PyTorch's and Hugging Face's, which rounds the rows; under autocast three of the four have results of their
    input's dtype.
    """
    model, args, kwargs = decoder(rows=6, width=8)
    if kind == "bfloat16":
        model, args = model.bfloat16(), tuple(each.bfloat16() for each in args)
    with torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else nullcontext():
        captured = admitted(capture(model, args), FULL, liger=True)
        made = [call for t in captured.program.tasks for call in t.calls if t.variant == "liger_rms_norm.train"]
        rounded = [call.args[-1] for call in made if "liger" in call.op]
        assert rounded == ([False, True, False, False] if kind == "bfloat16" else [False] * 3)
        schedule, example = by_liger(captured, in_place=True), (model, args, kwargs)
        scheduled = wrapped(example, captured, schedule, autocast=kind == "autocast", anew=False)
        plain, outcome = (run(each, args, kwargs) for each in (twin(model), scheduled))
    assert 0.0 < max(plain.differences(outcome).values()) <= 3e-2


@pytest.mark.slow
def test_a_file_without_liger_is_for_the_program_without(example: Built, plain: Captured, offered: Captured) -> None:
    model, args, kwargs = example
    without = admitted(plain, FULL, liger=False)
    record = record_for(without, store_all(without.program), FULL, example)
    outcome = run(ScheduleWrapper(twin(model), record), args, kwargs)
    assert max(run(twin(model), args, kwargs).differences(outcome).values()) == 0.0
    record = record_for(offered, store_all(offered.program), FULL, example)
    with pytest.raises(ScheduleFileError, match="does not match the model"):
        ScheduleWrapper(twin(model), record)  # its versions name no Liger


def test_twins_that_exceed_the_budget_are_refused(example: Built, offered: Captured) -> None:
    model, args, kwargs = example
    schedule = by_liger(offered)
    needed = simulate(offered.program, schedule, workspaces_of_twins(offered, "cpu")).peak_bytes
    versions = {"liger_kernel": "0.8.5"}
    record = replace(
        record_for(offered, schedule, FULL, example), versions=versions, budget_bytes=needed, peak_bytes=needed - 1
    )
    ScheduleWrapper(model, record, example=(args, kwargs), captured=offered)
    words = (
        r"this schedule needs Liger's kernels \(liger-kernel 0\.8\.5\): with the plain-torch twins, which run here "
        r"on cpu.*more than its budget.*pip install 'monet_like\[liger\]'.*plan here"
    )
    with pytest.raises(ScheduleFileError, match=words):
        ScheduleWrapper(model, replace(record, budget_bytes=needed - 1), example=(args, kwargs), captured=offered)


def test_a_gpu_without_liger_is_said_once(offered: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(twins, "_warned_of_liger", False)
    monkeypatch.setattr(twins.ops, "runs_here", lambda op, _: "liger_" not in op)  # our own kernels are there
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_liger(offered.program, store_all(offered.program), cuda, stacklevel=1)
        warn_of_liger(offered.program, by_liger(offered), CPU, stacklevel=1)
        warn_of_twins(offered, cuda, stacklevel=1)
    with pytest.warns(UserWarning, match=r"takes Liger's kernels, which are not installed here.*monet_like\[liger\]"):
        warn_of_liger(offered.program, by_liger(offered), cuda, stacklevel=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_liger(offered.program, by_liger(offered), cuda, stacklevel=1)  # once in a process


def test_a_kernel_that_does_not_run_is_refused(offered: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Triton has no registers for it: no plan takes it, and planning goes on."""

    def compiled(block: Block, name: str, *rest: Any) -> Any:
        run = compile_block(block, name, *rest)
        by_liger = any("liger_" in call.op for task in block.tasks for call in task.calls)

        def failing(given: list[Any]) -> Any:
            raise RuntimeError("Triton cannot run Liger's kernel here (OutOfResources)")

        return failing if by_liger else run

    monkeypatch.setattr(profiler, "compile_block", compiled)
    tasks = {t.cost: t for t in offered.program.tasks if t.variant in ("swiglu", "liger_swiglu")}
    costs = profiler.measure(tasks, Inputs(offered, CPU), timed=False)
    assert {tasks[key].variant: cost == REFUSED for key, cost in costs.items()} == {
        "swiglu": False,
        "liger_swiglu": True,
    }


@pytest.mark.slow
def test_a_plan_by_estimates_is_loaded_where_there_is_no_liger(example: Built) -> None:
    model, args, kwargs = example
    request = Request(model, (args, kwargs), FULL, strategy="heuristic", liger=True)
    record = Job(request, CPU, Given(DEVICES["cpu"])).plan("95%").record
    assert record.versions["liger_kernel"] == (liger.version() or "none")
    scheduled = ScheduleWrapper(twin(model), replace(record, budget_bytes=2 * record.budget_bytes))
    assert max(run(twin(model), args, kwargs).differences(run(scheduled, args, kwargs)).values()) <= 1e-5
    without = Job(replace(request, liger=None), CPU, Given(DEVICES["cpu"])).plan("100%").record
    assert "liger_kernel" not in without.versions
