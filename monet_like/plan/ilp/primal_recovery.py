"""Primal recovery: a plan from the Lagrangian relaxation's answers at the best price."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeGuard

from ..local_search.policy import Policy
from ..local_search.searcher import Found, Searcher
from .lagrangian import Answer, Choice, Parts, _Case

#: How often the price is improved.
TURNS = 12
#: How often the price is raised fourfold until the answer fits.
MOST_RISES = 30
#: Factor of the price where a plan takes more than what it keeps.
STEP = 1.15
#: The price at which one sees whether any answer fits, as a multiple of that of the answer that does not.
DEAREST = 1000
#: How many exchanges of parts' choices are tried, and how far along a part's menu.
MOST_EXCHANGES, REACH = 3000, 2
#: Lengths of chains that are tried; see `Parts.answer`.
CHAINS = (0, 1, 3, 7)


@dataclass(frozen=True)
class Composed:
    """What the parts give.

    Attributes:
        bound_seconds: no schedule within the budget is faster.
        found: a policy that keeps what the best answers keep, and does not always fit; None if there is none.
    """

    bound_seconds: float
    found: Found | None


def compose(parts: Parts, searcher: Searcher, budget_bytes: int) -> Composed | None:
    """A bound and a plan for a budget; None if some part cannot be solved in time.

    Args:
        parts: of the searcher's program.
        searcher: judges the plans.
    """
    room = budget_bytes - parts.fixed_bytes
    rich = parts.answer(0.0)
    if rich is None:
        return None
    best, lean, price = rich.bound, rich, rich.seconds / max(1, rich.bytes)
    for _ in range(MOST_RISES):  # dearer and dearer, until it fits
        if lean.bytes <= room:
            break
        answer = parts.answer(price) if parts.time_left() > 0 else None
        if answer is None:
            return Composed(best, None)
        rich, lean = (answer, answer) if answer.bytes > room else (rich, answer)
        price *= 4
    else:  # not even the least that can be kept fits, says the bound of one block; others will say so too
        return Composed(best, None)
    for _ in range(TURNS):  # the price at which both are equally good, until nothing better is found there
        best = max(best, rich.bound - rich.price * room, lean.bound - lean.price * room)
        if rich.bytes <= lean.bytes:
            break
        price = (lean.seconds - rich.seconds) / (rich.bytes - lean.bytes)
        answer = parts.answer(price) if parts.time_left() > 0 else None
        if answer is None or answer.bytes in (rich.bytes, lean.bytes):
            best = best if answer is None else max(best, answer.bound - price * room)
            break
        rich, lean = (answer, lean) if answer.bytes > room else (rich, answer)
    found = [_mixed(parts, searcher, budget_bytes, rich.price, lean.price, chain) for chain in CHAINS]
    return Composed(best, min(filter(None, found), key=lambda f: f.score(budget_bytes), default=None))


def _mixed(
    parts: Parts,
    searcher: Searcher,
    budget_bytes: int,
    rich_price: float,
    lean_price: float,
    chain: int,
) -> Found | None:
    """The first parts as at the lean price, the others as at the rich one: as many of the latter as fit.

    Where not even the lean answer fits, leaner ones are asked for.
    """
    rich, lean = parts.answer(rich_price, chain), parts.answer(lean_price, chain)
    if rich is None or lean is None:
        return None

    def judged(first: Answer, second: Answer, cut: int) -> Found | None:
        choices = (*first.choices[:cut], *second.choices[cut:])
        return searcher.judge(_policy(parts, searcher, choices), budget_bytes)

    def fits(found: Found | None) -> TypeGuard[Found]:
        return found is not None and found.judgement.peak_bytes <= budget_bytes

    count, price = len(parts.parts), max(lean.price, lean.seconds / 2**50)
    found = judged(lean, lean, count)
    if not fits(found):
        leanest = parts.answer(DEAREST * price, chain) if parts.time_left() > 0 else None
        least = None if leanest is None else judged(leanest, leanest, count)
        if leanest is None or not fits(least):
            return found
        while not fits(found):
            price *= STEP
            leaner = parts.answer(price, chain) if price < leanest.price else leanest
            if leaner is None or parts.time_left() <= 0:
                return least
            rich, lean = (lean, leaner) if leaner.bytes < lean.bytes else (rich, leaner)
            found = judged(lean, lean, count)
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        tried = judged(lean, rich, middle)
        if fits(tried):
            found, high = tried, middle
        else:
            low = middle + 1
    choices = (*lean.choices[:high], *rich.choices[high:])
    cases = (*lean.cases[:high], *rich.cases[high:])
    return _exchanged(parts, searcher, budget_bytes, found, choices, cases)


def _exchanged(
    parts: Parts,
    searcher: Searcher,
    budget_bytes: int,
    found: Found,
    choices: Sequence[Choice],
    cases: Sequence[_Case],
) -> Found:
    """Exchange the choices of single parts, then of two at once, one giving memory that the other takes."""
    menus = [parts.menu(case) for case in cases]
    chosen, left = list(choices), MOST_EXCHANGES

    def better(changes: Mapping[int, Choice]) -> bool:
        nonlocal found, left
        left -= 1
        changed = [changes.get(place, choice) for place, choice in enumerate(chosen)]
        tried = searcher.judge(_policy(parts, searcher, changed), budget_bytes)
        if tried is None or tried.score(budget_bytes) >= found.score(budget_bytes):
            return False
        chosen[:] = changed
        found = tried
        return True

    def around(place: int, reach: int) -> tuple[list[Choice], list[Choice]]:
        menu, size = menus[place], chosen[place].bytes
        leaner = [choice for choice in menu if choice.bytes < size]
        richer = [choice for choice in menu if choice.bytes > size]
        return leaner[-reach:], richer[:reach]

    def moves() -> Iterator[Mapping[int, Choice]]:
        for place in range(len(menus)):
            yield from ({place: choice} for choice in reversed(around(place, REACH)[1]))
        for taker, giver in product(range(len(menus)), repeat=2):
            if taker != giver:
                pairs = product(around(taker, REACH)[1], around(giver, REACH)[0])
                yield from ({taker: more, giver: less} for more, less in pairs)

    improved = True
    while improved:
        improved = False
        for move in moves():
            if left <= 0 or parts.time_left() <= 0:
                return found
            improved |= better(move)
    return found


def _policy(parts: Parts, searcher: Searcher, choices: Sequence[Choice]) -> Policy:
    """Keep what the choices keep and read what they read; what is made again stays until it is not needed."""
    tables = searcher.tables
    kept = {v for choice in choices for v in choice.kept}
    policy = searcher.keeping(kept)
    for part, choice in zip(parts.parts, choices, strict=True):
        for slot, way in zip(part.slots, choice.ways, strict=True):
            for k, option in enumerate(tables.options[slot]):
                if any(w.way == way for w in tables.ways[option]):
                    policy.option[slot] = k
    return policy
