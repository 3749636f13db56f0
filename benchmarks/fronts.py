"""Fronts of time over memory: exact, and with lossy words or copies: python -m benchmarks.fronts [--models vgg16,gpt]

Step time and budget in units of plain PyTorch's, by a device's datasheet rates; nothing is run. Each plan is one of the
local search alone (seconds); a front goes on from its smallest budget upwards and is nowhere slower than below. Writes
a picture and a CSV file for each model, and fronts.md, into benchmarks/results/fronts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import click
import torch
from rich.console import Console

from monet_like.cli.output import draw, write_table
from monet_like.compiler.pipeline import prepare
from monet_like.compiler.problem import read_problem
from monet_like.files import write_atomically
from monet_like.ir.frames import frame
from monet_like.ir.units import format_bytes, format_seconds
from monet_like.plan.budgets import Point, pareto
from monet_like.profile.devices import DEVICES

FOLDER = Path(__file__).parent / "results" / "fronts"
CPU = torch.device("cpu")
#: Expression, batch, device whose rates are used, input shape without the batch ("": the model's own).
MODELS: Mapping[str, tuple[str, int, str, str]] = {
    "resnet50": ("torchvision.models.resnet50()", 184, "a100", ""),
    "vgg16": ("torchvision.models.vgg16()", 176, "a100", ""),
    "unet": ("unet", 11, "a100", ""),
    "mlp": ("torchvision.ops.MLP(2048, [2048, 2048, 2048, 2048, 2048, 2048, 2048, 2048])", 16384, "a100", "2048"),
}
#: Of the CSV file of a model.
COLUMNS = {
    "front": "object",
    "budget_percent": "float64",
    "peak_bytes": "int64",
    "seconds": "float64",
    "host_bytes": "int64",
}
EXACT = "inplace_conv_multiway_newnode"
FRONTS: Mapping[str, str] = {
    "exact": EXACT,
    "exact + lowp8": f"{EXACT}_lowp8",
    "exact + dropit0.9": f"{EXACT}_dropit0.9",
    "exact + offload": f"{EXACT}_offload",
}


def front(name: str, mode: str, shares: list[float]) -> tuple[list[Point], float, int]:
    """Points in bytes and seconds; and seconds and peak bytes of plain PyTorch."""
    expression, batch, device, shape = MODELS[name]
    problem = read_problem(
        model=expression, batch=str(batch), budget="1", mode=mode, solver="HIGHS", device="cpu", dtype="float32",
        input_shape=shape or None,
    )  # fmt: skip
    ready = prepare(problem.request, CPU, profile=DEVICES[device])
    budgets = [int(share * ready.plain.peak_bytes) for share in shares]
    points = pareto(ready.captured.program, ready.costs, budgets, strategy="heuristic", extra_bytes=ready.extra_bytes)
    return list(points), ready.plain.seconds, ready.plain.peak_bytes


@click.command()
@click.option("--models", default=",".join(MODELS), show_default=True, help=", ".join(MODELS))
@click.option("--shares", default="25,30,35,40,50,60,80", show_default=True, help="Percent of plain PyTorch's peak.")
def main(models: str, shares: str) -> None:
    """Plan, draw, and write the tables."""
    console, wanted = Console(highlight=False), [float(text) / 100 for text in shares.split(",")]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in models.split(","):
        lines: dict[str, list[tuple[float, float]]] = {}
        rows: list[list[object]] = []
        plain_seconds, plain_bytes = 1.0, 1
        for label, mode in FRONTS.items():
            started = time.monotonic()
            points, plain_seconds, plain_bytes = front(name, mode, wanted)
            found = [(p.budget_bytes / plain_bytes, p.plan.report) for p in points if p.plan is not None]
            lines[label] = [(100 * share, 100 * (r.seconds / plain_seconds - 1)) for share, r in found]
            rows += [[label, round(100 * s, 1), r.peak_bytes, r.seconds, r.host_bytes] for s, r in found]
            console.print(f"{name}, {label}: {len(found)} budgets in {time.monotonic() - started:.0f} s")
        _, batch, device, _ = MODELS[name]
        title = (
            f"{name}, batch {batch}, {device} rates; plain PyTorch: {format_bytes(plain_bytes)}, "
            f"{format_seconds(plain_seconds)}"
        )
        labels = "budget, % of plain PyTorch's peak", "step against plain PyTorch, %"
        draw(console, FOLDER / f"{name}.png", title, lines, labels, {"plain PyTorch": (100.0, 0.0)})
        write_table(console, FOLDER / f"{name}.csv", frame(COLUMNS, rows))
        write_atomically(FOLDER / f"{name}.md", table(name, title, wanted, lines).encode())
    parts = [path.read_text() for path in sorted(FOLDER.glob("*.md")) if path.name != "fronts.md"]
    head = (
        "# Fronts\n\nStep against plain PyTorch's at budgets in percent of plain PyTorch's peak; -: no plan was "
        "found.\nOne run of the local search for each point, which may miss a percent, and plans that a wider mode has "
        "too.\nWhat copies take of the host's memory is in the CSV files.\n`python -m benchmarks.fronts --models NAME "
        "--shares PERCENTS`\n"
    )
    write_atomically(FOLDER / "fronts.md", "\n".join([head, *parts]).encode())


def table(name: str, title: str, shares: list[float], lines: Mapping[str, list[tuple[float, float]]]) -> str:
    """A Markdown section: a row for each front, "-" where no plan was found."""
    text = f"## {name}\n\n{title}\n\n![{name}]({name}.png)\n\n"
    text += f"| | {' | '.join(f'{100 * share:g} %' for share in shares)} |\n|---|{'---|' * len(shares)}\n"
    for label, points in lines.items():
        cells = []
        for share in shares:
            near = [seconds for place, seconds in points if abs(place - 100 * share) < 0.01]
            cells.append(f"{near[0]:+.1f} %" if near else "-")
        text += f"| {label} | {' | '.join(cells)} |\n"
    return text


if __name__ == "__main__":
    main()
