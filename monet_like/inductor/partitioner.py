"""The partitioner that Inductor calls with every joint graph: it plans the graph within what is left of the budget."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._guards import TracingContext
from torch._inductor import config as inductor
from torch._inductor.codecache import BypassFxGraphCache
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from ..errors import InfeasibleError, UsageError
from ..ir.program import Cost, Program
from ..ir.schedule import Schedule
from ..ir.simulate import simulate
from ..ir.step import Point, peak_of
from ..ir.units import format_bytes
from ..plan import plan, store_all
from ..plan.bound.pieces import block_relaxation
from ..plan.local_search.searcher import quick_evaluations
from ..plan.result import Plan
from ..plan.step.menus import menu
from ..plan.step.proof import Chooser
from .choice import Handed, fastest, handed_over, partition_of, timed
from .kept_graphs import find, keep_graph, path_of
from .kernels import Kernels
from .menu import menu_of, saved_bytes, with_plan, within
from .passes import code_digest
from .planned_graph import PlannedGraph, Settings, graph_key, nameless, point_of_call, step_of_calls
from .prices import prices


class PlannedPartitioner(CustomPartitionerFn):
    """Plans the joint graphs of one compiled model.

    Attributes:
        settings, planned: as given: what decides, and schedules that are known in advance, by `graph_key`; where there
            are some, no others are looked for.
        compares: on a GPU, plans are ordered for fusion and compared with PyTorch's own partitions. A file has
            schedules alone, so its plans are not.
        graphs: the plan of every distinct graph so far, in the order in which they were compiled.
    """

    def __init__(self, settings: Settings, planned: Mapping[str, Schedule] | None = None) -> None:
        self.settings, self.planned = settings, dict(planned or {})
        self.compares = not self.planned
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
        handed = handed_over(gm, joint_inputs, kwargs, self.settings.draws)
        found = self._known(handed.kernels)
        if found is None:
            found = self._planned(handed.kernels) if self.planned else self._kept(handed)
            self.graphs.append(found)
        return partition_of(handed, found, measured=self.settings.measured)

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
        alone = self.settings.calls == 1 and self.settings.limits is None
        if alone and self.settings.budget.bytes is not None:
            return None  # what is left of the amount is another
        for place, graph in enumerate(self.graphs):
            if nameless(graph.program) == nameless(kernels.program):
                self.graphs[place] = replace(graph, equal=graph.equal + 1)
                return graph
        return None

    def _kept(self, handed: Handed) -> PlannedGraph:
        """The plan in the cache, or one that is made now and kept."""
        kernels, settings = handed.kernels, self.settings
        device, calls = kernels.joint.device, settings.calls
        compares = self.compares and device.type == "cuda" and inductor.custom_partitioner_fn is self
        path = path_of(kernels.program, device, (settings, compares, self._held_bytes))
        if (kept := find(path, kernels.program)) is not None:
            return kept
        if settings.limits is not None:
            found = timed(within(settings.limits, menu_of(handed, settings)), handed, measured=settings.measured)
            keep_graph(path, found)
            return found
        found = self._planned(kernels)
        if compares:
            planned = partial(self._replanned, found, kernels)
            found = fastest(found, handed, planned, calls, measured=self.settings.measured)
        if not compares or (found.way is not None and found.room(calls) >= 0):  # else a warning says what is wrong
            keep_graph(path, found)
        return found

    @property
    def _held_bytes(self) -> int:
        """What earlier graphs hold; graphs that are called several times are equal blocks, but for the first one."""
        return sum(graph.held_bytes for graph in self.graphs) if self.settings.calls == 1 else 0

    def _planned(self, kernels: Kernels) -> PlannedGraph:
        program = kernels.program
        costs = prices(kernels, measured=self.settings.measured)
        plain = simulate(program, store_all(program), costs)
        before = self.settings.extra_bytes + self._held_bytes
        step, kept = step_of_calls(program, self.settings.calls), _point(kernels, costs, store_all(program))
        copied = copied_bytes(kernels)
        whole = self.settings.budget.of(peak_of(step, [kept])[0] + copied)
        budget = whole - copied - (before if self.settings.budget.bytes is not None else 0)
        try:
            found, for_one = self._from_file(program, costs) or self._plan_calls(kernels, costs, budget)
        except InfeasibleError as error:
            raise self._explained(error, before, copied) from None
        return with_plan(PlannedGraph(program, costs, found, plain, for_one, (), 0, step_bytes=budget), found, kernels)

    def _replanned(self, found: PlannedGraph, kernels: Kernels, more: int) -> PlannedGraph:
        """The graph with a plan for so many bytes more than its budget, or less."""
        return with_plan(found, self._plan_calls(kernels, found.costs, found.step_bytes + more)[0], kernels)

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

    def _explained(self, error: InfeasibleError, before: int, copied: int) -> InfeasibleError:
        """The error, with what is not the plan's: ``before`` and ``copied`` bytes of the budget."""
        graphs = f"what is resident, and what {len(self.graphs)} graph(s) of this model hold that were compiled before"
        others = {graphs: before, "copies of inputs and incoming gradients for CUDA graphs": copied}
        if not any(others.values()) or self.settings.budget.bytes is None:
            return error
        before += copied
        smallest = error.smallest_bytes and error.smallest_bytes + before
        enough = "more" if smallest is None else f"{format_bytes(smallest)} ({smallest} bytes)"
        return InfeasibleError(
            f"{error}. {format_bytes(before)} of the budget are not for this graph: "
            f"{', '.join(what for what, size in others.items() if size)}; give {enough}, or a percentage, such as "
            '"60%", which each graph has of its own peak',
            smallest,
            error.step,
            proven=error.proven,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedPartitioner:
        """Itself: PyTorch copies its configuration, and all copies are to know the same graphs."""
        return self

    def __reduce__(self) -> Any:
        """What is in the key of Inductor's cache: not the graphs."""
        return PlannedPartitioner, (self.settings, self.planned)

    def uuid(self) -> str:
        """Changes with the code: of a graph that is partitioned Inductor's cache has all in its key.

        Raises:
            NotKept: of a joint graph, which has no place in AOTAutograd's cache. It would be taken from there without a
                partitioner, and what it holds is not for later graphs.
        """
        context = TracingContext.try_get()
        if context is None or context.fw_metadata is None:  # set as soon as there is a partition
            raise NotKept("graphs are planned one after the other")
        return code_digest()


class NotKept(BypassAOTAutogradCache, BypassFxGraphCache):
    """Has PyTorch compile a graph without its caches."""


def copied_bytes(kernels: Kernels) -> int:
    """What CUDA graphs copy, where Inductor makes some: inputs that are no parameters, and incoming gradients."""
    if kernels.joint.device.type != "cuda" or not inductor.triton.cudagraphs:
        return 0
    values, tangents = kernels.program.values, kernels.program.tangents
    return sum(value.bytes for v, value in enumerate(values) if value.kind == "input" or v in tangents)


def _point(kernels: Kernels, costs: Mapping[str, Cost], schedule: Schedule) -> Point:
    return point_of_call(kernels.program, costs, schedule, saved_bytes(kernels, schedule))
