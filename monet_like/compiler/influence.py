"""The order in which operators are measured: first those whose costs decide between plans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ..capture.captured import Captured
from ..ir.program import REFUSED, Cost

#: What is measured is divided into so many parts of about equal influence; each is measured completely before the next.
PARTS = 3
#: Fewer operators on average make no parts: runs of one would follow each other
#: (`monet_like.profile.profiler.measure`).
LEAST_PART = 20


def influences(captured: Captured, estimated: Mapping[str, Cost]) -> dict[str, float]:
    """Estimated seconds per step whose true value a plan depends on, by cost key.

    A forward task may be run again or replaced, and a backward slot with several ways has a choice. The only way of a
    slot runs once in every plan: its cost shifts all plans alike and has no influence.
    """
    found: dict[str, float] = defaultdict(float)
    program = captured.program
    for task in (*program.tasks, *(way for slot in program.slots if len(slot) > 1 for way in slot)):
        if task.cost:
            found[task.cost] += _seconds(estimated[task.cost])
    return found


def by_influence(keys: Iterable[str], captured: Captured, estimated: Mapping[str, Cost]) -> list[str]:
    """Cost keys, the most influential first, and of those without influence the longest first."""
    found = influences(captured, estimated)
    return sorted(keys, key=lambda key: (-found[key], -_seconds(estimated[key]), key))


def in_parts(ordered: Sequence[str], captured: Captured, estimated: Mapping[str, Cost]) -> list[list[str]]:
    """Ordered keys in `PARTS` parts of about equal influence; the last one has those without any, too."""
    if len(ordered) < PARTS * LEAST_PART:
        return [list(ordered)] if ordered else []
    found = influences(captured, estimated)
    total, before = sum(found[key] for key in ordered), 0.0
    parts: list[list[str]] = [[] for _ in range(PARTS)]
    for key in ordered:
        parts[min(PARTS - 1, int(PARTS * before / total)) if total else 0].append(key)
        before += found[key]
    return [part for part in parts if part]


def _seconds(cost: Cost) -> float:
    """Of what cannot be estimated, 0: it is measured last."""
    return 0.0 if cost == REFUSED else cost.seconds
