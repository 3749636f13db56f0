#!/usr/bin/env python3
"""What lossy caches do to training: ResNet-18 and a small ViT on scikit-learn's digits, with and without.

    python scripts/train_dropit.py --out benchmarks/results/cpu/dropit.md

Every row is trained from scratch with several seeds, the same ones for all rows. ``dropit`` rows drop in every layer
that `to_dropit` covers; ``lowp8`` keeps every value that can be in 8 bits. So this is the most that each can spoil:
a plan uses them only where they pay. Needs ``pip install 'monet_like[train]'``.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
import torchvision
from rich.progress import track
from torch import Tensor, nn

from monet_like import ScheduleWrapper, to_dropit
from monet_like.capture.captured import Captured
from monet_like.capture.example_inputs import input_spec
from monet_like.capture.lower.step import capture
from monet_like.capture.precision import weights_layout
from monet_like.errors import UsageError
from monet_like.files import write_atomically
from monet_like.ir.schedule import Schedule, kept_values
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.plan import store_all
from monet_like.variants import admitted

SIDE = 16
MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": lambda: torchvision.models.resnet18(num_classes=10),
    "vit": lambda: torchvision.models.VisionTransformer(SIDE, 4, 4, 4, 64, 256, num_classes=10),
}
ROWS = ("plain", "dropit 0.5", "dropit 0.7", "dropit 0.9", "lowp8")

Images = tuple[Tensor, Tensor]


def digits() -> tuple[Images, Images]:
    """Training and test images float32[N, 3, 16, 16] of mean 0 and deviation 1, and their classes."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None]
    x = nn.functional.interpolate(x, size=(SIDE, SIDE), mode="bilinear").expand(-1, 3, -1, -1).contiguous()
    x, y = (x - x.mean()) / x.std(), torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(x) // 5], order[len(x) // 5 :]
    return (x[train], y[train]), (x[test], y[test])


def in_fewer_bits(captured: Captured, word: str) -> Schedule:
    """Plain PyTorch's schedule, but everything that has a copy is kept as that and made again where it is
    read first.
    """
    program, schedule = captured.program, store_all(captured.program)
    packs = [p for p, task in enumerate(program.tasks) if task.variant == f"{word}.pack"]
    restores = {task.writes[0]: p for p, task in enumerate(program.tasks) if task.variant == f"{word}.restore"}
    again = []
    for ways, way, tasks in zip(program.slots, schedule.ways, schedule.again, strict=True):
        read = [v for v in program.forward_reads(ways[way]) if v in restores]
        again.append(tuple(sorted((*tasks, *(restores.pop(v) for v in read)))))
    return replace(schedule, forward=tuple(sorted((*schedule.forward, *packs))), again=tuple(again))


def prepared(row: str, model: nn.Module, x: Tensor) -> tuple[nn.Module, int]:
    """The model that a row trains, and bytes that the forward of one batch leaves for the backward."""
    if row.startswith("dropit"):
        model = to_dropit(model, gamma=float(row.split()[1]))
    if row != "lowp8":
        return model, saved_bytes(model, x)
    captured = admitted(capture(model, (x,)), row)
    schedule = in_fewer_bits(captured, row)
    record = ScheduleRecord(
        schedule=schedule,
        model=type(model).__name__,
        inputs=(input_spec(x),),
        mode=row,
        budget_bytes=1,
        fingerprint=captured.program.fingerprint,
        device="",
        versions={},
        peak_bytes=0,
        seconds=0.0,
        plain_peak_bytes=0,
        plain_seconds=0.0,
        solver="none",
        status="made",
        layout=weights_layout(model),
    )
    kept = kept_values(captured.program, schedule)
    size = sum(captured.program.values[v].bytes for v in kept)
    return ScheduleWrapper(model, record, example=((x,), {}), captured=captured), size


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes of the storages that autograd saves, parameters, buffers and the input apart; the model stays as it is."""
    model = copy.deepcopy(model)
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), x)}
    found: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        found[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(x)
    size = sum(t.untyped_storage().nbytes() for place, t in found.items() if place not in own)
    del out
    return size


def trained(
    row: str, name: str, seed: int, epochs: int, batch: int, data: tuple[Images, Images], writer: Any
) -> tuple[float, int, float]:
    """Test accuracy in percent, bytes of a batch's cache, and seconds of an epoch (median), after training."""
    (x, y), (x_test, y_test) = data
    torch.manual_seed(seed)
    model, size = prepared(row, MODELS[name]().train(), x[:batch])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    seconds = []
    torch.manual_seed(seed)
    for epoch in range(epochs):
        started = time.perf_counter()
        model.train()
        order = torch.randperm(len(x))
        for start in range(0, len(x) - batch + 1, batch):  # whole batches only
            chosen = order[start : start + batch]
            loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seconds.append(time.perf_counter() - started)
        model.eval()
        with torch.no_grad():
            accuracy = 100 * float((model(x_test).argmax(1) == y_test).float().mean())
        if writer is not None:
            writer.add_scalar(f"{name}/{row}/{seed}/loss", float(loss), epoch)
            writer.add_scalar(f"{name}/{row}/{seed}/accuracy", accuracy, epoch)
    return accuracy, size, statistics.median(seconds)


def tensorboard(folder: Path | None) -> Any:
    """A writer into ``folder``, or None."""
    if folder is None:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UsageError("--log-dir needs tensorboard: pip install 'monet_like[train]', or leave it out") from error
    return SummaryWriter(str(folder))


@click.command()
@click.option("--models", default="resnet18,vit", show_default=True, help="Some of resnet18, vit.")
@click.option("--seeds", default=3, show_default=True, help="Runs of every row.")
@click.option("--epochs", default="6,20", show_default=True, help="Of each model.")
@click.option("--batch", default=64, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Markdown file to write; else it is printed.")
@click.option("--log-dir", type=click.Path(path_type=Path), help="Folder for TensorBoard.")
def main(models: str, seeds: int, epochs: str, batch: int, out: Path | None, log_dir: Path | None) -> None:
    """Train with and without lossy caches; a Markdown table of accuracy, bytes and seconds."""
    writer, data = tensorboard(log_dir), digits()
    lines = [
        f"`python scripts/train_dropit.py --models {models} --seeds {seeds} --epochs {epochs} --batch {batch}`: "
        f"scikit-learn's digits at {SIDE} x {SIDE}, {len(data[0][0])} to train, {len(data[1][0])} to test, trained "
        f"from scratch by AdamW; mean and standard deviation over {seeds} seeds.",
        "",
        "| model | caches | test accuracy | lowest, highest | bytes a batch | seconds an epoch |",
        "|---|---|---|---|---|---|",
    ]
    counts = dict(zip(models.split(","), map(int, epochs.split(",")), strict=True))
    for name, row in track([(name, row) for name in counts for row in ROWS], description="training"):
        found = [trained(row, name, seed, counts[name], batch, data, writer) for seed in range(seeds)]
        accuracies = [accuracy for accuracy, _, _ in found]
        spread = statistics.stdev(accuracies) if seeds > 1 else 0.0
        lines.append(
            f"| {name} | {row} | {statistics.mean(accuracies):.2f} ± {spread:.2f} % | {min(accuracies):.2f}, "
            f"{max(accuracies):.2f} % | {found[0][1]:,} | {statistics.median(seconds for _, _, seconds in found):.2f} |"
        )
    text = "\n".join(lines) + "\n"
    if out is None:
        click.echo(text)
    else:
        write_atomically(out, text.encode())


if __name__ == "__main__":
    main()
