"""Data parallel training of a scheduled model: torchrun --nproc-per-node 2 examples/dist_training.py

Rank 0 plans, the others read its schedule. ``DistributedDataParallel`` goes around it as around any module.
"""

from __future__ import annotations

import os
from pathlib import Path

import click
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import monet_like


@click.command()
@click.option("--steps", default=10, show_default=True)
@click.option("--batch", default=8, show_default=True, help="Of each process.")
@click.option("--size", default=96, show_default=True, help="Of the square images, in pixels.")
@click.option("--budget", default="70%", show_default=True, help="Of plain PyTorch's peak, or such as 1.5 GB.")
@click.option("--sync-bn", is_flag=True, help="Batch norm by the statistics of all processes' images.")
@click.option("--planning", default=60.0, show_default=True, help="Seconds to plan in, at most.")
@click.option("--schedule", type=click.Path(path_type=Path), default="schedule.json", show_default=True)
def main(steps: int, batch: int, size: int, budget: str, sync_bn: bool, planning: float, schedule: Path) -> None:
    """Train a MobileNetV2 on random images."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.mobilenet_v2(num_classes=10).to(device)
    if sync_bn:  # on GPUs torch.nn.SyncBatchNorm.convert_sync_batchnorm does as well
        model = monet_like.convert_sync_batchnorm(model)
    torch.manual_seed(rank)
    images = torch.randn(batch, 3, size, size, device=device)
    labels = torch.randint(0, 10, (batch,), device=device)
    if rank == 0:
        planned = monet_like.auto_schedule(model, images, memory_budget=budget, time_limit_seconds=planning)
        planned.record.save(schedule)
    dist.barrier()
    scheduled = monet_like.ScheduleWrapper(model, schedule, (3, size, size))
    parallel = DistributedDataParallel(scheduled)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(parallel(images), labels)
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        if rank == 0:
            print(f"step {step}: loss {mean.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
