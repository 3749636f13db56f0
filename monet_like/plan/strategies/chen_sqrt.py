"""Checkpointing in sqrt(n) segments (Chen et al. 2016, section 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...ir.program import Cost, Program
from ...ir.schedule import Schedule
from .checkpointing import Keeping


def chen_sqrt(program: Program, costs: Mapping[str, Cost], budget_bytes: int, *, extra_bytes: int = 0) -> Schedule:
    """Segments of about sqrt(n) operators: what later segments read is kept, the inside of each is run again.

    The budget plays no part.
    """
    keeping = Keeping(program, costs, extra_bytes)
    reads = keeping.forward.reads
    size = max(1, math.isqrt(len(reads)))
    kept = {u for place, us in enumerate(reads) for u in us if u // size != place // size}
    return keeping.whole(keeping.schedule(kept))
