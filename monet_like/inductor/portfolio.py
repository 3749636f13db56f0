"""Ways to run a joint graph on a GPU, judged alike by the code that Inductor writes for them: a plan of ours, and
PyTorch's own partitions under several values of ``activation_memory_budget``, as ``torch.compile`` has them.

The fastest that fits is taken. So the price of a planned step is at most that of ``torch.compile`` at the same peak.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ir.program import Cost
from ..profile.roofline import seconds_of as seconds_by_rates
from ..profile.work import Operation
from ..runtime.operators import communicates, waits
from .collectives import writes_of
from .joint import Kernel, draws, is_generated, is_view, viewed
from .prices import Device, measured_cost, price_of, with_strides
from .rehearsal import Rehearsed, rehearsed

#: Values of ``activation_memory_budget`` that are tried, besides the user's own.
SHARES = (1.0, 0.5, 0.2)
#: In a node's ``meta``: the partition is PyTorch's, and Inductor's own settings apply to its graphs.
UNTOUCHED = "monet_like_untouched"

_OVERWRITE = torch.ops.aten.copy_.default

Partition = tuple[fx.GraphModule, fx.GraphModule]


@dataclass(frozen=True)
class Way:
    """A partition of a joint graph and what a step of it needs.

    Attributes:
        share: the ``activation_memory_budget`` that it is PyTorch's partition for; None: it is a plan's.
        seconds: of one call, by the prices of plans.
        rehearsed: memory beyond the graph's inputs, and kernels.
        saved, inputs: names of the nodes that the forward hands to the backward: what it makes, and its own inputs.
    """

    share: float | None
    seconds: float
    rehearsed: Rehearsed
    saved: tuple[str, ...]
    inputs: tuple[str, ...]


def own_partitions(
    module: fx.GraphModule, inputs: Sequence[object], options: Mapping[str, Any]
) -> Iterator[tuple[float, Partition]]:
    """PyTorch's partitions of a joint graph, each distinct one once, from the one that saves most.

    A partition that draws random numbers a second time is left out: its gradients would be of other masks. One that
    saves an input which its forward overwrites is left out, too: its backward would read what was written. A graph with
    collectives has none: they may be in another order there than in a plan of another process.

    Args:
        module: it is not changed.
        inputs, options: as Inductor gives them to a partitioner.
    """
    if any(communicates(node.target) for node in module.graph.nodes):
        return
    known = []
    shares = {torch._functorch.config.activation_memory_budget, *SHARES}
    for share in sorted(shares, reverse=True):
        partition = own_partition(module, inputs, share, options)
        names = [[node.name for node in part.graph.nodes if node.op != "output"] for part in partition]
        drawn = {node.name for node in partition[0].graph.nodes if node.op == "call_function" and draws(node)}
        again = {node.name for node in partition[1].graph.nodes if node.op == "call_function"}
        results: Any = partition[0].graph.output_node().args[0]
        read = {viewed(node) for node in results[options["num_fwd_outputs"] :] if isinstance(node, fx.Node)}
        overwritten = {node.args[0] for node in partition[0].graph.find_nodes(op="call_function", target=_OVERWRITE)}
        if names not in known and drawn.isdisjoint(again) and overwritten.isdisjoint(read):
            known.append(names)
            yield share, partition


def own_partition(
    module: fx.GraphModule, inputs: Sequence[object], share: float, options: Mapping[str, Any]
) -> Partition:
    """PyTorch's partition of a joint graph under an ``activation_memory_budget``."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    copied = fx.GraphModule(module, copy.deepcopy(module.graph))
    with torch._functorch.config.patch(activation_memory_budget=share):
        partition = min_cut_rematerialization_partition(copied, inputs, **options)
    for part in partition:
        for node in part.graph.nodes:
            node.meta[UNTOUCHED] = True
    return partition


def is_called(node: fx.Node) -> bool:
    """Whether Inductor calls PyTorch's operator; a plan's own operators are none of them, and become no calls."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace == "monet_like_inductor":
        return False
    return not is_generated(node) and not is_view(node) and not waits(node.target)


def called_costs(partition: Partition, device: Device) -> tuple[dict[str, Cost], float]:
    """Costs of PyTorch's operators that Inductor calls, by the names of their nodes, and their seconds in all."""
    found: dict[str, Cost] = {}
    seconds = 0.0
    for part in partition:
        for node in filter(is_called, part.graph.nodes):
            kernel = Kernel(node, tuple(node.all_input_nodes), (), writes_of(node))
            found[node.name] = price_of(kernel, node, device)
            seconds += found[node.name].seconds
    return found, seconds


def judged(share: float | None, partition: Partition, forward_count: int, device: Device) -> Way:
    """Have Inductor write a partition's code, and price it.

    Args:
        forward_count: how many results of the forward are the model's.
    """
    costs, seconds = called_costs(partition, device)

    def workspace(call: fx.Node, strides: Sequence[tuple[int, ...]]) -> int:
        if call.name not in costs:
            return 0
        changed = with_strides(call, strides) if device.measured else None
        cost = measured_cost(changed, writes_of(call), device) if changed is not None else None
        return max(known.workspace_bytes for known in (costs[call.name], cost) if known is not None)

    needed = rehearsed(*partition, forward_count, workspace)
    seconds += sum(seconds_by_rates([Operation(touched_bytes=moved)], device.limits) for moved in needed.moved)
    results: Any = partition[0].graph.output_node().args[0]
    saved = [node for node in results[forward_count:] if isinstance(node, fx.Node)]
    made, given = ([n.name for n in saved if (n.op == "placeholder") is wanted] for wanted in (False, True))
    return Way(share, seconds, needed, tuple(made), tuple(given))


class OwnSettings(torch._inductor.custom_graph_pass.CustomGraphPass):
    """Gives graphs of PyTorch's partitions the settings that Inductor has without a plan, for
    ``config.post_grad_custom_pre_pass``.

    The settings of a plan are among the options of the compilation, so they are as before when it ends.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings = dict(settings)

    def __call__(self, graph: fx.Graph) -> None:
        """Set them, if the graph is of such a partition."""
        if any(UNTOUCHED in node.meta for node in graph.nodes):
            for name, value in self.settings.items():
                setattr(torch._inductor.config, name, value)

    def uuid(self) -> str:
        """Changes with the settings."""
        return repr(sorted(self.settings.items()))
