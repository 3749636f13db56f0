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
* ``moving[m]``: the piece of the call whose offloaded values are on their way to or from the host at moment ``m``;

a choice has::

    seconds   sum[b] calls[b] seconds[p[b]]                                           `seconds_of`
    peak      max[m] bytes[m]                                                         `peak_of`
    bytes[m]  base[m] + sum[b] n[m,b] carried[p[b]] + rise[m] + offloaded[p[moving[m]]]
                                                                                      `Moment.bytes`
    rise[m]   forward[p[b]]                  if the forward of piece b runs at m      `Moment.rise`
              backward[p[b]] - carried[p[b]] if its backward does
              adding[p[b]] - carried[p[b]]   if its backward does, and its gradients are added to earlier ones
              0                              otherwise

Several micro-batches may be in flight, as in a pipeline: ``n[m,b]`` counts their calls.

A point may offload some of what its piece keeps: ``offloaded`` bytes, which are on the host and not carried. They leave
while the visit after the forward runs, and have left when it ends; they come back while the backward of the next call
runs. So those of one call at most are under way (`with_offloads`).

The frozen weights of a piece are resident, or streamed from the host (`Streaming`): its point has ``ahead > 0``. With
visits ``j = 0, 1, ...``, the moments at which a piece ``b(j)`` runs, and

* ``slot[b]``, ``freed[b]``: bytes of a slot for the piece's weights, and of them; ``copy[b]``: seconds of a copy;
* ``run[j]``: seconds of the forward or the backward of the point that ``b(j)`` takes; ``fetch[j]``: those among them in
  which the link from the host is busy with the point's own activations;
* ``slots``: the most streamed pieces that visits ``j .. j + ahead`` have, over all ``j``, visits taken as a circle
  (`slots_of`);

every moment's bytes are ``slots max[b] slot[b] - sum[b] freed[b]`` more, over streamed pieces (`streamed_bytes`),
and the seconds are those of two clocks, of the device and of the link (`seconds_of`)::

    end[j]    max(end[j-1], there[j]) + run[j]
    there[j]  max(end[j-ahead-1], there[i] + fetch[i .. j-1]) + copy[b(j)]   if b(j) has to be copied; ``i``: the visit
                                                                             that was copied before

without ``there[j]`` and with a copy of no time if ``b(j)`` is resident. A piece is not copied if one of the ``ahead``
visits before has it: its weights are still there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from .schedule import Schedule

Stage = Literal["", "forward", "backward"]
#: A piece and which of its stages runs.
Visit = tuple[int, Literal["forward", "backward"]]


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
        forward_seconds: of the forward alone.
        fetch_seconds: of the copies of activations from the host that the backward makes.
        ahead: how many pieces earlier the copy of its frozen weights from the host begins; 0: they are resident.
        offloaded: values that are on the host between the forward and the backward, if the piece follows ``schedule``;
            ``seconds`` has what of their copies is not hidden.
        copies: bytes of each copy on the host; in none of the bytes above but the backward's peaks.
    """

    schedule: Schedule
    seconds: float
    carried_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    adding_peak_bytes: int
    shared: tuple[int, ...] = ()
    forward_seconds: float = 0.0
    fetch_seconds: float = 0.0
    ahead: int = 0
    offloaded: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()

    @property
    def offloaded_bytes(self) -> int:
        """Of all copies on the host."""
        return sum(self.copies)

    @property
    def numbers(self) -> tuple[float, int, int, int, int, int]:
        """Seconds and bytes: a point is no worse than another if none of them is larger."""
        return (
            self.seconds, self.offloaded_bytes, self.carried_bytes, self.forward_peak_bytes, self.backward_peak_bytes,
            self.adding_peak_bytes,
        )  # fmt: skip

    @property
    def costs(self) -> tuple[Any, ...]:
        """All but the schedule, in the order of the arguments."""
        return tuple(getattr(self, each.name) for each in fields(self)[1:])


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
        moving: the piece of the call whose offloaded values are under way; None: there is none.
    """

    name: str
    base_bytes: int
    carrying: tuple[tuple[int, int], ...] = ()
    running: int | None = None
    stage: Stage = ""
    adds: bool = False
    moving: int | None = None

    @property
    def what(self) -> tuple[object, ...]:
        """Which pieces carry and which runs: moments for which this is the same differ in their base alone."""
        return self.carrying, self.running, self.stage, self.adds, self.moving

    def bytes(self, choice: Sequence[Point]) -> int:
        """The memory at this moment if every piece takes the point given for it."""
        there = sum(calls * choice[piece].carried_bytes for piece, calls in self.carrying)
        there += 0 if self.moving is None else choice[self.moving].offloaded_bytes
        return self.base_bytes + there + (0 if self.running is None else self.rise(choice[self.running]))

    def rise(self, point: Point) -> int:
        """What the running piece adds by a point, above what is carried."""
        if self.stage == "backward":
            return (point.adding_peak_bytes if self.adds else point.backward_peak_bytes) - point.carried_bytes
        return point.forward_peak_bytes if self.stage == "forward" else 0


@dataclass(frozen=True)
class Streaming:
    """Frozen weights that may be streamed from the host.

    Attributes:
        bytes: by piece, those of a slot for its weights; 0: it has none that may be streamed.
        freed_bytes: by piece, those that its weights take where they are resident.
        seconds: by piece, of a copy.
        given: by piece the ``ahead`` of an earlier plan, which stays; None: the planner chooses.
    """

    bytes: tuple[int, ...]
    freed_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    given: tuple[int, ...] | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """What a plan depends on, without the link's rate, which differs a little from one measurement to the next."""
        return self.bytes, self.freed_bytes, self.given


@dataclass(frozen=True)
class Step:
    """A training step: its pieces, which moments name by their places, and its moments in order.

    Attributes:
        streaming: of frozen weights; None: all are resident.
        host_bytes: that offloaded values may take of the host.
    """

    pieces: tuple[Piece, ...]
    moments: tuple[Moment, ...]
    streaming: Streaming | None = None
    host_bytes: int = 0

    @cached_property
    def visits(self) -> tuple[Visit, ...]:
        """The forwards and backwards of pieces in the order in which they run."""
        return tuple((m.running, m.stage) for m in self.moments if m.running is not None and m.stage)

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


def with_offloads(step: Step) -> Step | None:
    """The step with `Moment.moving`; None if its backwards do not run in the reverse order of its forwards, all of
    these before: then nothing says what comes back next.
    """
    waiting: list[int | None] = []
    moments, moving, before = [], None, "backward"
    for moment in step.moments:
        if moment.stage == "backward":
            if not waiting or waiting.pop() != moment.running:
                return None
            moving = waiting[-1] if waiting else None
        elif moment.stage == "forward" and before == "backward" and waiting:
            return None
        moments.append(replace(moment, moving=moving))
        if moment.stage == "forward":
            waiting.append(moment.running)
            moving = moment.running
        before = moment.stage or before
    return None if waiting else replace(step, moments=tuple(moments))


def without_offloads(step: Step) -> Step:
    """The step with the points alone that offload nothing."""
    return step.with_menus((point for point in menu if not point.copies) for menu in step.menus)


def bytes_on_host(step: Step, choice: Sequence[Point]) -> int:
    """Offloaded bytes that are on the host when all forwards have ended."""
    return sum(piece.calls * point.offloaded_bytes for piece, point in zip(step.pieces, choice, strict=True))


def peak_of(step: Step, choice: Sequence[Point]) -> tuple[int, str]:
    """The largest memory of all moments in bytes, and the name of the first moment that has it."""
    found = max(step.moments, key=lambda moment: moment.bytes(choice))
    return found.bytes(choice) + streamed_bytes(step, choice), found.name


def moments_of(step: Step, choice: Sequence[Point]) -> tuple[tuple[str, int], ...]:
    """The name and the memory of every moment, in the order of the step."""
    streamed = streamed_bytes(step, choice)
    return tuple((moment.name, moment.bytes(choice) + streamed) for moment in step.moments)


def seconds_of(step: Step, choice: Sequence[Point]) -> float:
    """Seconds of all pieces together, each run as often as the step calls it, and those of waiting for weights."""
    plain = sum(piece.calls * point.seconds for piece, point in zip(step.pieces, choice, strict=True))
    return plain + waiting_seconds(step, choice)


def waiting_seconds(step: Step, choice: Sequence[Point]) -> float:
    """Seconds for which the device waits for streamed weights; the link is measured by a clock of its own."""
    if step.streaming is None or not any(point.ahead for point in choice):
        return 0.0
    visits, ahead = step.visits, max(point.ahead for point in choice)
    end: list[float] = []
    there = waited = 0.0
    for place, ((piece, stage), is_copied) in enumerate(zip(visits, copied(visits, ahead), strict=True)):
        point, now = choice[piece], end[-1] if end else 0.0
        start = now
        if is_copied:
            there = max(end[place - ahead - 1] if place > ahead else 0.0, there)
            if point.ahead:
                there += step.streaming.seconds[piece]
                start = max(now, there)
        waited += start - now
        end.append(start + run_seconds(point, stage))
        if stage == "backward":
            there += point.fetch_seconds
    return waited


def run_seconds(point: Point, stage: Stage) -> float:
    """Seconds of one of a point's two stages."""
    return point.forward_seconds if stage == "forward" else point.seconds - point.forward_seconds


@lru_cache(maxsize=64)
def copied(visits: tuple[Visit, ...], ahead: int) -> tuple[bool, ...]:
    """Whether each visit's piece, if it is streamed, has to be copied: none of the step's visits just before has it."""
    return tuple(
        all(piece != before for before, _ in visits[max(place - ahead, 0) : place])
        for place, (piece, _) in enumerate(visits)
    )


@lru_cache(maxsize=64)
def windows(visits: tuple[Visit, ...], ahead: int) -> frozenset[frozenset[int]]:
    """The pieces of each visit and the ``ahead`` visits after it."""
    return frozenset(
        frozenset(visits[(place + distance) % len(visits)][0] for distance in range(ahead + 1))
        for place in range(len(visits))
    )


def slots_of(step: Step, choice: Sequence[Point]) -> int:
    """Slots that streamed weights need on the device; 0: none are streamed."""
    ahead = max(point.ahead for point in choice)
    return max((sum(choice[p].ahead > 0 for p in window) for window in windows(step.visits, ahead)), default=0)


def streamed_bytes(step: Step, choice: Sequence[Point]) -> int:
    """Bytes of the slots, without those of streamed weights: by so many each moment has more than with all weights on
    the device.
    """
    if step.streaming is None or not any(point.ahead for point in choice):
        return 0
    streamed = [piece for piece, point in enumerate(choice) if point.ahead]
    slot = max(step.streaming.bytes[piece] for piece in streamed)
    return slots_of(step, choice) * slot - sum(step.streaming.freed_bytes[piece] for piece in streamed)
