"""Checkpointing in segments (Chen et al. 2016): keep what later segments read, run the inside of a segment again.

`chen_sqrt` cuts the forward into about sqrt(n) segments of equally many operators (section 3 of the paper),
`chen_greedy` into segments of equal bytes and searches over their size (algorithm 3).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ...ir.program import Cost, Program
from ...ir.schedule import Schedule
from .checkpointing import Keeping, PlainForward

#: Segment sizes that `chen_greedy` tries.
SIZES = 40


def chen_sqrt(program: Program, costs: Mapping[str, Cost], budget_bytes: int, *, extra_bytes: int = 0) -> Schedule:
    """Segments of about sqrt(n) operators; the budget plays no part."""
    keeping = Keeping(program, costs, extra_bytes)
    reads = keeping.forward.reads
    size = max(1, math.isqrt(len(reads)))
    kept = {u for place, us in enumerate(reads) for u in us if u // size != place // size}
    return keeping.whole(keeping.schedule(kept))


def chen_greedy(program: Program, costs: Mapping[str, Cost], budget_bytes: int, *, extra_bytes: int = 0) -> Schedule:
    """Start a new segment whenever the results since the last one reach a size; the fastest size that fits.

    If none fits, the one with the lowest peak.
    """
    keeping = Keeping(program, costs, extra_bytes)
    return keeping.whole(keeping.best(_segmentations(keeping.forward), budget_bytes))


def _segmentations(forward: PlainForward) -> Iterator[set[int]]:
    """The operators whose results are kept, for every segment size; each set once."""
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
