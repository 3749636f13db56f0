"""The menu of a joint graph: ways to run it as a piece of a larger step, plans of ours and PyTorch's own partitions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..errors import InfeasibleError
from ..ir.units import format_bytes
from .handed import Handed
from .kept_graphs import find, keep_graphs, path_of
from .planned_graph import Limits, PlannedGraph

#: Plans that are written as Inductor's code: of more, some between the leanest and the fastest are left out.
MOST = 6
#: Beyond all memory: kernels are in the order in which Inductor fuses most.
UNLIMITED = 2**60


def menu_of(handed: Handed) -> tuple[PlannedGraph, ...]:
    """The menu of a graph, from the cache or made now; the leanest first.

    On a GPU the ways are as Inductor writes them, in an order for fusion, beside PyTorch's own partitions.
    """
    path = path_of(handed, ("menu", handed.settings.measured, handed.settings.search))
    if kept := find(path, handed.program):
        return kept
    plans = [handed.planned(handed.plan_of(point.schedule, "menu")) for point in handed.points()]
    found = efficient(_written(handed, plans) if handed.is_on_gpu else plans)
    keep_graphs(path, found)
    return found


def _written(handed: Handed, plans: Sequence[PlannedGraph]) -> Iterable[PlannedGraph]:
    """The ways, as Inductor writes them."""
    for plan in _some(plans):
        for within in (UNLIMITED, plan.peak_bytes):
            yield handed.written(replace(plan, fused_within=within))
    for own in handed.own_partitions():
        yield handed.written(plans[0], own)


def _some(plans: Sequence[PlannedGraph]) -> Sequence[PlannedGraph]:
    """At most `MOST` of the plans, the first and the last among them."""
    if len(plans) <= MOST:
        return plans
    return [plans[place * (len(plans) - 1) // (MOST - 1)] for place in range(MOST)]


def efficient(graphs: Iterable[PlannedGraph]) -> tuple[PlannedGraph, ...]:
    """Those that no other one beats in time and in all memory, by what they carry."""
    found: list[tuple[tuple[float, ...], PlannedGraph]] = []
    for graph in sorted(graphs, key=lambda one: (one.seconds, *_numbers(one.needs))):
        numbers = (graph.seconds, *_numbers(graph.needs))
        if not any(all(a <= b for a, b in zip(known, numbers, strict=True)) for known, _ in found):
            found.append((numbers, graph))
    return tuple(graph for _, graph in sorted(found, key=lambda entry: entry[0][1:]))


def _numbers(limits: Limits) -> tuple[int, int, int]:
    return limits.carried_bytes, limits.forward_bytes, limits.backward_bytes


def within(limits: Limits, graphs: Sequence[PlannedGraph]) -> list[PlannedGraph]:
    """The ways of a menu that are within limits; at least one.

    Raises:
        InfeasibleError: none is.
    """

    def lacks(graph: PlannedGraph) -> int:
        carried, *others = _numbers(graph.needs)
        needs = carried - sum(graph.copies(limits.offloaded_bytes, limits.lone)), *others
        return max(need - has for need, has in zip(needs, _numbers(limits), strict=True))

    fitting = [graph for graph in graphs if lacks(graph) <= 0]
    if not fitting:
        raise InfeasibleError(
            f"as Inductor compiles it, it needs at least {format_bytes(min(map(lacks, graphs)))} more than the plan of "
            "the whole step gives to it"
        )
    return fitting
