"""ResNet-50 against ``torch.utils.checkpoint`` per block: memory and time, one process, alternating steps.

    python -m benchmarks.checkpoint                 # batch 16, 224 x 224, about ten minutes on two cores
    python -m benchmarks.checkpoint --batch 4 --size 128 --steps 3

Prints a Markdown table. Memory is the rise of allocations during a step (parameters, buffers and input not
counted, gradients counted), every one of PyTorch's allocations included; time is the median of alternating steps.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import click
import torch
import torchvision
from rich.progress import track
from torch import nn
from torch.utils.checkpoint import checkpoint

from monet_like.compiler import Request, compile_schedule
from monet_like.errors import InfeasibleError
from monet_like.measure import allocated_peak
from monet_like.replay import ScheduleWrapper

MB = 10**6
CPU = torch.device("cpu")
FULL = "inplace_conv_multiway_newnode"


class Checkpointed(nn.Module):
    """A ResNet whose residual blocks are each a ``torch.utils.checkpoint`` segment."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m = self.model
        x = m.maxpool(m.relu(m.bn1(m.conv1(x))))
        for layer in (m.layer1, m.layer2, m.layer3, m.layer4):
            for block in layer:
                x = checkpoint(block, x, use_reentrant=False)
        result: torch.Tensor = m.fc(torch.flatten(m.avgpool(x), 1))
        return result


def train_step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()


def scheduled(model: nn.Module, x: torch.Tensor, rise_bytes: int, seconds: float, costs: dict[str, Any]) -> Any:
    """The model under a budget of ``rise_bytes`` beyond parameters, buffers and input, and the compiled plan."""
    resident = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers(), x))
    request = Request(model, ((x,), {}), FULL, solver="HIGHS", time_limit_seconds=seconds, profile_batch=x.shape[0])
    compiled = compile_schedule(
        request,
        resident + rise_bytes,
        CPU,
        profile=costs.get("profile"),
        save_profile=lambda p: costs.update(profile=p),
    )
    return ScheduleWrapper(model, compiled.record), compiled.record


@click.command()
@click.option("--batch", default=16, show_default=True)
@click.option("--size", default=224, show_default=True)
@click.option("--steps", default=5, show_default=True, help="Timed steps of each contender.")
@click.option("--seconds", default=60.0, show_default=True, help="For the solver, per budget.")
@click.option("--budgets", default="565,400", show_default=True, help="Megabytes (10**6 bytes) a step may add.")
def main(batch: int, size: int, steps: int, seconds: float, budgets: str) -> None:
    """Measure and print the table."""
    torch.manual_seed(0)
    model = torchvision.models.resnet50().train()
    x = torch.randn(batch, 3, size, size)
    contenders: dict[str, nn.Module] = {
        "plain PyTorch": copy.deepcopy(model),
        "torch.utils.checkpoint per block": Checkpointed(copy.deepcopy(model)),
    }
    costs: dict[str, Any] = {}
    for budget in map(int, budgets.split(",")):
        click.echo(f"planning for {budget} MB", err=True)
        try:
            wrapped, record = scheduled(copy.deepcopy(model), x, budget * MB, seconds, costs)
        except InfeasibleError as error:
            click.echo(f"{budget} MB: {error}")
            continue
        gap = "no bound" if record.gap is None else f"gap {100 * record.gap:.1f} %"
        contenders[f"monet_like, {budget} MB ({record.status}, {gap})"] = wrapped
    peaks = {}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in track(range(steps + 1), "steps of each contender"):
        for name, contender in contenders.items():
            if index == 0:  # warms up, and is not timed: recording the allocations takes time of its own
                peaks[name] = allocated_peak(lambda c=contender: train_step(c, x), CPU)
                continue
            started = time.perf_counter()
            train_step(contender, x)
            times[name].append(time.perf_counter() - started)
    plain = statistics.median(times["plain PyTorch"])
    click.echo(
        f"ResNet-50, batch {batch}, {size} x {size}, float32, {torch.get_num_threads()} CPU threads, torch {torch.__version__}\n"
    )
    click.echo("| | rise in memory | step, median | against plain |\n|---|---|---|---|")
    for name, found in times.items():
        median = statistics.median(found)
        click.echo(f"| {name} | {peaks[name] / MB:,.0f} MB | {median:.2f} s | {100 * (median / plain - 1):+.0f} % |")


if __name__ == "__main__":
    main()
