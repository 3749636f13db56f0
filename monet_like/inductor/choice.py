"""On a GPU: which plan of a joint graph, in which order, or which of PyTorch's own partitions is run.

Each candidate is judged by the code that Inductor writes for it. What is made and read within one fused kernel needs no
memory there, while a plan counts it; and Inductor lays out tensors in its own way, so that PyTorch's operators may need
more. So the graph is planned again for what the budget and such code leave of each other, until they agree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import fx

from ..errors import InfeasibleError, warn_caller
from ..ir.units import format_apart
from .draws import check_draws
from .emission import modules_of
from .groups import arranged_runs, runs_of
from .joint import read_joint
from .kernels import Kernels, kernels_of
from .planned_graph import PlannedGraph, with_way
from .portfolio import Partition, Way, called_costs, judged, own_partition, own_partitions
from .prices import device_of
from .trial import NEAR, fastest_timed

#: How often the kernels of a plan are ordered, each time for less memory.
ORDERS = 2
#: How often a graph is planned again, and the share of the budget that is not worth a plan.
AGAIN, NARROW = 3, 0.005


@dataclass(frozen=True)
class Handed:
    """A joint graph as Inductor hands it over.

    Attributes:
        module: the graph, as plans have it.
        untouched: as Inductor gave it.
        kernels: of ``module``.
        inputs, options: as Inductor gives them to a partitioner.
    """

    module: fx.GraphModule
    untouched: fx.GraphModule
    kernels: Kernels
    inputs: Sequence[object]
    options: Mapping[str, Any]


def handed_over(
    gm: fx.GraphModule, inputs: Sequence[object], options: Mapping[str, Any], draws: int | None
) -> Handed:  # fmt: skip
    """What Inductor gives to a partitioner; ``draws``: see `Settings`.

    Raises:
        UsageError: the graph has what a plan cannot express, or draws other random numbers.
    """
    static = options.get("static_lifetime_input_indices") or ()
    untouched = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    if draws is not None:
        check_draws(gm.graph, draws)
    joint = read_joint(gm, options["num_fwd_outputs"], static)
    return Handed(gm, untouched, kernels_of(joint, static), inputs, options)


def partition_of(handed: Handed, found: PlannedGraph, *, measured: bool) -> Partition:
    """The forward and the backward of a way to run a graph."""
    if found.share is not None:
        return own_partition(handed.untouched, handed.inputs, found.share, handed.options)
    schedule, costs, planned = found.schedule, found.costs, found.plan.report.peak_bytes
    if found.fused_within is None:
        forward, backward = runs_of(handed.kernels, schedule, costs, planned)
    else:
        limits = device_of(handed.kernels.joint.device, measured).limits
        launch = int(limits.launch_seconds * limits.bytes_per_second)
        forward, backward = arranged_runs(handed.kernels, schedule, costs, found.fused_within, launch)
    return modules_of(handed.module, handed.kernels, schedule, forward, backward)


def fastest(
    found: PlannedGraph, handed: Handed, planned: Callable[[int], PlannedGraph], calls: int, *, measured: bool
) -> PlannedGraph:
    """The fastest of plans and PyTorch's own partitions that fits; the one that lacks least if none does.

    Args:
        found: the plan for the budget.
        planned: plans for so many bytes more than the budget, or less.
        calls: of the graph in a step.
    """
    device = device_of(handed.kernels.joint.device, measured)
    judge = partial(judged, forward_count=handed.options["num_fwd_outputs"], device=device, measured=measured)

    def written(one: PlannedGraph) -> Way:
        return judge(None, partition_of(handed, one, measured=measured))

    try:
        tried = _plans_tried(found, planned, written, calls)
        for share, partition in own_partitions(handed.untouched, handed.inputs, handed.options):
            best = min(tried, key=lambda graph: _worth(graph, calls))
            if called_costs(partition, device, measured)[1] < NEAR * best.seconds or best.room(calls) < 0:
                tried.append(with_way(found, judge(share, partition)))
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
    return timed([graph for graph in tried if graph.room(calls) >= 0], handed, measured=measured)


def timed(ways: Sequence[PlannedGraph], handed: Handed, *, measured: bool) -> PlannedGraph:
    """The fastest of ways to run a graph, of which those that are priced alike are timed, where anything is."""
    if not measured or handed.kernels.joint.device.type != "cuda":
        return min(ways, key=lambda way: way.seconds)
    parts = partial(partition_of, handed, measured=measured)
    return fastest_timed(ways, parts, handed.untouched.graph, handed.options["num_fwd_outputs"])


def _worth(graph: PlannedGraph, calls: int) -> tuple[int, float]:
    """The less, the better: bytes that it lacks, and seconds."""
    return max(0, -graph.room(calls)), graph.seconds


def _plans_tried(
    found: PlannedGraph, planned: Callable[[int], PlannedGraph], written: Callable[[PlannedGraph], Way], calls: int
) -> list[PlannedGraph]:
    """Plans for the budget, for more and for less, with what Inductor's code for them needs."""
    made = _ordered(found, written, calls)
    tried = [made]
    more, fitting, unfitting = 0, None, None
    for _ in range(AGAIN):
        room = made.room(calls)
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
        made = _ordered(again, written, calls)
        tried.append(made)
    return tried


def _ordered(found: PlannedGraph, written: Callable[[PlannedGraph], Way], calls: int) -> PlannedGraph:
    """The plan with its kernels in the order in which Inductor fuses most and that fits."""
    room = max(0, found.room(calls))
    for _ in range(ORDERS):
        made = replace(found, fused_within=found.peak_bytes + room)
        made = with_way(made, written(made))
        if made.room(calls) >= 0:
            return made
        room += made.room(calls)
    return with_way(found, written(found))
