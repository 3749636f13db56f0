"""Large gradients that are made last: less memory, the same bits, and plain PyTorch's step as it is."""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from training import run

from monet_like import ScheduleWrapper, auto_schedule
from monet_like.capture.captured import Captured
from monet_like.capture.lower.delayed_gradients import _least_bytes, find_delayed_gradients
from monet_like.capture.lower.step import capture
from monet_like.compiler.costs import to_profile
from monet_like.compiler.request import Request, captured_for, in_autograd_order
from monet_like.compiler.sources import Cached, Given
from monet_like.errors import InfeasibleError, ScheduleFileError
from monet_like.ir.program import FREE, Cost
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.ir.units import Budget
from monet_like.job.job import Job
from monet_like.plan.budgets import smallest_budget
from monet_like.replay.verify.steps import step_peak

CPU = torch.device("cpu")
LOSS_BYTES = 100  # of a few scalars
MODE = "inplace_multiway_newnode"  # equal to plain PyTorch to the bit


class Net(nn.Module):
    """As VGG-16: convolutions whose results are large, then a linear layer whose weight is."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)
        )
        self.large, self.last = nn.Linear(1024, 1024), nn.Linear(1024, 10)
        self.tied = tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.large(self.features(x).flatten(1)).relu()
        return self.last(self.large(x) if self.tied else x)


def images(batch: int = 32) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def names(captured: Captured) -> list[str]:
    return [captured.parameters[index][0] for index, _ in captured.parameter_gradients]


def solved(
    model: nn.Module, budget: float, made_last: tuple[str, ...] | None = None, batch: int = 32
) -> ScheduleRecord:
    request = Request(model, ((images(batch),), {}), MODE, solver="HIGHS", made_last=made_last)
    return Job(request, CPU, Given(None)).plan(Budget(share=budget)).record


@pytest.fixture(name="planned", scope="module")
def _planned() -> tuple[nn.Module, ScheduleRecord]:
    """A net, and its plan within 80 % of plain PyTorch's peak."""
    torch.manual_seed(0)
    model = Net()
    return model, solved(model, 0.8)


def test_a_large_weights_gradient_is_made_last_and_plain_pytorch_keeps_its_order() -> None:
    x = images()
    first, chosen = capture(Net(), (x,)), capture(Net(), (x,), made_last=None)
    assert first.made_last == ()
    assert chosen.made_last == ("large.weight",)
    assert names(first).index("large.weight") == 2
    assert names(chosen) == [n for n in names(first) if n != "large.weight"] + ["large.weight"]
    assert chosen.plain == first.plain
    named = capture(Net(), (x,), made_last=["large.weight", "no.such.weight"])
    assert named.made_last == chosen.made_last
    assert named.program == chosen.program


@pytest.mark.parametrize("is_opted_out", [False, True])
def test_one_trace_gives_the_step_in_autograds_order_too(is_opted_out: bool) -> None:
    """Field by field what a capture without delays gives; numbers of autograd's nodes go up from trace to trace."""
    model = Net()
    model.large.no_dropit = is_opted_out
    model.features[1].inplace = True  # plain PyTorch's calls are not those of the program
    wanted, found = (capture(model, (images(),), made_last=names) for names in ((), None))
    assert wanted.undelayed is None and found.undelayed is not None and found.undelayed.program != found.program
    for field in dataclasses.fields(Captured):
        one, other = (getattr(captured, field.name) for captured in (wanted, found.undelayed))
        if field.name == "autograd_nodes":
            one, other = one.keys(), other.keys()
        elif field.name == "reads":
            one, other = one.change(), other.change()
        elif field.name == "constants":
            one, other = one.tensors, other.tensors
        assert one == other, field.name
    assert bool(found.undelayed.no_dropit) == is_opted_out
    request = Request(model, ((images(),), {}), MODE)
    expected = captured_for(replace(request, made_last=()), request.example)
    assert in_autograd_order(request, captured_for(request, request.example)).program == expected.program
    assert in_autograd_order(request, expected) is expected


@pytest.mark.slow
def test_less_memory_is_needed_and_gradients_are_the_same_bits(planned: tuple[nn.Module, ScheduleRecord]) -> None:
    (plain, record), x = planned, images()
    with pytest.raises(InfeasibleError):
        solved(plain, 0.8, made_last=())
    assert record.made_last == ("large.weight",)
    wrapped, plain = ScheduleWrapper(copy.deepcopy(plain), record), copy.deepcopy(plain)
    assert set(run(plain, (x,), {}).differences(run(wrapped, (x,), {})).values()) == {0.0}
    assert step_peak(wrapped, ((x,), {}), CPU) == pytest.approx(record.peak_bytes, abs=LOSS_BYTES)
    assert step_peak(plain, ((x,), {}), CPU) == pytest.approx(record.plain_peak_bytes, abs=LOSS_BYTES)


@pytest.mark.slow
def test_the_file_says_which_and_a_smaller_batch_has_the_same(
    planned: tuple[nn.Module, ScheduleRecord], tmp_path: Path
) -> None:
    (plain, record), path = planned, tmp_path / "schedule.json"
    record.save(path)
    assert ScheduleRecord.load(path) == record
    wrapped, small = ScheduleWrapper(copy.deepcopy(plain), path), images(2)
    assert set(run(copy.deepcopy(plain), (small,), {}).differences(run(wrapped, (small,), {})).values()) == {0.0}

    content = json.loads(path.read_text())
    assert content.pop("made_last") == ["large.weight"]
    path.write_text(json.dumps(content))  # as files were before there was this
    assert ScheduleRecord.load(path) == replace(record, made_last=())
    with pytest.raises(ScheduleFileError, match="does not match the model"):
        ScheduleWrapper(Net(), path)
    path.write_text(json.dumps(content | {"made_last": [1]}))
    with pytest.raises(ScheduleFileError, match="damaged"):
        ScheduleRecord.load(path)


@pytest.mark.slow
def test_auto_schedule_replays_a_batch_at_which_it_would_choose_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MONET_LIKE_CACHE", str(tmp_path))
    torch.manual_seed(0)
    model, x, small = Net(), images(512), images(8)
    choices = [captured_for(Request(model, ((i,), {}), MODE), ((i,), {})).made_last for i in (x, small)]
    assert choices[0] != choices[1]
    wrapped = auto_schedule(model, x, memory_budget="90 %", effort="quick")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(small).sum().backward()
    assert len(wrapped.records) == 1


class Wide(nn.Module):
    """A linear layer that is called twice, a convolution, and a larger linear layer, whose gradient can be delayed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.features = nn.Linear(512, 512), nn.Sequential(nn.Conv2d(2, 64, 3, padding=1), nn.MaxPool2d(4))
        self.large = nn.Linear(1024, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.large(self.features(self.first(self.first(x)).view(-1, 2, 16, 16)).flatten(1))


@pytest.mark.slow
def test_a_gradient_with_a_large_workspace_is_not_delayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONET_LIKE_CACHE", str(tmp_path))
    model, x = Wide(), torch.randn(32, 512)
    captured = captured_for(Request(model, ((x,), {}), MODE), ((x,), {}))
    assert captured.made_last == ("large.weight",)
    costs = {task.cost: Cost(1e-4, 0) for task in captured.every_task()}
    values = captured.program.values
    ways = (way for slot in captured.program.slots for way in slot)
    large = {way.cost for way in ways if sum(values[v].bytes for v in way.writes) == 4 << 20}
    for workspace, delayed in ((0, captured.made_last), (8 << 20, ())):
        Cached.of(CPU).save(to_profile(costs | dict.fromkeys(large, Cost(1e-4, workspace)), CPU, ""))
        wrapped = auto_schedule(model, x, memory_budget="100 %", effort="full", time_limit_seconds=20)
        assert wrapped.record is not None
        assert wrapped.record.made_last == delayed
        with pytest.MonkeyPatch.context() as patch:  # another start takes it from the cache
            patch.setattr("monet_like.auto.whole_plan.prepare", None)
            again = auto_schedule(model, x, memory_budget="100 %", effort="full", time_limit_seconds=20)
        assert again.record == wrapped.record
        for path in tmp_path.glob("plan_*"):
            path.unlink()


def test_what_would_need_more_memory_stays_where_it_is() -> None:
    deep = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])  # made last, all their inputs would live to the end
    assert capture(deep, (torch.randn(8, 512, requires_grad=True),), made_last=None).made_last == ()
    tied = capture(Net(tied=True), (images(),), made_last=None)  # the sum of two gradients, each as large
    assert tied.made_last == ()
    many = capture(Net(), (images(512),), made_last=None)
    assert many.made_last == ()
    assert find_delayed_gradients(many.program, ()) == ()


@pytest.mark.parametrize("made_last", [(), None])
def test_the_least_memory_by_which_is_chosen_is_below_what_any_schedule_takes(
    made_last: tuple[str, ...] | None,
) -> None:
    captured = capture(Net(), (images(),), made_last=made_last)
    program = captured.program
    found = smallest_budget(program, {task.cost: FREE for task in program.every_task()})
    least = _least_bytes(program, [ways[0] for ways in program.slots])
    assert 0.6 * found.report.peak_bytes < least <= found.proven_bytes <= found.report.peak_bytes
