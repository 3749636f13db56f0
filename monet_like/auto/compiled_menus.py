"""Menus of blocks that Inductor compiles: points of its graphs in the place of schedules."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from ..capture.captured import Captured
from ..capture.checks import is_sharded
from ..capture.example_inputs import materialised
from ..capture.resident import parts_of
from ..compiler.prepared import Prepared
from ..inductor.compiled_call import NotCompiled, menu_for
from ..inductor.planned_graph import PlannedGraph
from ..inductor.planned_graph import Settings as GraphSettings
from ..ir.program import Program
from ..ir.schedule import Schedule
from ..ir.step import Point
from ..ir.units import Budget
from ..plan.step.menus import with_copies
from ..replay.checks.draws import draws_of
from ..replay.kept_steps import tensor_slots
from ..runtime.offloaded_calls import LEAST_BYTES
from .block import BlockCall, BlockSchedule
from .block_shares import needed_bytes
from .offloaded import lone_looks, looks_of


def compiled_menu(
    block: BlockSchedule, call: BlockCall, ready: Prepared, held: Sequence[int], schedules: Sequence[Point],
    lone: Collection[int], link: float,
) -> tuple[Point, ...]:  # fmt: skip
    """The points of a block's graphs in Inductor, and if there is a link, those that offload; none, where it cannot be
    compiled.

    Args:
        held: values that the rest of the model holds.
        lone, link: see `monet_like.auto.block_menus.menus_of`.
        schedules: points of the block's own schedules. A block that turns out not to be compiled follows the one that
            is nearest to the point of its graph.
    """
    if call.example is None or block.why_not_compiled(ready.captured):
        return ()
    args, kwargs = materialised(call.example)
    settings = GraphSettings(Budget(), quick=True, draws=draws_of(ready.captured))
    try:
        with whole_weights(block._model, ready.captured) if is_sharded(block) else contextlib.nullcontext():
            graphs = menu_for(block._model, args, kwargs, settings)
    except NotCompiled:  # its first call says why
        return ()
    points = [point for graph in graphs for point in _points(graph, ready.captured, held, lone, link)]
    return tuple(_following(point, schedules, ready.captured.program) for point in points)


@contextlib.contextmanager
def whole_weights(module: nn.Module, captured: Captured) -> Iterator[None]:
    """Within it the parameters of a sharded module that its program reads are as in a forward: whole, here of any
    content. Quantised ones stay as they are.
    """
    slots = tensor_slots(module, captured, "_parameters")
    made = {
        id(there[name]): nn.Parameter(captured.metas[value].empty(), requires_grad=there[name].requires_grad)
        for (there, name), (_, value) in zip(slots, captured.parameters, strict=True)
        if [*map(type, parts_of(there[name]))] == [torch.Tensor]
    }
    every = [(owner._parameters, *entry) for owner in module.modules() for entry in owner._parameters.items()]
    changed = [(there, name, tensor) for there, name, tensor in every if id(tensor) in made]
    for there, name, tensor in changed:
        there[name] = made[id(tensor)]
    try:
        yield
    finally:
        for there, name, tensor in changed:
            there[name] = tensor


def _points(
    graph: PlannedGraph, captured: Captured, held: Sequence[int], lone: Collection[int], link: float
) -> Iterator[Point]:
    """A graph with everything on the device; with the inputs that nobody else holds on the host, with what is copied in
    hidden time, and with all.
    """
    point = _point(graph, captured, held)
    yield point
    if not link:
        return
    values, look = captured.program.values, looks_of(captured)
    unlike = lone_looks(captured, lone)
    inputs = [v for v in point.shared if look[v] in unlike and values[v].bytes >= LEAST_BYTES]
    given = sum(values[v].bytes for v in inputs)
    hidden = int(min(point.forward_seconds, point.seconds - point.forward_seconds) * link)
    found: dict[tuple[int, ...], None] = {}
    for most in (given, hidden, sum((given, *graph.movable))):
        moved = inputs if given <= most else []
        copies = graph.copies(most, [look[v] for v in moved])
        if copies and copies not in found:
            found[copies] = None
            yield with_copies(point, captured.program, moved, copies, link)


def _point(graph: PlannedGraph, captured: Captured, held: Sequence[int]) -> Point:
    needs, program = graph.needs, captured.program
    shared, size = _shared(graph, captured)
    # An incoming gradient that somebody else holds is not freed in the block's backward.
    kept_on = sum(program.values[v].bytes for v in program.tangents if v in held)
    carried, backward = needs.carried_bytes - size, needs.backward_bytes - size + kept_on
    return Point(
        Schedule((), (), ()), graph.seconds, carried, needs.forward_bytes, backward, backward, shared,
        graph.forward_seconds,
    )  # fmt: skip


def _following(point: Point, schedules: Sequence[Point], program: Program) -> Point:
    """The point of a graph with the schedule that is nearest to it."""

    def lacks(other: Point) -> tuple[int, float]:
        both = zip(needed_bytes(other, program), needed_bytes(point, program), strict=True)
        return max(0, *(needs - has for needs, has in both)), other.seconds

    nearest = min(schedules, key=lacks)
    return replace(point, schedule=nearest.schedule, offloaded=nearest.offloaded)


def _shared(graph: PlannedGraph, captured: Captured) -> tuple[tuple[int, ...], int]:
    """The inputs of the block that a graph keeps, and their bytes. Of inputs that look alike it keeps all, or they
    count as carried: which they are cannot be told.
    """
    looks = looks_of(captured)
    there = Counter(looks.values())
    kept = Counter(graph.program.values[v].spec for v in graph.kept_inputs)
    shared = tuple(sorted(v for v, look in looks.items() if kept[look] == there[look]))
    known = {looks[v] for v in shared}
    inputs = [graph.program.values[v] for v in graph.kept_inputs]
    return shared, sum(value.bytes for value in inputs if value.spec in known)
