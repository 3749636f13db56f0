"""Checkpointing in segments of equal bytes (Chen et al. 2016, algorithm 3), searched over their size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...ir.program import Cost, Program
from ...ir.schedule import Schedule
from .checkpointing import Keeping, PlainForward

#: Sizes of segments that are tried.
SIZES = 40


def chen_greedy(program: Program, costs: Mapping[str, Cost], budget_bytes: int, *, extra_bytes: int = 0) -> Schedule:
    """Start a new segment whenever the results since the last one reach a size; the fastest size that fits.

    If none fits, the one with the lowest peak.
    """
    keeping = Keeping(program, costs, extra_bytes)
    return keeping.whole(keeping.best(_choices(keeping.forward), budget_bytes))


def _choices(forward: PlainForward) -> Iterator[set[int]]:
    total, seen = sum(forward.bytes), set[frozenset[int]]()
    for number in range(1, SIZES + 1):
        segment, since, segments = 0, 0, []
        for size in forward.bytes:
            segments.append(segment)
            since += size
            if since * SIZES > total * number:
                segment, since = segment + 1, 0
        keep = {u for place, us in enumerate(forward.reads) for u in us if segments[u] != segments[place]}
        if frozenset(keep) not in seen:
            seen.add(frozenset(keep))
            yield keep
