"""Replays a schedule of a small model and compares the step with plain PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import zoo
from training import Outcome, run, tensors, twin

from monet_like.capture.captured import Captured
from monet_like.capture.example_inputs import input_spec
from monet_like.capture.lower.step import capture
from monet_like.capture.precision import weights_layout
from monet_like.compiler.costs import measured_costs
from monet_like.compiler.request import Request
from monet_like.ir.program import Cost
from monet_like.ir.schedule import Schedule
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.plan.random_schedules import random_schedule
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.variants import admitted

FULL = "inplace_conv_multiway_newnode"
CPU = torch.device("cpu")
#: The test's own loss and its gradient, two numbers that are not the model's.
LOSS_BYTES = 8


def record_for(captured: Captured, schedule: Schedule, mode: str, example: zoo.Built) -> ScheduleRecord:
    """A record as the compiler would make it, for any schedule."""
    model, args, kwargs = example
    return ScheduleRecord(
        schedule, "test", tuple(map(input_spec, tensors((args, kwargs)))), mode, 1, captured.program.fingerprint,
        "cpu", {}, 0, 0.0, 0, 0.0, "none", "made", layout=weights_layout(model),
    )  # fmt: skip


def costs_of(captured: Captured, example: zoo.Built, mode: str, *, timed: bool) -> Mapping[str, Cost]:
    """Workspace measured; seconds too, or else a stand-in that grows with the bytes a task touches."""
    model, args, kwargs = example
    request = Request(model, (args, kwargs), mode, profile_batch=10**6)
    costs, _ = measured_costs(request, captured, CPU, timed=timed)
    if timed:
        return costs
    values = captured.program.values
    heavy = ("conv", "mm", "attention")
    seconds = {
        t.cost: sum(values[v].bytes for v in (*t.reads, *t.writes))
        * (20 if any(w in t.cost for w in heavy) else 1)
        / 1e10
        for t in captured.every_task()
    }
    return {key: Cost(seconds[key] + 1e-6, cost.workspace_bytes) for key, cost in costs.items() if key in seconds}


def replayed(
    example: zoo.Built, captured: Captured, schedule: Schedule, mode: str, *, measured: bool = True
) -> Outcome:
    model, args, kwargs = example
    record = record_for(captured, schedule, mode, example)
    wrapped = ScheduleWrapper(twin(model), record, example=(args, kwargs), captured=captured)
    return run(wrapped, args, kwargs, measured=measured)


def worst(plain: Outcome, other: Outcome) -> float:
    assert other.structure is plain.structure
    return max(plain.differences(other).values())


def assert_exact(example: zoo.Built, *modes: str) -> None:
    """Assert that steps that keep everything, or next to nothing, are plain PyTorch's to the bit."""
    plain, raw = run(twin(example[0]), *example[1:]), capture(*example)
    for mode in modes:
        captured = admitted(raw, mode)
        for seed, drop in enumerate((0.0, 0.9)):
            schedule = random_schedule(captured.program, seed, drop=drop)
            assert worst(plain, replayed(example, captured, schedule, mode, measured=False)) == 0.0, (mode, drop)
