"""Which kernels Inductor may fuse, and in which order they run: its scheduler fuses within groups, never across them.

Neighbouring generated kernels of a schedule form a group as long as everything that they write can exist at once within
the schedule's peak. The number of its group stands in the ``meta`` of every node; `grouped` has Inductor's scheduler
keep it, and `ungrouped` its C++ backend, which otherwise writes all kernels between two products as one function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, cast

from torch import fx

from ..ir.program import RESIDENT_KINDS, Cost, Program, Task
from ..ir.schedule import Schedule, kept_values
from ..ir.simulate import running
from .emission import GROUP, Run
from .joint import Kernel, name_of
from .kernels import Kernels
from .order import Chain, Item, arranged

#: How groups of nodes are called in Inductor's scheduler.
_GROUP_NAME = "monet_like_group_of_"


def runs_of(
    kernels: Kernels, schedule: Schedule, costs: Mapping[str, Cost], limit_bytes: int
) -> tuple[list[Run], list[Run]]:
    """The runs of the forward and of the backward, in groups.

    Args:
        limit_bytes: what a group may raise the memory to; resident memory beyond the program's is not counted.
    """
    program, values = kernels.program, kernels.program.values
    ordered = _ordered(kernels, schedule)
    runs: list[Run] = []
    levels: list[int] = []  # the most memory of each run, with all that its group writes
    group, begun, written, first = 0, 0, 0, 0
    for place, (kernel, moment) in enumerate(zip(ordered, running(program, schedule, costs), strict=True)):
        task = moment.task
        fresh = sum(values[v].bytes for v in task.writes)
        taken = values[task.overwrites].bytes if task.overwrites is not None else 0
        before = moment.step.bytes + taken - fresh - (costs[task.cost].workspace_bytes if task.cost else 0)
        previous = runs[-1].kernel if runs else None
        fusible = kernel is not None and kernel.generated and previous is not None and previous.generated
        if not fusible or place == len(schedule.forward) or begun + written + fresh > limit_bytes:
            group, begun, written, first = group + 1, before, 0, place
        written += fresh
        runs.append(Run(kernel, group))
        levels.append(moment.step.bytes)
        levels[first:] = (max(level, begun + written) for level in levels[first:])
    ends = [(0, len(schedule.forward)), (len(schedule.forward), len(runs))]
    handed_over = {*program.outputs, *program.gradients, *kept_values(program, schedule)}
    kept = {node for node, v in kernels.value_of.items() if v in handed_over}
    forward, backward = (_with_apart(runs[a:b], levels[a:b], kept, kernels, limit_bytes) for a, b in ends)
    return forward, backward


def _ordered(kernels: Kernels, schedule: Schedule) -> list[Kernel | None]:
    """The kernel of each run of a schedule, in order; None for effects."""
    ordered = [kernels.tasks[p] for p in schedule.forward]
    for slot, again in enumerate(schedule.again):
        ordered += [kernels.tasks[p] for p in again]
        ordered.append(kernels.slots[slot][schedule.ways[slot]])
    return ordered


def arranged_runs(
    kernels: Kernels, schedule: Schedule, costs: Mapping[str, Cost], limit_bytes: int, launch_bytes: int
) -> tuple[list[Run], list[Run]]:
    """The runs of the forward and of the backward in the order in which Inductor can fuse most (`order`).

    What is made and read within a group is taken to need no memory. Whether that is so only Inductor knows, so the
    peak of such runs is to be rehearsed.

    Args:
        limit_bytes: see `runs_of`.
        launch_bytes: what the device moves in the time of a launch.
    """
    program = kernels.program
    ordered = _ordered(kernels, schedule)
    tasks = [moment.task for moment in running(program, schedule, costs)]
    count, handed_over = len(schedule.forward), {*program.outputs, *program.gradients}
    saved = kept_values(program, schedule)
    held = {node for node, v in kernels.value_of.items() if v in handed_over | saved}
    found, first = [], 0
    for part, start, kept in (
        (slice(0, count), set[int](), saved | set(program.outputs)),
        (slice(count, None), saved | {*program.tangents, *program.outputs}, handed_over),
    ):
        chain = _chain(program, tasks[part], ordered[part], costs, start, kept, launch_bytes)
        made = arranged(chain, limit_bytes - program.resident_bytes)
        levels, groups = made.followed(max(0, limit_bytes - program.resident_bytes))
        order = made.order()
        runs = [Run(ordered[part][k], first + groups[k]) for k in order]
        first += len(order)
        ahead = [levels[k] + program.resident_bytes for k in order]
        found.append(_with_apart(runs, ahead, held, kernels, limit_bytes))
    return found[0], found[1]


def _chain(
    program: Program,
    tasks: Sequence[Task],
    ordered: Sequence[Kernel | None],
    costs: Mapping[str, Cost],
    start: Collection[int],
    kept: Collection[int],
    launch_bytes: int,
) -> Chain:
    """The runs of one graph as a chain: a value that is made again is another tensor.

    Args:
        start, kept: values that exist before and after.
    """
    now = {v: v for v in range(len(program.values))}
    value_of = dict(now)
    readers: dict[int, list[int]] = {}
    items = []
    for k, (task, kernel) in enumerate(zip(tasks, ordered, strict=True)):
        reads = tuple(now[v] for v in task.reads)
        after: list[int] = []
        for v in task.writes:
            after += readers.get(now[v], [])
            if v in start or any(v in other.writes for other in tasks[:k]):
                now[v] = len(value_of)
                value_of[now[v]] = v
        if kernel is None:  # effects: they write into inputs that others read
            after += range(k)
        for tensor in reads:
            readers.setdefault(tensor, []).append(k)
        moves = kernel is not None and kernel.generated
        beside = costs[task.cost].workspace_bytes if task.cost else 0
        items.append(Item(reads, tuple(now[v] for v in task.writes), moves, beside, tuple(after)))
    sizes = {tensor: program.values[v].bytes for tensor, v in value_of.items()}
    counted = {t: 0 if program.values[v].kind in RESIDENT_KINDS else sizes[t] for t, v in value_of.items()}
    ended = frozenset(now[v] for v in kept)
    return Chain(tuple(items), counted, sizes, frozenset(start), ended, launch_bytes)


def _with_apart(
    runs: Sequence[Run], levels: Sequence[int], kept: Collection[fx.Node], kernels: Kernels, limit_bytes: int
) -> list[Run]:
    """The runs of one graph, which write to a concatenation's memory only where that needs no more than the limit.

    Inductor has a result that a concatenation reads written to its place there. Then all of the concatenation is there
    from the first such result on, and until nobody reads any of them; the plan has it from its own run on.

    Args:
        levels: the most memory of each run.
        kept: what others read when the graph has ended.
    """
    levels = list(levels)
    apart: list[set[fx.Node]] = [set() for _ in runs]
    # Of every concatenation: what it alone reads, and the runs that write it.
    in_place: dict[int, list[tuple[int, fx.Node]]] = {}
    parts = {node for run in runs if run.kernel is not None and _concatenates(run) for node in run.kernel.reads}
    for place, run in enumerate(runs):
        for node in parts.intersection(run.kernel.writes) if run.kernel is not None else ():
            reading = _reading(runs, place, node)
            if any(_concatenates(runs[k]) for k in reading):
                if len(reading) == 1 and node not in kept:
                    in_place.setdefault(reading[0], []).append((place, node))
                else:
                    apart[place].add(node)
    for end, found in sorted(in_place.items()):
        (joined,) = cast(Kernel, runs[end].kernel).writes
        size, is_there = kernels.joint.bytes_of(joined), False
        for place, node in found:
            if is_there:
                continue
            if max(levels[place:end]) + size <= limit_bytes:
                levels[place:end] = (level + size for level in levels[place:end])
                is_there = True
            else:
                apart[place].add(node)
    return [replace(run, apart=frozenset(nodes)) for run, nodes in zip(runs, apart, strict=True)]


def _reading(runs: Sequence[Run], place: int, node: fx.Node) -> list[int]:
    """The runs that read what the one at a place has written to a node, until it is written again."""
    found = []
    for k, run in enumerate(runs[place + 1 :], place + 1):
        if run.kernel is not None and node in run.kernel.reads:
            found.append(k)
        if run.kernel is not None and node in run.kernel.writes:
            break
    return found


def _concatenates(run: Run) -> bool:
    return run.kernel is not None and run.kernel.root is not None and name_of(run.kernel.root) == "aten::cat"


def grouped(nodes: list[Any]) -> list[Any]:
    """Nodes of Inductor's scheduler in groups, for ``config._pre_fusion_custom_pass``; other graphs' as given."""
    from torch._inductor.scheduler import ExternKernelSchedulerNode, GroupedSchedulerNode, NopKernelSchedulerNode
    from torch._inductor.utils import cache_on_self

    class Group(GroupedSchedulerNode):
        """With a name of its own: unpacking removes the name, which in a group of one would be its member's."""

        @cache_on_self
        def get_name(self) -> str:
            return f"{_GROUP_NAME}{self.snodes[0].get_name()}"

    number = _numbers(nodes)
    if number is None:
        return nodes
    nodes = sorted(nodes, key=number.__getitem__)
    for place, node in enumerate(nodes):
        node.min_order = node.max_order = place
    made: list[Any] = []
    for (_, is_extern), found in groupby(nodes, key=lambda n: (number[n], isinstance(n, ExternKernelSchedulerNode))):
        members = list(found)
        # A concatenation is a node without a kernel behind those that write its parts: it belongs to their group.
        if is_extern or all(isinstance(n, NopKernelSchedulerNode) for n in members):
            made += members
        else:
            made.append(Group.create(members))
    return made


def ungrouped(nodes: list[Any]) -> list[Any]:
    """The members of groups, fused, for ``config._post_fusion_custom_pass``; each group is written before the next."""
    from torch._inductor.scheduler import NopKernelSchedulerNode

    made: list[Any] = []
    ends: list[Any] = []
    for node in nodes:
        if node.get_name().startswith(_GROUP_NAME):
            members = node.unpack()
            made += members
            ends.append([member for member in members if not isinstance(member, NopKernelSchedulerNode)][-1])
        else:
            made.append(node)
    if ends:
        _write_after(ends)
    return made


def _write_after(ends: Sequence[Any]) -> None:
    """Have the C++ backend write what it has collected when it comes to one of these nodes.

    It puts all kernels between two products into one C++ function. Their buffers are allocated before it is called and
    freed after it, whatever fusion has decided. Triton's backend writes every kernel by itself.
    """
    from torch._inductor.codegen.cpp import CppScheduling

    scheduler, names = ends[0].scheduler, {node.get_name() for node in ends}
    for device in {node.get_device() for node in ends}:
        backend = scheduler.get_backend(device)
        if isinstance(backend, CppScheduling):
            ends_group = partial(_is_full_or_at, backend.ready_to_flush, scheduler, names)
            backend.ready_to_flush = ends_group  # type: ignore[method-assign]


def _is_full_or_at(full: Callable[[], bool], scheduler: Any, names: Collection[str]) -> bool:
    return full() or scheduler.current_node.get_name() in names


def _numbers(nodes: Iterable[Any]) -> dict[Any, int] | None:
    """The group of every node; None: the nodes are not from a plan."""
    found: dict[Any, int] = {}
    maker = {name: node for node in nodes for name in node.get_buffer_names()}
    known = False
    for node in nodes:
        origins = getattr(node.node, "origins", ()) if getattr(node, "node", None) is not None else ()
        own = [origin.meta[GROUP] for origin in origins if GROUP in origin.meta]
        known = known or bool(own)
        before = [found[maker[d.name]] for d in node.unmet_dependencies if maker.get(d.name) in found]
        found[node] = max([*own, *before, 0])
    return found if known else None
