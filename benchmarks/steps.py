"""Step time and memory on this machine's CPU, plain against scheduled: python -m benchmarks.steps [--models resnet50]

Every model is profiled at the batch it runs at and planned for shares of plain PyTorch's peak; then all its
contenders take turns in one process. Prints Markdown: measured peak (everything a step holds, parameters and input
included), median step, and that against plain PyTorch's, measured and predicted. malloc keeps what is freed, as CUDA's
caching allocator does (`benchmarks.malloc`): also while operators are profiled.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import click
import torch
import torchvision
from rich.progress import track
from torch import nn

from benchmarks.malloc import keep_freed
from benchmarks.work import images
from monet_like.capture.example_inputs import Example
from monet_like.compiler.pipeline import make_record, plan_for, prepare
from monet_like.compiler.request import Request
from monet_like.errors import InfeasibleError, SolverError
from monet_like.ir.defaults import MODE
from monet_like.models import UNet
from monet_like.replay.verify.steps import step_peak, step_seconds
from monet_like.replay.wrapper import ScheduleWrapper

MB = 10**6
CPU = torch.device("cpu")


class Head(nn.Module):
    """The head of a language model: norm, linear layer and loss."""

    def __init__(self, width: int = 768, words: int = 50257) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean loss of x [tokens, width] against targets [tokens]."""
        return nn.functional.cross_entropy(self.linear(self.norm(x)), targets)


def tokens(count: int) -> Callable[[], Example]:
    """Random inputs and targets of `Head`."""
    return lambda: ((torch.randn(count, 768, requires_grad=True), torch.randint(0, 50257, (count,))), {})


#: The batches of VGG-16 and ViT are so large because their weights are.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Example], str]] = {
    "resnet50": (torchvision.models.resnet50, partial(images, 16, 224), "batch 16, 224 pixels"),
    "mobilenet_v2": (torchvision.models.mobilenet_v2, partial(images, 32, 224), "batch 32, 224 pixels"),
    "vgg16_bn": (torchvision.models.vgg16_bn, partial(images, 16, 224), "batch 16, 224 pixels"),
    "vit_b_16": (torchvision.models.vit_b_16, partial(images, 12, 224), "batch 12, 224 pixels"),
    "unet": (partial(UNet, width=32), partial(images, 1, 576), "width 32, batch 1, 576 pixels"),
    "gpt2_head": (Head, tokens(2048), "2,048 tokens, 50,257 words"),
}


def example_for(name: str) -> tuple[nn.Module, Example]:
    """A model in training mode and random inputs."""
    torch.manual_seed(0)
    make, inputs, _ = MODELS[name]
    return make().train(), inputs()


def table(name: str, shares: list[float], mode: str, steps: int, seconds: float) -> None:
    """Plan, run and print one model."""
    model, example = example_for(name)
    batch = example[0][0].shape[0]
    request = Request(model, example, mode, solver="HIGHS", time_limit_seconds=seconds, profile_batch=batch)
    ready = prepare(request, CPU)
    runs: list[tuple[str, nn.Module, float]] = [("plain PyTorch", copy.deepcopy(model), 1.0)]
    missing = []
    for share in shares:
        budget = int(share * ready.plain.peak_bytes)
        label = f"{100 * share:.0f} %, {budget / MB:,.0f} MB"
        try:
            found = plan_for(ready, request, budget)
        except (InfeasibleError, SolverError) as error:
            missing.append(f"| {label} | - | - | {str(error).split(';')[0]} | |")
            continue
        record = make_record(request, ready, found, budget)
        wrapped = ScheduleWrapper(copy.deepcopy(model), record)
        runs.append((label, wrapped, found.report.seconds / ready.plain.seconds))
    peaks = [step_peak(contender, example, CPU) for _, contender, _ in track(runs, f"{name}: peaks")]
    medians = step_seconds([(contender, example) for _, contender, _ in runs], CPU, steps)
    print(f"\n{name}, {MODELS[name][2]}, {mode}\n", flush=True)
    print("| budget | peak | step, median | against plain | predicted |\n|---|---|---|---|---|")
    for (label, _, predicted), peak, median in zip(runs, peaks, medians, strict=True):
        change = f"{100 * (median / medians[0] - 1):+.1f} % | {100 * (predicted - 1):+.1f} %"
        print(f"| {label} | {peak / MB:,.0f} MB | {median:.2f} s | {change} |")
    print("\n".join(missing), flush=True)


@click.command()
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--shares", default="100,70,50,40,33", show_default=True, help="Percent of plain PyTorch's peak.")
@click.option("--mode", default=MODE, show_default=True)
@click.option("--steps", default=5, show_default=True, help="Timed steps of each contender.")
@click.option("--seconds", default=60.0, show_default=True, help="For the solver, per budget.")
def main(models: str, shares: str, mode: str, steps: int, seconds: float) -> None:
    """Measure and print a table for every model."""
    keep_freed()
    print(f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}, float32")
    for name in models.split(","):
        table(name, [float(share) / 100 for share in shares.split(",")], mode, steps, seconds)


if __name__ == "__main__":
    main()
