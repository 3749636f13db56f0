"""Whole models that have activations on the host of their own accord, on a CPU that is taken for a GPU with a fast
link: to the bit, with the memory that is predicted.
"""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from offload_cases import layers
from torch import nn

from monet_like import auto_schedule
from monet_like.auto import offloaded, whole_plan
from monet_like.auto.auto_schedule import AutoSchedule
from monet_like.auto.offloaded import adds_copies
from monet_like.auto.planning import Planning, Settings
from monet_like.compiler import offloading
from monet_like.ir.defaults import EXACT_MODE, MODE
from monet_like.ir.mode import parse_mode
from monet_like.replay.verify.steps import step_peak

OPTIONS: dict[str, Any] = {"memory_budget": "55%", "effort": "quick"}


@pytest.fixture(autouse=True)
def _as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded, "_admits", lambda device, settings: settings.offloads)
    monkeypatch.setattr(offloaded, "host_rate", lambda device: 1e13)
    monkeypatch.setattr(offloading, "WORTH", math.inf)  # what is measured on this machine decides nothing


@pytest.fixture(scope="module")
def case() -> tuple[nn.Module, torch.Tensor]:
    model, (x,) = layers(8, 256, 1024)
    return model, x


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The result and the gradients of a step."""
    model.zero_grad()
    result = model(x)
    result.square().mean().backward()
    return [result.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_same(one: nn.Module, other: nn.Module, x: torch.Tensor) -> None:
    found, wanted = step(one, x), step(other, x)
    assert len(found) == len(wanted) > 1 and all(map(torch.equal, found, wanted))


def planned(model: nn.Module, x: torch.Tensor, **options: Any) -> AutoSchedule:
    wrapped = auto_schedule(copy.deepcopy(model), x, **{**OPTIONS, **options})
    assert isinstance(wrapped, AutoSchedule)
    return wrapped


def host_bytes(wrapped: AutoSchedule) -> int:
    assert wrapped.record is not None
    return wrapped.record.counts.get("host_bytes", 0)


def test_a_model_offloads_and_the_next_start_has_its_plan(
    case: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = case
    with caplog.at_level("INFO", logger="monet_like"):
        wrapped = planned(model, x, exact=True)
    record = wrapped.record
    assert record is not None and record.mode == f"{EXACT_MODE}_offload"
    assert "of activations on the host until the backward; planned in" in caplog.text
    assert record.peak_bytes <= record.budget_bytes < record.plain_peak_bytes and host_bytes(wrapped) >= 2**20
    assert_same(wrapped, model, x)
    monkeypatch.setattr(whole_plan, "compile_prepared", None)
    again = planned(model, x, exact=True)
    assert again.record == record
    assert_same(again, model, x)


def test_calls_of_other_forms_are_planned_so_too(case: tuple[nn.Module, torch.Tensor]) -> None:
    model, x = case
    wrapped = planned(model, x, exact=True)
    larger = torch.cat([x, x])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a call is planned anew
        for given in (x[:1000], larger, x):
            assert_same(wrapped, model, given)
    modes = [parse_mode(record.mode) for record in wrapped.records]
    assert len(modes) == 1 + len({record.inputs for record in wrapped.records[1:]}) and "offload" in modes[0]


@pytest.mark.parametrize("mode", [EXACT_MODE, "normal"])
def test_a_mode_without_the_word_is_kept_to(case: tuple[nn.Module, torch.Tensor], mode: str) -> None:
    wrapped = planned(*case, mode=mode, memory_budget="70%")
    assert wrapped.record is not None and wrapped.record.mode == mode and not host_bytes(wrapped)


def test_on_a_gpu_copies_are_added_unless_a_mode_is_given_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    given: list[tuple[Planning, str, bool]] = [
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"mode": MODE}, "cuda", False),
        ({"mode": "normal_offload"}, "cuda", False),  # has them already
    ]
    for planning, device, adds in given:
        settings = Settings.of("60%", None, "none", planning, blocks=False)
        assert adds_copies(torch.device(device), settings) == adds, (planning, device)
    assert adds_copies(torch.device("cuda"), Settings.of("60%", True, "none", {}, blocks=False))


def test_where_plain_pytorch_fits_the_link_is_not_measured(
    case: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloaded, "host_rate", None)
    assert not host_bytes(planned(*case, memory_budget="100%"))


def test_what_cannot_be_pinned_is_not_planned_for(
    case: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []

    def cannot(counts: list[int], _: torch.device) -> bool:
        asked.append(counts)
        return False

    monkeypatch.setattr(offloaded, "can_pin", cannot)
    with pytest.warns(UserWarning, match="could not be pinned, so the plan offloads none"):
        wrapped = planned(*case, memory_budget="56%", exact=True)
    assert not host_bytes(wrapped)
    ((*counts,),) = asked
    assert set(counts) == {2**20}  # values of [1024, 256] in float32, each by itself


def test_a_plan_that_finds_no_room_at_the_next_start_is_made_anew(
    case: tuple[nn.Module, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = case
    assert host_bytes(planned(model, x, memory_budget="57%", exact=True))
    monkeypatch.setattr(offloaded, "available_bytes", lambda: 2**16)
    wrapped = planned(model, x, memory_budget="57%", exact=True)
    assert not host_bytes(wrapped)
    assert_same(wrapped, model, x)


def test_the_step_needs_what_is_predicted(case: tuple[nn.Module, torch.Tensor]) -> None:
    model, x = case
    wrapped = planned(model, x, exact=True)
    record = wrapped.record
    assert record is not None and host_bytes(wrapped)
    assert 0.98 * record.peak_bytes <= step_peak(wrapped, ((x,), {}), x.device) <= record.peak_bytes
