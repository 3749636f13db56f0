"""The rows of a table: each card's prices, and the choice of schedules for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ..ir.program import Cost
from ..ir.schedule import Schedule
from ..ir.step import Point, Step, peak_of, seconds_of
from ..plan.bound.pieces import BlockRelaxation, block_relaxation
from ..plan.step.choice import Choice
from ..plan.step.proof import Chooser
from ..profile.devices import DeviceLimits
from ..profile.roofline import roofline
from .decoder import Question
from .pieces import Capability, Capturing, Piece, Pieces
from .points import Priced, alike, own_point, own_schedules, priced
from .step import step_of, with_way
from .table import WAYS, Row


class Answer:
    """The rows so far, and everything that several cards share."""

    def __init__(self, asked: Question, batch: int, length: int, free: int, say: Callable[[str], None]) -> None:
        self.asked, self.batch, self.length, self.free, self.say = asked, batch, length, free, say
        self.capturing = Capturing(asked, say)
        self.rows: list[Row] = []
        self.seconds = {"capture": 0.0, "menus": 0.0, "choice": 0.0, "largest": 0.0}
        self._schedules: list[tuple[Piece, tuple[Schedule, ...]]] = []
        self._costs: dict[tuple[Piece, str], Mapping[str, Cost]] = {}
        self._prices: dict[tuple[Piece, str], Priced] = {}
        self._relaxations: dict[tuple[Piece, str], BlockRelaxation] = {}

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
        for way in WAYS[:2]:
            points = with_way(pieces, lambda piece, way=way: prices[piece].of(way))  # type: ignore[misc]
            peak, moment = peak_of(step, points)
            self._row(card, way, peak, moment, seconds_of(step, points), seconds_of(step, plain))
        with self.timed("choice"):
            self._choose(card, step, seconds_of(step, plain))

    def budget(self, card: DeviceLimits) -> int:
        """What a step may use of a card."""
        return card.memory_bytes - self.free

    def chosen(self, card: DeviceLimits, step: Step, budget: int) -> Choice:
        """Our schedules for the parts of a step within a budget, and a bound for all schedules."""
        order = with_way(self.pieces(card.capability), lambda piece: piece)
        step = step.with_menus(self.priced(piece, card).ours for piece in order)
        relaxations = [self.relaxation(piece, card) for piece in order]

        def point(block: int, schedule: Schedule) -> Point:
            return own_point(order[block].captured, schedule, self.costs(order[block], card))

        return Chooser(step, relaxations, budget, point).choose()

    def _choose(self, card: DeviceLimits, step: Step, plain: float) -> None:
        found = self.chosen(card, step, self.budget(card))
        fits = found.peak_bytes <= self.budget(card)
        promised = (found.seconds, plain, found.bound_seconds) if fits else (None, plain)
        self._row(card, "ours", found.peak_bytes, found.moment, *promised)

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

    def costs(self, piece: Piece, card: DeviceLimits) -> Mapping[str, Cost]:
        """Seconds and workspaces of a part's tasks on a card."""
        key = (piece, card.name)
        if key not in self._costs:
            with self.timed("capture"):
                self._costs[key] = roofline(piece.captured, card)
        return self._costs[key]

    def priced(self, piece: Piece, card: DeviceLimits) -> Priced:
        """A part with a card's costs."""
        key = (piece, card.name)
        if key not in self._prices:
            costs = self.costs(piece, card)
            self._prices[key] = priced(piece.captured, self.schedules(piece, costs), costs)
        return self._prices[key]

    def relaxation(self, piece: Piece, card: DeviceLimits) -> BlockRelaxation:
        """A bound of what any schedule of a part costs on a card, at prices that are asked for later."""
        key = (piece, card.name)
        if key not in self._relaxations:
            self._relaxations[key] = block_relaxation(piece.captured.program, self.costs(piece, card))
        return self._relaxations[key]


def least_peak(pieces: Pieces, prices: Mapping[Piece, Priced], step: Step, way: str) -> int:
    """The lowest peak of a way; of ours, the lowest of those with one schedule for all equal blocks."""
    if way != "ours":
        return peak_of(step, with_way(pieces, lambda piece: prices[piece].of(way)))[0]
    chosen: dict[Piece, Point] = {piece: prices[piece].checkpoint for piece in pieces.every}
    best = peak_of(step, with_way(pieces, chosen.__getitem__))[0]
    for _ in range(2):
        for piece in pieces.every:
            for point in prices[piece].ours:
                tried = {**chosen, piece: point}
                peak = peak_of(step, with_way(pieces, tried.__getitem__))[0]
                if peak < best:
                    best, chosen = peak, tried
    return best
