"""The largest batch or length of each way on each card, from captures at two or three sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy

from ...ir.step import Point, Step, peak_of
from ...plan.budgets import largest_size
from ...profile.devices import DeviceLimits
from ...profile.roofline import roofline
from .answer import Answer
from .pieces import Capability, Pieces
from .points import Priced, Sized, through, with_host
from .step import all_shared, lone_inputs, pinned_bytes, step_of, streaming_of
from .table import Row


def add_largest(answer: Answer, cards: Sequence[DeviceLimits], what: str) -> list[Row]:
    """The rows with the largest batch or length that fits.

    Schedules are those that were found at the asked size, so more may fit than is found. Bytes at other sizes are those
    of captures at the asked size and its double, and for lengths, which attention may need the square of, its treble.
    """
    searches: dict[Capability, _Search] = {}
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for card in cards:
        if card.capability not in searches:
            searches[card.capability] = _Search(answer, card, what)
        search = searches[card.capability]
        answer.say(f"looking for the largest {what} on {card.name}")
        for row in (row for row in answer.rows if row.card == card.name):
            found[card.name, row.way] = search.largest(row, answer.budget(card), card.cublas_bytes)
    both = [(row, *found[row.card, row.way]) for row in answer.rows]
    return [replace(row, largest=size, largest_host_bytes=host) for row, size, host in both]


class _Search:
    """Peaks of a step by its size."""

    def __init__(self, answer: Answer, card: DeviceLimits, what: str) -> None:
        self.answer, self.what, self.card = answer, what, card
        self.asked = answer.batch if what == "batch" else answer.length
        self._capture(self.asked)
        if not self.regular and self.asked == 1:  # what one sample computes in another way than several
            self._capture(2)
        self._priced, self._lowest = cache(self._find_prices), cache(self._find_lowest)

    def _capture(self, begin: int) -> None:
        """Capture the step at two or three sizes from this one on."""
        self.begin = begin
        self.sizes = [begin * times for times in ((1, 2) if self.what == "batch" else (1, 2, 3))]
        capturing, capability = self.answer.capturing, self.card.capability
        first = capturing.at(*self._size(begin), capability)
        self.at = [first, *(capturing.at(*self._size(size), capability, first) for size in self.sizes[1:])]
        self.regular = all(one.outline == first.outline for one in self.at)
        self.parts: list[Sized] = []
        for pieces in zip(*(found.kinds for found in self.at), strict=self.regular):
            costs = [roofline(piece.captured, self.card) for piece in pieces]
            self.parts.append(Sized(self.sizes, [piece.captured for piece in pieces], costs))
        self.regular = self.regular and all(part.regular for part in self.parts)

    def _size(self, size: int) -> tuple[int, int]:
        return (size, self.answer.length) if self.what == "batch" else (self.answer.batch, size)

    def largest(self, row: Row, budget: int, cublas_bytes: int) -> tuple[int, int]:
        """The largest size whose peak is within the budget, and what it takes of the host; 0: not even 1.

        Where the program changes with the size, nothing larger than the asked size is known.
        """

        def host(size: int) -> int | None:
            ways = ("ours", "host") if row.way == "host" else (row.way,)
            both = (self._lowest(way, size) for way in ways)
            return next((there for peak, there, _ in both if peak + cublas_bytes <= budget), None)

        def fit(size: int) -> bool:
            return host(size) is not None

        if self.begin == self.asked and self.regular:
            most = largest_size(fit, self.asked)
        else:
            most = largest_size(fit, self.begin) if self.regular and fit(self.begin) else 0
        if most < self.asked and row.fits:
            return self.asked, row.host_bytes
        return most, (host(most) or 0) if most else 0

    def _find_lowest(self, way: str, size: int) -> tuple[int, int, list[Point]]:
        """The peak without what cuBLAS keeps, bytes of the host, and the points by kind; of ours, the lowest with one
        schedule for all equal pieces, and with the weights of all layers on the host.
        """
        pieces, prices = self._pieces(size), self._priced(size)
        kinds = [pieces.ranges[number].kind for number in pieces.trained]
        if way == "host":
            every = self._with_host(pieces, prices, kinds, size)
        else:
            every = [price.ours if way == "ours" else (price.of(way),) for price in prices]
        menus = [every[kind] for kind in kinds]
        step = step_of(self.answer.asked, pieces, 0, all_shared(menus))
        start = [price.checkpoint if way == "ours" else menu[0] for price, menu in zip(prices, every, strict=True)]
        tried = [_least(step, kinds, start, every)]
        if way == "host":  # also what is lowest without the host
            tried.append(self._lowest("ours", size)[2])
        found = [(*self._exact(pieces, [points[kind] for kind in kinds], way), points) for points in tried]
        return min(found, key=lambda each: each[0])

    def _exact(self, pieces: Pieces, chosen: list[Point], way: str) -> tuple[int, int]:
        """The peak with these points, and bytes of the host."""
        streaming = streaming_of(pieces, self.card) if way == "host" else None
        if streaming is not None:
            chosen = [replace(p, ahead=int(size > 0)) for p, size in zip(chosen, streaming.bytes, strict=True)]
        exact = step_of(self.answer.asked, pieces, 0, [point.shared for point in chosen], streaming)
        return peak_of(exact, chosen)[0], pinned_bytes(pieces, chosen)

    def _with_host(
        self, pieces: Pieces, prices: Sequence[Priced], kinds: Sequence[int], size: int
    ) -> list[tuple[Point, ...]]:
        """By kind, our points with those that offload."""
        lone: dict[int, frozenset[int]] = {}
        for kind, own in zip(kinds, lone_inputs(pieces, [prices[kind].ours for kind in kinds]), strict=True):
            lone[kind] = lone.get(kind, own) & own
        link = self.card.host_bytes_per_second
        each = enumerate(zip(self.parts, prices, strict=True))
        return [with_host(part.at(size), price, lone[kind], link) for kind, (part, price) in each]

    def _pieces(self, size: int) -> Pieces:
        """The pieces of the asked size with the bytes between them of another one."""

        def grown(found: Sequence[int]) -> int:
            return through(self.sizes, found, size)

        crossing = tuple(
            replace(
                same[0], bytes=grown([one.bytes for one in same]),
                gradient_bytes=grown([one.gradient_bytes for one in same]),
            )
            for same in zip(*(pieces.crossing for pieces in self.at), strict=True)
        )  # fmt: skip
        return replace(self.at[0], crossing=crossing, input_bytes=grown([pieces.input_bytes for pieces in self.at]))

    def _find_prices(self, size: int) -> list[Priced]:
        of = zip(self.at[0].kinds, self.parts, strict=True)
        return [part.priced(self.answer.schedules(piece, part.costs[0]), size) for piece, part in of]


def _least(step: Step, kinds: Sequence[int], chosen: Sequence[Point], menus: Sequence[Sequence[Point]]) -> list[Point]:
    """One point for each kind of piece, with the lowest peak that changes of one of them lead to.

    Args:
        kinds: of the step's pieces.
        chosen: to begin with.
        menus: by kind.
    """
    moments = step.distinct_moments
    base = numpy.array([moment.base_bytes for moment in moments])
    carrying = numpy.zeros((len(moments), len(menus)), dtype=base.dtype)
    rises = numpy.full(len(moments), -1)
    for place, moment in enumerate(moments):
        for piece, calls in moment.carrying:
            carrying[place, kinds[piece]] += calls
        rises[place] = -1 if moment.running is None else kinds[moment.running]

    def rise(kind: int, point: Point) -> numpy.ndarray:
        return numpy.array([
            moment.rise(point) if of == kind else 0 for moment, of in zip(moments, rises, strict=True)
        ])  # fmt: skip

    taken = [numpy.array([[*rise(kind, point)] for point in menu]) for kind, menu in enumerate(menus)]
    found = list(chosen)
    total = base + sum(carrying[:, kind] * point.carried_bytes + rise(kind, point) for kind, point in enumerate(found))
    for _ in range(2):
        for kind, menu in enumerate(menus):
            rest = total - carrying[:, kind] * found[kind].carried_bytes - rise(kind, found[kind])
            tried = [rest + carrying[:, kind] * point.carried_bytes + taken[kind][n] for n, point in enumerate(menu)]
            best = min(range(len(menu)), key=lambda n: tried[n].max())
            if tried[best].max() < total.max():
                total, found[kind] = tried[best], menu[best]
    return found
