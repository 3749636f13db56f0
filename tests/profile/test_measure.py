"""Times of calls."""

from __future__ import annotations

import re
import time
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monet_like.capture.lower.step import capture
from monet_like.compiler.costs import measured_costs
from monet_like.compiler.request import Request
from monet_like.errors import ProfileError
from monet_like.ir.program import REFUSED
from monet_like.profile import measure, profiler
from monet_like.variants import admitted

EXACT = "inplace_multiway_newnode"


class _Event:
    """A GPU that takes two milliseconds for everything."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: object) -> float:
        del other
        return 2.0


def test_the_cpus_time_is_added_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(device=lambda device: nullcontext(), Event=_Event, _sleep=lambda cycles: None)
    monkeypatch.setattr(measure.torch, "cuda", cuda)
    device = torch.device("cuda", 0)
    assert measure.seconds_of(lambda: time.sleep(0.005), device) == 0.002
    assert measure.seconds_of(lambda: time.sleep(0.005), device, of_launches=True) >= 0.007


def test_a_variant_that_does_not_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own operators must run."""
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4)), torch.randn(3, 4)
    captured = admitted(capture(model, (x,)), EXACT)
    failing = {task.variant for task in captured.every_task()} - {"aten"}
    assert "relu.packed" in failing
    own = profiler._Trial._peak

    def peak(trial: Any, inputs: Any) -> int:
        if trial.task.variant in failing:
            raise RuntimeError("no such kernel")
        return own(trial, inputs)

    monkeypatch.setattr(profiler._Trial, "_peak", peak)
    request = Request(model, ((x,), {}), EXACT, profile_batch=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        costs, _ = measured_costs(request, captured, torch.device("cpu"), timed=False)
    told = [str(warning.message) for warning in caught]
    assert any(re.search(r"operator variant relu\.\w+ is left out .* failed: .*no such kernel", line) for line in told)
    refused = {task.variant for task in captured.every_task() if task.cost and costs[task.cost] == REFUSED}
    assert "in_place" in refused <= failing  # what has the calls of PyTorch's own has its cost, too
    failing = {"aten"}
    with pytest.raises(ProfileError, match=r"failed: .*no such kernel"):
        measured_costs(request, captured, torch.device("cpu"), timed=False)
