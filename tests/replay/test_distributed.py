"""Data parallel training in real processes: what plain modules give there, a scheduled one gives too, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import PROCESSES, assert_same, step, together
from replays import record_for
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from monet_like.capture.lower.step import capture
from monet_like.errors import CaptureError
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.plan.random_schedules import random_schedule
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.variants import admitted

MODE = "inplace_multiway_newnode"


class Net(nn.Module):
    """Convolutions, batch norm, dropout, and a layer that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
        for _ in range(4):
            layers += [nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(32, 32, 3, padding=1)]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 5))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def images() -> torch.Tensor:
    return torch.randn(4, 3, 12, 12)


def made(model: nn.Module) -> ScheduleRecord:
    """A schedule that runs half of what it can again."""
    x = images()
    captured = admitted(capture(model, (x,)), MODE)
    return record_for(captured, random_schedule(captured.program, 3, drop=0.5), MODE, (model, (x,), {}))


def pair(record: ScheduleRecord, wrap: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The same model plain and scheduled, wrapped alike."""
    model = Net()
    return wrap(copy.deepcopy(model)), wrap(ScheduleWrapper(copy.deepcopy(model), record))


#: Options of the wrapper; a layer without gradients needs one of the first two.
OPTIONS: list[dict[str, Any]] = [
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True},
]


def _steps_and_accumulation(rank: int, record: ScheduleRecord, options: dict[str, Any], turns: int = 4) -> None:
    plain, ours = pair(record, lambda m: DistributedDataParallel(m, bucket_cap_mb=0.05, **options))
    torch.manual_seed(rank)
    batches = [images() for _ in range(turns)]
    for turn, x in enumerate(batches):
        for model in (plain, ours):
            model.zero_grad(set_to_none=turn % 2 == 0)
            step(model, x, seed=10 * turn + rank)
        assert_same(plain, ours)
    if options.get("static_graph"):
        return  # PyTorch's own no_sync is not for static graphs
    for model in (plain, ours):
        with model.no_sync():
            step(model, batches[0], seed=50 + rank)
        step(model, batches[1], seed=60 + rank)
    assert_same(plain, ours)


def test_gradients_are_plain_ddps_in_a_group_of_one(tmp_path: Path) -> None:
    """In this process: buckets, hooks and accumulation are there, sums over processes are not."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        _steps_and_accumulation(0, made(Net()), {"find_unused_parameters": True}, turns=2)
    finally:
        dist.destroy_process_group()


def _buckets(rank: int, record: ScheduleRecord) -> None:
    """Each bucket is sent when its gradients are there, not at the end."""
    arrived: list[list[int]] = []
    for model in pair(record, lambda m: DistributedDataParallel(m, bucket_cap_mb=0.05, find_unused_parameters=True)):
        sent: list[int] = []
        count = [0]

        def hook(state, bucket, sent=sent, count=count):  # type: ignore[no-untyped-def]  # refuses annotations as text
            sent.append(count[0])
            done = dist.all_reduce(bucket.buffer().div_(PROCESSES), async_op=True).get_future()
            return done.then(lambda f: f.value()[0])

        model.register_comm_hook(None, hook)
        for layer in model.parameters():  # before the gradient reaches a bucket
            layer.register_hook(lambda grad, count=count: count.__setitem__(0, count[0] + 1))
        for turn in range(3):  # the buckets are made anew after the first step
            sent.clear()
            count[0] = 0
            step(model, images(), seed=turn)
        arrived.append(list(sent))
    plain, ours = arrived
    assert len(plain) == len(ours) >= 3
    # A segment of the schedule hands over several gradients at once, of one layer or two.
    assert all(abs(one - other) <= 2 for one, other in zip(plain, ours, strict=True)), arrived


def _sharded(rank: int, record: ScheduleRecord) -> None:
    plain, ours = pair(record, fully_shard)
    torch.manual_seed(rank)
    for turn in range(2):
        x = images()
        for model in (plain, ours):
            model.zero_grad()
            step(model, x, seed=10 * turn + rank)
    assert_same(plain, ours)
    inside = Net()
    fully_shard(inside)
    with pytest.raises(CaptureError, match=r"shard around it: fully_shard\(ScheduleWrapper"):
        ScheduleWrapper(inside, record)


def _all(rank: int, record: ScheduleRecord) -> None:
    for options in OPTIONS:
        torch.manual_seed(0)
        _steps_and_accumulation(rank, record, options)
    for work in (_buckets, _sharded):
        torch.manual_seed(0)
        work(rank, record)


@pytest.mark.slow
def test_two_processes_train_as_plain_modules_do(tmp_path: Path) -> None:
    """Gradients under `DistributedDataParallel` with every set of options, its buckets, and `fully_shard`."""
    together(tmp_path, _all, made(Net()))
