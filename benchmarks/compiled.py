"""Plans under Inductor beside torch.compile, with and without its memory budget: python -m benchmarks.compiled

For every model one schedule, replayed eagerly and with ``backend="inductor"``, and a plan of ``compile_options`` for
the same budget, beside plain PyTorch, ``torch.compile`` and ``torch.compile`` under ``activation_memory_budget`` at the
largest of some settings whose measured peak is at most the schedule's, or else at the setting with the least. All take
turns in one process. Prints Markdown: measured peak (everything a step holds, parameters and input included), median
step, and both against plain PyTorch's. No dropout: the budget recomputes it with other masks (pytorch issue 190717).
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch
import torchvision
from torch import nn

import monet_like
from benchmarks.contenders import under_budget
from benchmarks.work import LanguageModel, images, tokens
from monet_like.capture.example_inputs import Example
from monet_like.compiler.request import Request
from monet_like.compiler.sources import Given
from monet_like.errors import InfeasibleError
from monet_like.ir.defaults import MODE
from monet_like.ir.units import Budget
from monet_like.job.job import Job
from monet_like.replay.verify.steps import step_peak, step_seconds, train_step
from monet_like.replay.wrapper import ScheduleWrapper

MB = 10**6
CPU = torch.device("cpu")


def vit() -> nn.Module:
    """A ViT of 6 layers whose head is not zero at the start, as torchvision's is."""
    model = torchvision.models.VisionTransformer(
        image_size=128, patch_size=16, num_layers=6, num_heads=6, hidden_dim=384, mlp_dim=1536
    )
    nn.init.normal_(model.heads[0].weight, std=0.02)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Example], str]] = {
    "gpt2": (
        partial(LanguageModel, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
        partial(tokens(8192, 256), 4),
        "4 layers of 256, 8,192 words, batch 4, 256 tokens",
    ),
    "vit": (vit, partial(images, 24, 128), "6 layers of 384, batch 24, 128 pixels"),
    "resnet18": (torchvision.models.resnet18, partial(images, 64, 112), "batch 64, 112 pixels"),
    "resnet50": (torchvision.models.resnet50, partial(images, 16, 112), "batch 16, 112 pixels"),
}


def compiled(model: nn.Module, setting: float, example: Example) -> nn.Module:
    """``torch.compile`` of a copy, after one step; the backend is an object of its own, so that no graph is shared."""
    made: Any = torch.compile(copy.deepcopy(model), backend=partial(under_budget, setting, "dp", False))
    train_step(made, example)
    return made


def planned(model: nn.Module, budget_bytes: int, seconds: float, example: Example) -> nn.Module:
    """``torch.compile`` of a copy with a plan for a peak, after one step."""
    options = monet_like.compile_options(budget_bytes, time_limit_seconds=seconds)
    torch._dynamo.reset()
    made: Any = torch.compile(copy.deepcopy(model), options=options, dynamic=False)
    train_step(made, example)
    return made


def table(name: str, share: float, settings: list[float], mode: str, steps: int, seconds: float) -> None:
    """Plan, compile, run and print one model."""
    torch.manual_seed(0)
    make, inputs, description = MODELS[name]
    model, example = make().train(), inputs()
    batch = example[0][0].shape[0]
    request = Request(model, example, mode, solver="HIGHS", time_limit_seconds=seconds, profile_batch=batch)
    print(f"\n{name}, {description}, {mode}, schedule for {100 * share:.0f} % of plain PyTorch's peak\n")
    try:
        found = Job(request, CPU, Given(None)).plan(Budget(share=share))
    except InfeasibleError as error:
        print(f"{str(error).split(';')[0]}.\n")
        return
    wrap = partial(ScheduleWrapper, solution_file=found.record, example=example, captured=found.ready.captured)
    runs: dict[str, nn.Module] = {"plain PyTorch": copy.deepcopy(model), "schedule, eager": wrap(copy.deepcopy(model))}
    started = time.perf_counter()
    scheduled = wrap(copy.deepcopy(model), backend="inductor")
    built = {"schedule, inductor": time.perf_counter() - started}
    runs["schedule, inductor"] = scheduled
    peaks = {label: step_peak(run, example, CPU) for label, run in runs.items()}
    started = time.perf_counter()
    runs["torch.compile, planned"] = planned(model, found.record.budget_bytes, seconds, example)
    built["torch.compile, planned"] = time.perf_counter() - started
    started = time.perf_counter()
    runs["torch.compile"] = compiled(model, 1.0, example)
    built["torch.compile"] = time.perf_counter() - started
    for label in ("torch.compile, planned", "torch.compile"):
        peaks[label] = step_peak(runs[label], example, CPU)
    tried: dict[float, tuple[int, nn.Module]] = {}
    for setting in sorted(settings, reverse=True):
        contender = compiled(model, setting, example)
        tried[setting] = step_peak(contender, example, CPU), contender
        if tried[setting][0] <= peaks["schedule, inductor"]:
            break
    setting = min(tried, key=lambda s: tried[s][0])
    label = f"torch.compile, activation_memory_budget {setting}"
    peaks[label], runs[label] = tried[setting]
    medians = dict(zip(runs, step_seconds([(run, example) for run in runs.values()], CPU, steps), strict=True))
    fused = next(kept.step.fused for kept in scheduled._kept)
    assert fused is not None
    print("| | peak | against plain | step, median | against plain | compiled in |\n|---|---|---|---|---|---|")
    for label, median in medians.items():
        peak, took = peaks[label], f"{built[label]:.0f} s" if label in built else ""
        less, faster = peak / peaks["plain PyTorch"] - 1, median / medians["plain PyTorch"] - 1
        print(
            f"| {label} | {peak / MB:,.0f} MB | {100 * less:+.1f} % | {median * 1e3:,.0f} ms | {100 * faster:+.1f} % | "
            f"{took} |"
        )
    others = ", ".join(f"{s}: {peak / MB:,.0f} MB" for s, (peak, _) in tried.items())
    print(f"\nPredicted peak of the schedule: {found.record.peak_bytes / MB:,.0f} MB.", end=" ")
    print(f"Compiled: {fused.compiled} of its {fused.operators} operators (views not counted),", end=" ")
    print(f"in {fused.pieces} pieces, {fused.distinct} of them different. Peaks by activation_memory_budget: {others}.")


@click.command()
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--share", default=60.0, show_default=True, help="Percent of plain PyTorch's peak.")
@click.option("--settings", default="0.5,0.2", show_default=True, help="Values of activation_memory_budget to try.")
@click.option("--mode", default=MODE, show_default=True)
@click.option("--steps", default=5, show_default=True, help="Timed steps of each contender.")
@click.option("--seconds", default=10.0, show_default=True, help="For the solver, per model.")
def main(models: str, share: float, settings: str, mode: str, steps: int, seconds: float) -> None:
    """Measure and print a table for every model."""
    print("# `python -m benchmarks.compiled`\n")
    print(f"{torch.get_num_threads()} CPU threads, torch {torch.__version__}, float32, medians of {steps} steps.")
    before = os.getloadavg()[0]
    with TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        torch.compile(torch.neg)(torch.ones(9))  # what the first kernel of all takes is nobody's
        for name in models.split(","):
            table(name, share / 100, [float(s) for s in settings.split(",")], mode, steps, seconds)
            after = os.getloadavg()[0]
            busy = max(before, after) > torch.get_num_threads() + 1
            note = "other work ran beside this, so only steps of one table compare" if busy else "nothing else ran"
            print(f"Load average {before:.1f} before, {after:.1f} after: {note}.", flush=True)
            before = after


if __name__ == "__main__":
    main()
