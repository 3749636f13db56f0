"""Times ways to run a joint graph on the device: prices leave open which of those is the fastest that are priced alike.

A way is compiled as it will be and run with values that are made up, before the model's first step. So a graph is
timed only if no value can make one of its kernels fail: kernels end a process on a GPU if an index is out of range.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ..ir.units import format_seconds
from ..profile.measure import seconds_of
from ..runtime.operators import communicates
from ..runtime.out_of_memory import silent
from .joint import is_generated, is_view, name_of, viewed
from .planned_graph import PlannedGraph
from .portfolio import Partition
from .prices import MadeUp
from .rehearsal import settings_kept, strided

_log = logging.getLogger("monet_like")

#: At most so many ways are timed, and none that is priced at more than so many times the one with the lowest price.
MOST_TIMED, NEAR = 3, 1.1
#: A step is run at most so often, and not again once that took so long in all; the least counts.
TIMED_STEPS, ENOUGH_SECONDS = 10, 0.5
#: Larger tensors of indices are not computed in advance.
MOST_INDICES = 2**22
#: Operators that Inductor calls, and that can be run with any values of the right shapes and types.
_CALLED = frozenset(
    {
        "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution", "aten::convolution_backward",
        "aten::copy_", "aten::native_dropout", "aten::rand", "aten::rand_like", "aten::randn", "aten::randn_like",
        "aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::native_group_norm",
        "aten::native_group_norm_backward", "aten::embedding_dense_backward", "aten::_unsafe_masked_index",
        "aten::new_empty_strided", "aten::as_strided_scatter", "aten::_unsafe_masked_index_put_accumulate",
        "prims::inductor_seeds", "prims::inductor_seed", "aten::_adaptive_avg_pool2d",
        "aten::_adaptive_avg_pool2d_backward",
    }
)  # fmt: skip
_ATTENTION = "aten::_scaled_dot_product_"
#: Draws whose chances are numbers, not values of a tensor.
_DRAWS = (torch.ops.aten.bernoulli.p,)
#: Makes indices that are in range, as long as its input is what a max pooling has found.
_FROM_WINDOWS = "prims::_low_memory_max_pool_offsets_to_indices"


def fastest_timed(
    ways: Iterable[PlannedGraph], partition: Callable[[PlannedGraph], Partition], graph: fx.Graph, forward_count: int
) -> PlannedGraph:
    """The fastest of ways to run a graph, on a GPU by the time that it takes there; it has these seconds then.

    Processes may find different ones: their collectives are the graph's, and none of those is timed.

    Args:
        ways: all fit; at least one.
        partition: of a way, made anew each time.
        graph: forward and backward.
        forward_count: how many results of the forward are the model's.
    """
    ordered = sorted(_distinct(ways), key=lambda way: way.seconds)
    best = ordered[0]
    near = [way for way in ordered[:MOST_TIMED] if way.seconds <= NEAR * best.seconds]
    if len(near) == 1 or torch.are_deterministic_algorithms_enabled():  # what rounds otherwise would be by chance
        return best
    try:
        if reason := why_untimed(graph):
            _log.info("%d ways to run a graph are priced alike, and none is timed: %s", len(near), reason)
            return best
        timed = [_with_seconds(way, seconds_of_step(partition(way), forward_count)) for way in near]
    except Exception as error:  # there is no room for it beside the model, or PyTorch cannot compile it so
        _log.info("%d ways to run a graph are priced alike, and could not be timed: %r", len(near), error)
        return best
    best = min(timed, key=lambda way: way.seconds)
    shown = ", ".join(format_seconds(way.seconds) for way in timed)
    _log.info("%d ways to run a graph took %s, and the fastest is taken", len(timed), shown)
    return best


def _distinct(ways: Iterable[PlannedGraph]) -> Iterator[PlannedGraph]:
    """One of those for which Inductor writes code that needs the same."""
    known = []
    for way in ways:
        needs = way.way and (way.way.seconds, way.way.rehearsed, way.way.saved, way.way.inputs)
        if needs not in known:
            known.append(needs)
            yield way


def _with_seconds(graph: PlannedGraph, seconds: float) -> PlannedGraph:
    assert graph.way is not None
    return replace(graph, way=replace(graph.way, seconds=seconds))


def seconds_of_step(partition: Partition, forward_count: int) -> float:
    """Seconds of a forward and a backward, compiled and run with values that are made up.

    Dynamo, which asks for the partition, puts generators back.

    Args:
        partition: it is changed.
    """
    forward, backward = partition
    made = MadeUp()
    with unset_fake_temporarily(), torch.no_grad(), torch._C._DisableAutocast(), silent():
        given, later = (part.graph.find_nodes(op="placeholder") for part in partition)
        inputs = [made(node.meta["val"]) for node in given]
        run_forward = _compiled(forward, [node.meta["val"] for node in given])
        saved = run_forward([*inputs])[forward_count:]
        tangents = [made(node.meta["val"]) for node in later[len(saved) :]]
        fakes = [strided(node.meta["val"], t.stride()) for node, t in zip(later, (*saved, *tangents), strict=True)]
        del saved
        run_backward = _compiled(backward, fakes, is_backward=True)

        def step() -> None:
            run_backward([*run_forward([*inputs])[forward_count:], *tangents])

        step()  # what libraries set up in their first call
        return seconds_of(step, inputs[0].device, repeats=TIMED_STEPS, enough_seconds=ENOUGH_SECONDS)


def _compiled(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[[list[Any]], Sequence[Any]]:
    """A graph as Inductor compiles it; of the list that it is given, it lets go of what it needs no more."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    with settings_kept():
        run: Callable[[list[Any]], Sequence[Any]] = compile_fx_inner(
            module, inputs, cudagraphs=BoxedBool(False), **options
        )
    return run


def why_untimed(graph: fx.Graph) -> str:
    """Why a graph is not run with values that are made up; "" if it can be."""
    known = _Indices()
    for node in graph.nodes:
        if node.op != "call_function" or is_view(node):
            continue
        name = name_of(node)
        if communicates(node.target):
            return f"{name} communicates"
        known_call = name in _CALLED or name.startswith((_ATTENTION, "monet_like")) or node.target in _DRAWS
        if name and not (is_generated(node) or known_call):
            return f"{name} may do more than to compute"
        for index, size in _indices_of(node):
            least, most = known.range_of(index)
            if not 0 <= least <= most < size:
                return f"an index of {name} is not known, or might be out of range"
    return ""


def _indices_of(node: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    """The indices that a call reads or writes by, and what each has to be below."""
    name = name_of(node).removeprefix("aten::").removeprefix("_unsafe_")
    args: Any = node.args

    def size_of(dimension: int) -> int:
        return int(args[0].meta["val"].shape[dimension])

    if name == "embedding":
        yield args[1], size_of(0)
    elif name == "embedding_dense_backward":
        yield args[1], int(args[2])
    elif name in ("index", "index_put", "masked_index", "masked_index_put_accumulate"):
        indices = args[2 if name.startswith("masked") else 1]
        yield from ((index, size_of(place)) for place, index in enumerate(indices) if index is not None)
    elif name in ("gather", "index_select") or name.startswith("scatter"):
        yield args[2], size_of(args[1])


class _Indices:
    """Values of a graph's nodes, where all its integers and truth values are 0, and its other inputs are not known."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, torch.Tensor | None] = {}

    def range_of(self, node: fx.Node) -> tuple[int, int]:
        """The least and the greatest value of a node; below 0 if they are not known."""
        if name_of(viewed(node)) == _FROM_WINDOWS:
            return 0, 0
        with unset_fake_temporarily():
            values = self._of(node)
            if values is None:
                return -1, -1
            return (int(values.min()), int(values.max())) if values.numel() else (0, 0)

    def _of(self, node: fx.Node) -> torch.Tensor | None:
        """The values of a node, on the CPU; None: they are not known."""
        needed = [node]
        while needed:
            last = needed[-1]
            missing = [given for given in last.all_input_nodes if given not in self._known]
            if missing and last not in self._known:
                needed += missing
                continue
            self._known.setdefault(last, self._computed(last))
            needed.pop()
        return self._known[node]

    def _computed(self, node: fx.Node) -> torch.Tensor | None:
        like = node.meta.get("val")
        if not isinstance(like, torch.Tensor) or like.numel() > MOST_INDICES:
            return None
        if node.op == "placeholder":
            unknown = like.is_floating_point() or like.is_complex()
            return None if unknown else torch.zeros(like.shape, dtype=like.dtype, device="cpu")
        if not (is_generated(node) or is_view(node)) or any(self._known[n] is None for n in node.all_input_nodes):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._known.__getitem__)
        on_cpu = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), kwargs)
        target: Any = node.target
        made: torch.Tensor = target(*args, **on_cpu)
        return made
