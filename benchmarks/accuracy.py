"""What lossy caches do to training: python -m benchmarks.accuracy

Trains one small decoder on text by bytes, once for each mode and seed, from the same weights on the same batches, each
by the plan for the same share of plain PyTorch's peak. The text is the source of Python's standard library, whose last
twentieth is held out. Prints Markdown:

* *lossy*: the part of the bytes kept for the backward that is in lossy caches;
* *step*: predicted seconds against plain PyTorch's, by a CPU's estimated rates;
* *gradient*: the difference from the exact gradient in the first step, relative to its norm, over all parameters;
* *loss*: of the held-out text after training, in nats a byte: mean of the seeds, and the mean difference from the exact
  mode with its standard error over the seeds.
"""

from __future__ import annotations

import math
import statistics
import sysconfig
from pathlib import Path

import click
import torch
from torch import nn
from torch.nn import functional

import monet_like
from monet_like.ir.schedule import kept_values
from monet_like.job.solved import SolvedPlan

EXACT = "normal"
MODES = (EXACT, "normal_lowp16", "normal_lowp8", "normal_dropit0.9", "normal_dropit0.9_lowp8")
CONTEXT, BATCH, WIDTH, LAYERS, HEADS = 64, 16, 96, 3, 4


class Block(nn.Module):
    """Attention and an MLP, each after a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.heads, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [N, length, width]."""
        query, key, value = self.heads(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """A language model of bytes; the result is the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """``text``: [N, context + 1] bytes as int64."""
        x = self.bytes(text[:, :-1]) + self.places
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """Text to train on and text that is held out, as bytes in int64."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    cut = len(text) * 19 // 20
    return text[:cut], text[cut:]


def batches(text: torch.Tensor, count: int, seed: int) -> list[torch.Tensor]:
    """``count`` batches of random places, each [BATCH, CONTEXT + 1]."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - CONTEXT - 1, (count, BATCH, 1), generator=generator)
    return list(text[starts + torch.arange(CONTEXT + 1)])


def planned(mode: str, batch: torch.Tensor, share: int) -> SolvedPlan:
    """The plan for a share of plain PyTorch's peak."""
    torch.manual_seed(0)
    job = monet_like.problem(Decoder().train(), batch, mode=mode, device="roofline:cpu", verbose=False)
    return job.plan(f"{share}%", time_limit_seconds=20.0)


def lossy_share(plan: SolvedPlan) -> float:
    """The part of the bytes kept for the backward that is in lossy caches."""
    program, schedule = plan.ready.captured.program, plan.schedule
    packed = {v for task in program.tasks if task.variant.endswith(".pack") for v in task.writes}
    kept = {v: program.values[v].bytes for v in kept_values(program, schedule)}
    return sum(size for v, size in kept.items() if v in packed) / sum(kept.values())


def trained(
    plan: SolvedPlan, seed: int, steps: int, data: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, float]:
    """The first step's gradient, and the loss of held-out text after training."""
    torch.manual_seed(seed)
    model = Decoder().train()
    wrapped = monet_like.ScheduleWrapper(model, plan.record)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    first = None
    for batch in batches(data[0], steps, seed):
        wrapped(batch).backward()
        if first is None:
            first = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
    assert first is not None
    model.eval()
    with torch.no_grad():
        return first, statistics.fmean(float(model(batch)) for batch in batches(data[1], 50, 0))


@click.command()
@click.option("--share", default=60, show_default=True, help="Budget, in percent of plain PyTorch's peak.")
@click.option("--steps", default=400, show_default=True, help="Of each training.")
@click.option("--seeds", default=3, show_default=True, help="Trainings of each mode.")
def main(share: int, steps: int, seeds: int) -> None:
    """Train in every mode and print a table."""
    data = corpus()
    example = batches(data[0], 1, 0)[0]
    plans = {mode: planned(mode, example, share) for mode in MODES}
    found = {mode: [trained(plan, seed, steps, data) for seed in range(seeds)] for mode, plan in plans.items()}
    print(
        f"{LAYERS} layers of {WIDTH} at {share} % of plain PyTorch's peak, {steps} steps of {BATCH} x {CONTEXT} bytes, "
        f"{seeds} seeds, torch {torch.__version__}\n"
    )
    print("| mode | lossy | step | gradient | loss | against exact |\n|---|---|---|---|---|---|")
    for mode, runs in found.items():
        record = plans[mode].record
        pairs = list(zip(runs, found[EXACT], strict=True))
        away = max(float((mine - exact).norm() / exact.norm()) for (mine, _), (exact, _) in pairs)
        differences = [mine - exact for (_, mine), (_, exact) in pairs]
        error = statistics.stdev(differences) / math.sqrt(seeds) if seeds > 1 else math.nan
        cells = (
            f"`{mode}`",
            f"{100 * lossy_share(plans[mode]):.0f} %",
            f"{100 * (record.seconds / record.plain_seconds - 1):+.1f} %",
            f"{100 * away:.2g} %",
            f"{statistics.fmean(loss for _, loss in runs):.4f}",
            "" if mode == EXACT else f"{statistics.fmean(differences):+.4f} ± {error:.4f}",
        )
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
