"""The relaxation of a block: at any prices and limits no schedule of a small program costs less, by trying all."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator
from operator import le

import pytest
from random_programs import all_schedules, random_program

from monet_like.ir.step import Point
from monet_like.plan.bound.pieces import Amounts, BlockRelaxation, Limit, Prices, amounts_of, block_relaxation
from monet_like.plan.step.menus import point_of
from monet_like.solvers.pool import Pool

#: Programs of the sweep.
SEEDS = int(os.environ.get("MONET_LIKE_RANDOM_BLOCKS", "16"))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool() as workers:
        yield workers


@functools.cache
def every_point(seed: int) -> tuple[BlockRelaxation, list[Point]]:
    """A small program's relaxation, and the points of all its schedules."""
    program, costs = random_program(random.Random(seed), 4)
    every = all_schedules(program, costs, 10**6, [float("inf")], anywhere=seed % 5 == 0 < seed)
    return block_relaxation(program, costs), [point_of(program, schedule, costs) for schedule in every]


def unbeaten(points: list[Point]) -> list[Amounts]:
    """The points that no other one beats."""
    mine = set(map(amounts_of, points))
    return [one for one in mine if not any(other != one and all(map(le, other, one)) for other in mine)]


def bounds(relaxation: BlockRelaxation, asked: list[tuple[Prices, tuple[Limit, ...]]], pool: Pool) -> list[float]:
    """The relaxation's optimum for each; inf where it has no point."""
    matrices = [matrix for prices, limits in asked for matrix in relaxation.programs(prices, limits)]
    answers = pool.solve(matrices, 10.0, 1e-9, lambda: 100.0)
    assert all(answer is not None for answer in answers)
    return [
        float("inf") if answer["x"] is None else (answer["bound"] + matrix.offset) * matrix.seconds_per_unit  # type: ignore[index]
        for matrix, answer in zip(matrices, answers, strict=True)
    ]


@pytest.mark.slow(every=8)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_schedule_costs_less_than_the_bound(seed: int, pool: Pool) -> None:
    rng = random.Random(seed)
    relaxation, points = every_point(seed)
    asked: list[tuple[Prices, tuple[Limit, ...]]] = [(Prices(), ())]
    for name in ("carried", "forward", "backward"):
        asked.append((Prices(**{name: 2.0}), ()))
    asked += [(Prices(*(rng.choice((0.0, rng.random() * 4)) for _ in range(3))), ()) for _ in range(6)]
    for _ in range(6):
        amount = rng.choice(("carried", "forward", "backward"))
        middle = getattr(amounts_of(rng.choice(points)), amount)
        limit = rng.choice((Limit(amount, most=middle), Limit(amount, least=middle)))  # type: ignore[arg-type]
        asked.append((Prices(*(rng.random() for _ in range(3))), (limit,)))
    for (prices, limits), bound in zip(asked, bounds(relaxation, asked, pool), strict=True):
        within = [one for one in unbeaten(points) if all(limit.admits(one) == one for limit in limits)]
        least = min((prices.of(one) for one in within), default=float("inf"))
        assert bound <= least + 1e-6, (prices, limits)


@pytest.mark.slow
def test_the_bound_is_mostly_exact(pool: Pool) -> None:
    """Small programs have a row for every run and slot: what the relaxation ignores is seldom of use."""
    exact = tried = 0
    for seed in range(SEEDS):
        relaxation, points = every_point(seed)
        asked: list[tuple[Prices, tuple[Limit, ...]]] = [
            (Prices(1.0), ()), (Prices(forward=1.0), ()), (Prices(backward=1.0), ())
        ]  # fmt: skip
        for (prices, _), bound in zip(asked, bounds(relaxation, asked, pool), strict=True):
            tried += 1
            exact += bound >= min(prices.of(amounts_of(point)) for point in points) - 1e-6
    assert exact > 0.7 * tried
