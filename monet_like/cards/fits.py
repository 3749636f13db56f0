"""`fits`: which cards a decoder trains on, how fast, and how large its batch may be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..errors import InfeasibleError, UsageError
from ..ir.program import Cost
from ..ir.schedule import Schedule
from ..ir.units import format_bytes, parse_budget
from ..plan.block_points import Point
from ..plan.blocks import choose, peak_of, seconds_of
from ..profile.devices import DEVICES, DeviceLimits
from ..profile.roofline import roofline
from .decoder import Question, read_question
from .pieces import Capability, Capturing, Piece, Pieces
from .points import Priced, alike, own_schedules, priced
from .step import Step, step_of, with_way
from .table import WAYS, Fits, Row

#: One card of each usual size: 16, 24, 40, 48, 80 and 141 GB.
CARDS = ("rtx4080", "rtx4090", "a100", "l40s", "h100", "h200")
LARGEST = ("", "batch", "length")
#: Of each card's memory that a step may not use: the driver's context, the allocator's fragments.
RESERVE = "1 GB"
#: Batches and lengths are not larger than this.
MOST = 2**24


def fits(
    model: str | nn.Module,
    *,
    batch: int = 1,
    length: int = 2048,
    cards: Sequence[str | DeviceLimits] = CARDS,
    largest: str = "batch",
    reserve: str | int = RESERVE,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Fits:
    """Predict which cards a decoder trains on; no card and no weights are needed.

    Each distinct block is captured once, on meta tensors as on the target card, and gets a menu of schedules. For each card one
    integer program chooses a schedule for every block, so that the whole step fits (`monet_like.plan.blocks`).

    Args:
        model: a name such as ``"llama_8b"``, ``"transformers:LlamaForCausalLM(config.json)"``, another MODEL of the command
            line, or a module whose parts are known (`monet_like.models.parts_of`).
        batch, length: samples and tokens of a step.
        cards: names of data sheets in `monet_like.profile.devices.DEVICES`, or data sheets.
        largest: what to look for the largest of: ``batch`` at this length, ``length`` at this batch, or "".
        reserve: of each card's memory that the step may not use, such as ``"1 GB"``.
        progress: called with lines for people.
        options: ``dtype``, ``lora``, ``quant``, ``optimizer``, ``optimizer_in_backward``, ``attention`` and ``mode``; see
            `monet_like.cards.decoder.read_question`.

    Raises:
        UsageError: an argument is wrong.
        CaptureError: a part of the model cannot be captured for a card.
    """
    limits = [_card(card) for card in cards]
    if largest not in LARGEST:
        raise UsageError(f"largest {largest!r} is unknown; give batch, length or nothing")
    for name, count in (("batch", batch), ("length", length)):
        if not 1 <= count <= MOST:
            raise UsageError(f"{name} {count} must be at least 1 and at most {MOST}")
    free = parse_budget(reserve, "reserve").of(0) if reserve not in (0, "0") else 0
    asked = read_question(model, **options)
    answer = _Answer(asked, batch, length, free, progress or (lambda _: None))
    for card in limits:
        answer.add(card)
    if largest:
        from .largest import add_largest

        with answer.timed("largest"):
            answer.rows = add_largest(answer, limits, largest)
    return Fits(str(asked), batch, length, largest, free, tuple(answer.rows), answer.seconds)


def _card(card: str | DeviceLimits) -> DeviceLimits:
    """The data sheet of a card.

    Raises:
        UsageError: it is not known, or of no GPU with a known memory.
    """
    known = [name for name, limits in DEVICES.items() if limits.device == "cuda"]
    limits = DEVICES.get(card) if isinstance(card, str) else card
    if limits is None or limits.device != "cuda" or not limits.memory_bytes:
        raise UsageError(f"card {card!r} is unknown; choose of {', '.join(known)}")
    return limits


class _Answer:
    """The rows so far, and everything that several cards share."""

    def __init__(self, asked: Question, batch: int, length: int, free: int, say: Callable[[str], None]) -> None:
        self.asked, self.batch, self.length, self.free, self.say = asked, batch, length, free, say
        self.capturing = Capturing(asked, say)
        self.rows: list[Row] = []
        self.seconds = {"capture": 0.0, "menus": 0.0, "choice": 0.0, "largest": 0.0}
        self._schedules: list[tuple[Piece, tuple[Schedule, ...]]] = []
        self._prices: dict[tuple[Piece, str], Priced] = {}

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the wall seconds of a ``with`` statement to a stage."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - started

    def pieces(self, capability: Capability) -> Pieces:
        """The parts at the asked size; captured once for each compute capability."""
        with self.timed("capture"):
            return self.capturing.at(self.batch, self.length, capability)

    def add(self, card: DeviceLimits) -> None:
        """The rows of a card."""
        pieces = self.pieces(card.capability)
        prices = {piece: self.priced(piece, card) for piece in pieces.every}
        step = step_of(self.asked, pieces, card.cublas_bytes)
        self.say(f"choosing schedules for {card.name}")
        plain = with_way(pieces, lambda piece: prices[piece].plain)
        once = [1] * len(plain)
        for way in WAYS[:2]:
            points = with_way(pieces, lambda piece, way=way: prices[piece].of(way))  # type: ignore[misc]
            peak, moment = peak_of(points, step.moments)
            self._row(card, way, peak, moment, seconds_of(points, once), seconds_of(plain, once))
        with self.timed("choice"):
            self._choose(card, pieces, prices, step, seconds_of(plain, once))

    def budget(self, card: DeviceLimits) -> int:
        """What a step may use of a card."""
        return card.memory_bytes - self.free

    def _choose(
        self, card: DeviceLimits, pieces: Pieces, prices: Mapping[Piece, Priced], step: Step, plain: float
    ) -> None:
        kinds = [pieces.kinds[kind] for kind in pieces.kind_of]
        order = [*kinds, pieces.end, *([pieces.start] if pieces.start else [])]
        try:
            found = choose([prices[piece].ours for piece in order], step.moments, self.budget(card))
        except InfeasibleError as error:
            self._row(card, "ours", error.smallest_bytes or 0, error.step or "", None, plain)
            return
        self._row(card, "ours", found.peak_bytes, found.moment, found.seconds, plain, found.bound_seconds)

    def _row(
        self, card: DeviceLimits, way: str, peak: int, moment: str, seconds: float | None, plain: float,
        bound: float | None = None,
    ) -> None:  # fmt: skip
        missing = max(0, peak - self.budget(card))
        ratio = None if seconds is None else seconds / plain
        self.rows.append(
            Row(card.name, card.memory_bytes, way, not missing, peak, missing, seconds, ratio, bound, moment)
        )

    def schedules(self, piece: Piece, costs: Mapping[str, Cost]) -> tuple[Schedule, ...]:
        """Our schedules of a part: those of an equal program, or found now."""
        for known, found in self._schedules:
            if alike(known.captured, piece.captured):
                return found
        self.say(f"planning {piece.name}")
        with self.timed("menus"):
            found = own_schedules(piece.captured, costs, self.say)
        self._schedules.append((piece, found))
        return found

    def priced(self, piece: Piece, card: DeviceLimits) -> Priced:
        """A part with a card's costs."""
        key = (piece, card.name)
        if key not in self._prices:
            with self.timed("capture"):
                costs = roofline(piece.captured, card)
            self._prices[key] = priced(piece.captured, self.schedules(piece, costs), costs)
        return self._prices[key]

    def told(self, card: DeviceLimits) -> str:
        """A card for messages."""
        return f"{card.name} ({format_bytes(card.memory_bytes)})"


def least_peak(pieces: Pieces, prices: Mapping[Piece, Priced], step: Step, way: str) -> int:
    """The lowest peak of a way; of ours, the lowest of those with one schedule for all equal blocks."""
    if way != "ours":
        return peak_of(with_way(pieces, lambda piece: prices[piece].of(way)), step.moments)[0]
    chosen: dict[Piece, Point] = {piece: prices[piece].checkpoint for piece in pieces.every}
    best = peak_of(with_way(pieces, chosen.__getitem__), step.moments)[0]
    for _ in range(2):
        for piece in pieces.every:
            for point in prices[piece].ours:
                tried = {**chosen, piece: point}
                peak = peak_of(with_way(pieces, tried.__getitem__), step.moments)[0]
                if peak < best:
                    best, chosen = peak, tried
    return best
