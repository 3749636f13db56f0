"""Adapters on 4-bit weights in several processes: a schedule's gradients are those of the plain model there."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import assert_same, step, together
from quantised_nets import adapted, four_bit
from replays import record_for
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from monet_like import ScheduleWrapper
from monet_like.capture.lower.step import capture
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.plan.random_schedules import random_schedule
from monet_like.variants import admitted

#: Weights are stored as numbers of the dtype that all others have, as `fully_shard` wants them.
MAKE = four_bit(quant_storage=torch.float32)


def made() -> ScheduleRecord:
    model, x = adapted(MAKE), torch.randn(4, 64)
    captured = admitted(capture(model, (x,)), "normal")
    return record_for(captured, random_schedule(captured.program, 3, drop=0.5), "normal", (model, (x,), {}))


def turns(rank: int, *models: nn.Module) -> Iterator[None]:
    """Two steps of every model, on this process's inputs."""
    torch.manual_seed(rank)
    for turn in range(2):
        x = torch.randn(4, 64)
        for model in models:
            model.zero_grad()
            step(model, x, seed=turn)
        yield


def _replicated(rank: int, record: ScheduleRecord) -> None:
    model = adapted(MAKE)
    plain = DistributedDataParallel(copy.deepcopy(model))
    ours = DistributedDataParallel(ScheduleWrapper(model, record))
    for _ in turns(rank, plain, ours):
        assert_same(plain, ours)


def _sharded(rank: int, record: ScheduleRecord) -> None:
    model = adapted(MAKE)
    plain, ours = fully_shard(copy.deepcopy(model)), fully_shard(ScheduleWrapper(model, record))
    before = len(ours._kept)
    for _ in turns(rank, plain, ours):
        pass
    assert len(ours._kept) == before + 1  # captured once for the gathered parameters
    assert_same(plain, ours)


def _both(rank: int, record: ScheduleRecord) -> None:
    for function in (_replicated, _sharded):
        torch.manual_seed(0)
        function(rank, record)


@pytest.mark.slow
def test_adapters_on_four_bit_weights(tmp_path: Path) -> None:
    together(tmp_path, _both, made())
