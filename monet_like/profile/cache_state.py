"""How long ago, in bytes, plain PyTorch's step has touched what an operator reads: what of it caches still hold."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping

from ..capture.lowering import Captured
from ..ir.program import Program, Task

#: Of what no operator has touched before in the step.
NEVER = 2**62


def reuse_bytes(captured: Captured) -> Mapping[tuple[str, int], tuple[int, ...]]:
    """For every value that a task reads: bytes touched since it was, its own size included.

    That is the reuse distance of Mattson et al. (IBM Systems Journal 9, 1970), by whole values: a cache of so many bytes
    still holds it. Variants are taken to stand where plain PyTorch's step makes what they write. Of tasks with the same
    cost key and as many reads the median counts.
    """
    plain, values = captured.plain, captured.program.values
    clock, begins, touched = 0, dict[int, int](), defaultdict[int, list[int]](list)
    for task in _in_order(plain):
        for value in task.writes:
            begins.setdefault(value, clock)
        clock += sum(values[v].bytes for v in {*task.reads, *task.writes} - {task.overwrites})
        for value in {*task.reads, *task.writes}:
            touched[value].append(clock)
    found: dict[tuple[str, int], list[tuple[int, ...]]] = defaultdict(list)
    for task in captured.every_task():
        if task.cost:
            now = _begin(task, begins)
            since = tuple(_since(touched[v], now, values[v].bytes) for v in task.reads)
            found[task.cost, len(task.reads)].append(since)
    return {key: tuple(int(statistics.median(d)) for d in zip(*known, strict=True)) for key, known in found.items()}


def _in_order(plain: Program) -> Iterator[Task]:
    yield from (task for task in plain.tasks if task.runs != "again")
    yield from (slot[0] for slot in plain.slots)


def _begin(task: Task, begins: Mapping[int, int]) -> int:
    """When plain PyTorch begins what a task does: with what it writes, or, where that is a value of its own, reads."""
    return max(
        (begins[v] for v in task.writes if v in begins), default=max((begins.get(v, 0) for v in task.reads), default=0)
    )


def _since(touched: list[int], now: int, count: int) -> int:
    before = bisect_right(touched, now)
    return now - touched[before - 1] + count if before else NEVER
