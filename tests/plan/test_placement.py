"""Places of tensors in one block: none overlap, and the block is as small as brute force says, or nearly."""

from __future__ import annotations

import itertools
import random

import pytest

from monet_like.plan.local_search.native import library
from monet_like.replay.memory import placement
from monet_like.replay.memory.placement import Lifetime, Placement, most_at_once, place


def of(*tensors: tuple[int, int, int]) -> list[Lifetime]:
    return [Lifetime(*one) for one in tensors]


def some(seed: int, count: int) -> list[Lifetime]:
    rng = random.Random(seed)
    begins = [rng.randrange(2 * count) for _ in range(count)]
    return of(*((rng.randint(1, 20), begin, begin + rng.randint(1, count)) for begin in begins))


def assert_valid(found: Placement, lifetimes: list[Lifetime]) -> None:
    there = list(zip(found.offsets, lifetimes, strict=True))
    assert all(offset >= 0 for offset in found.offsets)
    assert found.height == max((offset + one.bytes for offset, one in there), default=0)
    for (at, one), (other_at, other) in itertools.combinations(there, 2):
        if one.begin < other.end and other.begin < one.end:
            assert at + one.bytes <= other_at or other_at + other.bytes <= at, (one, other)


def smallest(lifetimes: list[Lifetime]) -> int:
    """By every order; some order of placing as low as possible gives the smallest block."""
    orders = itertools.permutations(range(len(lifetimes)))
    return min(placement._height(lifetimes, placement._in_order(lifetimes, order)) for order in orders)


@pytest.fixture(params=["compiled", "python"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "compiled" and library() is None:
        pytest.skip("the library is not compiled")
    if request.param == "python":
        monkeypatch.setattr(placement, "library", lambda: None)
    return str(request.param)


def test_nothing_and_one(engine: str) -> None:
    assert place([]) == Placement([], 0, 0)
    assert place(of((7, 0, 3))) == Placement([0], 7, 7)


def test_neighbours_in_time_share_a_place(engine: str) -> None:
    assert place(of((8, 0, 1), (8, 1, 2), (8, 2, 3))).height == 8
    assert place(of((8, 0, 2), (8, 1, 3), (8, 2, 4))).height == 16


def test_a_block_may_have_to_be_larger_than_what_lives_at_one_time() -> None:
    """Two tensors of 1 are left on either side of a hole when a tensor of 2 comes."""
    lifetimes = of((2, 0, 2), (1, 0, 4), (1, 1, 6), (2, 3, 6), (3, 5, 8))
    assert most_at_once(lifetimes) <= smallest(lifetimes) == place(lifetimes).height


@pytest.mark.parametrize("seed", range(40))
def test_small_cases_are_solved_as_brute_force_does(seed: int) -> None:
    lifetimes = some(seed, 6)
    found = place(lifetimes)
    assert_valid(found, lifetimes)
    assert found.least_bytes == most_at_once(lifetimes)
    if library() is not None:
        assert found.height == smallest(lifetimes)


@pytest.mark.parametrize("seed", range(3))
def test_large_cases_are_valid_and_searching_helps(engine: str, seed: int) -> None:
    lifetimes = some(seed, 300)
    first, found = place(lifetimes, most_steps=0), place(lifetimes, most_steps=5_000_000)
    for one in (first, found):
        assert_valid(one, lifetimes)
    assert place(lifetimes, most_steps=5_000_000) == found
    if engine == "compiled":
        assert found.height < first.height
        assert found.height <= 1.08 * found.least_bytes


def test_the_compiled_search_starts_as_its_twin_does(monkeypatch: pytest.MonkeyPatch) -> None:
    if library() is None:
        pytest.skip("the library is not compiled")
    for seed in range(20):
        lifetimes = some(seed, 40)
        compiled = place(lifetimes, most_steps=0)
        with monkeypatch.context() as patch:
            patch.setattr(placement, "library", lambda: None)
            assert place(lifetimes) == compiled
