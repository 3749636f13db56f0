"""Which pieces stream their frozen weights from the host: the part of the step's program that says so.

With the notation of `monet_like.ir.step`, for one distance ``ahead`` and one size ``slot``, `choice._program` gets

* ``s[b]``: 1 if piece ``b`` streams its weights, which no larger ones than ``slot`` may;
* ``ring``: slots of the device; ``end[j]``, ``there[j]``: the two clocks at visit ``j``; ``waited``: seconds

and the rows::

    (slots)   sum[b in window] s[b] <= ring                            for every window of visits      `Streams.rows`
    (memory)  ... + slot ring - sum[b] freed[b] s[b] <=   budget       for every moment                `Streams.bytes`
    (clocks)  end[j-1] + run[j] <= end[j]                                                              `Streams.clocks`
              there[j] + run[j] <= end[j]                              if visit j may have to be copied
              end[j-ahead-1] + copy[b(j)] s[b(j)] <= there[j]          likewise
              there[i] + fetch[i .. j-1] + copy[b(j)] s[b(j)] <= there[j]
              end[last] - sum[j] run[j] <= waited

where ``run`` and ``fetch`` are those of the points that are chosen. Of a piece that is resident the copy takes no time,
and its rows hold anyway: a point's own copies end within its backward. So the rows need no large constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ...ir.step import Point, Step, copied, run_seconds, streamed_bytes, windows
from ...solvers.matrix import ZERO, Builder, Expr, total

#: How many visits ahead a copy may begin; each is tried.
AHEADS = (1, 2, 4)
#: So many sizes of slots are tried, the largest.
SIZES = 2


@dataclass(frozen=True)
class Streams:
    """A way in which weights may be streamed.

    Attributes:
        ahead: copies begin so many visits before.
        slot_bytes: of a slot; larger weights are resident.
    """

    step: Step
    ahead: int
    slot_bytes: int

    @staticmethod
    def of(step: Step) -> list[Streams]:
        """All that a step has; none if the weights of no piece may be streamed, or an earlier plan says which are."""
        if step.streaming is None or step.streaming.given is not None:
            return []
        sizes = sorted(set(step.streaming.bytes) - {0}, reverse=True)[:SIZES]
        aheads = [ahead for ahead in AHEADS if ahead < len(step.visits)]
        return [Streams(step, ahead, size) for size, ahead in product(sizes, aheads)]

    def may(self, piece: int) -> bool:
        """Whether a piece may stream its weights."""
        assert self.step.streaming is not None
        return 0 < self.step.streaming.bytes[piece] <= self.slot_bytes

    def rows(self, builder: Builder) -> tuple[list[Expr], list[Expr]]:
        """The columns by piece with the rows (slots); and the terms of the rows (memory)."""
        assert self.step.streaming is not None
        columns = [builder.column() if self.may(piece) else ZERO for piece in range(len(self.step.pieces))]
        most = min(self.ahead + 1, len(columns))
        ring = builder.column(integral=False)  # as a share of the most
        for window in windows(self.step.visits, self.ahead):
            builder.at_most(total(columns[piece] for piece in window), ring * float(most))
        freed = [s * -float(size) for s, size in zip(columns, self.step.streaming.freed_bytes, strict=True)]
        return columns, [ring * float(most * self.slot_bytes), *freed]

    def clocks(
        self, builder: Builder, streamed: Sequence[Expr], columns: Sequence[Sequence[Expr]], unit: float
    ) -> None:
        """The rows (clocks); waiting counts in the objective as other seconds do."""
        streaming, visits, menus = self.step.streaming, self.step.visits, self.step.menus
        assert streaming is not None
        horizon = sum(max(run_seconds(p, stage) for p in menus[piece]) for piece, stage in visits) + sum(
            streaming.seconds[piece] for piece, _ in visits
        )
        waited = builder.column(horizon / unit, integral=False)
        end: list[Expr] = []
        there, runs = ZERO, []
        for place, (piece, stage) in enumerate(visits):
            chosen = [(x, p) for x, p in zip(columns[piece], menus[piece], strict=True)]
            run = total(x * (run_seconds(p, stage) / horizon) for x, p in chosen)
            ended = builder.column(integral=False)
            builder.at_most((end[-1] if end else ZERO) + run, ended)
            if copied(visits, self.ahead)[place]:
                copy = streamed[piece] * (streaming.seconds[piece] / horizon)
                arrived = builder.column(integral=False)
                builder.at_most((end[place - self.ahead - 1] if place > self.ahead else ZERO) + copy, arrived)
                builder.at_most(there + copy, arrived)
                builder.at_most(arrived + run, ended)
                there = arrived
            if stage == "backward":
                there = there + total(x * (p.fetch_seconds / horizon) for x, p in chosen)
            end.append(ended)
            runs.append(run)
        builder.at_most(end[-1] + total(runs) * -1.0, waited)

    def taken(self, points: Sequence[Point], streamed: Sequence[Expr], x: Any) -> tuple[Point, ...]:
        """The points of a solution, those of streamed pieces with their ``ahead``."""
        return tuple(
            replace(point, ahead=self.ahead if column.value(x) > 0.5 else 0)
            for point, column in zip(points, streamed, strict=True)
        )

    def all(self, points: Sequence[Point]) -> tuple[Point, ...]:
        """Points whose pieces stream all that they may."""
        return tuple(replace(p, ahead=self.ahead if self.may(place) else 0) for place, p in enumerate(points))

    def one_changed(self, points: tuple[Point, ...]) -> Iterator[tuple[Point, ...]]:
        """The same points with the weights of one piece resident instead of streamed, or the other way round."""
        for place, point in enumerate(points):
            if self.may(place):
                other = replace(point, ahead=0 if point.ahead else self.ahead)
                yield (*points[:place], other, *points[place + 1 :])


def as_given(step: Step) -> Step:
    """The step with points that are streamed as an earlier plan has it."""
    if step.streaming is None or step.streaming.given is None:
        return step
    menus = zip(step.menus, step.streaming.given, strict=True)
    return step.with_menus([replace(point, ahead=ahead) for point in menu] for menu, ahead in menus)


def most_freed(step: Step) -> int:
    """No choice of what is streamed frees more bytes of the device."""
    if step.streaming is None:
        return 0
    if step.streaming.given is not None:
        return -streamed_bytes(step, [menu[0] for menu in as_given(step).menus])
    return max(0, sum(step.streaming.freed_bytes) - min(filter(None, step.streaming.bytes), default=0))
