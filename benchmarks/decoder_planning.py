"""How long a decoder of 8B parameters takes to plan block by block, and how near the plans are to their bounds.

    python -m benchmarks.decoder_planning --model 8B --seq 2048 --shares 90,75,60,50

Budgets are shares of plain PyTorch's predicted peak. "Within 0.1 % of all" means that no schedules of the parts that
fit are more than 0.1 % faster, whether they were found or not (`monet_like.plan.bound.prices`). "Without a limit"
compares with the time of the fastest schedules, which need not fit.
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from dataclasses import replace
from typing import Any

import torch

from monet_like import fits
from monet_like.ir.units import format_bytes, format_seconds
from monet_like.profile.devices import DEVICES

#: How the decoder is trained: options of `monet_like.fits`.
TRAININGS = {
    "LoRA on nf4 weights": {"lora": 16, "quant": "nf4"},
    "LoRA": {"lora": 16},
    "all parameters, 8-bit AdamW in the backward": {"optimizer": "adamw8bit", "optimizer_in_backward": True},
}


def show(name: str, model: str, length: int, shares: list[float], card: str) -> None:
    """Plan one training at all budgets, and print the figures."""
    sheet = DEVICES[card]
    options: dict[str, Any] = {"length": length, "largest": "", "reserve": "0", **TRAININGS[name]}
    first = fits(model, cards=[replace(sheet, name="no limit", memory_bytes=2**50)], **options)
    plain, fastest = first.row("no limit", "plain"), first.row("no limit", "ours")
    before = sum(os.times()[:4])  # of this process, and of those that it has waited for
    cards = [replace(sheet, name=f"{share:g} %", memory_bytes=int(share / 100 * plain.peak_bytes)) for share in shares]
    started = time.perf_counter()
    found = fits(model, cards=cards, **options)
    whole, used = time.perf_counter() - started, sum(os.times()[:4]) - before
    stages = ", ".join(f"{k} {v:.1f} s" for k, v in found.stage_seconds.items() if v)
    print(f"\n{name}: plain {format_bytes(plain.peak_bytes)}, {format_seconds(plain.seconds)}")
    print(f"  {len(cards)} budgets in {whole:.1f} s wall, {used:.1f} s CPU ({stages})")
    for limits in cards:
        row = found.row(limits.name, "ours")
        if not row.fits:
            print(f"  {limits.name:>5}: does not fit by {format_bytes(row.peak_bytes - limits.memory_bytes)}")
            continue
        print(
            f"  {limits.name:>5}: {100 * (row.against_plain - 1):+.1f} % time, peak {format_bytes(row.peak_bytes)}, "
            f"within {100 * row.gap:.2f} % of all, {100 * (row.seconds / fastest.seconds - 1):+.1f} % without a limit"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8B")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--shares", default="90,75,60,50")
    parser.add_argument("--card", default="h100", help="data sheet of the rates")
    given = parser.parse_args()
    shares = [float(share) for share in given.shares.split(",")]
    print(
        f"{given.model}, batch 1, {given.seq} tokens; rates of {given.card}; PyTorch {torch.__version__}, load "
        f"{os.getloadavg()[0]:.1f}"
    )
    for name in TRAININGS:
        show(name, given.model, given.seq, shares, given.card)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"\npeak memory of the process: {format_bytes(peak)}; CPU {time.process_time():.0f} s")


if __name__ == "__main__":
    main()
