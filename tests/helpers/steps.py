"""Small steps: points, moments of pieces that run one after the other, and random menus."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest

from monet_like.ir.schedule import Schedule
from monet_like.ir.step import Moment, Piece, Point, Step, bytes_on_host, peak_of, seconds_of
from monet_like.plan.step.choice import fastest, smallest

NONE = Schedule((), (), ())


def point(
    seconds: float, carried: int, forward: int, backward: int, shared: tuple[int, ...] = (), saves: int = 0
) -> Point:
    """``saves``: bytes by which the backward's peak is lower where its gradients are added to earlier ones."""
    return Point(NONE, seconds, carried, forward, backward, backward - saves, shared)


def pieces_of(menus: Sequence[Sequence[Point]], calls: Sequence[int] | None = None) -> tuple[Piece, ...]:
    """A piece for each menu; ``calls`` how often each runs, by default once."""
    counts = calls or [1] * len(menus)
    return tuple(
        Piece(f"piece {k}", count, tuple(menu)) for k, (menu, count) in enumerate(zip(menus, counts, strict=True))
    )


def in_a_row(pieces: int, base_bytes: int, extra: dict[str, int] | None = None) -> tuple[Moment, ...]:
    """The moments of a step that runs each piece once, one after the other, and then their backward.

    Args:
        pieces: how many.
        base_bytes: of every moment.
        extra: further bytes by the moment's name: ``forward 0``, ``loss``, ``backward 0``, ``end`` and so on.
    """
    more = extra or {}
    found = []
    for piece in range(pieces):
        before = tuple((other, 1) for other in range(piece))
        found.append(Moment(f"forward {piece}", base_bytes, before, piece, "forward"))
    found.append(Moment("loss", base_bytes, tuple((other, 1) for other in range(pieces))))
    for piece in reversed(range(pieces)):
        there = tuple((other, 1) for other in range(piece + 1))
        found.append(Moment(f"backward {piece}", base_bytes, there, piece, "backward"))
    found.append(Moment("end", base_bytes))
    return tuple(replace(m, base_bytes=m.base_bytes + more.get(m.name, 0)) for m in found)


def random_menu(rng: random.Random) -> list[Point]:
    """One to four points."""
    carried = [rng.randint(0, 60) for _ in range(rng.randint(1, 4))]
    sizes = [(rng.randint(0, 40), c + rng.randint(0, 40), rng.randint(0, 20)) for c in carried]
    found = zip(carried, sizes, strict=True)
    return [point(rng.randint(1, 50) / 10, c, one, other, saves=less) for c, (one, other, less) in found]


def random_step(seed: int) -> Step:
    """Two to four pieces with one to four points each, in a step with random bytes of its own at every moment."""
    rng = random.Random(seed)
    menus = [random_menu(rng) for _ in range(rng.randint(2, 4))]
    names = [moment.name for moment in in_a_row(len(menus), 0)]
    moments = in_a_row(len(menus), rng.randint(0, 30), {name: rng.randint(0, 40) for name in names})
    moments = tuple(replace(m, adds=m.stage == "backward" and rng.random() < 0.5) for m in moments)
    return Step(pieces_of(menus, [rng.randint(1, 3) for _ in menus]), moments)


def assert_best_of_all(step: Step, choices: Iterable[Sequence[Point]], shares: Sequence[float]) -> None:
    """Of all choices, `fastest` has the fewest seconds within budgets at these places among their peaks, and `smallest`
    the least peak.
    """
    every = [(peak_of(step, points)[0], seconds_of(step, points)) for points in choices]
    peaks = sorted({peak for peak, _ in every})
    for share in shares:
        budget = peaks[int(share * len(peaks))]
        found = fastest(step, budget)
        assert found.peak_bytes == peak_of(step, found.points)[0] <= budget
        assert bytes_on_host(step, found.points) <= step.host_bytes
        assert found.seconds == pytest.approx(min(seconds for peak, seconds in every if peak <= budget), rel=1e-4)
        assert 0 < found.bound_seconds <= found.seconds * (1 + 1e-9)
    assert smallest(step).peak_bytes == peaks[0]
