"""Reuse distances of operators' inputs in plain PyTorch's step, and caches warmed to the state they have there."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ..capture.captured import Captured
from ..ir.program import Program, Task

#: Of what no operator has touched before in the step.
NEVER = 2**62


def reuse_bytes(captured: Captured) -> Mapping[tuple[str, int], tuple[int, ...]]:
    """The reuse distance of every value that a task reads: bytes touched since its last use, its own included.

    That is the reuse distance of Mattson et al. (IBM Systems Journal 9, 1970), by whole values: a cache of so many
    bytes still holds it. Variants are taken to stand where plain PyTorch's step makes what they write. Of tasks with
    the same cost key and as many reads the median counts.
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


#: So many bytes later nothing of a value is left in a CPU's caches: in what a core has of its own, and in its share of
#: what it has with others.
_FORGOTTEN = 64 * 2**20


class CacheState:
    """Puts the caches into the state that a step leaves them in; called before an operator is timed.

    Operators that move more than they compute take up to twice as long on inputs that are not in the cache. What a step
    of MobileNetV2, ResNet-50 or ViT takes is 15 to 25 % more than its operators do if only the caches nearest to the
    core hold other things, and within 9 % of that if those of its inputs that are long ago are in none (plain PyTorch,
    one thread, turns taken).
    """

    def __init__(self, device: torch.device) -> None:
        size = _FORGOTTEN
        if device.type == "cuda":
            size = 2 * int(torch.cuda.get_device_properties(device).L2_cache_size)
        self._others = torch.zeros(size // 8, dtype=torch.int64, device=device)

    def __call__(
        self, recent: Sequence[tuple[torch.Tensor, int]] = (), warm: Callable[[], object] = lambda: None
    ) -> None:
        """Leave the caches with others, then what ``warm`` leaves in them, then ``recent``.

        Args:
            recent: tensors, and the bytes touched since they began to be, their own included.
            warm: runs the operator on other tensors: a step ran its code a moment ago.
        """
        self._others.sum()
        warm()
        sizes = [(tensor.untyped_storage().nbytes(), since) for tensor, since in recent]
        for index, others in touches(sizes, self._others.nbytes):
            storage = recent[index][0].untyped_storage()
            torch.empty(0, dtype=torch.int64, device=storage.device).set_(
                storage, 0, (storage.nbytes() // 8,), (1,)
            ).sum()
            self._others[: others // 8].sum()


def touches(sizes: Sequence[tuple[int, int]], capacity: int) -> list[tuple[int, int]]:
    """In what order to touch things of given (bytes, bytes since), and how many bytes of others after each of them.

    What is as long ago as ``capacity`` is left out. Where they do not fit into the time since one, it is longer ago.
    """
    order, later = list[tuple[int, int]](), 0
    for index, (own, since) in sorted(enumerate(sizes), key=lambda item: item[1][1]):
        if since < capacity:
            order.append((index, max(0, since - own - later)))
            later = max(since, own + later)
    return order[::-1]
