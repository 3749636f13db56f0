"""Runs a function in several processes that form a group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

PROCESSES = 2


def together(tmp_path: Path, work: Callable[..., None], *args: Any) -> None:
    """Run ``work(rank, *args)`` in processes of one group; what fails there fails here."""
    mp.spawn(_process, (f"file://{tmp_path / 'rendezvous'}", work, args), nprocs=PROCESSES)


def _process(rank: int, rendezvous: str, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=PROCESSES)
    torch.manual_seed(0)
    work(rank, *args)
    dist.destroy_process_group()


def step(model: nn.Module, x: torch.Tensor, seed: int) -> None:
    torch.manual_seed(seed)  # dropout
    model(x).square().mean().backward()


def assert_same(plain: nn.Module, ours: nn.Module) -> None:
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)
    for one, other in zip(plain.buffers(), ours.buffers(), strict=True):
        assert torch.equal(one, other)
