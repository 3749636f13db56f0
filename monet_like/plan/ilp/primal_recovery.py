"""Primal recovery: from the paths of the Lagrangian relaxation to a plan within the budget.

At the best price there are two shortest paths, one over the budget and one within it. The parts of both are mixed into
a policy that fits; then the solutions of single parts, and of two parts at once, are exchanged as long as that helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeGuard

from ..bound.parts import Case, PartSolution, PartsRelaxation, PricedPath
from ..bound.prices import step_bound
from ..local_search.policy import Policy
from ..local_search.searcher import Found, Searcher

#: Factor of the price while a path's plan does not fit: its peak is later than the start of the backward.
STEP = 1.15
#: A multiple of the price at which a path's plan did not fit: if that at this price does not fit either, none does.
DEAREST = 1000
#: Most exchanges that are tried, and how many alternatives of a part on either side of the present one.
MOST_EXCHANGES, REACH = 3000, 2
#: Lengths of chains for which plans are made; see `PartsRelaxation.shortest_path`.
CHAINS = (0, 1, 3, 7)


@dataclass(frozen=True)
class Recovery:
    """A bound, and a policy that mostly fits.

    Attributes:
        bound_seconds: no schedule within the budget is faster.
        found: a policy that keeps what the best paths keep. It does not always fit; None if there is none.
    """

    bound_seconds: float
    found: Found | None


def recover_plan(relaxation: PartsRelaxation, searcher: Searcher, budget_bytes: int) -> Recovery | None:
    """A bound and a plan of the searcher's program for a budget; None if some part cannot be solved in time."""
    step = relaxation.step()
    if step is None:
        return None
    bound = step_bound(
        step, [relaxation], budget_bytes, known=None, gap=0.0, time_limit_seconds=relaxation.time_left(),
        pool=relaxation.pool
    ).seconds  # fmt: skip
    room = budget_bytes - relaxation.fixed_bytes
    paths = relaxation.paths
    fitting = [path for path in paths if path.bytes <= room]
    if not fitting:  # time is up, or not even the path that keeps least fits: other stages will say so too
        return Recovery(bound, None)
    price = max(paths, key=lambda path: path.bound - path.price * room).price

    def cheapest(among: list[PricedPath]) -> PricedPath:
        return min(among, key=lambda path: path.seconds + price * path.bytes)

    within = cheapest(fitting)
    over = cheapest([path for path in paths if path.bytes > room] or [within])
    found = [_mix_paths(relaxation, searcher, budget_bytes, over.price, within.price, chain) for chain in CHAINS]
    return Recovery(bound, min(filter(None, found), key=lambda f: f.score(budget_bytes), default=None))


def _mix_paths(
    relaxation: PartsRelaxation,
    searcher: Searcher,
    budget_bytes: int,
    over_price: float,
    within_price: float,
    chain: int,
) -> Found | None:
    """The first parts as on the path within the budget, the others as on the path over it: as many of these as fit.

    The bytes of a path are those at the start of the backward, so the plan of the path within the budget may be over
    it. Then paths at higher prices are tried.
    """
    over, within = relaxation.shortest_path(over_price, chain), relaxation.shortest_path(within_price, chain)
    if over is None or within is None:
        return None

    def judged(first: PricedPath, second: PricedPath, cut: int) -> Found | None:
        choices = (*first.choices[:cut], *second.choices[cut:])
        return searcher.judge(_policy(relaxation, searcher, choices), budget_bytes)

    def fits(found: Found | None) -> TypeGuard[Found]:
        return found is not None and found.judgement.peak_bytes <= budget_bytes

    count, price = len(relaxation.parts), max(within.price, within.seconds / 2**50)
    found = judged(within, within, count)
    if not fits(found):
        leanest = relaxation.shortest_path(DEAREST * price, chain) if relaxation.time_left() > 0 else None
        least = None if leanest is None else judged(leanest, leanest, count)
        if leanest is None or not fits(least):
            return found
        while not fits(found):
            price *= STEP
            leaner = relaxation.shortest_path(price, chain) if price < leanest.price else leanest
            if leaner is None or relaxation.time_left() <= 0:
                return least
            over, within = (within, leaner) if leaner.bytes < within.bytes else (over, leaner)
            found = judged(within, within, count)
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        tried = judged(within, over, middle)
        if fits(tried):
            found, high = tried, middle
        else:
            low = middle + 1
    choices = (*within.choices[:high], *over.choices[high:])
    cases = (*within.cases[:high], *over.cases[high:])
    return _exchange(relaxation, searcher, budget_bytes, found, choices, cases)


def _exchange(
    relaxation: PartsRelaxation,
    searcher: Searcher,
    budget_bytes: int,
    found: Found,
    choices: Sequence[PartSolution],
    cases: Sequence[Case],
) -> Found:
    """Exchange the solutions of single parts, then of two parts at once, one giving memory that the other takes."""
    alternatives = [relaxation.alternatives(case) for case in cases]
    chosen, left = list(choices), MOST_EXCHANGES

    def improve(changes: Mapping[int, PartSolution]) -> bool:
        nonlocal found, left
        left -= 1
        changed = [changes.get(place, choice) for place, choice in enumerate(chosen)]
        tried = searcher.judge(_policy(relaxation, searcher, changed), budget_bytes)
        if tried is None or tried.score(budget_bytes) >= found.score(budget_bytes):
            return False
        chosen[:] = changed
        found = tried
        return True

    def around(place: int, reach: int) -> tuple[list[PartSolution], list[PartSolution]]:
        """The next alternatives of a part that keep fewer bytes, and those that keep more."""
        known, size = alternatives[place], chosen[place].bytes
        fewer = [choice for choice in known if choice.bytes < size]
        more = [choice for choice in known if choice.bytes > size]
        return fewer[-reach:], more[:reach]

    def moves() -> Iterator[Mapping[int, PartSolution]]:
        for place in range(len(alternatives)):
            yield from ({place: choice} for choice in reversed(around(place, REACH)[1]))
        for taker, giver in product(range(len(alternatives)), repeat=2):
            if taker != giver:
                pairs = product(around(taker, REACH)[1], around(giver, REACH)[0])
                yield from ({taker: more, giver: fewer} for more, fewer in pairs)

    improved = True
    while improved:
        improved = False
        for move in moves():
            if left <= 0 or relaxation.time_left() <= 0:
                return found
            improved |= improve(move)
    return found


def _policy(relaxation: PartsRelaxation, searcher: Searcher, choices: Sequence[PartSolution]) -> Policy:
    """The policy that keeps what the parts' solutions keep and takes their ways; reruns' results stay while needed."""
    tables = searcher.tables
    kept = {v for choice in choices for v in choice.kept}
    policy = searcher.keeping(kept)
    for part, choice in zip(relaxation.parts, choices, strict=True):
        for slot, way in zip(part.slots, choice.ways, strict=True):
            for k, option in enumerate(tables.options[slot]):
                if any(w.way == way for w in tables.ways[option]):
                    policy.option[slot] = k
    return policy
