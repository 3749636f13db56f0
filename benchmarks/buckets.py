"""When data parallel training sends its gradients: python -m benchmarks.buckets

Two processes on this machine (gloo), DistributedDataParallel around plain ResNet-18 and around schedules of it: one
that keeps everything and one for 70 % of plain PyTorch's peak. For each bucket the share of the backward's time at
which it is sent, median over the steps. Prints Markdown.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchvision
from torch.nn.parallel import DistributedDataParallel

from monet_like.compiler.pipeline import compile_schedule
from monet_like.compiler.request import Request
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.profile.devices import DEVICES
from monet_like.replay.wrapper import ScheduleWrapper

PROCESSES = 2
CPU = torch.device("cpu")
BUCKET_MB = 10


def images() -> torch.Tensor:
    """A batch."""
    return torch.randn(16, 3, 160, 160)


def part_of(share: float, plain_peak_bytes: int) -> int:
    """A budget."""
    return int(share * plain_peak_bytes)


def records() -> dict[str, ScheduleRecord]:
    """The schedules to compare."""
    model, example = torchvision.models.resnet18().train(), ((images(),), {})
    ask = (("everything kept", "store_all", 10.0), ("70 % of the memory", "milp", 0.7))
    made = {}
    for name, strategy, share in ask:
        request = Request(model, example, "inplace_multiway_newnode", strategy=strategy, solver="HIGHS")
        made[name] = compile_schedule(request, partial(part_of, share), CPU, profile=DEVICES["cpu"]).record
    return made


class Clock:
    """Notes when buckets are sent during a backward."""

    def __init__(self) -> None:
        self.begin = 0.0
        self.sent: list[float] = []

    def measure(self, model: torch.nn.Module, x: torch.Tensor) -> list[float]:
        """One step; shares of its backward."""
        loss = model(x).square().mean()
        self.sent, self.begin = [], time.perf_counter()
        loss.backward()
        whole = time.perf_counter() - self.begin
        return [at / whole for at in self.sent]


def process(rank: int, folder: str, schedules: dict[str, ScheduleRecord], steps: int) -> None:
    """One of the processes; the first one prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=PROCESSES)
    torch.manual_seed(0)
    model = torchvision.models.resnet18().train()
    contenders: dict[str, torch.nn.Module] = {"plain PyTorch": copy.deepcopy(model)}
    contenders |= {name: ScheduleWrapper(copy.deepcopy(model), record) for name, record in schedules.items()}
    clocks: dict[str, Clock] = {}
    wrapped = {}
    for name, contender in contenders.items():
        wrapped[name] = DistributedDataParallel(contender, bucket_cap_mb=BUCKET_MB)
        clocks[name] = clock = Clock()

        def send(state, bucket, clock=clock):  # type: ignore[no-untyped-def]  # it refuses annotations as text
            clock.sent.append(time.perf_counter() - clock.begin)
            work: Any = dist.all_reduce(bucket.buffer().div_(PROCESSES), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        wrapped[name].register_comm_hook(None, send)
    found: dict[str, list[list[float]]] = {name: [] for name in wrapped}
    for turn in range(steps + 2):  # the buckets are made anew after the first
        x = images()
        for name, contender in wrapped.items():
            shares = clocks[name].measure(contender, x)
            if turn > 1:
                found[name].append(shares)
    if rank == 0:
        for name, each in found.items():
            medians = [statistics.median(shares) for shares in zip(*each, strict=True)]
            print(f"| {name} | " + " | ".join(f"{share:.2f}" for share in medians) + " |", flush=True)
    dist.destroy_process_group()


@click.command()
@click.option("--steps", default=9, show_default=True)
def main(steps: int) -> None:
    """Print the table."""
    print(f"ResNet-18, batch 16, 160 pixels, buckets of {BUCKET_MB} MB, torch {torch.__version__}: when each is sent\n")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (str(Path(folder)), records(), steps), nprocs=PROCESSES)


if __name__ == "__main__":
    main()
