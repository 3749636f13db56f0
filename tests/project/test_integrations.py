"""The recipes of examples/, with the real libraries: scheduled and plain training end with the same weights."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from block_models import plan_briefly
from later import Later
from torch import nn

import monet_like
from monet_like.auto.auto_schedule import AutoSchedule

state = Later("accelerate.state")
EXAMPLES = Path(__file__).parents[2] / "examples"
#: The library that each needs.
RECIPES = {
    "accelerate_training": "accelerate",
    "diffusers_lora": "diffusers",
    "huggingface_trainer": "transformers",
    "lightning_training": "lightning",
    "opacus_training": "opacus",
    "peft_trainer": "peft",
    "plain_loop": "peft",
    "pyg_padding": "torch_geometric",
    "robot_policy": "torchvision",
    "timm_training": "timm",
    "trl_dpo": "trl",
    "trl_sft": "trl",
}
#: Those with `weights="auto"` whose budgets are too small for plans that stream none.
STREAMED = {"peft_trainer", "plain_loop", "trl_dpo", "trl_sft"}


@pytest.fixture(autouse=True)
def _briefly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    plan_briefly(monkeypatch.setattr)
    # A vocabulary of 32 in one chunk of 32, as one of 32 thousand: else the loss is all of a small model's memory.
    monkeypatch.setattr("trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE", 32, raising=False)
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_trains_as_without(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(RECIPES[name])
    made: list[nn.Module] = []
    real = monet_like.auto_schedule

    def scheduled(model: nn.Module, **options: Any) -> nn.Module:
        """With no word that changes an order of sums."""
        made.append(real(model, mode="inplace_multiway_newnode", effort="quick", **options))
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
    (model,) = made
    plan: Any = model.record if isinstance(model, AutoSchedule) else monet_like.block_plan(model)
    assert plan.peak_bytes < plan.plain_peak_bytes
    assert name not in STREAMED or any(point.ahead for point in plan.points)
