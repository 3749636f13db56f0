"""Checkpointing in segments (Chen et al. 2016): keep about sqrt(n) of the forward's values, run the rest again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...program import Cost, Program
from ...schedule import Schedule
from ..heuristic import Policy, Searcher
from .store_all import store_all


def chen(program: Program, costs: Mapping[str, Cost], budget_bytes: int, **options: Any) -> Schedule:
    """Segments of about sqrt(n) tasks: what later segments read is kept, the inside of each is made again.

    The budget plays no part. If the program does not allow it, the same as `store_all`.
    """
    plain = store_all(program)
    size = max(1, math.isqrt(len(plain.forward)))
    segment = {v: place // size for place, p in enumerate(plain.forward) for v in program.tasks[p].writes}
    searcher = Searcher(program, costs)
    keep = {v for v in segment if not searcher.makers_again[v]}
    for place, p in enumerate(plain.forward):
        keep.update(v for v in program.forward_reads(program.tasks[p]) if segment[v] != place // size)
    everything = frozenset(v for v, value in enumerate(program.values) if value.kind == "forward")
    schedule = searcher.derive(Policy(frozenset(keep), everything, plain.ways))
    return schedule if schedule is not None else plain
