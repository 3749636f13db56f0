"""Whole models under DeepSpeed's engine, which has hooks on all of their results; where DeepSpeed is installed."""

from __future__ import annotations

import copy
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from any_schedule import AnySchedule
from processes import together
from torch import nn

from monet_like.auto.auto_schedule import auto_schedule
from monet_like.errors import CaptureError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install deepspeed"),
]


class Classifier(nn.Module):
    """Returns its loss and the logits that this is made from, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def engine_of(model: nn.Module, stage: int, rank: int) -> Any:
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # by gloo; it would compile kernels for minutes
    config = {
        "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}, "gradient_clipping": 1.0,
    }  # fmt: skip
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def batch(turn: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(10 * turn + rank)
    return torch.randn(8, 16), torch.randint(0, 4, (8,))


def _trains(rank: int, stage: int) -> None:
    torch.manual_seed(0)
    model = Classifier()
    ours = AnySchedule(copy.deepcopy(model))
    engines = [engine_of(each, stage, rank) for each in (model, ours)]
    for turn in range(4):
        losses = []
        for engine in engines:
            loss = engine(*batch(turn, rank))["loss"]
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    assert ours.captures == 1
    for one, other in zip(model.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one, other)


def _every_stage(rank: int) -> None:
    for stage in (0, 1, 2):
        _trains(rank, stage)
    engine = engine_of(auto_schedule(Classifier()), 3, rank)
    with pytest.raises(CaptureError, match=r"DeepSpeed's ZeRO stage 3 gathers .*; take stage 1 or 2"):
        engine(*batch(0, rank))


def test_a_whole_model_trains_under_zero_and_is_refused_at_stage_3(tmp_path: Path) -> None:
    together(tmp_path, _every_stage)
