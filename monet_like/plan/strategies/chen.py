"""Checkpointing in segments (Chen et al. 2016): keep about sqrt(n) of the forward's values, run the rest again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...program import Cost, Program
from ...schedule import Schedule
from ..heuristic import Searcher
from .store_all import store_all


def chen(program: Program, costs: Mapping[str, Cost], budget_bytes: int, **options: Any) -> Schedule:
    """Segments of about sqrt(n) tasks: what later segments read is kept, the inside of each is made again.

    The budget plays no part. If the program does not allow it, the same as `store_all`.
    """
    plain = store_all(program)
    size = max(1, math.isqrt(len(plain.forward)))
    segment = {v: place // size for place, p in enumerate(plain.forward) for v in program.tasks[p].writes}
    keep: set[int] = set()
    for place, p in enumerate(plain.forward):
        keep.update(v for v in program.forward_reads(program.tasks[p]) if segment[v] != place // size)
    searcher = Searcher(program, costs)
    found = searcher.keeping(keep, budget_bytes)
    planned = None if found is None else searcher.plan(found, budget_bytes)
    return planned[0] if planned is not None else plain
