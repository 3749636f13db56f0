"""Runs a function, or scripts, in several processes that form a group."""

from __future__ import annotations

import contextlib
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable, Sequence
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
    _spawned(_process, (f"file://{tmp_path / 'rendezvous'}", processes, work, args), processes, within_seconds)


def scripts_together(
    folder: Path, scripts: Sequence[Sequence[str]], before: Callable[[], None], *, within_seconds: float = 600.0
) -> list[str]:
    """Run scripts one after the other in `PROCESSES` processes, with the environment that torchrun gives.

    Args:
        folder: where they run, and where their output goes.
        scripts: the path of each and its arguments.
        before: called first in each process.
        within_seconds: when processes that hang are ended.

    Returns:
        What the first process printed, for each script.
    """
    with contextlib.ExitStack() as held:  # all at once, so that they differ
        taken = [held.enter_context(socket.socket()) for _ in scripts]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in taken]
    _spawned(_run_scripts, (folder, [list(script) for script in scripts], ports, before), PROCESSES, within_seconds)
    return [(folder / f"printed_{number}").read_text() for number in range(len(scripts))]


def _run_scripts(
    rank: int, folder: Path, scripts: list[list[str]], ports: list[int], before: Callable[[], None]
) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    before()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES), "MASTER_ADDR": "127.0.0.1"}
    for number, (words, port) in enumerate(zip(scripts, ports, strict=True)):
        os.environ["MASTER_PORT"] = str(port)
        sys.argv = words
        printed = folder / (os.devnull if rank else f"printed_{number}")
        with printed.open("w") as file, contextlib.redirect_stdout(file):
            try:
                runpy.run_path(words[0], run_name="__main__")
            except SystemExit as ended:  # of a command of click
                if ended.code:
                    raise RuntimeError(f"{words} ended with {ended.code}") from ended


def _spawned(function: Callable[..., None], given: tuple[Any, ...], processes: int, within_seconds: float) -> None:
    """Run ``function(rank, *given)`` in processes."""
    running = mp.spawn(function, given, nprocs=processes, join=False)
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
