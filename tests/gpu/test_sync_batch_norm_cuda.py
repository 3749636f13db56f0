"""SyncBatchNorm over NCCL: what PyTorch's own gives, a scheduled one gives too, to the bit.

Skipped with fewer than 2 GPUs.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from processes import PROCESSES, assert_same, step
from sync_batch_norm_cases import Net, images, made
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from monet_like.capture.precision import autocast_as
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.replay.wrapper import ScheduleWrapper

if torch.cuda.device_count() < PROCESSES:
    pytest.skip(f"needs {PROCESSES} GPUs, this machine has {torch.cuda.device_count()}", allow_module_level=True)


def model_on(rank: int, layout: torch.memory_format) -> nn.Module:
    torch.manual_seed(0)
    model: Any = nn.SyncBatchNorm.convert_sync_batchnorm(Net(0.2))
    placed: nn.Module = model.to(torch.device("cuda", rank), memory_format=layout)
    return placed


def _process(
    rank: int, rendezvous: str, records: list[ScheduleRecord], layout: torch.memory_format, autocast: str
) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.backends.cudnn.deterministic = True
    dist.init_process_group("nccl", init_method=rendezvous, rank=rank, world_size=PROCESSES)
    base = model_on(rank, layout)
    plain, ours = (
        DistributedDataParallel(model, bucket_cap_mb=0.001)
        for model in (copy.deepcopy(base), ScheduleWrapper(copy.deepcopy(base), records[rank]))
    )
    torch.manual_seed(rank)
    for turn, batch in enumerate((4, 3, 4 - rank)):
        x = images(batch).to(device, memory_format=layout)
        for model in (plain, ours):
            model.zero_grad()
            with autocast_as(autocast, device):
                step(model, x, seed=10 * turn + rank)
        assert_same(plain, ours)
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("autocast", ["", "float16"])
def test_as_pytorchs_own(layout: torch.memory_format, autocast: str, tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    with autocast_as(autocast, device):
        found = made(model_on(0, layout), images().to(device, memory_format=layout))
    records = [replace(record, autocast=autocast) for record in found]
    mp.spawn(_process, (f"file://{tmp_path / 'rendezvous'}", records, layout, autocast), nprocs=PROCESSES)
