"""Menus of blocks that Inductor compiles: points of its graphs in the place of schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..capture.captured import Captured
from ..capture.checks import is_sharded
from ..capture.example_inputs import materialised
from ..compiler.prepared import Prepared
from ..inductor.compiled_call import NotCompiled, menu_for
from ..inductor.planned_graph import PlannedGraph
from ..inductor.planned_graph import Settings as GraphSettings
from ..ir.step import Point
from ..ir.units import Budget
from ..replay.checks.draws import draws_of
from .block import BlockCall, BlockSchedule


def compiled_menu(
    block: BlockSchedule, call: BlockCall, ready: Prepared, held: Sequence[int], schedules: Sequence[Point]
) -> tuple[Point, ...]:
    """The points of a block's graphs in Inductor; none, where it cannot be compiled.

    Args:
        held: values that the rest of the model holds.
        schedules: points of the block's own schedules. A block that turns out not to be compiled follows the one that
            is nearest to the point of its graph.
    """
    # The weights of a block that is sharded are not there while it is planned.
    if call.example is None or is_sharded(block) or block.why_not_compiled(ready.captured):
        return ()
    args, kwargs = materialised(call.example)
    try:
        graphs = menu_for(
            block._model, args, kwargs, GraphSettings(Budget(), quick=True, draws=draws_of(ready.captured))
        )
    except NotCompiled:  # its first call says why
        return ()
    return tuple(_point(graph, ready.captured, held, schedules) for graph in graphs)


def _point(graph: PlannedGraph, captured: Captured, held: Sequence[int], schedules: Sequence[Point]) -> Point:
    needs, program = graph.needs, captured.program
    shared, size = _shared(graph, captured)
    # An incoming gradient that somebody else holds is not freed in the block's backward.
    kept_on = sum(program.values[v].bytes for v in program.tangents if v in held)
    carried, backward = needs.carried_bytes - size, needs.backward_bytes - size + kept_on

    def lacks(point: Point) -> tuple[int, float]:
        over = (
            point.carried_bytes - carried,
            point.forward_peak_bytes - needs.forward_bytes,
            point.backward_peak_bytes - backward,
        )
        return max(0, *over), point.seconds

    nearest = min(schedules, key=lacks)
    return Point(nearest.schedule, graph.seconds, carried, needs.forward_bytes, backward, backward, shared)


def _shared(graph: PlannedGraph, captured: Captured) -> tuple[tuple[int, ...], int]:
    """The inputs of the block that a graph keeps, and their bytes. Of inputs that look alike it keeps all, or they
    count as carried: which they are cannot be told.
    """
    looks = {v: f"{str(captured.metas[v].dtype)[6:]}{list(captured.metas[v].shape)}" for v in captured.inputs}
    there = Counter(looks.values())
    kept = Counter(graph.program.values[v].spec for v in graph.kept_inputs)
    shared = tuple(sorted(v for v, look in looks.items() if kept[look] == there[look]))
    known = {looks[v] for v in shared}
    inputs = [graph.program.values[v] for v in graph.kept_inputs]
    return shared, sum(value.bytes for value in inputs if value.spec in known)
