"""The largest batch or length of each way on each card, from captures at two or three sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..profile.devices import DeviceLimits
from ..profile.roofline import roofline
from .answer import Answer, least_peak
from .pieces import Capability, Piece, Pieces
from .points import Priced, Sized, through
from .step import step_of
from .table import Row

#: Batches are tried up to this multiple of 2, lengths too.
_DOUBLINGS = 22


def add_largest(answer: Answer, cards: Sequence[DeviceLimits], what: str) -> list[Row]:
    """The rows with the largest batch or length that fits.

    Schedules are those that were found at the asked size, so more may fit than is found. Bytes at other sizes are those
    of captures at the asked size and its double, and for lengths, which attention may need the square of, its treble.
    """
    searches: dict[Capability, _Search] = {}
    found: dict[tuple[str, str], int] = {}
    for card in cards:
        if card.capability not in searches:
            searches[card.capability] = _Search(answer, card, what)
        search = searches[card.capability]
        answer.say(f"looking for the largest {what} on {card.name}")
        for row in (row for row in answer.rows if row.card == card.name):
            found[card.name, row.way] = search.largest(row.way, answer.budget(card), card.cublas_bytes)
    return [replace(row, largest=found[row.card, row.way]) for row in answer.rows]


class _Search:
    """Peaks of a step by its size."""

    def __init__(self, answer: Answer, card: DeviceLimits, what: str) -> None:
        self.answer, self.what = answer, what
        self.asked = answer.batch if what == "batch" else answer.length
        self.sizes = [self.asked * times for times in ((1, 2) if what == "batch" else (1, 2, 3))]
        first = answer.capturing.at(*self._size(self.asked), card.capability)
        others = (answer.capturing.at(*self._size(size), card.capability, first) for size in self.sizes[1:])
        self.at = [first, *others]
        self.parts: list[Sized] = []
        for pieces in zip(*(found.every for found in self.at), strict=True):
            costs = [roofline(piece.captured, card) for piece in pieces]
            self.parts.append(Sized(self.sizes, pieces, costs))
        self.schedules = [answer.schedules(part.pieces[0], part.costs[0]) for part in self.parts]
        self._prices: dict[int, dict[Piece, Priced]] = {}
        self._peaks: dict[tuple[str, int, int], int] = {}

    def _size(self, size: int) -> tuple[int, int]:
        return (size, self.answer.length) if self.what == "batch" else (self.answer.batch, size)

    def largest(self, way: str, budget: int, cublas_bytes: int) -> int:
        """The largest size whose peak is within the budget; 0: not even 1.

        Where the program changes with the size, nothing larger than the asked size is known.
        """

        def fit(size: int) -> bool:
            return self._peak(way, size, cublas_bytes) <= budget

        if not all(part.regular for part in self.parts):
            return self.asked if fit(self.asked) else 0
        return largest_where(fit, self.asked)

    def _peak(self, way: str, size: int, cublas_bytes: int) -> int:
        key = (way, size, cublas_bytes)
        if key not in self._peaks:
            pieces = self._pieces(size)
            step = step_of(self.answer.asked, pieces, cublas_bytes)
            self._peaks[key] = least_peak(pieces, self._priced(size), step, way)
        return self._peaks[key]

    def _pieces(self, size: int) -> Pieces:
        """The parts of the asked size with the bytes between them of another one."""

        def grown(of: Callable[[Pieces], int]) -> int:
            return through(self.sizes, [of(pieces) for pieces in self.at], size)

        batch, length = self._size(size)
        return replace(
            self.at[0], batch=batch, length=length, stream_bytes=grown(lambda p: p.stream_bytes),
            table_bytes=grown(lambda p: p.table_bytes), input_bytes=grown(lambda p: p.input_bytes),
        )  # fmt: skip

    def _priced(self, size: int) -> dict[Piece, Priced]:
        if size not in self._prices:
            self._prices[size] = {
                part.pieces[0]: part.priced(schedules, size)
                for part, schedules in zip(self.parts, self.schedules, strict=True)
            }
        return self._prices[size]


def largest_where(fit: Callable[[int], bool], begin: int) -> int:
    """The largest number from 1 on for which ``fit`` holds, where it holds for all smaller ones; 0: for none."""
    low, high = (begin, 2 * begin) if fit(begin) else (0, begin)
    for _ in range(_DOUBLINGS):
        if low == 0 or not fit(high):
            break
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return low
