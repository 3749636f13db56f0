"""Steps: bytes and seconds of choices against hand-counted ones, and against a ledger of all that is allocated and
freed.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from steps import in_a_row, pieces_of, point, random_menu, random_step

from monet_like.ir.step import Moment, Point, Stage, Step, peak_of, seconds_of


def test_bytes_of_a_moment() -> None:
    points = (point(1, 10, 3, 14, saves=4), point(1, 20, 5, 27))
    assert Moment("f", 100, ((0, 1),), 1, "forward").bytes(points) == 100 + 10 + 5
    assert Moment("b", 100, ((0, 1), (1, 1)), 1, "backward").bytes(points) == 100 + 10 + 27
    assert Moment("two calls", 100, ((0, 2), (1, 1)), 0, "backward").bytes(points) == 100 + 10 + 20 + 14
    assert Moment("adds", 100, ((0, 2), (1, 1)), 0, "backward", adds=True).bytes(points) == 100 + 10 + 20 + 10
    assert Moment("loss", 100, ((0, 2), (1, 1))).bytes(points) == 140


def test_the_first_of_equal_moments_is_the_peak() -> None:
    step = Step(pieces_of([[point(2.0, 10, 0, 10)]], [3]), in_a_row(1, 5))
    assert peak_of(step, step.menus[0]) == (15, "loss")
    assert seconds_of(step, step.menus[0]) == 6.0


@dataclass
class Ledger:
    """Memory of a step that runs: allocated when made, freed when no longer needed; and its seconds."""

    choice: tuple[Point, ...]
    held: Counter[str] = field(default_factory=Counter)
    peaks: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, piece: int, stage: Stage, number: int, base: int, adds: bool) -> None:
        """One forward or backward of call ``number``, while ``base`` bytes exist besides."""
        mine, of = self.choice[piece], f"{piece}.{number}"
        self.held["base"] = base
        if stage == "forward":
            self.held["running"] = mine.forward_peak_bytes
            self.peaks.append(self.held.total())
            self.held["running"] = 0
            self.held[of] = mine.carried_bytes
            self.seconds += mine.seconds
        else:
            self.held[of] = mine.adding_peak_bytes if adds else mine.backward_peak_bytes  # what it carried is in there
            self.peaks.append(self.held.total())
            del self.held[of]


def in_flight(seed: int) -> tuple[Step, list[tuple[int, Stage, int, int, bool]]]:
    """A step in which calls of several pieces are in flight in any order, and what runs: see `Ledger.run`."""
    rng = random.Random(seed)
    menus = [random_menu(rng) for _ in range(rng.randint(1, 3))]
    calls = [rng.randint(1, 3) for _ in menus]
    waiting = [(piece, number) for piece, count in enumerate(calls) for number in range(count)]
    rng.shuffle(waiting)
    runs: list[tuple[int, Stage, int, int, bool]] = []
    moments: list[Moment] = []
    carrying: list[tuple[int, int]] = []
    while waiting or carrying:
        forward = bool(waiting) and (not carrying or rng.random() < 0.6)
        piece, number = waiting.pop() if forward else rng.choice(carrying)
        stage: Stage = "forward" if forward else "backward"
        adds, base = not forward and rng.random() < 0.5, rng.randint(0, 50)
        there = tuple(sorted(Counter(p for p, _ in carrying).items()))
        runs.append((piece, stage, number, base, adds))
        moments.append(Moment(f"{stage} {piece}.{number}", base, there, piece, stage, adds))
        carrying.append((piece, number)) if forward else carrying.remove((piece, number))
    return Step(pieces_of(menus, calls), tuple(moments)), runs


@pytest.mark.parametrize("seed", range(30))
def test_every_choice_has_the_bytes_and_seconds_of_a_ledger(seed: int) -> None:
    step, runs = in_flight(seed)
    for choice in itertools.product(*step.menus):
        ledger = Ledger(choice)
        for run in runs:
            ledger.run(*run)
        assert [moment.bytes(choice) for moment in step.moments] == ledger.peaks
        assert peak_of(step, choice)[0] == max(ledger.peaks)
        assert seconds_of(step, choice) == pytest.approx(ledger.seconds)


@pytest.mark.parametrize("seed", range(10))
def test_distinct_moments_have_the_same_peaks(seed: int) -> None:
    step = random_step(seed)
    more = [replace(moment, base_bytes=moment.base_bytes - 1, name="less") for moment in step.moments]
    both = replace(step, moments=(*more, *step.moments))
    assert both.distinct_moments == step.moments
    for choice in itertools.product(*step.menus):
        assert peak_of(replace(both, moments=both.distinct_moments), choice)[0] == peak_of(both, choice)[0]


def test_other_menus_leave_the_rest_of_a_step() -> None:
    step = random_step(0)
    firsts = step.with_menus(menu[:1] for menu in step.menus)
    assert firsts.menus == tuple(menu[:1] for menu in step.menus)
    assert firsts.with_menus(step.menus) == step
    with pytest.raises(ValueError, match="zip"):
        step.with_menus(step.menus[1:])
