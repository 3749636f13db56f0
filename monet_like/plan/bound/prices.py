"""A bound of a step's seconds for all schedules of its blocks, by a Lagrangian relaxation of the memory at its moments.

`choice.choose` finds the fastest of the schedules in the menus. Here every schedule of a block's program may be taken.
With a price ``mu[m] >= 0``, in seconds per byte, on the memory of every moment ``m`` (notation of
`monet_like.ir.step`), schedules that fit have at least

    sum[m] mu[m] (base[m] - budget) + sum[b] min over schedules s of block b of
        (calls[b] seconds(s) + sum[m] mu[m] (n[m,b] carried(s) + running[m,b,s]))

seconds (Everett 1963, Geoffrion 1974). Each minimum is bounded by a small 0/1 program (`block_relaxation`), solved once
for equal blocks with equal prices. Its prices are, for a call of the block,

    carried    sum[m] mu[m] n[m,b], without the block itself where its backward runs and adds nothing
    forward    sum of mu[m] over the moments at which the forward of b runs
    backward   sum of mu[m] over those at which its backward runs and adds nothing

A backward whose gradients are added to earlier ones counts what the block carries alone: `Point.adding_peak_bytes` is
not less.

**Prices.** Cutting planes find them (Kelley 1960). A linear program maximises the bound over the solutions known so
far, which are the menus' points at first. At its prices the small programs give a bound and new solutions. This is
column generation, seen from the dual side (Dantzig and Wolfe 1960): most new solutions are schedules that a menu lacks
(`Bound.schedules`).

**Branches.** The bound lets a block take a mixture of schedules. That is nearly true of many equal blocks, and far from
it for a head that needs 1 GB with one schedule and 2 GB with another. So the step is split in two, where the amount of
such a block is at most or at least a number between the two, and each half gets prices of its own; the bound is the
lowest of the parts'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from math import inf

from ...ir.schedule import Schedule
from ...ir.step import Moment, Point, Step, seconds_of
from ...solvers.matrix import Builder, Expr, total
from ...solvers.pool import Pool
from .pieces import PROGRAM_GAP, PROGRAM_SECONDS, Amounts, Answer, Limit, Prices, Relaxation, amounts_of

#: Distance of a bound from the most that its prices can prove, relative to the step, at which the search for prices
#: ends.
ENOUGH = 2e-4
#: Rounds of that search at most, and parts of the step that it is made for.
ROUNDS, PARTS = 30, 24
#: Prices are first looked for on this many moments, those that are nearest to the budget. Fewer prices make fewer
#: different programs.
FIRST_MOMENTS = 8
#: The highest price of a moment, as a multiple of the step's seconds per byte of the budget.
MOST_PRICE = 50.0
#: A bound of this many times the fastest schedules' seconds is not raised further: nothing fits, or hardly anything.
HOPELESS = 8.0
#: Two solutions of a block are mixed if their costs at the best prices differ by at most this share of the step.
EQUAL = 1e-4

#: Limits of blocks: a part of the step.
Limits = Mapping[int, tuple[Limit, ...]]


@dataclass(frozen=True)
class Bound:
    """A bound of the blocks' seconds.

    Attributes:
        seconds: no schedules of the blocks that fit are faster; inf: none fit.
        parts: how many parts of the step were looked at.
        rounds: of the search for prices, in all parts.
        schedules: for every block, schedules of its program that solutions stand for; some may break a rule or a limit.
    """

    seconds: float
    parts: int
    rounds: int
    schedules: tuple[tuple[Schedule, ...], ...]


#: By piece, one object for equal pieces; None: of a piece that takes the points of its menu alone.
Relaxations = Sequence[Relaxation | None]


def step_bound(
    step: Step,
    relaxations: Relaxations,
    budget_bytes: int,
    *,
    known: Sequence[Point] | None,
    gap: float,
    time_limit_seconds: float,
    pool: Pool | None = None,
) -> Bound:
    """A bound of the seconds of all blocks together, for all their schedules.

    Args:
        step: its bases are such that no schedules of the blocks make them smaller. Its menus have known schedules,
            which need not be schedules of the relaxation's program: the bound holds for them, too.
        budget_bytes: of the whole step.
        known: the fastest schedules of the blocks that are known to fit; None: none are, and the step is not split.
        gap: relative distance from these at which no part is looked at further.
        time_limit_seconds: wall seconds after which nothing new is begun.
        pool: solves the programs; None: one of its own.
    """
    ends = time.monotonic() + time_limit_seconds
    with nullcontext(pool) if pool is not None else Pool() as workers:
        return _Search(step, relaxations, budget_bytes, known, gap, workers, lambda: ends - time.monotonic()).run()


@dataclass(frozen=True)
class _Part:
    """A part of the step, the best bound of its seconds that is known, and the moments' prices that prove it."""

    limits: Limits
    bound: float
    prices: tuple[float, ...]


class _Search:
    """The search for a bound of one step; arguments as of `step_bound`."""

    def __init__(
        self, step: Step, relaxations: Relaxations, budget_bytes: int, known: Sequence[Point] | None, gap: float,
        pool: Pool,
        time_left: Callable[[], float],
    ) -> None:  # fmt: skip
        self.relaxations, self.budget, self.pool, self.time_left = relaxations, budget_bytes, pool, time_left
        self.calls = [piece.calls for piece in step.pieces]
        points = known or [min(menu, key=lambda p: p.numbers) for menu in step.menus]
        self.moments = sorted(step.distinct_moments, key=lambda m: -m.bytes(points))
        if self.moments[0].bytes(points) <= self.budget:
            known = points
        self.carrying = [dict(moment.carrying) for moment in self.moments]
        self.given = [[amounts_of(point) for point in menu] for menu in step.menus]
        self.known = [list(dict.fromkeys(given)) for given in self.given]
        self.schedules: list[dict[Schedule, None]] = [{} for _ in step.pieces]
        seconds = [
            count * min(one.seconds for one in given) for count, given in zip(self.calls, self.given, strict=True)
        ]
        self.unit = sum(seconds) or 1.0
        self.most = MOST_PRICE * self.unit / max(1, self.budget)
        #: Of the fastest schedules that are known to fit; and the bound with which the search ends.
        self.fastest = inf if known is None else seconds_of(step, known)
        self.wanted = (1 - gap) * self.fastest
        self.rounds = 0

    def run(self) -> Bound:
        """The lowest bound of all parts, after those with the lowest were split."""
        whole = self._raised({}, 0.0, [0.0] * len(self.moments))
        parts, looked = [whole], 1
        while looked < PARTS and self.time_left() > 0:
            worst = min(parts, key=lambda part: part.bound)
            split = self._split(worst) if worst.bound < self.wanted < inf else None
            if split is None:
                break
            parts.remove(worst)
            for limits in split:
                parts.append(self._raised(limits, worst.bound, worst.prices))
                looked += 1
        found = tuple(tuple(schedules) for schedules in self.schedules)
        return Bound(min(part.bound for part in parts), looked, self.rounds, found)

    def _raised(self, limits: Limits, bound: float, prices: Sequence[float]) -> _Part:
        """A part with the best bound that prices prove, from those given on; ``bound``: proven already."""
        best = _Part(limits, bound, tuple(prices))
        active, most = FIRST_MOMENTS, inf
        for _ in range(ROUNDS):
            answers = self._solve(prices, limits)
            if answers is None:
                break
            self.rounds += 1
            fixed = sum(mu * (m.base_bytes - self.budget) for mu, m in zip(prices, self.moments, strict=True))
            found = fixed + sum(count * one for count, one in zip(self.calls, answers, strict=True))
            if found >= best.bound:
                best = _Part(limits, found, tuple(prices))
            if (
                best.bound >= (self.wanted if limits else (1 - ENOUGH) * self.fastest)
                or best.bound > HOPELESS * self.unit
            ):
                break
            if best.bound >= most - ENOUGH * self.unit:
                if active >= len(self.moments) or best.bound >= self.wanted:
                    break
                active = len(self.moments)
            better = self._best_prices(limits, active)
            if better is None:
                break
            most, prices = better
        return best

    def _best_prices(self, limits: Limits, active: int) -> tuple[float, list[float]] | None:
        """The most that prices of the first ``active`` moments can prove as far as is known, and these prices."""
        builder = Builder()
        moments = self.moments[:active]
        mu = [builder.column(self.most * (self.budget - m.base_bytes) / self.unit, integral=False) for m in moments]
        for block, known in enumerate(self.known):
            costs = [self._cost(block, one, mu) for one in _admitted(known, limits.get(block, ()))]
            if not costs:
                return None
            top = max(cost.const + sum(max(0.0, c) for _, c in cost.terms) for cost in costs) or 1.0
            theta = builder.column(-top, integral=False)
            for cost in dict.fromkeys(costs):
                builder.at_most(theta, cost * (1 / top))
        matrix = builder.finish(self.unit)
        (answer,) = self.pool.solve([matrix], PROGRAM_SECONDS, PROGRAM_GAP, self.time_left)
        if answer is None or answer["x"] is None:
            return None
        x = answer["x"].clip(0.0, 1.0)
        prices = [self.most * one.value(x) for one in mu] + [0.0] * (len(self.moments) - active)
        return -float(matrix.cost @ x) * self.unit, prices

    def _cost(self, block: int, one: Amounts, mu: Sequence[Expr]) -> Expr:
        """Seconds and priced bytes of a solution, in units of the step."""
        parts = [Expr(self.calls[block] * one.seconds / self.unit)]
        for price, moment, carrying in zip(mu, self.moments, self.carrying, strict=False):
            size = carrying.get(block, 0) * one.carried
            if moment.running == block:
                size += self._rise(moment, one)
            if size:
                parts.append(price * (self.most * size / self.unit))
        return total(parts)

    def _rise(self, moment: Moment, one: Amounts) -> float:
        """What the running block adds by a solution, as `Moment.rise`."""
        if moment.stage != "backward":
            return one.forward if moment.stage == "forward" else 0.0
        return -self._shrinkage(moment) if moment.adds else one.backward - one.carried

    def _shrinkage(self, moment: Moment) -> int:
        relaxation = None if moment.running is None else self.relaxations[moment.running]
        return 0 if relaxation is None else relaxation.shrinkage_bytes

    def _prices(self, block: int, of_moments: Sequence[float]) -> tuple[Prices, float]:
        """The prices of a block's bytes for one of its calls, and its seconds that no schedule changes."""
        carried = forward = backward = fixed = 0.0
        for mu, moment, carrying in zip(of_moments, self.moments, self.carrying, strict=True):
            carried += mu * carrying.get(block, 0)
            if moment.running == block and moment.stage == "forward":
                forward += mu
            elif moment.running == block and moment.stage == "backward":
                if moment.adds:
                    fixed -= mu * self._shrinkage(moment)
                else:
                    backward += mu
                    carried -= mu
        count = self.calls[block] or 1
        return Prices(max(0.0, carried) / count, forward / count, backward / count), fixed / count

    def _solve(self, of_moments: Sequence[float], limits: Limits) -> list[float] | None:
        """For every block a bound of what one call costs; None if one is not solved in time.

        The bound is infinite where nothing is within the limits.
        """
        priced = [self._prices(block, of_moments) for block in range(len(self.calls))]
        keys = [
            (id(relaxation), prices, limits.get(block, ()))
            for block, (relaxation, (prices, _)) in enumerate(zip(self.relaxations, priced, strict=True))
        ]
        first = {key: block for block, key in enumerate(keys) if self.relaxations[block] is not None}
        solved = self._programs({block: key[1] for key, block in first.items()}, limits)
        if solved is None:
            return None
        answers = []
        for block, (key, (prices, fixed)) in enumerate(zip(keys, priced, strict=True)):
            own = map(prices.of, _admitted(self.given[block], limits.get(block, ())))
            bound = solved[first[key]] if key in first else inf
            answers.append(min(bound, *own, inf) + fixed)
        return answers

    def _programs(self, prices: Mapping[int, Prices], limits: Limits) -> dict[int, float] | None:
        """The bounds of some blocks; None if one is not solved in time."""
        relaxations = {block: relaxation for block in prices if (relaxation := self.relaxations[block])}
        asked = {block: one.programs(prices[block], limits.get(block, ())) for block, one in relaxations.items()}
        every = [program for programs in asked.values() for program in programs]
        answers = iter(self.pool.solve(every, PROGRAM_SECONDS, PROGRAM_GAP, self.time_left))
        found: dict[int, float] = {}
        for block, programs in asked.items():
            one = relaxations[block].read(prices[block], programs, list(islice(answers, len(programs))))
            if one is None:
                return None
            found[block] = one.bound
            self._learn(relaxations[block], one)
        return found

    def _learn(self, relaxation: Relaxation, one: Answer) -> None:
        """Add a solution to those of all equal blocks."""
        for block, other in enumerate(self.relaxations):
            if other is relaxation:
                if one.schedule is not None:
                    self.schedules[block].setdefault(one.schedule)
                if one.amounts is not None and one.amounts not in self.known[block]:
                    self.known[block].append(one.amounts)

    def _split(self, part: _Part) -> tuple[Limits, Limits] | None:
        """Two parts whose union is this one: the largest mixture of a block that is alone of its kind is in neither.

        Of the solutions that cost about the same at the part's prices, those are taken whose amounts differ most in
        price.
        """
        best: tuple[float, int, Limit, Limit] | None = None
        kinds = list(self.relaxations)
        for block, relaxation in enumerate(kinds):
            if relaxation is None or sum(other is relaxation for other in kinds) > 1:
                continue
            prices = self._prices(block, part.prices)[0]
            known = _admitted(self.known[block], part.limits.get(block, ()))
            least = min(map(prices.of, known), default=inf)
            equal = [one for one in known if prices.of(one) <= least + EQUAL * self.unit]
            for name, price in zip(prices._fields, prices, strict=True):
                sizes = sorted({getattr(one, name) for one in equal})
                if len(sizes) > 1 and (best is None or price * (sizes[-1] - sizes[0]) > best[0]):
                    middle = (sizes[-1] + sizes[0]) / 2
                    lower, upper = Limit(name, most=middle), Limit(name, least=middle)  # type: ignore[arg-type]
                    best = price * (sizes[-1] - sizes[0]), block, lower, upper
        if best is None or best[0] <= EQUAL * self.unit:
            return None
        _, block, lower, upper = best
        mine = part.limits.get(block, ())
        return {**part.limits, block: (*mine, lower)}, {**part.limits, block: (*mine, upper)}


def _admitted(known: Sequence[Amounts], limits: Sequence[Limit]) -> list[Amounts]:
    """The solutions within the limits, with higher peaks where these are below them."""
    found = []
    for one in known:
        mine: Amounts | None = one
        for limit in limits:
            mine = None if mine is None else limit.admits(mine)
        if mine is not None:
            found.append(mine)
    return found
