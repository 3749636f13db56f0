"""The recipes of examples/, with the real libraries: scheduled and plain training end with the same weights."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monet_like
from monet_like.auto.auto_schedule import AutoSchedule

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = ("accelerate_training", "huggingface_trainer", "lightning_training", "timm_training")


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_trains_as_without(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[AutoSchedule] = []
    real = partial(monet_like.auto_schedule, mode="inplace_multiway_newnode")  # no word that changes an order of sums

    def scheduled(model: nn.Module, **options: Any) -> nn.Module:
        made.append(real(model, **options))
        return made[-1]

    def train(auto_schedule: Any) -> nn.Module:
        monkeypatch.setattr(monet_like, "auto_schedule", auto_schedule)
        torch.manual_seed(0)
        model: nn.Module = runpy.run_path(str(EXAMPLES / f"{name}.py"))["model"]
        return model

    monkeypatch.chdir(tmp_path)
    wanted, found = train(lambda model, **_: model).state_dict(), train(scheduled).state_dict()
    assert list(found) == list(wanted)
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
    (wrapper,) = made
    assert wrapper.record is not None
    assert wrapper.record.peak_bytes < wrapper.record.plain_peak_bytes
