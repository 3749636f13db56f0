"""Calls of a whole model that its first plan does not serve: planned in the first plan's bytes, or plain PyTorch's."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from replays import record_for
from torch import nn
from training import twin

import monet_like
from monet_like.auto import auto_schedule as auto
from monet_like.auto.auto_schedule import AutoSchedule
from monet_like.auto.planning import Settings
from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.compiler import pipeline, quick
from monet_like.compiler.request import Request
from monet_like.errors import InfeasibleError, ProfileError, UsageError
from monet_like.ir.schedule_file import PLAIN, ScheduleRecord
from monet_like.ir.units import MIB, format_apart
from monet_like.plan.random_schedules import random_schedule

EXACT = "inplace_multiway_newnode"


def mlp(*sizes: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [part for a, b in zip(sizes, sizes[1:], strict=False) for part in (nn.Linear(a, b), nn.SiLU())]
    return nn.Sequential(*layers[:-1]).train()


def trained(model: nn.Module, calls: list[tuple[Any, ...]]) -> list[torch.Tensor]:
    """Losses and parameters of a loop of SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for call in calls:
        optimizer.zero_grad()
        result = model(*call)
        loss = sum(part.float().square().mean() for part in (result if isinstance(result, tuple) else (result,)))
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
        losses.append(loss.detach())  # type: ignore[union-attr]
    return [*losses, *model.parameters(), *model.buffers()]


def as_plain(model: nn.Module, calls: list[tuple[Any, ...]], **options: Any) -> AutoSchedule:
    """The wrapper, after it has trained as the plain model does."""
    plain = twin(model)
    wrapped = monet_like.auto_schedule(model, **{"mode": EXACT, "effort": "quick", **options})
    assert isinstance(wrapped, AutoSchedule)
    torch.testing.assert_close(trained(wrapped, calls), trained(plain, calls), rtol=0, atol=0)
    return wrapped


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Instead of planning: schedules drawn at random for 64 rows at most, which take a megabyte; the rows that were
    planned.
    """
    rows: list[tuple[int, ...]] = []

    def planned(request: Request, settings: Settings, device: torch.device, captured: Captured) -> ScheduleRecord:
        rows.append(tuple(request.example[0][0].shape))
        if rows[-1][0] > 64:
            error = InfeasibleError(f"no plan fits into {settings.budget}")
            error.plain_peak_bytes = 3 * MIB
            raise error
        schedule = random_schedule(captured.program, 0, drop=0.5, others=0.5)
        record = record_for(captured, schedule, EXACT, (request.model, *request.example))
        return replace_budget(record, settings)

    monkeypatch.setattr(auto, "plan_or_load", planned)
    return rows


def replace_budget(record: ScheduleRecord, settings: Settings) -> ScheduleRecord:
    return ScheduleRecord(**{**vars(record), "budget_bytes": settings.budget.of(2 * MIB)})


def rows(count: int, width: int = 8) -> tuple[torch.Tensor]:
    return (torch.randn(count, width, generator=torch.Generator().manual_seed(count)),)


def test_larger_inputs_are_planned_in_the_first_plans_bytes(plans: list[tuple[int, ...]]) -> None:
    with pytest.warns(
        UserWarning, match=r"planning Sequential anew: planned for float32\[8, 8\], called with float32\[16, 8\]"
    ):
        wrapped = as_plain(mlp(8, 8, 8), [rows(8), rows(4), rows(16), rows(8)], memory_budget="50%")
    assert plans == [(8, 8), (16, 8)]
    assert [record.budget_bytes for record in wrapped.records] == [MIB, MIB]


def test_what_cannot_be_planned_runs_as_plain_pytorch(plans: list[tuple[int, ...]]) -> None:
    said = (
        r"Sequential runs as plain PyTorch when it is called with float32\[65, 8\], whose predicted peak is 3.0 MB: "
        r"no plan fits into 1.0 MB"
    )
    with pytest.warns(UserWarning, match=said) as caught:
        as_plain(mlp(8, 8, 8), [rows(8), rows(65), rows(65), rows(8)], memory_budget="50%")
    assert len([w for w in caught if "runs as plain" in str(w.message)]) == 1
    assert plans == [(8, 8), (65, 8)]
    with pytest.raises(InfeasibleError, match="no plan fits into 50 %"):  # of the first call it is an error
        monet_like.auto_schedule(mlp(8, 8, 8), rows(65), memory_budget="50%")


def test_those_who_want_plain_pytorch_for_other_inputs(plans: list[tuple[int, ...]]) -> None:
    said = (
        r"runs as plain PyTorch when it is called with float32\[16, 8\].*"
        r"no plan of Sequential serves this call: planned for"
    )
    with pytest.warns(UserWarning, match=said):
        as_plain(mlp(8, 8, 8), [rows(8), rows(16), rows(16), rows(4)], on_new_input="plain")
    assert plans == [(8, 8)]
    wrapped = monet_like.auto_schedule(mlp(8, 8, 8), rows(8), on_new_input="plain")
    with pytest.warns(UserWarning, match=said):  # also of the first call that trains
        wrapped(*rows(16))


def test_those_who_want_an_error_for_other_inputs(plans: list[tuple[int, ...]]) -> None:
    wrapped = as_plain(mlp(8, 8, 8), [rows(8), rows(4)], on_new_input="error")
    with pytest.raises(
        UsageError, match=r"serves this call: planned for float32\[8, 8\], called with float32\[16, 8\]"
    ):
        wrapped(*rows(16))


class Parts(nn.Module):
    """Dropout, a batch norm, and a layer that may be merged into the one before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.down, self.up, self.last = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False), nn.Linear(8, 4)
        self.merged = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if not self.merged:
            y = y + self.up(self.down(x))
        return self.last(self.drop(self.norm(y).relu()))

    def merge(self) -> None:
        with torch.no_grad():
            self.first.weight += self.up.weight @ self.down.weight
        self.merged = True


def eval_norm(model: Any) -> None:
    model.norm.eval()


def merged(model: Any) -> None:
    model.merge()


def in_bfloat16(model: nn.Module) -> None:
    model.to(torch.bfloat16)


def freeze_first(model: Any) -> None:
    model.first.requires_grad_(False)


def another_head(model: Any) -> None:
    torch.manual_seed(7)
    model.last = nn.Linear(8, 3)


CHANGES: list[Callable[[Any], None]] = [eval_norm, merged, in_bfloat16, freeze_first, another_head]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:planning Parts anew")
def test_a_model_that_changes_between_its_steps_is_planned_anew(
    change: Callable[[Any], None], plans: list[tuple[int, ...]]
) -> None:
    results = []
    for scheduled in (False, True):
        model = Parts().train()
        called = monet_like.auto_schedule(model, mode=EXACT) if scheduled else model
        torch.manual_seed(1)
        noted = []
        for turn in range(4):
            if turn == 2:
                change(model)
            x = rows(6)[0].to(model.first.weight.dtype)
            model.zero_grad()
            loss = called(x).float().square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
            noted += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        results.append([*noted, *model.state_dict().values(), torch.get_rng_state()])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert len(plans) == 2


def test_plain_pytorchs_own_step_is_a_plan_where_only_that_fits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a convolution a schedule makes the weight's gradient before the input's, which has more workspace here."""
    model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3), nn.ReLU()).train()
    x = torch.randn(2, 3, 40)
    with caplog.at_level(logging.INFO, logger="monet_like"):
        wrapped = as_plain(model, [(x,), (x[:1],), (x,)], memory_budget="100%")
    record = wrapped.record
    assert record is not None and record.solver == PLAIN
    assert record.peak_bytes == record.plain_peak_bytes == record.budget_bytes
    assert not any(wrapped._kept)
    assert "no schedule fits, so the step is plain PyTorch's own" in caplog.text
    same = monet_like.auto_schedule(twin(model), x, memory_budget="100%", mode=EXACT, effort="quick")
    assert same.record == record  # from the cache
    with pytest.raises(InfeasibleError) as error:
        monet_like.auto_schedule(twin(model), x, memory_budget="99%", mode=EXACT, effort="quick")
    assert error.value.plain_peak_bytes == record.peak_bytes


def test_messages_speak_of_the_call() -> None:
    with pytest.raises(InfeasibleError) as error:
        monet_like.auto_schedule(
            mlp(8, 32, 32, 4), torch.randn(256, 8), memory_budget="50%", mode=EXACT, effort="quick"
        )
    message = str(error.value)
    assert message.startswith("no plan of Sequential for float32[256, 8] fits into ")
    assert "(50 % of plain PyTorch's peak); plain PyTorch needs " in message
    enough = error.value.smallest_bytes
    assert re.search(
        rf"; give auto_schedule memory_budget={enough} \([\d.]+ KB\), for which a plan was found, or smaller inputs$",
        message,
    )
    assert "monet-like" not in message


def test_numbers_that_differ_look_different() -> None:
    assert format_apart(22_000, 22_016) == ["21.5 KB (22000 bytes)", "21.5 KB (22016 bytes)"]
    assert format_apart(22_000, 44_000, 22_000) == ["21.5 KB", "43.0 KB", "21.5 KB"]


class Critics(nn.Module):
    """Called in two ways, the second of which takes less memory."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.judged = mlp(8, 32, 32, 20), mlp(20, 32, 32, 1)

    def forward(self, z: torch.Tensor, real: torch.Tensor | None = None) -> Any:
        judged = self.judged(self.made(z))
        return judged if real is None else (judged, self.judged(real))


@pytest.mark.slow
def test_a_second_way_of_calling_has_the_first_ones_bytes() -> None:
    """A share of the second call's own peak would be too little."""
    z, real = torch.randn(16, 8), torch.randn(16, 20)
    with pytest.warns(UserWarning, match="planning Critics anew"):
        wrapped = as_plain(Critics(), [(z, real), (z,), (z, real), (z,)], memory_budget="90%")
    first, second = wrapped.records
    assert 0.9 * second.plain_peak_bytes < second.budget_bytes == first.budget_bytes


def test_an_example_of_no_rows_plans_nothing(plans: list[tuple[int, ...]]) -> None:
    wrapped = monet_like.auto_schedule(mlp(8, 8, 8), torch.randn(0, 8), mode=EXACT)
    assert plans == []
    trained(wrapped, [rows(6), (torch.randn(0, 8),), rows(6)])
    assert plans == [(6, 8)]


def test_what_cannot_be_measured_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] can't allocate memory: you tried to allocate 64 bytes. Error 12"
        )

    monkeypatch.setattr("monet_like.profile.profiler.allocated_peak", fail)
    said = (
        r"^Sequential for float32\[6, 8\] cannot be planned on .*: \w+ ran out of memory when it was measured by "
        r"itself \(it wanted 64 bytes\); give smaller inputs, or a machine with more memory$"
    )
    with pytest.raises(ProfileError, match=said):
        monet_like.auto_schedule(mlp(8, 8, 8), rows(6), mode="normal", effort="quick")


def test_costs_of_a_larger_batch_are_those_of_the_first_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    own = quick.quick_costs

    def measuring(request: Request, *args: Any) -> Any:
        measured.append(request.example[0][0].shape[0])
        return own(request, *args)

    monkeypatch.setattr(quick, "quick_costs", measuring)
    calls = [(torch.randn(rows, 8),) for rows in (16, 64, 24)]
    wrapped = as_plain(mlp(8, 32, 32, 32, 8), calls, memory_budget=4 * MIB)
    assert measured == [16]
    assert [record.inputs[0].shape[0] for record in wrapped.records] == [16, 64]
    assert "other sizes" in wrapped.records[1].note


def test_costs_are_scaled_also_where_no_gradient_is_delayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Because it would need more memory, as told by costs: the program that is planned is another than was captured."""
    measured: list[int] = []
    own = quick.measure_partly

    def measuring(tasks: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        measured.append(len(tasks))
        return own(tasks, *args, **options)

    def cost(request: Request, captured: Captured, costs: Any) -> bool:
        return request.made_last is None and bool(captured.made_last)

    monkeypatch.setattr(quick, "measure_partly", measuring)
    monkeypatch.setattr(pipeline, "delays_cost", cost)
    layers = nn.Conv2d(2, 64, 3, padding=1), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(1024, 1024)
    model, calls = nn.Sequential(*layers).train(), [(torch.randn(rows, 2, 16, 16),) for rows in (32, 40)]
    assert capture(model, calls[0], made_last=None).made_last == ("3.weight",)
    wrapped = as_plain(model, calls, memory_budget=256 * MIB)
    first, second = wrapped.records
    assert not first.made_last and not second.made_last and "other sizes" in second.note
    assert measured[0] > 0 and not any(measured[1:])
