"""The partitioner that Inductor calls with every joint graph: it plans the graph within what is left of the budget."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from .._version import __version__
from ..errors import InfeasibleError, UsageError
from ..ir.defaults import SOLVER
from ..ir.program import Cost, Program
from ..ir.schedule import Schedule
from ..ir.simulate import Report, simulate
from ..ir.step import Moment, Piece, Point, Step, peak_of
from ..ir.units import Budget, format_bytes, format_seconds
from ..plan import plan, store_all
from ..plan.bound.pieces import block_relaxation
from ..plan.local_search.searcher import quick_evaluations
from ..plan.result import Plan
from ..plan.step.menus import menu
from ..plan.step.proof import Chooser
from .emission import modules_of, saved_nodes
from .groups import runs_of
from .in_place import settled
from .joint import read_joint
from .kernels import Kernels, kernels_of
from .prices import prices


@dataclass(frozen=True)
class Settings:
    """What decides the plans of a partitioner: see `monet_like.inductor.options.compile_options`."""

    budget: Budget
    extra_bytes: int = 0
    calls: int = 1
    quick: bool = False
    measured: bool = True
    solver: str = SOLVER
    time_limit_seconds: float = 30.0
    gap: float = 0.01


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
        equal: how many graphs like it were compiled: all have this plan.
    """

    program: Program
    costs: Mapping[str, Cost]
    plan: Plan
    plain: Report
    budget_bytes: int
    saved: tuple[str, ...]
    saved_bytes: int
    equal: int = 1

    @property
    def schedule(self) -> Schedule:
        """The schedule of the plan."""
        return self.plan.schedule

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of one call's forward and backward."""
        return self.plan.report.peak_bytes

    @property
    def held_bytes(self) -> int:
        """What the graph adds to the memory while another graph's backward runs: parameters, and what is saved."""
        return self.saved_bytes + parameter_bytes(self.program)

    def __repr__(self) -> str:
        report = self.plan.report
        return (
            f"PlannedGraph({len(self.program.slots)} backward kernels, {self.schedule.rerun_count} recomputations: "
            f"peak {format_bytes(report.peak_bytes)}, step {format_seconds(report.seconds)}, saved "
            f"{format_bytes(self.saved_bytes)}; nothing recomputed: {format_bytes(self.plain.peak_bytes)}, "
            f"{format_seconds(self.plain.seconds)})"
        )


def parameter_bytes(program: Program) -> int:
    """Bytes of a graph's parameters and buffers."""
    return sum(value.bytes for value in program.values if value.kind == "parameter")


class PlannedPartitioner(CustomPartitionerFn):
    """Plans the joint graphs of one compiled model.

    Attributes:
        settings, planned: as given: what decides, and schedules that are known in advance, by `graph_key`; where there
            are some, no others are looked for.
        graphs: the plan of every distinct graph so far, in the order in which they were compiled.
    """

    def __init__(self, settings: Settings, planned: Mapping[str, Schedule] | None = None) -> None:
        self.settings, self.planned = settings, dict(planned or {})
        self.graphs: list[PlannedGraph] = []

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and backward of a joint graph, as Inductor asks for them.

        Raises:
            UsageError: the graph has what a plan cannot express, or is a region of a graph whose options are not safe.
            InfeasibleError: the graph does not fit into what is left of the budget.
        """
        self._check_region()
        static = kwargs.get("static_lifetime_input_indices") or ()
        joint = read_joint(gm, kwargs["num_fwd_outputs"], static)
        kernels = kernels_of(joint, static)
        found = self._known(kernels) or self._planned(kernels)
        forward, backward = runs_of(kernels, found.schedule, found.costs, found.peak_bytes)
        return modules_of(gm, kernels, found.schedule, forward, backward)

    def _check_region(self) -> None:
        """Refuse a nested region of a graph that may write into buffers of which its regions need the content.

        Seen with PyTorch 2.14.1 and 2.15.0, also without this partitioner: gradients of six equal regions are 1 % off.
        """
        if inductor.custom_partitioner_fn is not self and (inductor.inplace_buffers or inductor.allow_buffer_reuse):
            raise UsageError(
                "PyTorch computes wrong gradients for graphs with nested regions if it may reuse buffers in them; give "
                "torch.compile, which compiles what is around the regions, "
                'options={"inplace_buffers": False, "allow_buffer_reuse": False}'
            )

    def _known(self, kernels: Kernels) -> PlannedGraph | None:
        """The plan of an equal graph that has the same share of the budget, such as that of another block."""
        if self.settings.calls == 1 and self.settings.budget.bytes is not None:
            return None  # what is left of the amount is another
        for place, graph in enumerate(self.graphs):
            if _nameless(graph.program) == _nameless(kernels.program):
                self.graphs[place] = replace(graph, equal=graph.equal + 1)
                return graph
        return None

    @property
    def _held_bytes(self) -> int:
        """What earlier graphs hold; graphs that are called several times stand for the same blocks, the first of which
        differs.
        """
        return sum(graph.held_bytes for graph in self.graphs) if self.settings.calls == 1 else 0

    def _planned(self, kernels: Kernels) -> PlannedGraph:
        program = kernels.program
        costs = prices(kernels, measured=self.settings.measured)
        plain = simulate(program, store_all(program), costs)
        before = self.settings.extra_bytes + self._held_bytes
        step, kept = step_of_calls(program, self.settings.calls), _point(kernels, costs, store_all(program))
        whole = self.settings.budget.of(peak_of(step, [kept])[0])
        budget = whole - (before if self.settings.budget.bytes is not None else 0)
        try:
            found, for_one = self._from_file(program, costs) or self._plan_calls(kernels, costs, budget)
        except InfeasibleError as error:
            raise self._explained(error, budget) from None
        schedule = settled(program, found.schedule)
        found = replace(found, schedule=schedule, report=simulate(program, schedule, costs))
        size, saved = _saved_bytes(kernels, found.schedule), saved_nodes(kernels, found.schedule)
        names = tuple(node.name for node in saved if node.op != "placeholder")
        graph = PlannedGraph(program, costs, found, plain, for_one, names, size)
        self.graphs.append(graph)
        return graph

    def _from_file(self, program: Program, costs: Mapping[str, Cost]) -> tuple[Plan, int] | None:
        """The plan that was made in advance; None: none was."""
        if not self.planned:
            return None
        schedule = self.planned.get(graph_key(program))
        if schedule is None:
            raise UsageError(
                f"the plan is of {len(self.planned)} other graph(s): it fits one model, its inputs' shapes and dtypes, "
                "this PyTorch, and a compiled part that is the model alone; export it again, or give compile_options a "
                "budget"
            )
        return Plan(
            schedule, simulate(program, schedule, costs), "feasible", found_by="file"
        ), self.settings.budget.bytes or 0

    def _plan_calls(self, kernels: Kernels, costs: Mapping[str, Cost], budget: int) -> tuple[Plan, int]:
        """The plan of one call with which all calls of a step fit, and the budget that the call has."""
        calls = self.settings.calls
        if calls == 1:
            return self._plan(kernels.program, costs, budget), budget
        settings, program = self.settings, kernels.program
        points = menu(
            program, costs, solver=settings.solver, strategy="heuristic" if settings.quick else "milp",
            time_limit_seconds=settings.time_limit_seconds, gap=settings.gap, threads=torch.get_num_threads(),
        )  # fmt: skip
        menus = [[_point(kernels, costs, point.schedule) for point in points]]
        found = Chooser(
            step_of_calls(program, calls).with_menus(menus), [None if settings.quick else block_relaxation(program,
            costs)], budget,
            lambda _, schedule: _point(kernels, costs, schedule), settings.solver,
            bound_seconds=0.0 if settings.quick else settings.time_limit_seconds,
        ).choose()  # fmt: skip
        if found.peak_bytes > budget:
            raise InfeasibleError(
                f"{calls} calls of this graph do not fit into {format_bytes(budget)}: with the least that was found "
                f"they need {format_bytes(found.peak_bytes)} ({found.peak_bytes} bytes); give that much",
                found.peak_bytes,
            )
        schedule = found.points[0].schedule
        report = simulate(program, schedule, costs)
        return Plan(schedule, report, "feasible", found_by="menu"), report.peak_bytes

    def _plan(self, program: Program, costs: Mapping[str, Cost], budget: int, **more: Any) -> Plan:
        """The plan of one graph; ``more`` are options of `monet_like.plan.plan`."""
        settings = self.settings
        if settings.quick:
            ends = time.monotonic() + settings.time_limit_seconds
            return plan(
                program, costs, max(1, budget), strategy="heuristic", evaluations=quick_evaluations(),
                enough=lambda fits: fits and time.monotonic() > ends, **more,
            )  # fmt: skip
        return plan(
            program, costs, max(1, budget), solver=settings.solver, time_limit_seconds=settings.time_limit_seconds,
            gap=settings.gap, threads=torch.get_num_threads(), **more,
        )  # fmt: skip

    def _explained(self, error: InfeasibleError, budget: int) -> InfeasibleError:
        """The error, and what other graphs take of the budget."""
        if not self.graphs or self.settings.budget.bytes is None:
            return error
        held = self._held_bytes
        return InfeasibleError(
            f"{error}. {format_bytes(held)} of the budget are held by {len(self.graphs)} graph(s) of this model that "
            "were "
            'compiled before; give more, or a percentage, such as "60%", which each graph has of its own peak',
            error.smallest_bytes,
            error.step,
            proven=error.proven,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedPartitioner:
        """Itself: PyTorch copies its configuration, and all copies are to know the same graphs."""
        return self

    def uuid(self) -> str:
        """Changes with all that the next decision depends on."""
        before = [(graph.budget_bytes, graph.held_bytes) for graph in self.graphs]
        return hashlib.sha256(
            f"{__version__} {torch.__version__} {self.settings} {self.planned} {before}".encode()
        ).hexdigest()


def graph_key(program: Program) -> str:
    """The same for graphs whose schedules can be exchanged."""
    return hashlib.sha256(repr(_nameless(program)).encode()).hexdigest()


def _nameless(program: Program) -> tuple[Any, ...]:
    """All of a program that plans depend on."""
    tasks = [(t.reads, t.writes, t.cost, t.runs, t.overwrites) for t in program.every_task()]
    values = [(value.bytes, value.kind, value.spec) for value in program.values]
    return values, tasks, [len(ways) for ways in program.slots], program.outputs, program.tangents, program.gradients


def _saved_bytes(kernels: Kernels, schedule: Schedule) -> int:
    saved = (kernels.program.values[kernels.value_of[node]] for node in saved_nodes(kernels, schedule))
    return sum(value.bytes for value in saved if value.kind != "parameter")


def step_of_calls(program: Program, calls: int) -> Step:
    """A step that calls a graph several times, each time with parameters of its own; its menu is empty.

    While one call runs backward, each of the others holds its parameters, and what it has saved or its gradients.
    """
    gradients = sum(program.values[v].bytes for v in program.gradients if v not in program.tangents)
    base = _base_bytes(program) + (calls - 1) * parameter_bytes(program)
    last = Moment("the backward of the last call", base, ((0, calls),), 0, "backward")
    first = Moment("the backward of the first call", base + (calls - 1) * gradients, ((0, 1),), 0, "backward")
    return Step((Piece("graph", calls),), (last, first))


def point_of_call(program: Program, costs: Mapping[str, Cost], schedule: Schedule, saved_bytes: int) -> Point:
    """A schedule of a graph as a point of `step_of_calls`.

    Args:
        saved_bytes: handed to the backward, inputs and results included.
    """
    report = simulate(program, schedule, costs)
    peak = report.peak_bytes - _base_bytes(program)
    return Point(schedule, report.seconds, saved_bytes, peak, peak, peak)


def _point(kernels: Kernels, costs: Mapping[str, Cost], schedule: Schedule) -> Point:
    return point_of_call(kernels.program, costs, schedule, _saved_bytes(kernels, schedule))


def _base_bytes(program: Program) -> int:
    """What is there in the backward of one call whatever its schedule is."""
    return program.resident_bytes + sum(program.values[v].bytes for v in program.tangents)
