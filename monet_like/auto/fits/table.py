"""The result of `fits` as plain data: a row for each card and each way to run the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import UsageError
from ...ir.frames import frame_of
from ...ir.units import format_bytes, format_seconds
from ...profile.card_budget import RESERVE_IN_WORDS

if TYPE_CHECKING:
    import pandas

#: Ways to run a step, in the order of a table: plain PyTorch, a checkpoint around each block, our plan, and ours with
#: ``weights="auto"``, which may keep frozen weights of layers and what layers carry on the host. The last is there if
#: there are such weights.
WAYS = ("plain", "checkpoint", "ours", "host")
TITLES = {"plain": "plain", "checkpoint": "checkpoint per block", "ours": "our plan", "host": "our plan with the host"}
#: What a table says of its figures.
NOTE = (
    "predicted: bytes as the simulator counts them, seconds from datasheet rates and the shares of them that operators "
    "reached on an H200; forward and backward without the optimizer's step"
)


@dataclass(frozen=True)
class Row:
    """One way to run the step on one card.

    Attributes:
        card: name of its data sheet.
        memory_bytes: of the card.
        way: one of `WAYS`.
        fits: whether the peak is within the card's memory without the reserve.
        peak_bytes: of the step; where our plan does not fit, the lowest that was found.
        missing_bytes: by how much it does not fit; 0: it fits.
        seconds: of forward and backward; None: our plan does not fit.
        against_plain: ``seconds`` as a multiple of plain PyTorch's on this card, whether that fits or not.
        bound_seconds: no schedules of the parts that fit are faster, whether they were found or not; 0: nothing is
            known. None but for our plan.
        limit: the part of the step with the peak.
        largest: largest batch, or length, that fits; 0: none; None: not asked for.
        host_bytes: of the host's memory that frozen weights and activations take there, pinned.
        largest_host_bytes: the same at the largest batch or length.
    """

    card: str
    memory_bytes: int
    way: str
    fits: bool
    peak_bytes: int
    missing_bytes: int
    seconds: float | None
    against_plain: float | None
    bound_seconds: float | None
    limit: str
    largest: int | None = None
    host_bytes: int = 0
    largest_host_bytes: int = 0

    @property
    def gap(self) -> float | None:
        """By how much of its seconds our plan may be slower than the fastest of all schedules that fit; None where it
        does not fit.
        """
        if self.seconds is None or self.bound_seconds is None:
            return None
        return 1 - self.bound_seconds / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Fits:
    """What fits on which card.

    Attributes:
        asked: the model and how it is trained, in words.
        batch, length: of a step; 0: the step has no such size that could be another.
        largest: ``batch``, ``length`` or "": what `Row.largest` counts.
        reserve_bytes: of each card's memory, that the step may not use; None: as with ``memory_budget="card"``.
        rows: by card, then by way.
        stage_seconds: wall seconds of capture, menus, choice and the search for the largest.
    """

    asked: str
    batch: int
    length: int
    largest: str
    reserve_bytes: int | None
    rows: tuple[Row, ...]
    stage_seconds: dict[str, float]

    def row(self, card: str, way: str) -> Row:
        """The row of a card, as `cards` spells it, and a way of `WAYS`.

        Raises:
            UsageError: the table has no such row.
        """
        found = next((row for row in self.rows if (row.card, row.way) == (card, way)), None)
        if found is None:
            raise UsageError(
                f"the table has no row for card {card!r} and way {way!r}; it has the cards {', '.join(self.cards)}, "
                f"and the ways {', '.join(self.ways)}"
            )
        return found

    @property
    def cards(self) -> tuple[str, ...]:
        """The cards, in the order of the rows."""
        return tuple(dict.fromkeys(row.card for row in self.rows))

    @property
    def ways(self) -> tuple[str, ...]:
        """Those that the table has."""
        found = {row.way for row in self.rows}
        return tuple(way for way in WAYS if way in found)

    def to_frame(self) -> pandas.DataFrame:
        """A DataFrame with the fields of `Row` as columns."""
        return frame_of(Row, self.rows)

    @property
    def title(self) -> str:
        """What was asked, in one line."""
        sizes = [f"batch {self.batch}"] * bool(self.batch) + [f"{self.length} tokens"] * bool(self.length)
        return "; ".join(filter(None, (self.asked, ", ".join(sizes))))

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Header and cells of the table for people: a row for each card."""
        header = ["card", "memory", *(TITLES[way] for way in self.ways), "limited by"]
        if self.largest:
            header.append(f"largest {self.largest}")
        cells = []
        for card in self.cards:
            mine = [self.row(card, way) for way in self.ways]
            line = [card, format_bytes(mine[0].memory_bytes), *map(_cell, mine), mine[-1].limit]
            if self.largest:
                line.append(" / ".join(map(_largest, mine)))
            cells.append(tuple(line))
        return tuple(header), cells

    @property
    def note(self) -> str:
        """How to read the table, in one line."""
        more = f"; largest {self.largest}: {' / '.join(self.ways)}" if self.largest else ""
        reserve = RESERVE_IN_WORDS if self.reserve_bytes is None else f"{format_bytes(self.reserve_bytes)} of each card"
        return f"{NOTE}; {reserve} are left free{more}"

    def __repr__(self) -> str:
        count = sum(row.fits for row in self.rows if row.way == "ours")
        return f"Fits({self.title}: our plan fits on {count} of {len(self.cards)} cards)"


def _largest(row: Row) -> str:
    host = f" ({format_bytes(row.largest_host_bytes)} of the host)" if row.largest_host_bytes else ""
    return "-" if row.largest is None else f"{row.largest}{host}"


def _cell(row: Row) -> str:
    """Peak and step of one way, or by how much it does not fit."""
    if row.way == "host" and row.fits and not row.host_bytes:
        return "not needed"
    peak = format_bytes(row.peak_bytes)
    if not row.fits:
        return f"{peak}, {format_bytes(row.missing_bytes)} too much"
    if row.way == "plain" or row.against_plain is None:
        return f"{peak}, {format_seconds(row.seconds or 0.0)}"
    host = f", {format_bytes(row.host_bytes)} of the host" if row.host_bytes else ""
    return f"{peak}, {100 * (row.against_plain - 1):+.1f} %{host}"
