"""Granularity by hand: schedules obey marks, and what a model computes does not change."""

from __future__ import annotations

import pytest
import torch
from replays import record_for
from torch import nn
from training import run, twin

import monet_like
from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.compiler.request import Request
from monet_like.compiler.sources import Given
from monet_like.errors import UsageError
from monet_like.job.job import Job
from monet_like.plan import store_all
from monet_like.plan.random_schedules import random_schedule
from monet_like.profile.devices import DEVICES
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.variants import admitted

FULL = "inplace_conv_multiway_newnode"
CPU = torch.device("cpu")


class Layer(nn.Module):
    """A block with everything that variants look for; marked as a whole if there is a mark."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.kind = nn.Dropout(0.2), mark

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.drop(self.norm(self.conv(x)).relu()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.kind:
            return x + self.inner(x)
        with monet_like.mark(self.kind):
            made = self.inner(x)
        return x + made


def net(*marks: str) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), *map(Layer, marks), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)
    )


def captured_of(model: nn.Module, mode: str = FULL) -> tuple[Captured, torch.Tensor]:
    x = torch.randn(4, 3, 12, 12)
    return admitted(capture(model, (x,)), mode), x


def marked(captured: Captured, kind: str) -> set[int]:
    return {value for value, (found, _) in captured.marks.items() if found == kind}


@pytest.mark.slow(but=["inplace_multiway_newnode"])
@pytest.mark.parametrize("mode", ["normal", "inplace_multiway_newnode"])
def test_schedules_that_obey_marks_are_exact(mode: str) -> None:
    model = net("keep", "", "recompute", "together", "").train()
    captured, x = captured_of(model, mode)
    plain = run(twin(model), (x,), {})
    for seed in range(4):
        schedule = random_schedule(captured.program, seed, drop=0.7) if seed else store_all(captured.program)
        record = record_for(captured, schedule, mode, (model, (x,), {}))
        known = captured if seed else None  # the first is captured as from a file
        wrapped = ScheduleWrapper(twin(model), record, example=((x,), {}), captured=known)
        assert max(plain.differences(run(wrapped, (x,), {})).values()) == 0.0


def test_what_is_kept_is_never_run_again() -> None:
    free, _ = captured_of(net("", "").train())
    captured, _ = captured_of(net("keep", "").train())
    kept = marked(captured, "keep")
    assert len(kept) >= 6
    again = [task for task in captured.program.tasks if task.runs != "first"]
    assert all(kept.isdisjoint(task.writes) for task in again)
    assert any(not kept.isdisjoint(task.writes) for task in free.program.tasks if task.runs != "first")


def test_what_is_to_be_recomputed_is_not_there_when_the_backward_begins() -> None:
    captured, _ = captured_of(net("recompute", "recompute").train())
    program = captured.program
    made_anew = {
        program.values[v].name.removesuffix(".anew")
        for v in range(len(captured.metas))
        if ".anew" in program.values[v].name
    }
    chosen = {v for v in marked(captured, "recompute") if program.values[v].name in made_anew}
    assert len(chosen) >= 8
    assert all(chosen.isdisjoint(way.reads) for ways in program.slots for way in ways)
    assert all(chosen.isdisjoint(task.reads) for task in program.tasks if task.runs != "first")
    free, _ = captured_of(net("", "").train())
    held = store_all(program)
    assert held.rerun_count > 0 == store_all(free.program).rerun_count


def test_what_is_together_is_run_again_by_one_task() -> None:
    captured, _ = captured_of(net("together", "together").train())
    values = marked(captured, "together")
    again = [task for task in captured.program.tasks if task.runs != "first" and not values.isdisjoint(task.writes)]
    assert [task.variant for task in again] == ["together", "together"]
    assert all(len(task.writes) > 2 and len(task.calls) > 3 for task in again)


@pytest.mark.slow
def test_planned_within_a_budget() -> None:
    model = net("keep", "", "recompute", "", "together", "").train()
    x = torch.randn(64, 3, 24, 24)
    request = Request(model, ((x,), {}), "inplace_multiway_newnode", solver="HIGHS", time_limit_seconds=5)
    found = Job(request, CPU, Given(DEVICES["cpu"])).plan("80%")
    assert found.record.peak_bytes <= 0.8 * found.ready.plain.peak_bytes
    wrapped = ScheduleWrapper(twin(model), found.record)
    assert max(run(twin(model), (x,), {}).differences(run(wrapped, (x,), {})).values()) == 0.0


def test_a_module_is_marked_for_good() -> None:
    model = net("", "").train()
    layer = model[1]
    monet_like.mark("together", layer)
    captured, x = captured_of(model)
    assert len(set(captured.marks.values())) == 1
    other = net("", "").train()
    other.load_state_dict(model.state_dict())
    record = record_for(captured, store_all(captured.program), FULL, (model, (x,), {}))
    with pytest.raises(monet_like.errors.ScheduleFileError, match="does not match the model"):
        ScheduleWrapper(other, record)
    monet_like.mark("together", other[1])
    ScheduleWrapper(other, record)


def test_marks_change_nothing_outside_of_a_capture() -> None:
    torch.manual_seed(0)
    model = net("keep", "recompute", "together")
    plain = net("", "", "")
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 12, 12)
    assert max(run(plain, (x,), {}).differences(run(model, (x,), {})).values()) == 0.0


def test_unknown_marks_are_refused() -> None:
    with pytest.raises(UsageError, match="mark 'forget' is unknown; give keep, recompute or together"):
        monet_like.mark("forget")
