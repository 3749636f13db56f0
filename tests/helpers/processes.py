"""Runs functions and scripts in other processes, also in such as form a group."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing.forkserver
import os
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from monet_like.plan.local_search import searcher
from monet_like.profile import cache_state

PROCESSES = 2
#: What the fork server loads once for all processes of a run, so that each of them starts in a moment. None starts
#: threads.
LOADED = (
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed._tools.fsdp2_mem_tracker",
    "monet_like.auto.auto_schedule",
    "monet_like.auto.blocks",
    "monet_like.replay.wrapper",
)


def together(
    tmp_path: Path, work: Callable[..., None], *args: Any, processes: int = PROCESSES, within_seconds: float = 600.0
) -> None:
    """As `in_processes`, in one group."""
    meeting = f"file://{tmp_path / 'rendezvous'}"
    in_processes(_process, meeting, processes, work, args, processes=processes, within_seconds=within_seconds)


def fork_server(*_: object) -> multiprocessing.context.ForkServerContext:
    """The context whose processes are forked from a server that has loaded PyTorch, instead of interpreters."""
    _start_server()
    return mp.get_context("forkserver")  # type: ignore[no-any-return]


def elsewhere(work: Callable[..., None], *args: Any, within_seconds: float = 600.0) -> None:
    """Run ``work(*args)`` in another process, which has this one's environment; what fails there fails here."""
    in_processes(_alone, work, args, processes=1, within_seconds=within_seconds)


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
    words = [list(script) for script in scripts]
    in_processes(_run_scripts, folder, words, ports, before, within_seconds=within_seconds)
    return [(folder / f"printed_{number}").read_text() for number in range(len(scripts))]


def _run_scripts(
    rank: int, folder: Path, scripts: list[list[str]], ports: list[int], before: Callable[[], None]
) -> None:
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


@functools.cache
def _start_server() -> None:
    """Start this process's fork server, which loads `LOADED`, and this checkout's package whatever is installed."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    mp.get_context("forkserver").set_forkserver_preload(list(LOADED))
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)):
        multiprocessing.forkserver.ensure_running()


def in_processes(
    work: Callable[..., None], *args: Any, processes: int = PROCESSES, within_seconds: float = 600.0
) -> None:
    """Run ``work(rank, *args)`` in processes that have this one's environment; what fails or hangs there fails here.

    They search as many schedules as this one does, and the profiler empties as much of the caches.
    """
    _start_server()
    everything = (dict(os.environ), searcher.EVALUATIONS, cache_state._FORGOTTEN, work, args)
    running = mp.start_processes(_run, everything, nprocs=processes, join=False, start_method="forkserver")
    end = time.monotonic() + within_seconds
    while not running.join(timeout=1.0):
        if time.monotonic() > end:
            for process in running.processes:
                process.kill()
            raise TimeoutError(f"the processes did not end within {within_seconds:g} s")


def _run(
    rank: int,
    environment: dict[str, str],
    evaluations: int,
    forgotten: int,
    function: Callable[..., None],
    given: tuple[Any, ...],
) -> None:
    os.environ.clear()  # the server's, of the test that started it
    os.environ.update(environment)
    searcher.EVALUATIONS = evaluations
    cache_state._FORGOTTEN = forgotten
    torch.set_num_threads(1)
    gc.freeze()  # what is loaded is no garbage: a collection would look at all of it
    function(rank, *given)


def _process(rank: int, rendezvous: str, processes: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=processes)
    torch.manual_seed(0)
    work(rank, *args)
    dist.destroy_process_group()


def forked_script(folder: Path, words: Sequence[object]) -> subprocess.CompletedProcess[str]:
    """Run a script as a user does in a folder, but in a process that has loaded PyTorch.

    Args:
        words: its path and arguments.
    """
    said = [folder / f".{name}" for name in ("stdout", "stderr")]
    elsewhere(_run_script, folder, [str(word) for word in words], said)
    code, *texts = ((folder / ".code").read_text(), *(path.read_text() for path in said))
    return subprocess.CompletedProcess(words, int(code), *texts)


def _run_script(folder: Path, words: list[str], said: list[Path]) -> None:
    os.chdir(folder)
    os.environ["COLUMNS"] = "160"
    sys.argv, code = words, 0
    with (
        said[0].open("w") as out,
        said[1].open("w") as errors,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(errors),
    ):
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    (folder / ".code").write_text(str(code))


def _alone(rank: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    work(*args)


def step(model: nn.Module, x: torch.Tensor, seed: int) -> None:
    torch.manual_seed(seed)  # dropout
    model(x).square().mean().backward()


def assert_same(plain: nn.Module, ours: nn.Module) -> None:
    """Gradients, or this process's shards of them, and buffers are equal."""
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        shards = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in (one, other)]
        assert one.grad is None or torch.equal(*shards)
    for one, other in zip(plain.buffers(), ours.buffers(), strict=True):
        assert torch.equal(one, other)
