"""What pieces offload: the integer program against every choice, bytes against a ledger, and points by hand."""

from __future__ import annotations

import itertools
import random
import warnings
from dataclasses import replace

import pytest
from planning import crash_solvers, network
from steps import assert_best_of_all, pieces_of, random_menu

from monet_like.ir.schedule import Schedule
from monet_like.ir.step import (
    Moment,
    Point,
    Stage,
    Step,
    bytes_on_host,
    peak_of,
    with_offloads,
)
from monet_like.plan.step.choice import fastest, smallest
from monet_like.plan.step.menus import BESIDE, offloading, owning, point_of


def offloads(menu: list[Point], draw: random.Random) -> list[Point]:
    """The menu with points that have some of what they carry on the host, and take a little longer."""
    more = []
    for one in menu:
        size = draw.randint(0, one.carried_bytes)
        if size:
            sent = replace(one, carried_bytes=one.carried_bytes - size, offloaded=(0,), copies=(size,))
            more.append(replace(sent, seconds=one.seconds * draw.uniform(1.001, 1.3)))
    return [*menu, *more]


def step_of(seed: int, micro_batches: int = 1) -> tuple[Step, list[tuple[int, Stage]]]:
    """A step whose backwards run in the reverse order of their forwards, with a moment of the rest after each; and its
    visits.
    """
    draw = random.Random(seed)
    menus = [offloads(random_menu(draw), draw) for _ in range(draw.randint(2, 3))]
    visits: list[tuple[int, Stage]] = []
    for _ in range(micro_batches):
        order = [draw.randrange(len(menus)) for _ in range(draw.randint(1, 4))]
        visits += [*((piece, "forward") for piece in order), *((piece, "backward") for piece in reversed(order))]
    moments, waiting = [], list[int]()
    for number, (piece, stage) in enumerate(visits):
        there = tuple((one, waiting.count(one)) for one in sorted(set(waiting)))
        moments.append(Moment(f"{number}", draw.randint(0, 40), there, piece, stage))
        waiting.append(piece) if stage == "forward" else waiting.pop()
        there = tuple((one, waiting.count(one)) for one in sorted(set(waiting)))
        moments.append(Moment(f"after {number}", draw.randint(0, 40), there))
    calls = [sum(visit == (piece, "forward") for visit in visits) for piece in range(len(menus))]
    found = with_offloads(Step(pieces_of(menus, calls), tuple(moments)))
    assert found is not None
    return replace(found, host_bytes=draw.choice([0, 40, 10**6])), visits


def ledger(choice: tuple[Point, ...], visits: list[tuple[int, Stage]]) -> list[int]:
    """What exists during each visit and after it: a call's values leave until the next forward has ended, and come from
    when the backward of the call after it begins.
    """
    found, waiting = [], list[int]()
    here: dict[int, int] = {}  # by call in order: bytes of it on the device
    for piece, stage in visits:
        point = choice[piece]
        if stage == "forward":
            found.append(sum(here.values()) + point.forward_peak_bytes)
            if waiting:
                here[len(waiting) - 1] = choice[waiting[-1]].carried_bytes
            here[len(waiting)] = point.carried_bytes + point.offloaded_bytes
            waiting.append(piece)
        else:
            waiting.pop()
            del here[len(waiting)]
            if waiting:
                last = choice[waiting[-1]]
                here[len(waiting) - 1] = last.carried_bytes + last.offloaded_bytes
            found.append(sum(here.values()) + point.backward_peak_bytes)
        found.append(sum(here.values()))
    return found


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_every_choice_has_the_bytes_of_a_ledger(seed: int, micro_batches: int) -> None:
    step, visits = step_of(seed, micro_batches)
    for choice in itertools.islice(itertools.product(*step.menus), 200):
        made = [m.bytes(choice) - m.base_bytes for m in step.moments]
        assert made == ledger(choice, visits)


@pytest.mark.slow(every=4)
@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    step, _ = step_of(seed)
    may = [p for p in itertools.product(*step.menus) if bytes_on_host(step, p) <= step.host_bytes]
    assert_best_of_all(step, may, [0, 1 / 3])


def test_without_a_solver_a_search_offloads_what_the_host_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    crash_solvers(monkeypatch.setattr)
    offloads = 0
    for seed in range(60):
        step, _ = step_of(seed)
        may = [p for p in itertools.product(*step.menus) if bytes_on_host(step, p) <= step.host_bytes]
        least = min(peak_of(step, points)[0] for points in may)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the solver that has failed
            found, lean = fastest(step, int(1.1 * least)), smallest(step)
        assert bytes_on_host(step, found.points) <= step.host_bytes >= bytes_on_host(step, lean.points)
        assert least <= lean.peak_bytes <= 1.2 * least
        offloads += found.peak_bytes <= 1.1 * least and any(point.offloaded for point in found.points)
    assert offloads


@pytest.mark.parametrize("order", ["0f 1f 0b 1b", "0f 0b 1b", "0f", "0f 1f 1b 1f 1b 0b"])
def test_another_order_says_nothing_of_what_comes_next(order: str) -> None:
    stages: dict[str, Stage] = {"f": "forward", "b": "backward"}
    moments = [Moment(each, 0, (), int(each[0]), stages[each[1]]) for each in order.split()]
    assert with_offloads(Step(pieces_of([[], []]), tuple(moments))) is None


def test_points_of_a_chain_by_hand() -> None:
    """x -> v0 -> v1 -> v2 (the result); each gradient reads its own value."""
    program, costs = network(3)
    number = {value.name: v for v, value in enumerate(program.values)}
    v0, v1, v2, x = (number[name] for name in ("v0", "v1", "v2", "x"))
    sizes = [value.bytes for value in program.values]
    kept = point_of(program, Schedule((0, 1, 2), ((), (), ()), (0, 0, 0)), costs)
    forward, backward = kept.forward_seconds, kept.seconds - kept.forward_seconds
    rate = sizes[v1] / min(forward, backward)  # of v1 alone a copy is hidden
    ways = {point.offloaded: point for point in offloading(kept, program, {v0, v1, v2}, rate)}
    both = (v0, v1, v2)
    assert both in ways and ways[both].offloaded_bytes == sum(sizes[v] for v in both)
    assert ways[both].carried_bytes == 0 and ways[both].shared == ()
    assert ways[both].backward_peak_bytes == kept.backward_peak_bytes + sizes[v2]  # which was not of the block before
    copy = ways[both].offloaded_bytes / rate
    waits = max(0.0, copy - forward) + max(0.0, copy - backward)
    assert ways[both].seconds == pytest.approx(kept.seconds + waits + 2 * BESIDE * copy)
    anew = point_of(program, Schedule((0, 1, 2), ((), (0, 1), ()), (0, 0, 0)), costs)
    mine = owning(anew, program, {x})
    assert mine.carried_bytes == sizes[x] and x not in mine.shared
    assert mine.backward_peak_bytes == anew.backward_peak_bytes + sizes[x]
    (sent,) = offloading(mine, program, {x}, rate)
    assert (sent.carried_bytes, sent.offloaded_bytes) == (0, sizes[x])
    assert sent.backward_peak_bytes == mine.backward_peak_bytes
