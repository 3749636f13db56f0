"""Primal recovery: from the paths of the Lagrangian relaxation to a plan within the budget.

At the best price there are two shortest paths, one over the budget and one within it. The parts of both are mixed into
a policy that fits; then the solutions of single parts, and of two parts at once, are exchanged as long as that helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeGuard

from ..bound.lagrangian import Case, LagrangianRelaxation, PartSolution, PricedPath
from ..local_search.policy import Policy
from ..local_search.searcher import Found, Searcher

#: Most improvements of the price.
TURNS = 12
#: Most fourfold rises of the price until a path fits.
MOST_RISES = 30
#: Factor of the price while a path's plan does not fit: its peak is later than the start of the backward.
STEP = 1.15
#: A multiple of the price at which a path's plan did not fit: if that at this price does not fit either, none does.
DEAREST = 1000
#: Most exchanges that are tried, and how many alternatives of a part on either side of the present one.
MOST_EXCHANGES, REACH = 3000, 2
#: Lengths of chains for which plans are made; see `LagrangianRelaxation.shortest_path`.
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


def recover_plan(relaxation: LagrangianRelaxation, searcher: Searcher, budget_bytes: int) -> Recovery | None:
    """A bound and a plan for a budget; None if some part cannot be solved in time.

    Args:
        relaxation: of the searcher's program.
        searcher: judges the plans.
    """
    room = budget_bytes - relaxation.fixed_bytes
    free = relaxation.shortest_path(0.0)
    if free is None:
        return None
    ends = _bracket(relaxation, free, room)
    if ends is None:
        return Recovery(free.bound, None)
    over, within, bound = _best_price(relaxation, *ends, room, free.bound)
    found = [_mix_paths(relaxation, searcher, budget_bytes, over.price, within.price, chain) for chain in CHAINS]
    return Recovery(bound, min(filter(None, found), key=lambda f: f.score(budget_bytes), default=None))


def _bracket(relaxation: LagrangianRelaxation, free: PricedPath, room: int) -> tuple[PricedPath, PricedPath] | None:
    """A path over the budget and one within it, by raising the price; the same path twice if ``free`` fits.

    None where time is up, or where not even the path that keeps least fits: then other stages will say so too.

    Args:
        free: the shortest path at price 0.
        room: bytes that the forward may keep.
    """
    over, within, price = free, free, free.seconds / max(1, free.bytes)
    for _ in range(MOST_RISES):
        if within.bytes <= room:
            return over, within
        path = relaxation.shortest_path(price) if relaxation.time_left() > 0 else None
        if path is None:
            return None
        over, within = (path, path) if path.bytes > room else (over, path)
        price *= 4
    return None


def _best_price(
    relaxation: LagrangianRelaxation, over: PricedPath, within: PricedPath, room: int, bound: float
) -> tuple[PricedPath, PricedPath, float]:
    """The two paths next to the price of the highest bound, and that bound.

    Each turn asks at the price at which both paths are equally good, until no better path is found there.
    """
    for _ in range(TURNS):
        bound = max(bound, over.bound - over.price * room, within.bound - within.price * room)
        if over.bytes <= within.bytes:
            break
        price = (within.seconds - over.seconds) / (over.bytes - within.bytes)
        path = relaxation.shortest_path(price) if relaxation.time_left() > 0 else None
        if path is None or path.bytes in (over.bytes, within.bytes):
            bound = bound if path is None else max(bound, path.bound - price * room)
            break
        over, within = (path, within) if path.bytes > room else (over, path)
    return over, within, bound


def _mix_paths(
    relaxation: LagrangianRelaxation,
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
    relaxation: LagrangianRelaxation,
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


def _policy(relaxation: LagrangianRelaxation, searcher: Searcher, choices: Sequence[PartSolution]) -> Policy:
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
