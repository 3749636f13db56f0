"""What a quick plan loses: python -m benchmarks.quick_plans

The quick plan of `auto_schedule` (costs partly estimated, local search) and the full one (all measured, integer
program), both judged by the simulator on costs that are measured once more, so that neither plan has been fitted to
their noise. Seconds are wall seconds after the capture. Prints Markdown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import click
import torch
import torchvision
from torch import nn

from benchmarks.overhead import gpt2, words
from benchmarks.work import images
from monet_like.auto.auto_schedule import ALL_VARIANTS
from monet_like.capture.example_inputs import Example
from monet_like.compiler import quick as quick_costs
from monet_like.compiler.pipeline import Compiled, compile_schedule, prepare
from monet_like.compiler.request import Request, captured_for
from monet_like.ir.simulate import simulate

CPU = torch.device("cpu")

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Example]]] = {
    "ResNet-18, batch 16, 112 pixels": (torchvision.models.resnet18, partial(images, 16, 112)),
    "MobileNetV2, batch 16, 112 pixels": (torchvision.models.mobilenet_v2, partial(images, 16, 112)),
    "ViT, 4 layers of 256, batch 16, 112 pixels": (
        partial(torchvision.models.VisionTransformer, 112, 16, 4, 4, 256, 1024),
        partial(images, 16, 112),
    ),
    "GPT-2, 4 layers of 256, batch 8, 256 tokens": (gpt2, partial(words, 8, 256)),
}


@click.command()
@click.option("--share", default=60, show_default=True, help="Budget, in percent of plain PyTorch's peak.")
@click.option("--seconds", default=60.0, show_default=True, help="For the full plan's integer program.")
@click.option("--allowance", default=quick_costs.ALLOWANCE_SECONDS, show_default=True, help="More on a busy machine.")
@click.option("--models", default="", help="Only those whose name contains this.")
def main(share: int, seconds: float, allowance: float, models: str) -> None:
    """Print one line for each model."""
    quick_costs.ALLOWANCE_SECONDS = allowance
    print(f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}, budget {share} %\n")
    print(
        "| model | timed for the quick plan | quick | full | step by the quick plan | by the full plan "
        "|\n|---|---|---|---|---|---|"
    )
    for name, (make, inputs) in MODELS.items():
        if models not in name:
            continue
        torch.manual_seed(0)
        request = Request(make().train(), inputs(), ALL_VARIANTS, solver="HIGHS", time_limit_seconds=seconds, gap=0.01)
        captured = captured_for(request, request.example)
        found: list[Compiled] = []
        took: list[float] = []
        for quick in (True, False):
            started = time.perf_counter()
            budget = (lambda peak: peak * share // 100) if quick else found[0].record.budget_bytes
            found.append(compile_schedule(request, budget, CPU, captured=captured, quick=quick))
            took.append(time.perf_counter() - started)
        first, full = found
        judge = prepare(request, CPU, captured=captured)
        plain = judge.plain.seconds
        steps = [simulate(captured.program, one.plan.schedule, judge.costs).seconds for one in (first, full)]
        shown = [f"{100 * (step / plain - 1):+.1f} %" for step in steps]
        planning = " | ".join(f"{one:.0f} s" for one in took)
        timed = first.record.note.partition(" operators")[0]
        print(f"| {name} | {timed} | {planning} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
