"""Times of calls."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from monet_like.profile import measure


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
