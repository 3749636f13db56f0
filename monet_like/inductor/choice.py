"""The way to run a joint graph within a budget: on a GPU the fastest of plans and PyTorch's own partitions.

The graph is planned again for what the budget and Inductor's code for a plan leave of each other, until they agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..errors import InfeasibleError, warn_caller
from ..ir.units import format_apart
from .handed import Handed
from .planned_graph import PlannedGraph
from .portfolio import called_costs
from .trial import NEAR

#: How often the kernels of a plan are ordered, each time for less memory.
ORDERS = 2
#: How often a graph is planned again, and the share of the budget that is not worth a plan.
AGAIN, NARROW = 3, 0.005


def fastest(handed: Handed, found: PlannedGraph, planned: Callable[[int], PlannedGraph]) -> PlannedGraph:
    """The fastest of plans and PyTorch's own partitions that fits; the one that lacks least if none does.

    Args:
        found: the plan for the budget.
        planned: plans for so many bytes more than the budget, or less.
    """
    calls = handed.settings.calls
    try:
        tried = _plans_tried(handed, found, planned)
        for share, partition in handed.own_partitions():
            best = min(tried, key=lambda graph: _worth(graph, calls))
            if called_costs(partition, handed.device)[1] < NEAR * best.seconds or best.room(calls) < 0:
                tried.append(handed.written(found, (share, partition)))
    except Exception as error:  # the plan is there, whatever fails in code that no plan needs
        warn_caller(
            "the plan is not compared with torch.compile's own partitions, because Inductor could not write their "
            f"code: {error!r}"
        )
        return found
    best = min(tried, key=lambda graph: _worth(graph, calls))
    if (room := best.room(calls)) < 0:
        needed, budget = format_apart(found.step_bytes - room, found.step_bytes)
        warn_caller(
            f"as Inductor writes it, this graph needs {needed} with every plan that was tried, and has {budget}; give "
            "compile_options a larger memory_budget"
        )
        return best
    return handed.fastest([graph for graph in tried if graph.room(calls) >= 0])


def _worth(graph: PlannedGraph, calls: int) -> tuple[int, float]:
    """The less, the better: bytes that it lacks, and seconds."""
    return max(0, -graph.room(calls)), graph.seconds


def _plans_tried(handed: Handed, found: PlannedGraph, planned: Callable[[int], PlannedGraph]) -> list[PlannedGraph]:
    """Plans for the budget, for more and for less, with what Inductor's code for them needs."""
    made = _ordered(handed, found)
    tried = [made]
    more, fitting, unfitting = 0, None, None
    for _ in range(AGAIN):
        room = made.room(handed.settings.calls)
        if 0 <= room < NARROW * found.step_bytes:
            break
        fitting, unfitting = (more, unfitting) if room >= 0 else (fitting, more)
        more += room
        if fitting is not None and unfitting is not None and not fitting < more < unfitting:
            more = (fitting + unfitting) // 2
        try:
            again = planned(more)
        except InfeasibleError as error:
            more = (error.smallest_bytes or found.step_bytes) - found.step_bytes
            if unfitting is None or more >= unfitting:
                break
            again = planned(more)
        if again.schedule == made.schedule:
            break
        made = _ordered(handed, again)
        tried.append(made)
    return tried


def _ordered(handed: Handed, found: PlannedGraph) -> PlannedGraph:
    """The plan with its kernels in the order in which Inductor fuses most and that fits."""
    calls = handed.settings.calls
    room = max(0, found.room(calls))
    for _ in range(ORDERS):
        made = handed.written(replace(found, fused_within=found.peak_bytes + room))
        if made.room(calls) >= 0:
            return made
        room += made.room(calls)
    return handed.written(found)
