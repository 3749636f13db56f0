"""PyTorch's ``activation_memory_budget``: keep expensive operators' results by a 0/1 knapsack, run the others again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...ir.program import Cost, Program
from ...ir.schedule import Schedule
from .checkpointing import Keeping, PlainForward

#: Operators that PyTorch's partitioner runs again without being asked: they only move bytes.
CHEAP = frozenset(
    [
        "relu",
        "hardtanh",
        "leaky_relu",
        "elu",
        "silu",
        "gelu",
        "hardswish",
        "hardsigmoid",
        "sigmoid",
        "tanh",
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "pow",
        "exp",
        "clone",
        "cat",
        "view",
        "reshape",
        "permute",
        "transpose",
        "expand",
        "unsqueeze",
        "squeeze",
        "slice",
        "select",
    ]
)
#: Memory budgets, as shares of everything expensive, that are tried.
SHARES = 20


def torch_budget(program: Program, costs: Mapping[str, Cost], budget_bytes: int, *, extra_bytes: int = 0) -> Schedule:
    """Keep results of operators that are not `CHEAP` by a 0/1 knapsack of bytes against seconds, run all others again.

    PyTorch's budget is a share of the activations, not bytes. The largest of 21 shares whose schedule fits is taken, or
    plain PyTorch's schedule if that fits.
    """
    keeping = Keeping(program, costs, extra_bytes)
    if keeping.report(keeping.forward.schedule).peak_bytes <= budget_bytes:
        return keeping.whole(keeping.forward.schedule)
    return keeping.whole(keeping.best(_choices(keeping.program, keeping.forward), budget_bytes))


def _choices(program: Program, forward: PlainForward) -> Iterator[set[int]]:
    tasks = [program.tasks[p] for p in forward.schedule.forward]
    read = {v for slot, k in zip(program.slots, forward.schedule.ways, strict=True) for v in slot[k].reads}
    items = [
        place
        for place, task in enumerate(tasks)
        if forward.bytes[place] and not any(call.op.split(".")[1] in CHEAP for call in task.calls[-1:])
    ]
    cheap_but_needed = {place for place, values in enumerate(forward.values) if read.intersection(values)} - set(items)
    total = sum(forward.bytes[place] for place in items)
    yield {*items, *cheap_but_needed}
    for share in reversed(range(SHARES + 1)):
        yield knapsack(
            [(place, forward.bytes[place], forward.seconds[place]) for place in items], total * share // SHARES
        )


def knapsack(items: list[tuple[int, int, float]], capacity: int) -> set[int]:
    """Names of the items (name, weight, value) of the highest value that weigh at most ``capacity``.

    Exact up to a rounding of weights to a 4,000th of the capacity, upwards.
    """
    cells = 4000
    unit = max(1, -(-capacity // cells))
    best: list[tuple[float, frozenset[int]]] = [(0.0, frozenset())] * (capacity // unit + 1)
    for name, weight, value in items:
        size = -(-weight // unit)
        for room in range(len(best) - 1, size - 1, -1):
            with_it = best[room - size][0] + value
            if with_it > best[room][0]:
                best[room] = with_it, best[room - size][1] | {name}
    return set(best[-1][1])
