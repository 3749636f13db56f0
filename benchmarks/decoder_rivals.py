"""What rivals' rules cost a decoder of 8B parameters, beside our plans at the same peak: python -m
benchmarks.decoder_rivals

Every rule is a choice of schedules for the decoder's parts, judged by the simulator at the rates of a data sheet, as
`monet_like.fits` does. Nothing is measured. The rules:

* *checkpoint per block*: ``gradient_checkpointing_enable()`` of Transformers, and DeepSpeed's activation checkpointing;
* *every 2nd block*, *every 4th block*: ``every_n_layers`` of Transformers;
* *selective*: PyTorch's selective checkpointing per block, which saves products and attention and recomputes the rest;
* *chunked loss*: the head and the loss in parts, as Liger, TRL's ``chunked_nll`` and ``linear_cross_entropy`` of
  PyTorch do.

``activation_memory_budget`` of ``torch.compile`` is not among them: its fusion decides its peak, so it is measured
(`benchmarks.run`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import click
import torch

from benchmarks.decoder_planning import TRAININGS
from monet_like.cards.answer import Answer
from monet_like.cards.decoder import read_question
from monet_like.cards.pieces import Piece
from monet_like.cards.points import Priced, checkpointed
from monet_like.cards.step import step_of, with_way
from monet_like.ir.step import Point, peak_of, seconds_of
from monet_like.ir.units import format_bytes, format_seconds
from monet_like.plan.baseline import plain_step
from monet_like.plan.step.menus import point_of
from monet_like.profile.devices import DEVICES, DeviceLimits
from monet_like.profile.roofline import roofline

#: Products and attention: what a selective checkpoint saves.
SAVED = frozenset(
    {
        "aten.mm.default", "aten.addmm.default", "aten.bmm.default",
        *(f"aten._scaled_dot_product_{kind}_attention.default" for kind in ("flash", "efficient", "cudnn")),
    }
)  # fmt: skip


def selective(piece: Piece, card: DeviceLimits) -> Point:
    """A block under selective checkpointing."""
    captured = piece.captured
    program, _, costs = plain_step(captured.plain, roofline(captured, card), autograd_nodes=captured.autograd_nodes)
    return point_of(program, checkpointed(program, SAVED), costs)


def chunked(piece: Piece, priced: Priced) -> Point | None:
    """The fastest schedule of the head with a loss in parts; None if there is none."""
    program = piece.captured.program

    def in_parts(point: Point) -> bool:
        schedule = point.schedule
        ways = (slot[way] for slot, way in zip(program.slots, schedule.ways, strict=True))
        return any(way.variant.startswith("linear_cross_entropy") for way in ways)

    own = [point for point in priced.ours if point not in (priced.plain, priced.checkpoint)]
    return min(filter(in_parts, own), key=lambda point: point.seconds, default=None)


def rules(answer: Answer, prices: Mapping[Piece, Priced], card: DeviceLimits) -> dict[str, tuple[Point, ...]]:
    """A point for every part by each rule."""
    pieces = answer.pieces(card.capability)
    count = len(pieces.kind_of)

    def points(block: Callable[[Piece], Point], *, end: Point | None = None) -> tuple[Point, ...]:
        found = with_way(pieces, lambda piece: block(piece) if piece in pieces.kinds else prices[piece].plain)
        return found if end is None else (*found[:count], end, *found[count + 1 :])

    plain, every = points(lambda p: prices[p].plain), points(lambda p: prices[p].checkpoint)
    found = {
        "plain": plain,
        "every 2nd block": tuple(every[b] if b < count and b % 2 == 0 else point for b, point in enumerate(plain)),
        "every 4th block": tuple(every[b] if b < count and b % 4 == 0 else point for b, point in enumerate(plain)),
        "selective": points(lambda piece: selective(piece, card)),
        "checkpoint per block": every,
    }
    if (end := chunked(pieces.end, prices[pieces.end])) is not None:
        found["chunked loss"] = points(lambda p: prices[p].plain, end=end)
        found["checkpoint per block, chunked loss"] = points(lambda p: prices[p].checkpoint, end=end)
    return found


@click.command()
@click.option("--model", default="8B", show_default=True)
@click.option("--seq", default=2048, show_default=True, help="Tokens of a sample.")
@click.option("--batch", default=1, show_default=True)
@click.option("--card", default="h100", show_default=True, help="Data sheet of the rates.")
def main(model: str, seq: int, batch: int, card: str) -> None:
    """Print a table for each kind of training."""
    sheet = DEVICES[card]
    print(f"{model}, batch {batch}, {seq} tokens, rates of {card}, predicted; torch {torch.__version__}")
    for name, options in TRAININGS.items():
        question = read_question(model, **options)  # type: ignore[arg-type]
        answer = Answer(question, batch, seq, 0, lambda _: None)
        pieces = answer.pieces(sheet.capability)
        prices = {piece: answer.priced(piece, sheet) for piece in pieces.every}
        step = step_of(question, pieces, sheet.cublas_bytes)
        found = rules(answer, prices, sheet)
        least = seconds_of(step, found["plain"])
        print(f"\n{name}: plain {format_seconds(least)}\n")
        print("| rule | peak | step | ours at that peak |\n|---|---|---|---|")
        for rule, points in sorted(found.items(), key=lambda item: -peak_of(step, item[1])[0]):
            peak = peak_of(step, points)[0]
            choice = answer.chosen(sheet, step, peak)
            ours = "none found" if choice.peak_bytes > peak else f"{100 * (choice.seconds / least - 1):+.1f} %"
            time = f"{100 * (seconds_of(step, points) / least - 1):+.1f} %"
            print(f"| {rule} | {format_bytes(peak)} | {time} | {ours} |")


if __name__ == "__main__":
    main()
