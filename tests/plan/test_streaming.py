"""Which weights are streamed: the integer program against every choice, and the two clocks by hand."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from planning import crash_solvers
from steps import assert_best_of_all, in_a_row, pieces_of, point

from monet_like.ir.step import (
    Point,
    Step,
    Streaming,
    peak_of,
    seconds_of,
    slots_of,
    streamed_bytes,
    waiting_seconds,
)
from monet_like.plan.step import choice
from monet_like.plan.step.choice import fastest, smallest
from monet_like.plan.step.streaming import AHEADS


def step_of(menus: list[list[Point]], streaming: Streaming, base: int = 0) -> Step:
    """Pieces that run forward in their order and backward in the other."""
    return Step(pieces_of(menus), in_a_row(len(menus), base), streaming)


def tiny_step(seed: int) -> Step:
    draw = random.Random(seed)
    menus = []
    for _ in range(draw.choice([3, 4])):
        fast = point(draw.uniform(2, 4), draw.randrange(40, 80), 0, 90, 90)
        lean = point(fast.seconds * draw.uniform(1.2, 2.0), draw.randrange(5, 20), 0, 90, 90)
        menu = [replace(p, forward_seconds=p.seconds / 3, fetch_seconds=draw.choice([0.0, 0.3])) for p in (fast, lean)]
        menus.append(menu)
    sizes = tuple(draw.choice([0, 60, 100]) if draw.random() < 0.4 else 100 for _ in menus)
    copies = draw.choice([0.3, 1.0, 3.0])
    return step_of(menus, Streaming(sizes, sizes, tuple(copies * size / 100 for size in sizes)), 500)


def every_choice(step: Step) -> list[tuple[Point, ...]]:
    assert step.streaming is not None
    found = []
    for ahead in AHEADS:
        if ahead < len(step.visits):
            menus = [
                [replace(p, ahead=a) for p in menu for a in ((0, ahead) if size else (0,))]
                for menu, size in zip(step.menus, step.streaming.bytes, strict=True)
            ]
            found += itertools.product(*menus)
    return found


@pytest.mark.slow(every=5)
@pytest.mark.parametrize("seed", range(10))
def test_the_choice_is_the_best_of_all(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "STREAMING_GAP", choice.GAP)
    step = tiny_step(seed)
    assert_best_of_all(step, every_choice(step), [1 / 8, 1 / 2])


def test_nothing_is_streamed_that_fits() -> None:
    step = tiny_step(1)
    quickest = tuple(min(menu, key=lambda p: p.numbers) for menu in step.menus)
    found = fastest(step, peak_of(step, quickest)[0])
    assert found.points == quickest and not any(p.ahead for p in found.points)
    least = smallest(step)
    assert any(p.ahead for p in least.points) and least.peak_bytes < peak_of(step, smallest_resident(step))[0]


def smallest_resident(step: Step) -> tuple[Point, ...]:
    return smallest(replace(step, streaming=None)).points


def test_two_clocks_by_hand() -> None:
    """Four equal pieces of 1 + 2 s, copies of 1.5 s, one visit ahead: the ends of forwards and backwards."""
    one = replace(point(3.0, 10, 0, 20, 20), forward_seconds=1.0)
    step = step_of([[one]] * 4, Streaming((100,) * 4, (100,) * 4, (1.5,) * 4))
    taken = [replace(one, ahead=1)] * 4
    # 0: copied from 0 to 1.5, ends 2.5, since a step copies all anew; 1: from 1.5, when the link is free, to 3.0,
    # ends 4.0; 2: from 3.0 to 4.5, ends 5.5; 3: from 4.5 to 6.0, ends 7.0. Its backward is next: no copy.
    # Backwards take 2 s, longer than a copy, which begins with the one before: none waits.
    assert waiting_seconds(step, taken) == pytest.approx(1.5 + 0.5 + 0.5 + 0.5)
    assert seconds_of(step, taken) == pytest.approx(12 + 3.0)
    assert slots_of(step, taken) == 2 and streamed_bytes(step, taken) == 2 * 100 - 4 * 100
    # A copy of two visits ahead begins earlier, but the link is the limit in the forward: only the first is sooner.
    assert slots_of(step, [replace(one, ahead=2)] * 4) == 3
    alternate = [replace(one, ahead=2 * (b % 2)) for b in range(4)]
    assert slots_of(step, alternate) == 2 and seconds_of(step, alternate) == pytest.approx(12 + 0.5)


def test_copies_wait_for_activations_that_come_back() -> None:
    one = replace(point(3.0, 10, 0, 20, 20), forward_seconds=1.0)
    busy = replace(one, fetch_seconds=2.0, ahead=1)
    step = step_of([[one]] * 3, Streaming((100,) * 3, (100,) * 3, (1.0,) * 3))
    # Backward of 1 ends at 8, and until then the link is busy with activations; the copy of 0 takes until 9.
    assert waiting_seconds(step, [replace(one, ahead=1)] * 3) == 1  # of the first copy
    assert waiting_seconds(step, [busy] * 3) == 1 + 1


def test_an_earlier_plan_says_what_is_streamed() -> None:
    step = tiny_step(2)
    assert step.streaming is not None
    given = tuple(2 if size and place % 2 else 0 for place, size in enumerate(step.streaming.bytes))
    step = replace(step, streaming=replace(step.streaming, given=given))
    menus = [[replace(p, ahead=a) for p in menu] for menu, a in zip(step.menus, given, strict=True)]
    every = [peak_of(step, points)[0] for points in itertools.product(*menus)]
    found = fastest(step, max(every) - 1)
    assert tuple(p.ahead for p in found.points) == given and found.peak_bytes == peak_of(step, found.points)[0]
    assert found.peak_bytes < max(every)


def test_a_search_streams_where_the_solver_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    step = tiny_step(3)
    crash_solvers(monkeypatch.setattr)
    resident = min(peak_of(step, points)[0] for points in itertools.product(*step.menus))
    with pytest.warns(UserWarning, match="failed"):
        found = fastest(step, resident - 1)
    assert found.status == "searched" and found.peak_bytes < resident and any(p.ahead for p in found.points)
