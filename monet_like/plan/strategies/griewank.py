"""Binomial checkpointing of a chain (Griewank and Walther 2000, algorithm 799): few snapshots, many reruns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...errors import SolverError
from ...ir.program import Cost, Program
from ...ir.schedule import Schedule, prune
from .checkpointing import Keeping


def griewank(program: Program, costs: Mapping[str, Cost], budget_bytes: int, *, extra_bytes: int = 0) -> Schedule:
    """Cut the forward into links at the results through which everything passes, and take as many snapshots as fit.

    Each number of snapshots gives one schedule. The fastest that fits is returned, else the one with the lowest peak.

    Raises:
        SolverError: the program is no chain of at least two links.
    """
    keeping = Keeping(program, costs, extra_bytes)
    chain = _Chain.of(keeping)
    if len(chain.links) < 2:
        raise SolverError("griewank plans chains only, and this model has no operator through which everything passes")
    schedules = [
        prune(keeping.program, _revolve(keeping, chain, snapshots)) for snapshots in _numbers(len(chain.links))
    ]
    return keeping.whole(keeping.fastest(schedules, budget_bytes))


def _numbers(links: int) -> Iterator[int]:
    """Numbers of snapshots to try: all up to 32, then at growing distances."""
    number = 1
    while number < links:
        yield number
        number += 1 if number < 32 else max(1, number // 8)


@dataclass(frozen=True)
class _Chain:
    """A chain: the tasks (indices) of every link and, for every backward slot, the link whose results it needs."""

    links: tuple[tuple[int, ...], ...]
    slots: tuple[int, ...]

    @staticmethod
    def of(keeping: Keeping) -> _Chain:
        program, forward = keeping.program, keeping.forward
        last_reader = list(range(len(forward.reads)))
        for place, reads in enumerate(forward.reads):
            for u in reads:
                last_reader[u] = place
        links: list[list[int]] = [[]]
        link_of: dict[int, int] = {}
        for place, p in enumerate(forward.schedule.forward):
            links[-1].append(p)
            link_of.update(dict.fromkeys(program.tasks[p].writes, len(links) - 1))
            open_places = [u for u in range(place + 1) if last_reader[u] > place and forward.bytes[u]]
            if open_places in ([], [place]) and place + 1 < len(forward.reads):
                links.append([])
        slots: list[int] = []
        current = max((link_of[v] for ways in program.slots for v in ways[0].reads if v in link_of), default=0)
        links = links[: current + 1]  # later tasks are never reversed
        for slot, k in zip(program.slots, forward.schedule.ways, strict=True):
            needed = [link_of[v] for v in program.forward_reads(slot[k]) if v in link_of]
            current = min(current, max(needed, default=current))
            slots.append(current)
        return _Chain(tuple(map(tuple, links)), tuple(slots))


def _revolve(keeping: Keeping, chain: _Chain, snapshots: int) -> Schedule:
    """Reverse one link after another.

    The results of a sweep are kept while something reads them before the next sweep.
    """
    program, plain = keeping.program, keeping.forward.schedule
    first_slot: dict[int, int] = {}
    for slot, link in enumerate(chain.slots):
        if program.slot_reads[slot]:
            first_slot.setdefault(link, slot)
    again: list[set[int]] = [set(tasks) for tasks in plain.again]

    def sweep(low: int, high: int) -> None:
        """Run links low .. high - 1 again, before the first slot that needs one of them."""
        link = next((link for link in reversed(range(low, high)) if link in first_slot), None)
        if link is not None:
            again[first_slot[link]].update(q for links in chain.links[low : link + 1] for p in links for q in rerun[p])

    def reverse(low: int, high: int, left: int) -> None:
        """Links low .. high - 1, which have just been run from a held input of ``low``."""
        while high - low > 1:
            middle = low + _split(high - low, left) if left else high - 1
            if left:
                reverse(middle, high, left - 1)
            sweep(low, middle)
            high = middle

    rerun = {p: _again(program, p) for links in chain.links for p in links}
    reverse(0, len(chain.links), snapshots)
    return Schedule(plain.forward, tuple(tuple(sorted(tasks)) for tasks in again), plain.ways)


def _again(program: Program, p: int) -> list[int]:
    """The task itself, or the tasks that make its results during the backward."""
    if program.tasks[p].runs == "both" and not set(program.outputs).intersection(program.tasks[p].writes):
        return [p]
    makers = {
        next((q for q in program.producers[v] if q != p and program.tasks[q].runs != "first"), None)
        for v in program.tasks[p].writes
        if v not in program.outputs
    }
    return sorted(q for q in makers if q is not None and program.tasks[q].variant == "aten")


def _split(length: int, snapshots: int) -> int:
    """How far from the last snapshot the next one goes, so that the fewest links are run again.

    With s snapshots and the chain's input, and no link run again more than r times, C(s + 1 + r, r) links can be
    reversed. The links before the next snapshot have one run less to spare, those after it one snapshot less.
    """
    repeats = 1
    while math.comb(snapshots + 1 + repeats, repeats) < length:
        repeats += 1
    after = math.comb(snapshots + repeats, repeats)
    before = math.comb(snapshots + repeats - 1, repeats - 2) if repeats > 1 else 1
    return max(1, min(length - 1, max(length - after, before)))
