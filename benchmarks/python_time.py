"""Python time of a replayed step: ResNet-50 at tiny size, where the operators are short, beside eager mode.

    python -m benchmarks.python_time

Alternating steps in one process, medians; the schedule keeps everything, so both run the same operators.
"""

from __future__ import annotations

import copy
import statistics
import time

import click
import torch
import torchvision

from monet_like.capture import capture
from monet_like.plan import store_all
from monet_like.replay import ScheduleWrapper, admitted
from monet_like.schedule_file import InputSpec, ScheduleRecord


@click.command()
@click.option("--steps", default=40, show_default=True)
def main(steps: int) -> None:
    """Print both medians and their ratio."""
    x = torch.randn(2, 3, 32, 32)
    plain = torchvision.models.resnet50().train()
    model = copy.deepcopy(plain)
    program = admitted(capture(model, (x,)), "normal").program
    spec = (InputSpec(tuple(x.shape), "float32"),)
    record = ScheduleRecord(
        store_all(program),
        "resnet50",
        spec,
        "normal",
        1,
        program.fingerprint,
        "cpu",
        {},
        0,
        0.0,
        0,
        0.0,
        "none",
        "made",
    )
    contenders = {"eager": plain, "replay": ScheduleWrapper(model, record)}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(steps + 5):
        for name, contender in contenders.items():
            contender.zero_grad(set_to_none=True)
            started = time.perf_counter()
            contender(x).square().mean().backward()
            if index >= 5:
                times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(found) for name, found in times.items()}
    click.echo(f"ResNet-50, batch 2, 32 x 32, {torch.get_num_threads()} CPU threads, torch {torch.__version__}")
    for name, median in medians.items():
        click.echo(f"{name}: {median * 1e3:.1f} ms a step")
    click.echo(f"replay / eager: {medians['replay'] / medians['eager']:.3f}")


if __name__ == "__main__":
    main()
