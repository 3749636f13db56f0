"""Runs a function in several processes that form a group."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

PROCESSES = 2


def together(
    tmp_path: Path, work: Callable[..., None], *args: Any, processes: int = PROCESSES, within_seconds: float = 600.0
) -> None:
    """Run ``work(rank, *args)`` in processes of one group; what fails there fails here, and so does what hangs."""
    given = (f"file://{tmp_path / 'rendezvous'}", processes, work, args)
    running = mp.spawn(_process, given, nprocs=processes, join=False)
    end = time.monotonic() + within_seconds
    while not running.join(timeout=1.0):
        if time.monotonic() > end:
            for process in running.processes:
                process.kill()
            raise TimeoutError(f"processes that train together did not end within {within_seconds:g} s")


def _process(rank: int, rendezvous: str, processes: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=processes)
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
