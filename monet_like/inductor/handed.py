"""A joint graph as Inductor hands it over, and the ways to run it: plans of ours, and PyTorch's own partitions.

On a GPU each way is judged by the code that Inductor writes for it. What is made and read within one fused kernel needs
no memory there, while a plan counts it; and Inductor lays out tensors in its own way, so that PyTorch's operators may
need more. Ways that are priced alike are timed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx
from torch._inductor import config as inductor

from ..ir.program import Cost, Program
from ..ir.schedule import Schedule
from ..ir.simulate import Report, simulate
from ..ir.step import Point
from ..plan import store_all
from ..plan.result import Plan
from ..plan.step.menus import menu
from .arguments import inputs_of
from .draws import check_draws
from .emission import modules_of, saved_nodes
from .groups import arranged_runs, runs_of
from .in_place import settled
from .joint import is_unchecked, read_joint
from .kernels import Kernels, kernels_of
from .planned_graph import PlannedGraph, Settings, point_of_call, with_way
from .portfolio import Partition, judged, own_partition, own_partitions
from .prices import Device, device_of, prices
from .trial import fastest_timed


@dataclass(frozen=True)
class Handed:
    """A joint graph as Inductor hands it over.

    Attributes:
        module: the graph, as plans have it.
        untouched: as Inductor gave it.
        kernels: of ``module``.
        inputs, options: as Inductor gives them to a partitioner.
        settings: of its plans.
    """

    module: fx.GraphModule
    untouched: fx.GraphModule
    kernels: Kernels
    inputs: Sequence[object]
    options: Mapping[str, Any]
    settings: Settings

    @property
    def program(self) -> Program:
        """The graph: its tasks and slots are kernels."""
        return self.kernels.program

    @property
    def is_on_gpu(self) -> bool:
        """Whether ways are judged by Inductor's code."""
        return self.kernels.joint.device.type == "cuda"

    @property
    def device(self) -> Device:
        """Where it runs."""
        return device_of(self.kernels.joint.device, self.settings.measured)

    @cached_property
    def costs(self) -> Mapping[str, Cost]:
        """Of its kernels."""
        return prices(self.kernels, self.device)

    @cached_property
    def plain(self) -> Report:
        """With everything kept that the backward reads."""
        return simulate(self.program, store_all(self.program), self.costs)

    @property
    def copied_bytes(self) -> int:
        """What CUDA graphs copy, where Inductor makes some: inputs that are no parameters, and incoming gradients."""
        if not (self.is_on_gpu and inductor.triton.cudagraphs):
            return 0
        values, tangents = self.program.values, self.program.tangents
        return sum(value.bytes for v, value in enumerate(values) if value.kind == "input" or v in tangents)

    def points(self) -> tuple[Point, ...]:
        """Schedules between the one that carries least and the fastest."""
        return menu(self.program, self.costs, **self.settings.search)

    def point(self, schedule: Schedule) -> Point:
        """A schedule as a point of `step_of_calls`."""
        return point_of_call(self.program, self.costs, schedule, self._saved(schedule)[1])

    def _saved(self, schedule: Schedule) -> tuple[list[fx.Node], int]:
        """What the forward of a schedule hands to its backward, and its bytes without parameters and buffers."""
        nodes = saved_nodes(self.kernels, schedule)
        values = (self.program.values[self.kernels.value_of[node]] for node in nodes)
        return nodes, sum(value.bytes for value in values if value.kind != "parameter")

    def plan_of(self, schedule: Schedule, found_by: str) -> Plan:
        """A schedule as a plan."""
        return Plan(schedule, simulate(self.program, schedule, self.costs), "feasible", found_by=found_by)

    def planned(self, found: Plan, budget_bytes: int = 0, step_bytes: int = 0) -> PlannedGraph:
        """The graph with a plan, whose kernels write to memory that ends with them where they can."""
        program, schedule = self.program, settled(self.program, found.schedule)
        nodes, size = self._saved(schedule)
        made = [node for node in nodes if node.op != "placeholder"]
        values = [self.kernels.value_of[node] for node in made if not is_unchecked(node)]
        return PlannedGraph(
            program, self.costs, replace(found, schedule=schedule, report=simulate(program, schedule, self.costs)),
            self.plain, budget_bytes, tuple(node.name for node in made), size,
            tuple(program.values[v].bytes for v in values if v not in program.outputs), step_bytes=step_bytes,
        )  # fmt: skip

    def own_partitions(self) -> Iterator[tuple[float, Partition]]:
        """PyTorch's own, and the ``activation_memory_budget`` of each."""
        return own_partitions(self.untouched, self.inputs, self.options)

    def partition(self, way: PlannedGraph) -> Partition:
        """The forward and the backward of a way to run the graph."""
        if way.share is not None:
            return own_partition(self.untouched, self.inputs, way.share, self.options)
        schedule, costs, planned = way.schedule, way.costs, way.plan.report.peak_bytes
        if way.fused_within is None:
            forward, backward = runs_of(self.kernels, schedule, costs, planned)
        else:
            limits = self.device.limits
            launch = int(limits.launch_seconds * limits.bytes_per_second)
            forward, backward = arranged_runs(self.kernels, schedule, costs, way.fused_within, launch)
        return modules_of(self.module, self.kernels, schedule, forward, backward)

    def written(self, graph: PlannedGraph, own: tuple[float, Partition] | None = None) -> PlannedGraph:
        """The graph with what Inductor makes of its plan, or of one of PyTorch's own partitions."""
        share, partition = own or (None, self.partition(graph))
        return with_way(graph, judged(share, partition, self.options["num_fwd_outputs"], self.device))

    def fastest(self, ways: Sequence[PlannedGraph]) -> PlannedGraph:
        """The fastest of ways to run the graph, of which those that are priced alike are timed, where anything is."""
        if not (self.settings.measured and self.is_on_gpu):
            return min(ways, key=lambda way: way.seconds)
        return fastest_timed(ways, self.partition, self.untouched.graph, self.options["num_fwd_outputs"])


def handed_over(gm: fx.GraphModule, inputs: Sequence[object], options: Mapping[str, Any], settings: Settings) -> Handed:
    """What Inductor gives to a partitioner.

    Raises:
        UsageError: the graph has what a plan cannot express, or draws other random numbers.
    """
    static = inputs_of(gm.graph, options.get("static_lifetime_input_indices") or ())
    untouched = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    if settings.draws is not None:
        check_draws(gm.graph, settings.draws)
    joint = read_joint(gm, options["num_fwd_outputs"], static)
    return Handed(gm, untouched, kernels_of(joint, static), inputs, options, settings)
