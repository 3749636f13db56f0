"""The menu of a joint graph: ways to run it as a piece of a larger step, plans of ours and PyTorch's own partitions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from ..errors import InfeasibleError
from ..ir.schedule import Schedule
from ..ir.simulate import simulate
from ..ir.units import Budget, format_bytes
from ..plan import store_all
from ..plan.result import Plan
from ..plan.step.menus import menu
from .choice import Handed, handed_over, partition_of
from .emission import saved_nodes
from .in_place import settled
from .joint import is_unchecked
from .kept_graphs import find_menu, keep_menu, path_of
from .kernels import Kernels
from .planned_graph import Limits, PlannedGraph, Settings, with_way
from .portfolio import judged, own_partitions
from .prices import device_of, prices

#: Plans that are written as Inductor's code: of more, some between the leanest and the fastest are left out.
MOST = 6
#: Beyond all memory: kernels are in the order in which Inductor fuses most.
UNLIMITED = 2**60


class MenuReader(CustomPartitionerFn):
    """In the place of a partitioner: finds the menu of the first graph, and ends the compilation.

    Attributes:
        found: the menu; None: there was no graph.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.found: tuple[PlannedGraph, ...] | None = None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        """Find it.

        Raises:
            MenuFound: always.
        """
        self.found = menu_of(handed_over(gm, joint_inputs, kwargs, self.settings.draws), self.settings)
        raise MenuFound

    def __deepcopy__(self, memo: dict[int, Any]) -> MenuReader:
        """Itself: PyTorch copies its configuration."""
        return self

    def uuid(self) -> Any:
        """None: nothing is compiled."""
        return None


class MenuFound(Exception):
    """A menu was asked for, and is there: nothing is to be compiled."""


def menu_of(handed: Handed, settings: Settings) -> tuple[PlannedGraph, ...]:
    """The menu of a graph, from the cache or made now; the leanest first.

    On a GPU the ways are as Inductor writes them, in an order for fusion, beside PyTorch's own partitions.
    """
    kernels, device = handed.kernels, handed.kernels.joint.device
    settings = Settings(
        Budget(), quick=True, measured=settings.measured, time_limit_seconds=settings.time_limit_seconds
    )
    path = path_of(kernels.program, device, ("menu", settings))
    if (kept := find_menu(path, kernels.program)) is not None:
        return kept
    plans = _plans(kernels, settings)
    found = efficient(_written(handed, plans, settings) if device.type == "cuda" else plans)
    keep_menu(path, found)
    return found


def _plans(kernels: Kernels, settings: Settings) -> Sequence[PlannedGraph]:
    program, costs = kernels.program, prices(kernels, measured=settings.measured)
    points = menu(program, costs, strategy="heuristic", time_limit_seconds=settings.time_limit_seconds)
    plain = simulate(program, store_all(program), costs)
    found = []
    for point in points:
        plan = Plan(point.schedule, simulate(program, point.schedule, costs), "feasible", found_by="menu")
        found.append(with_plan(PlannedGraph(program, costs, plan, plain, 0, (), 0), plan, kernels))
    return found


def _written(handed: Handed, plans: Sequence[PlannedGraph], settings: Settings) -> Iterable[PlannedGraph]:
    """The ways, as Inductor writes them."""
    device = device_of(handed.kernels.joint.device, settings.measured)
    count = handed.options["num_fwd_outputs"]
    judge = partial(judged, forward_count=count, device=device, measured=settings.measured)
    for plan in _some(plans):
        for within in (UNLIMITED, plan.peak_bytes):
            ordered = replace(plan, fused_within=within)
            yield with_way(ordered, judge(None, partition_of(handed, ordered, measured=settings.measured)))
    for share, partition in own_partitions(handed.untouched, handed.inputs, handed.options):
        yield with_way(plans[0], judge(share, partition))


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


def with_plan(graph: PlannedGraph, found: Plan, kernels: Kernels) -> PlannedGraph:
    """The graph with this plan, whose kernels write to memory that ends with them where they can."""
    schedule = settled(graph.program, found.schedule)
    found = replace(found, schedule=schedule, report=simulate(graph.program, schedule, graph.costs))
    nodes = saved_nodes(kernels, schedule)
    made = [node for node in nodes if node.op != "placeholder"]
    program, values = graph.program, {node: kernels.value_of[node] for node in made if not is_unchecked(node)}
    movable = tuple(program.values[v].bytes for v in values.values() if v not in program.outputs)
    return replace(
        graph, plan=found, saved=tuple(node.name for node in made), saved_bytes=saved_bytes(kernels, schedule),
        movable=movable,
    )  # fmt: skip


def saved_bytes(kernels: Kernels, schedule: Schedule) -> int:
    """What the forward of a schedule hands to its backward, without parameters and buffers."""
    saved = (kernels.program.values[kernels.value_of[node]] for node in saved_nodes(kernels, schedule))
    return sum(value.bytes for value in saved if value.kind != "parameter")
