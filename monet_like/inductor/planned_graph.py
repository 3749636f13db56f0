"""The plan of a joint graph, and the step that calls the graph."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..ir.defaults import SOLVER
from ..ir.program import Cost, Program
from ..ir.schedule import Schedule
from ..ir.simulate import Report, simulate
from ..ir.step import Moment, Piece, Point, Step, peak_of
from ..ir.units import Budget, format_bytes, format_seconds
from ..plan.result import Plan
from ..plan.step.menus import kept_inputs
from ..runtime.offloaded_calls import those_that_leave
from .portfolio import Way


@dataclass(frozen=True)
class Limits:
    """The bytes that a piece of a larger step may take.

    Attributes:
        carried_bytes: from its forward to its backward, inputs and results among them.
        forward_bytes: in its forward, above what exists when that begins.
        backward_bytes: in its backward, above what would exist when that begins if it carried nothing.
        offloaded_bytes: that may be on the host meanwhile, instead of being carried.
        lone: how inputs look that may be so: they exist only while the piece keeps them.
    """

    carried_bytes: int
    forward_bytes: int
    backward_bytes: int
    offloaded_bytes: int = 0
    lone: tuple[str, ...] = ()


@dataclass(frozen=True)
class Settings:
    """What decides the plans of a partitioner: see `monet_like.inductor.options.compile_options`.

    Attributes:
        limits: of a piece of a larger step, which takes a point of its menu (`monet_like.inductor.menu`); ``budget``
            and ``calls`` are then not asked. None: the graphs are the step.
        draws: how often a graph draws random numbers, in plain PyTorch's way; None: in any way.
    """

    budget: Budget
    extra_bytes: int = 0
    calls: int = 1
    quick: bool = False
    measured: bool = True
    solver: str = SOLVER
    time_limit_seconds: float = 30.0
    gap: float = 0.01
    limits: Limits | None = None
    draws: int | None = None

    @property
    def search(self) -> dict[str, Any]:
        """Options of `monet_like.plan.plan` and `monet_like.plan.step.menus.menu`."""
        return {
            "solver": self.solver, "strategy": "heuristic" if self.quick else "milp",
            "time_limit_seconds": self.time_limit_seconds, "gap": self.gap, "threads": torch.get_num_threads(),
        }  # fmt: skip


@dataclass(frozen=True)
class PlannedGraph:
    """The plan of one joint graph.

    Attributes:
        program: the graph: tasks and slots are kernels, with the names of the nodes whose results they write.
        costs: of its kernels.
        plan: the schedule; its report counts what one call of the graph needs, without other graphs and
            ``extra_bytes``.
        plain: the simulator's report on the graph with everything kept that its backward reads.
        budget_bytes: what one call was planned for.
        saved: names of the nodes that the forward hands to the backward, inputs apart.
        saved_bytes: of what the forward hands to the backward, without parameters and buffers.
        movable: bytes of each value among them that nobody else holds.
        equal: how many graphs like it were compiled: all have this plan.
        step_bytes: what all calls of the graph were planned for.
        fused_within: the bytes within which kernels are ordered for fusion; None: they are in the graph's order.
        way: what Inductor makes of the plan, or of PyTorch's own partition where that is faster; None: was not asked.
    """

    program: Program
    costs: Mapping[str, Cost]
    plan: Plan
    plain: Report
    budget_bytes: int
    saved: tuple[str, ...]
    saved_bytes: int
    movable: tuple[int, ...] = ()
    equal: int = 1
    step_bytes: int = 0
    fused_within: int | None = None
    way: Way | None = None

    @property
    def schedule(self) -> Schedule:
        """The schedule of the plan."""
        return self.plan.schedule

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of one call's forward and backward."""
        if self.way is None:
            return self.plan.report.peak_bytes
        return self.program.resident_bytes + self.way.rehearsed.peak_bytes

    @property
    def seconds(self) -> float:
        """Predicted time of one call's forward and backward."""
        return self.plan.report.seconds if self.way is None else self.way.seconds

    @property
    def share(self) -> float | None:
        """The ``activation_memory_budget`` whose partition is taken instead of the plan's; None: the plan's is."""
        return self.way.share if self.way is not None else None

    def room(self, calls: int) -> int:
        """The bytes of the budget that all calls of the graph leave; negative: that they lack."""
        peak = self.peak_bytes - base_bytes(self.program)
        point = Point(self.schedule, self.seconds, self.saved_bytes, peak, peak, peak)
        return self.step_bytes - peak_of(step_of_calls(self.program, calls), [point])[0]

    @property
    def kept_inputs(self) -> tuple[int, ...]:
        """The inputs that the forward hands to the backward: values of the program."""
        if self.way is None:
            return tuple(sorted(kept_inputs(self.program, self.schedule)))
        values = self.program.values
        return tuple(v for v, value in enumerate(values) if value.kind == "input" and value.name in self.way.inputs)

    def copies(self, most_bytes: int, lone: Collection[str]) -> tuple[int, ...]:
        """Bytes of each value that is on the host between forward and backward, if so much may be there.

        Args:
            lone: see `Limits`.
        """
        left, given = Counter(lone), list[int]()
        for value in (self.program.values[v] for v in self.kept_inputs):
            if left[value.spec]:
                left[value.spec] -= 1
                given.append(value.bytes)
        sizes = [*((True, size) for size in given), *((False, size) for size in self.movable)]
        return tuple(sizes[place][1] for place in those_that_leave(sizes, most_bytes))

    @property
    def forward_seconds(self) -> float:
        """Predicted time of one call's forward, about."""
        steps = self.plan.report.steps[: len(self.schedule.forward)]
        return min(sum(step.seconds for step in steps), self.seconds)

    @property
    def needs(self) -> Limits:
        """The least limits of a piece that runs so."""
        program, resident = self.program, self.program.resident_bytes
        if self.way is not None:
            forward, backward = self.way.rehearsed.forward_bytes, self.way.rehearsed.backward_bytes
        else:
            steps, count = self.plan.report.steps, len(self.schedule.forward)
            forward, backward = (
                max((step.bytes for step in some), default=resident) - resident
                for some in (steps[:count], steps[count:])
            )
        given = sum(program.values[v].bytes for v in self.kept_inputs)
        backward += given - (base_bytes(program) - resident)
        return Limits(self.saved_bytes, forward, max(backward, self.saved_bytes))

    @property
    def held_bytes(self) -> int:
        """What the graph adds to the memory while another graph's backward runs: parameters, and what is saved."""
        return self.saved_bytes + parameter_bytes(self.program)

    def __repr__(self) -> str:
        decided = f"{self.schedule.rerun_count} recomputations"
        if self.share is not None:
            decided = f"PyTorch's own partition for activation_memory_budget={self.share}"
        return (
            f"PlannedGraph({len(self.program.slots)} backward kernels, {decided}: peak "
            f"{format_bytes(self.peak_bytes)}, step {format_seconds(self.seconds)}, saved "
            f"{format_bytes(self.saved_bytes)}; nothing recomputed: "
            f"{format_bytes(self.plain.peak_bytes)}, {format_seconds(self.plain.seconds)})"
        )


def parameter_bytes(program: Program) -> int:
    """Bytes of a graph's parameters and buffers."""
    return sum(value.bytes for value in program.values if value.kind == "parameter")


def with_way(graph: PlannedGraph, way: Way) -> PlannedGraph:
    """The graph with what Inductor makes of its plan or of another partition."""
    inputs = {value.name: value.bytes for value in graph.program.values if value.kind == "input"}
    size = way.rehearsed.saved_bytes + sum(inputs.get(name, 0) for name in way.inputs)
    return replace(graph, way=way, saved=way.saved, saved_bytes=size, movable=way.rehearsed.movable)


def graph_key(program: Program) -> str:
    """The same for graphs whose schedules can be exchanged."""
    return hashlib.sha256(repr(nameless(program)).encode()).hexdigest()


def nameless(program: Program) -> tuple[Any, ...]:
    """All of a program that plans depend on."""
    tasks = [(t.reads, t.writes, t.cost, t.runs, t.overwrites) for t in program.every_task()]
    values = [(value.bytes, value.kind, value.spec) for value in program.values]
    return values, tasks, [len(ways) for ways in program.slots], program.outputs, program.tangents, program.gradients


def step_of_calls(program: Program, calls: int) -> Step:
    """A step that calls a graph several times, each time with parameters of its own; its menu is empty.

    While one call runs backward, each of the others holds its parameters, and what it has saved or its gradients.
    """
    gradients = sum(program.values[v].bytes for v in program.gradients if v not in program.tangents)
    base = base_bytes(program) + (calls - 1) * parameter_bytes(program)
    last = Moment("the backward of the last call", base, ((0, calls),), 0, "backward")
    first = Moment("the backward of the first call", base + (calls - 1) * gradients, ((0, 1),), 0, "backward")
    return Step((Piece("graph", calls),), (last, first))


def point_of_call(program: Program, costs: Mapping[str, Cost], schedule: Schedule, saved_bytes: int) -> Point:
    """A schedule of a graph as a point of `step_of_calls`.

    Args:
        saved_bytes: handed to the backward, inputs and results included.
    """
    report = simulate(program, schedule, costs)
    peak = report.peak_bytes - base_bytes(program)
    return Point(schedule, report.seconds, saved_bytes, peak, peak, peak)


def base_bytes(program: Program) -> int:
    """What is there in the backward of one call whatever its schedule is."""
    return program.resident_bytes + sum(program.values[v].bytes for v in program.tangents)
