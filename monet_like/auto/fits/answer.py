"""The rows of a table: each card's prices, and the choice of schedules for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

from ...ir.program import Cost
from ...ir.schedule import Schedule
from ...ir.step import Point, Step, Streaming, peak_of, seconds_of
from ...plan.bound.pieces import BlockRelaxation, block_relaxation
from ...plan.step.choice import Choice
from ...plan.step.menus import menu
from ...plan.step.proof import NEAR, Chooser
from ...profile.card_budget import reserve_of
from ...profile.devices import DeviceLimits
from ...profile.roofline import roofline
from .pieces import Capability, Capturing, Piece, Pieces
from .points import Priced, alike, own_point, priced, with_host
from .question import Question
from .step import Kept, all_shared, least_shared, lone_inputs, pinned_bytes, step_of, streaming_of
from .table import Row

#: Wall seconds for the menu of one part, about. The search ends by itself before, unless the machine is slow or very
#: busy: so its answers do not depend on what else runs there.
MENU_SECONDS = 120.0
#: Where between the least peak of a part and that of a schedule another one is looked for.
PEAK_SHARES = (0.0,)


class Answer:
    """The rows so far, and everything that several cards share."""

    def __init__(self, asked: Question, batch: int, length: int, free: int | None, say: Callable[[str], None]) -> None:
        self.asked, self.batch, self.length, self.free, self.say = asked, batch, length, free, say
        self.capturing = Capturing(asked, say)
        self.rows: list[Row] = []
        self.seconds = {"capture": 0.0, "menus": 0.0, "choice": 0.0, "largest": 0.0}
        self._schedules: list[tuple[Piece, tuple[Schedule, ...]]] = []
        self.costs, self.priced = cache(self._costs), cache(self._priced)
        self.with_host, self.relaxation = cache(self._with_host), cache(self._relaxation)

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
        prices = {piece: self.priced(piece, card) for piece in pieces.kinds}
        self.say(f"choosing schedules for {card.name}")
        plain = 0.0
        for way in ("plain", "checkpoint"):
            points = [prices[piece].of(way) for piece in pieces.order]
            step = self.step(pieces, card, [point.shared for point in points])
            peak, moment = peak_of(step, points)
            seconds = seconds_of(step, points)
            plain = seconds if way == "plain" else plain
            self._row(card, way, peak, moment, seconds, plain)
        streaming = streaming_of(pieces, card)
        with self.timed("choice"):
            found = self.chosen(card, self.budget(card))
        self._own(card, "ours", found, plain)
        if streaming is not None:
            least = sum(min(point.seconds for point in prices[piece].ours) for piece in pieces.order)
            if found.peak_bytes > self.budget(card) or found.seconds > (1 + NEAR) * least:
                with self.timed("choice"):
                    found = self.chosen(card, self.budget(card), streaming)
            self._own(card, "host", found, plain)

    def _own(self, card: DeviceLimits, way: str, found: Choice, plain: float) -> None:
        fits, pieces = found.peak_bytes <= self.budget(card), self.pieces(card.capability)
        seconds, bound = (found.seconds, found.bound_seconds) if fits else (None, None)
        self._row(card, way, found.peak_bytes, found.moment, seconds, plain, bound, pinned_bytes(pieces, found.points))

    def step(self, pieces: Pieces, card: DeviceLimits, kept: Kept, streaming: Streaming | None = None) -> Step:
        """The step on a card whose pieces keep these of their inputs and results."""
        return step_of(self.asked, pieces, card.cublas_bytes, kept, streaming)

    def budget(self, card: DeviceLimits) -> int:
        """What a step may use of a card."""
        return card.memory_bytes - (reserve_of(card.memory_bytes) if self.free is None else self.free)

    def chosen(self, card: DeviceLimits, budget: int, streaming: Streaming | None = None) -> Choice:
        """Our schedules for the pieces of a step within a budget, and a bound for all schedules.

        The first choice is made as if pieces kept only those inputs and results that all their schedules keep, so that
        the bound holds for all; if what it keeps does not fit then, another one as if they kept all that any schedule
        does.
        """
        pieces = self.pieces(card.capability)
        order = pieces.order
        menus = [self.priced(piece, card).ours for piece in order]
        lone = lone_inputs(pieces, menus) if streaming is not None else [frozenset[int]()] * len(order)
        if streaming is not None:
            menus = [self.with_host(piece, card, own) for piece, own in zip(order, lone, strict=True)]
        relaxations = [self.relaxation(piece, card) for piece in order]

        def point(place: int, schedule: Schedule) -> Point:
            return own_point(order[place].captured, schedule, self.costs(order[place], card), lone=lone[place])

        def judged(choice: Choice) -> Choice:
            step = self.step(pieces, card, [each.shared for each in choice.points], streaming)
            peak, moment = peak_of(step, choice.points)
            return replace(choice, peak_bytes=peak, moment=moment)

        least = self.step(pieces, card, least_shared(menus), streaming).with_menus(menus)
        chooser = Chooser(least, relaxations, budget, point)
        found = judged(chooser.choose())
        if found.peak_bytes > budget:
            most = self.step(pieces, card, all_shared(chooser.step.menus), streaming)
            other = chooser.bounded(judged(chooser.fastest(most.moments)))
            found = min(found, other, key=lambda one: (one.peak_bytes > budget, one.peak_bytes))
        return found

    def _row(
        self, card: DeviceLimits, way: str, peak: int, moment: str, seconds: float | None, plain: float,
        bound: float | None = None, on_host: int = 0,
    ) -> None:  # fmt: skip
        missing = max(0, peak - self.budget(card))
        ratio = None if seconds is None else seconds / plain
        self.rows.append(Row(
            card.name, card.memory_bytes, way, not missing, peak, missing, seconds, ratio, bound, moment,
            host_bytes=on_host,
        ))  # fmt: skip

    def schedules(self, piece: Piece, costs: Mapping[str, Cost]) -> tuple[Schedule, ...]:
        """Our schedules of a part: those of an equal program, or found now."""
        for known, found in self._schedules:
            if alike(known.captured, piece.captured):
                return found
        self.say(f"planning {piece.name}")
        with self.timed("menus"):
            points = menu(
                piece.captured.program, costs, strategy="heuristic", time_limit_seconds=MENU_SECONDS,
                peak_shares=PEAK_SHARES, progress=self.say,
            )  # fmt: skip
            found = tuple(point.schedule for point in points)
        self._schedules.append((piece, found))
        return found

    def _costs(self, piece: Piece, card: DeviceLimits) -> Mapping[str, Cost]:
        """Seconds and workspaces of a part's tasks on a card."""
        with self.timed("capture"):
            return roofline(piece.captured, card)

    def _priced(self, piece: Piece, card: DeviceLimits) -> Priced:
        costs = self.costs(piece, card)
        return priced(piece.captured, self.schedules(piece, costs), costs)

    def _with_host(self, piece: Piece, card: DeviceLimits, lone: frozenset[int]) -> tuple[Point, ...]:
        """Our points of a part with those that offload."""
        return with_host(piece.captured, self.priced(piece, card), lone, card.host_bytes_per_second)

    def _relaxation(self, piece: Piece, card: DeviceLimits) -> BlockRelaxation:
        """A bound of what any schedule of a part costs on a card, at prices that are asked for later."""
        return block_relaxation(piece.captured.program, self.costs(piece, card))
