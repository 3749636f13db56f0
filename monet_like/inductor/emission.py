"""A schedule of a joint graph as the two graphs that Inductor compiles, with every kernel where the schedule has it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch.utils._pytree as pytree
from torch import fx
from torch._functorch._aot_autograd import descriptors
from torch.fx._lazy_graph_module import _make_graph_module

from ..ir.program import RESIDENT_KINDS
from ..ir.schedule import Schedule, kept_values
from .joint import Kernel, is_elementwise, is_unchecked, name_of, readers, tensors_of
from .kernels import Kernels
from .written import apart_operator, inlined_operator, written_operator

#: In a node's ``meta``: the number of the group of kernels that Inductor may fuse it with.
GROUP = "monet_like_group"


@dataclass(frozen=True)
class Run:
    """One run of a kernel.

    Attributes:
        kernel: None: the effects of the forward.
        group: runs of one group stand next to each other, and Inductor may fuse them.
        apart: what it writes to memory of its own, although a concatenation reads it.
    """

    kernel: Kernel | None
    group: int
    apart: frozenset[fx.Node] = frozenset()


def saved_nodes(kernels: Kernels, schedule: Schedule) -> list[fx.Node]:
    """What the forward hands to the backward: items that are kept, and the inputs that the backward reads."""
    kept = kept_values(kernels.program, schedule)
    for slot, again in enumerate(schedule.again):
        way = kernels.program.slots[slot][schedule.ways[slot]]
        for task in (*(kernels.program.tasks[p] for p in again), way):
            kept.update(v for v in task.reads if kernels.program.values[v].kind in RESIDENT_KINDS)
    return sorted((node for node, v in kernels.value_of.items() if v in kept), key=kernels.order.__getitem__)


def modules_of(
    module: fx.GraphModule, kernels: Kernels, schedule: Schedule, forward: Sequence[Run], backward: Sequence[Run]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward of a schedule, as AOTAutograd expects them of a partitioner.

    The forward takes all inputs, and returns its results and what is saved. The backward takes what is saved and the
    incoming gradients.

    Args:
        module: the joint graph.
        forward, backward: all runs in order.
    """
    joint = kernels.joint
    saved = sorted(saved_nodes(kernels, schedule), key=_place_of)
    inputs = joint.graph.find_nodes(op="placeholder")
    returned = pytree.arg_tree_leaves(*joint.graph.output_node().args)
    descriptions = pytree.arg_tree_leaves(joint.graph.output_node().meta.get("desc", [None] * len(returned)))
    count = len(joint.forward_outputs)
    described = [*descriptions[:count], *(_description(node, place) for place, node in enumerate(saved))]
    first = _Emitter(kernels, [node for node in inputs if node not in joint.backward])
    second = _Emitter(kernels, [*saved, *(node for node in inputs if node in joint.backward)])
    return (
        first.emit(module, forward, [*returned[:count], *saved], described),
        second.emit(module, backward, returned[count:], descriptions[count:], late=True),
    )


def _place_of(node: fx.Node) -> int:
    """AOTAutograd takes tensors whose version is checked, then those whose version is not, then other objects."""
    return 2 if not tensors_of(node.meta.get("val")) else int(is_unchecked(node))


def _description(node: fx.Node, place: int) -> Any:
    kind = "SavedForBackwardsNoVcCheckAOTOutput" if is_unchecked(node) else "SavedForBackwardsAOTOutput"
    return getattr(descriptors, kind)(place)


def _is_added(node: fx.Node) -> bool:
    """Whether Inductor would call ``addmm`` in the place of a product and the sum that reads it."""
    return name_of(node) == "aten::mm" and any(name_of(user) == "aten::add" for user in node.users)


class _Emitter:
    """Writes a graph with these inputs, items or inputs of the joint graph."""

    def __init__(self, kernels: Kernels, inputs: Sequence[fx.Node]) -> None:
        self.kernels, self.inputs = kernels, inputs
        self.graph = fx.Graph()
        self.now: dict[fx.Node, fx.Node] = {}  # of items and inputs: the copy that is valid

    def emit(
        self,
        module: fx.GraphModule,
        runs: Sequence[Run],
        results: Sequence[Any],
        descriptions: Sequence[Any],
        *,
        late: bool = False,
    ) -> fx.GraphModule:
        """The module that runs these kernels and returns these nodes of the joint graph.

        Args:
            descriptions: of the results, for AOTAutograd.
            late: it is the backward.
        """
        for node in self.inputs:
            made = self.graph.placeholder(node.name)
            made.meta = node.meta
            self.now[node] = made
        for run, following in zip_longest(runs, runs[1:]):
            if run.kernel is None:
                for effect in self.kernels.joint.effects:
                    self.now[effect] = self._copied(effect, {}, run.group)
            else:
                self._run(run, run.kernel, following.kernel if following is not None else None)
        local: dict[fx.Node, fx.Node] = {}
        group = runs[-1].group if runs else 0
        copies = [self._copied(node, local, group) if isinstance(node, fx.Node) else node for node in results]
        end = self.graph.output(tuple(copies))
        end.meta["desc"] = list(descriptions)
        traces = [node.meta.get("stack_trace") if isinstance(node, fx.Node) else None for node in copies]
        end.meta["output_stack_traces"] = traces
        for node in self.graph.nodes:
            if late and node.op in ("call_function", "get_attr"):
                node.meta["autograd_backward"] = True
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return _make_graph_module(module, self.graph)

    def _run(self, run: Run, kernel: Kernel, following: Kernel | None) -> None:
        local: dict[fx.Node, fx.Node] = {}
        group = run.group
        if kernel.root is None:
            return
        for node in kernel.inlined:
            local[node] = self._inlined(node, self._copy(node, local, group))
        local[kernel.root] = self._copy(kernel.root, local, group)
        for node in kernel.writes:
            made = self._part(node, local, group)
            moves = following is None or node not in following.reads
            # Else Inductor computes a result anew in each kernel that reads it, also a short reduction or a small
            # window's. Of a product that a later kernel adds to something it would make one call with that, and run it
            # there.
            written = kernel.generated or (moves and _is_added(node))
            if node in run.apart:
                made = self._passed_on(apart_operator(), made)
            self.now[node] = self._passed_on(written_operator(), made) if written else made

    def _part(self, node: fx.Node, local: dict[fx.Node, fx.Node], group: int) -> fx.Node:
        """The copy of a result of the kernel whose root has just been copied."""
        if node not in local:
            self._part(node.all_input_nodes[0], local, group)
            local[node] = self._copy(node, local, group)
        return local[node]

    def _inlined(self, node: fx.Node, made: fx.Node) -> fx.Node:
        """Has Inductor compute a result within the kernel, also if several of its operators read it or it is random."""
        several = is_elementwise(node) and node.all_input_nodes and len(set(readers(node))) > 1
        is_random = name_of(node) == "prims::inductor_random"
        return self._passed_on(inlined_operator(), made) if several or is_random else made

    def _passed_on(self, target: Any, made: fx.Node) -> fx.Node:
        result = self.graph.call_function(target, (made,))
        result.meta = copy.copy(made.meta)
        return result

    def _copied(self, node: fx.Node, local: dict[fx.Node, fx.Node], group: int) -> fx.Node:
        """The copy of a node; what it is made from and has no copy yet is computed first."""
        if node in self.now:
            return self.now[node]
        if node not in local:
            for given in node.all_input_nodes:
                self._copied(given, local, group)
            local[node] = self._inlined(node, self._copy(node, local, group))
        return local[node]

    def _copy(self, node: fx.Node, local: Mapping[fx.Node, fx.Node], group: int) -> fx.Node:
        def there(given: fx.Node) -> fx.Node:
            return local[given] if given in local else self.now[given]

        made = self.graph.node_copy(node, there)
        made._rename(f"{node.name}_of_group_{group}")  # Inductor's cache knows a graph by its code, which has no meta
        made.meta[GROUP] = group
        return made
