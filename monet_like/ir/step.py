"""A training step as the planner sees it: pieces, each with a menu of points, and the moments at which memory can peak.

A step is what lies between two steps of the optimizer: forwards, losses, backwards. A **piece** is what is captured and
runs as one program: a whole model, a block, a head with its loss. A **point** is one way to run a piece, with its
seconds and bytes; the **menu** of a piece has the points that it may take. A **moment** is a part of the step: the
forward or the backward of one piece, or what the rest of the model does between two of them. A **choice** takes one
point ``p[b]`` for every piece ``b``. With

* ``seconds``, ``carried``, ``forward``, ``backward`` and ``adding``: of a point (`Point`);
* ``calls[b]``: how often piece ``b`` runs in the step;
* ``base[m]``: the bytes that exist at moment ``m`` whatever the choice is: parameters, gradients so far, the
  optimizer's state, buffers of a sharded model, the rest's own activations;
* ``n[m,b]``: calls of piece ``b`` whose forward has ended and whose backward has not, the one whose backward runs
  included;

a choice has::

    seconds   sum[b] calls[b] seconds[p[b]]                                           `seconds_of`
    peak      max[m] bytes[m]                                                         `peak_of`
    bytes[m]  base[m] + sum[b] n[m,b] carried[p[b]] + rise[m]                         `Moment.bytes`
    rise[m]   forward[p[b]]                  if the forward of piece b runs at m      `Moment.rise`
              backward[p[b]] - carried[p[b]] if its backward does
              adding[p[b]] - carried[p[b]]   if its backward does, and its gradients are added to earlier ones
              0                              otherwise

Several micro-batches may be in flight, as in a pipeline: ``n[m,b]`` counts their calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .schedule import Schedule

Stage = Literal["", "forward", "backward"]


@dataclass(frozen=True, slots=True)
class Point:
    """A way to run a piece, and its cost.

    Attributes:
        schedule: of the piece's program.
        seconds: of the piece's forward and backward.
        carried_bytes: kept from the forward to the backward. Inputs and results of the piece do not count: see
            ``shared``.
        forward_peak_bytes: above what exists when the forward begins.
        backward_peak_bytes: above what would exist when the backward begins if the piece carried nothing; the gradients
            of its parameters included.
        adding_peak_bytes: the same in a backward whose gradients are added to gradients that exist already, as those of
            an earlier micro-batch: each is freed as soon as it is added.
        shared: inputs and results of the piece that it keeps for the backward: values of the program. Their storage may
            be kept by other pieces as well.
    """

    schedule: Schedule
    seconds: float
    carried_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    adding_peak_bytes: int
    shared: tuple[int, ...] = ()

    @property
    def numbers(self) -> tuple[float, int, int, int, int]:
        """Seconds and bytes: a point is no worse than another if none of them is larger."""
        return (
            self.seconds, self.carried_bytes, self.forward_peak_bytes, self.backward_peak_bytes, self.adding_peak_bytes
        )  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A part of the model that runs as one program.

    Attributes:
        name: for people, such as ``layers.3``.
        calls: how often it runs in the step.
        menu: the points that it may take.
    """

    name: str
    calls: int = 1
    menu: tuple[Point, ...] = ()


@dataclass(frozen=True)
class Moment:
    """A part of the step and the memory that it takes whatever the choice is.

    Attributes:
        name: for people, such as ``backward of layers.3``.
        base_bytes: everything that exists then, without what pieces carry and without what the running piece makes.
        carrying: (piece, calls) of the calls whose forward has ended and whose backward has not; the one whose backward
            runs is among them.
        running: the piece whose forward or backward runs; None: the rest of the model.
        stage: which of the two.
        adds: the gradients of the running piece's parameters exist already, and its own are added to them.
    """

    name: str
    base_bytes: int
    carrying: tuple[tuple[int, int], ...] = ()
    running: int | None = None
    stage: Stage = ""
    adds: bool = False

    @property
    def what(self) -> tuple[object, ...]:
        """Which pieces carry and which runs: moments for which this is the same differ in their base alone."""
        return self.carrying, self.running, self.stage, self.adds

    def bytes(self, choice: Sequence[Point]) -> int:
        """The memory at this moment if every piece takes the point given for it."""
        carried = sum(calls * choice[piece].carried_bytes for piece, calls in self.carrying)
        return self.base_bytes + carried + (0 if self.running is None else self.rise(choice[self.running]))

    def rise(self, point: Point) -> int:
        """What the running piece adds by a point, above what is carried."""
        if self.stage == "backward":
            return (point.adding_peak_bytes if self.adds else point.backward_peak_bytes) - point.carried_bytes
        return point.forward_peak_bytes if self.stage == "forward" else 0


@dataclass(frozen=True)
class Step:
    """A training step: its pieces, which moments name by their places, and its moments in order."""

    pieces: tuple[Piece, ...]
    moments: tuple[Moment, ...]

    @property
    def menus(self) -> tuple[tuple[Point, ...], ...]:
        """By piece."""
        return tuple(piece.menu for piece in self.pieces)

    def with_menus(self, menus: Iterable[Iterable[Point]]) -> Step:
        """The step with other menus, by piece."""
        pieces = (replace(piece, menu=tuple(menu)) for piece, menu in zip(self.pieces, menus, strict=True))
        return replace(self, pieces=tuple(pieces))

    @property
    def distinct_moments(self) -> tuple[Moment, ...]:
        """One moment of all that differ in their base alone: the one with the largest."""
        found: dict[object, Moment] = {}
        for moment in self.moments:
            if moment.what not in found or found[moment.what].base_bytes < moment.base_bytes:
                found[moment.what] = moment
        return tuple(found.values())


def peak_of(step: Step, choice: Sequence[Point]) -> tuple[int, str]:
    """The largest memory of all moments in bytes, and the name of the first moment that has it."""
    found = max(step.moments, key=lambda moment: moment.bytes(choice))
    return found.bytes(choice), found.name


def seconds_of(step: Step, choice: Sequence[Point]) -> float:
    """Seconds of all pieces together, each run as often as the step calls it."""
    return sum(piece.calls * point.seconds for piece, point in zip(step.pieces, choice, strict=True))
