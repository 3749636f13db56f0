"""The partitioner that Inductor calls with every joint graph: it plans the graph within what is left of the budget."""

from __future__ import annotations

import copy
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

from ..errors import InfeasibleError, MonetError, UsageError, warn_caller
from ..ir.program import Program
from ..ir.schedule import Schedule
from ..ir.step import peak_of
from ..ir.units import format_bytes
from ..plan import plan, store_all
from ..plan.bound.pieces import block_relaxation
from ..plan.local_search.searcher import quick_evaluations
from ..plan.result import Plan
from ..plan.step.proof import Chooser
from .choice import fastest
from .forms import Part, Parts
from .handed import Handed, handed_over
from .kept_graphs import find, keep_graphs, path_of
from .menu import menu_of, within
from .passes import code_digest
from .planned_graph import PlannedGraph, Settings, graph_key, nameless, step_of_calls
from .portfolio import Partition, own_partitions


class PlannedPartitioner(CustomPartitionerFn):
    """Plans the joint graphs of one compiled model.

    Attributes:
        settings, planned: as given: what decides, and schedules that are known in advance, by `graph_key`; where there
            are some, no others are looked for.
        compares: on a GPU, plans are ordered for fusion and compared with PyTorch's own partitions. For a file, which
            has schedules alone, they are not.
        goes_on: a graph that cannot be planned does not end a training that has begun: one of another form than an
            earlier call's, such as of a smaller last batch.
        graphs: the plan of every distinct graph so far, in the order in which they were compiled.
    """

    def __init__(self, settings: Settings, planned: Mapping[str, Schedule] | None = None) -> None:
        self.settings, self.planned = settings, dict(planned or {})
        self.compares, self.goes_on = True, False
        self.graphs: list[PlannedGraph] = []
        self._parts = Parts()

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and backward of a joint graph, as Inductor asks for them.

        Raises:
            UsageError: the graph has what a plan cannot express, or is a region of a graph whose options are not safe.
            InfeasibleError: the graph does not fit into what is left of the budget.
        """
        self._check_region()
        part = Part.of(joint_inputs)
        if not (self.goes_on and self._parts.has_form_of(part)):
            return self._partition(part, gm, joint_inputs, kwargs)
        untouched = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        try:
            return self._partition(part, gm, joint_inputs, kwargs)
        except MonetError as error:
            return self._anyway(part, untouched, joint_inputs, kwargs, error)

    def _partition(
        self, part: Part, gm: fx.GraphModule, joint_inputs: Sequence[object], options: Mapping[str, Any],
        *, takes_more: bool = False,
    ) -> Partition:  # fmt: skip
        """Plan; ``takes_more``: what does not fit takes the least memory that is known, instead of an error."""
        handed = handed_over(gm, joint_inputs, options, self.settings)
        found = self._known(handed.program)
        if found is None:
            found = (self._planned if self.planned else self._kept)(handed, part, takes_more)
            self.graphs.append(found)
        self._parts.put(part, found)
        return handed.partition(found)

    def _anyway(
        self, part: Part, gm: fx.GraphModule, inputs: Sequence[object], options: Mapping[str, Any], why: MonetError
    ) -> Partition:
        """The partition of a graph that cannot be planned as it should: the leanest plan, or PyTorch's own."""
        how = "run by torch.compile's own partition, whose memory is not planned"
        partition: Partition | None = None
        if isinstance(why, InfeasibleError):
            copied = fx.GraphModule(gm, copy.deepcopy(gm.graph))
            try:
                partition = self._partition(part, copied, inputs, options, takes_more=True)
                how = "run with the least memory that is known, which is more than it may take"
            except MonetError as error:
                why = error
        if partition is None:
            found = dict(own_partitions(gm, inputs, options))
            if not found:  # that has plain PyTorch's gradients
                raise why
            self._parts.put(part, None)
            partition = found.get(torch._functorch.config.activation_memory_budget) or next(iter(found.values()))
        warn_caller(f"a call has another form than earlier ones, and is {how}: {why}")
        return partition

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

    def _known(self, program: Program) -> PlannedGraph | None:
        """The plan of an equal graph that has the same share of the budget, such as that of another block."""
        alone = self.settings.calls == 1 and self.settings.limits is None
        if alone and self.settings.budget.bytes is not None:
            return None  # what is left of the amount is another
        for place, graph in enumerate(self.graphs):
            if nameless(graph.program) == nameless(program):
                self.graphs[place] = replace(graph, equal=graph.equal + 1)
                return graph
        return None

    def _kept(self, handed: Handed, part: Part, takes_more: bool) -> PlannedGraph:
        """The plan in the cache, or one that is made now and kept."""
        settings = self.settings
        compares = self.compares and handed.is_on_gpu and inductor.custom_partitioner_fn is self
        path = path_of(handed, (settings, compares, self._held_bytes(part), self._least_bytes(part)))
        if kept := find(path, handed.program):
            return kept[0]
        if settings.limits is not None:
            found = handed.fastest(within(settings.limits, menu_of(handed)))
        else:
            found = self._planned(handed, part, takes_more)
            if compares:
                found = fastest(handed, found, partial(self._replanned, handed, found))
                if found.way is None or found.room(settings.calls) < 0:
                    return found  # a warning says what is wrong, in the next process too
            if takes_more:
                return found
        keep_graphs(path, [found])
        return found

    def _held_bytes(self, part: Part) -> int:
        """What earlier graphs hold; graphs that are called several times are equal blocks, but for the first one."""
        return self._parts.held_bytes(part) if self.settings.calls == 1 else 0

    def _least_bytes(self, part: Part) -> int:
        """Where the budget is a percentage, what a graph has in any case: as much as another form of it."""
        return self._parts.step_bytes(part) if self.settings.budget.bytes is None else 0

    def _planned(self, handed: Handed, part: Part, takes_more: bool) -> PlannedGraph:
        settings, program = self.settings, handed.program
        before, copied = settings.extra_bytes + self._held_bytes(part), handed.copied_bytes
        plain = handed.point(store_all(program))
        whole = settings.budget.of(peak_of(step_of_calls(program, settings.calls), [plain])[0] + copied)
        budget = whole - copied - (before if settings.budget.bytes is not None else 0)
        budget = max(budget, self._least_bytes(part))
        try:
            found, for_one = self._from_file(handed) or self._plan_calls(handed, budget)
        except InfeasibleError as error:
            if not takes_more or error.smallest_bytes is None:
                raise self._explained(error, before, copied) from None
            budget = error.smallest_bytes
            found, for_one = self._plan_calls(handed, budget)
        return handed.planned(found, for_one, budget)

    def _replanned(self, handed: Handed, found: PlannedGraph, more: int) -> PlannedGraph:
        """The graph with a plan for so many bytes more than its budget, or less."""
        again, _ = self._plan_calls(handed, found.step_bytes + more)
        return handed.planned(again, found.budget_bytes, found.step_bytes)

    def _from_file(self, handed: Handed) -> tuple[Plan, int] | None:
        """The plan that was made in advance; None: none was."""
        if not self.planned:
            return None
        schedule = self.planned.get(graph_key(handed.program))
        if schedule is None:
            raise UsageError(
                f"the plan is of {len(self.planned)} other graph(s): it fits one model, its inputs' shapes and dtypes, "
                "this PyTorch, and a compiled part that is the model alone; export it again, or give compile_options a "
                "budget"
            )
        return handed.plan_of(schedule, "file"), self.settings.budget.bytes or 0

    def _plan_calls(self, handed: Handed, budget: int) -> tuple[Plan, int]:
        """The plan of one call with which all calls of a step fit, and the budget that the call has."""
        settings, program, calls = self.settings, handed.program, self.settings.calls
        if calls == 1:
            return self._plan(handed, budget), budget
        menus = [[handed.point(point.schedule) for point in handed.points()]]
        found = Chooser(
            step_of_calls(program, calls).with_menus(menus),
            [None if settings.quick else block_relaxation(program, handed.costs)], budget,
            lambda _, schedule: handed.point(schedule), settings.solver,
            bound_seconds=0.0 if settings.quick else settings.time_limit_seconds,
        ).choose()  # fmt: skip
        if found.peak_bytes > budget:
            raise InfeasibleError(
                f"{calls} calls of this graph do not fit into {format_bytes(budget)}: with the least that was found "
                f"they need {format_bytes(found.peak_bytes)} ({found.peak_bytes} bytes); give that much",
                found.peak_bytes,
            )
        best = handed.plan_of(found.points[0].schedule, "menu")
        return best, best.report.peak_bytes

    def _plan(self, handed: Handed, budget: int, **more: Any) -> Plan:
        """The plan of one call; ``more`` are options of `monet_like.plan.plan`."""
        program, costs, most = handed.program, handed.costs, max(1, budget)
        if not self.settings.quick:
            return plan(program, costs, most, **self.settings.search, **more)
        ends = time.monotonic() + self.settings.time_limit_seconds
        enough = lambda fits: fits and time.monotonic() > ends  # noqa: E731
        return plan(
            program, costs, most, strategy="heuristic", evaluations=quick_evaluations(), enough=enough, **more
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


class MenuFound(Exception):
    """A menu was asked for, and is there: nothing is to be compiled."""


class MenuReader(PlannedPartitioner):
    """In the place of a partitioner: finds the menu of the first graph, and ends the compilation.

    Attributes:
        found: the menu; None: there was no graph.
    """

    found: tuple[PlannedGraph, ...] | None = None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        """Find it.

        Raises:
            MenuFound: always.
        """
        self.found = menu_of(handed_over(gm, joint_inputs, kwargs, self.settings))
        raise MenuFound
