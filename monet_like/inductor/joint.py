"""The joint graph that Inductor hands to a partitioner: what its nodes are, and which of them have memory of their own.

The graph is functional and decomposed: the forward, then the backward, in the order of execution. Inductor puts
elementwise operators into the kernels that read them. So a node of the graph is one of:

* an *item*: its result is written to memory. Products, convolutions, reductions, gathers; elementwise results that one
  of these reads as a whole, that the graph returns, that cost fewer bytes than what they are made from, or that take
  too many operators to be computed anew;
* *inlined*: views, and all other elementwise operators. Each kernel that reads one computes it anew, for free. What
  only a concatenation reads is computed in its place there.

An elementwise item that is made from about as many bytes as it has is *cheap*: a kernel may also compute it anew.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import fx

from ..capture.captured import allocated_bytes
from ..errors import UsageError
from ..runtime.operators import communicates, is_random, waits
from .collectives import check_collective
from .rewrites import convert_gradients, keep_before_changes, split_convolutions, without_shapes

#: A result is cheap if its sources have at most so many times its bytes; narrow if they have at least so many.
CHEAP, NARROW = 1.1, 2.0
#: The longest chain of operators that a kernel computes on the way, and how often it may call them in all. Inductor
#: calls an operator once for each path from it to the result that is written, so this number can double with each step
#: of a chain. Backwards of a normalisation and an activation take up to 23 in a row and 178 calls.
MOST_IN_A_ROW, MOST_CALLS = 64, 500

aten, prims = torch.ops.aten, torch.ops.prims

_ELEMENTWISE = frozenset(
    {
        "aten::clone", "aten::where", "aten::full", "aten::full_like", "aten::zeros_like", "aten::ones_like",
        "aten::scalar_tensor", "aten::arange", "aten::select_scatter", "aten::slice_scatter",
        "aten::_to_copy", "aten::constant_pad_nd", "aten::copy", "aten::fill", "aten::expand_copy", "aten::zeros",
        "aten::ones", "aten::empty", "aten::permute_copy", "aten::lift_fresh_copy",
        "prims::convert_element_type", "prims::inductor_random", "prims::inductor_lookup_seed", "prims::iota",
        "prims::_low_memory_max_pool_offsets_to_indices", "prims::broadcast_in_dim", "prims::fma",
        "prims::inductor_force_stride_order", "monet_like_inductor::copied",
    }
)  # fmt: skip
_REDUCTIONS = frozenset(
    {
        "aten::sum", "aten::mean", "aten::amax", "aten::amin", "aten::var_mean", "aten::var", "aten::std", "aten::prod",
        "aten::any", "aten::all", "aten::argmax", "aten::argmin", "aten::max", "aten::min", "aten::logsumexp",
        "aten::cumsum", "aten::_softmax", "aten::_log_softmax", "aten::std_mean", "aten::count_nonzero",
        "prims::prepare_softmax_online",
    }
)  # fmt: skip
#: Kernels of Inductor that read each element several times: it writes what is made from several tensors for them first.
_WINDOWS = frozenset(
    {
        "aten::avg_pool2d", "aten::avg_pool2d_backward", "aten::max_pool2d_with_indices", "aten::upsample_nearest2d",
        "aten::max_pool2d_with_indices_backward", "prims::_low_memory_max_pool_with_offsets",
    }
)  # fmt: skip
_SCATTERS = frozenset({"aten::scatter", "aten::scatter_add", "aten::scatter_reduce"})
#: Those that read elements of their inputs in another order.
_GATHERS = _WINDOWS | {
    "aten::cat", "aten::index", "aten::gather", "aten::embedding", "aten::index_select", "aten::_unsafe_index",
    "aten::flip", "aten::roll", "aten::repeat", "aten::index_put", "aten::_unsafe_index_put", *_SCATTERS,
}  # fmt: skip
_VIEWS = frozenset({"aten::_unsafe_view", "aten::alias", "aten::detach"})
_ONCE = frozenset({"prims::inductor_seeds", "prims::inductor_seed"})
_EFFECTS = frozenset({"aten::copy_", "aten::_assert_async", "aten::_assert_scalar", "aten::_assert_tensor_metadata"})
#: Calls an operator when the one that gave it a token has run, such as the check of ``torch.linalg.inv``.
_IN_ORDER = torch.ops.higher_order.with_effects


def name_of(node: fx.Node) -> str:
    """The operator of a node, such as ``aten::mm``; "" if it is none."""
    return str(node.target._schema.name) if isinstance(node.target, torch._ops.OpOverload) else ""


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a node's result."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_view(node: fx.Node) -> bool:
    """Whether the result lies in the memory of the first input."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    return isinstance(node.target, torch._ops.OpOverload) and (node.target.is_view or name_of(node) in _VIEWS)


def is_unchecked(node: fx.Node) -> bool:
    """Whether PyTorch does not check that a saved tensor has not been changed since; its hooks do not see it."""
    return bool(node.meta.get("saved_tensor_with_no_vc_check", False))


def is_elementwise(node: fx.Node) -> bool:
    """Whether Inductor computes an element of the result from one element of each input, within any kernel."""
    if not isinstance(node.target, torch._ops.OpOverload) or draws(node):
        return False
    return torch.Tag.pointwise in node.target.tags or name_of(node) in _ELEMENTWISE


def is_generated(node: fx.Node) -> bool:
    """Whether Inductor generates the kernel, so that it can be fused with its neighbours."""
    return is_elementwise(node) or (name_of(node) in _REDUCTIONS | _GATHERS and not _is_called_scatter(node))


def _is_called_scatter(node: fx.Node) -> bool:
    """Whether Inductor calls PyTorch's operator for a scatter, as for sums on a CPU with several threads.

    The call writes into a copy of its first tensor, which Inductor generates with what that is made from.
    """
    name, target = name_of(node), cast(torch._ops.OpOverload, node.target)
    if name not in _SCATTERS:
        return False
    from torch._inductor.utils import use_scatter_fallback

    names = [argument.name for argument in target._schema.arguments]
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    called = getattr(aten.scatter_, target._overloadname) if name == "aten::scatter" else aten.scatter_reduce_.two
    reduction = "sum" if name == "aten::scatter_add" else given.get("reduce")
    source, made = given.get("src", given.get("value")), node.meta["val"]
    is_tensor = isinstance(source, fx.Node)
    kind: Any = source.meta["val"].dtype if isinstance(source, fx.Node) else type(source)
    return bool(use_scatter_fallback(called, reduction, made.dtype, kind, made.device.type, is_tensor))


def reads_memory(node: fx.Node) -> bool:
    """Whether a kernel for it reads its inputs from memory and computes nothing of them on the way, but views."""
    return not is_generated(node) or name_of(node) in _WINDOWS


def draws(node: fx.Node) -> bool:
    """Whether it must run once only, because it draws random numbers."""
    if name_of(node) in _ONCE:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and is_random(node.target, node.args, node.kwargs)


@dataclass(frozen=True)
class Joint:
    """A joint graph and what its nodes are.

    Attributes:
        graph: of the module that Inductor hands over.
        forward_outputs, backward_outputs: what it returns; None: no tensor, or no gradient.
        effects: nodes that write into inputs, such as a batch norm's statistics, check tensors, or wait for collectives
            whose results nobody reads; all in the forward.
        backward: nodes that depend on an incoming gradient, or on a collective that the forward does not need.
        forward: nodes that the forward cannot do without.
        items: nodes with memory of their own, inputs apart.
        cheap: elementwise items that a kernel may also compute anew.
        narrow: the same of items that have much fewer bytes than what they are made from.
        changed: inputs that the effects write into.
        device: of the computation.
    """

    graph: fx.Graph
    forward_outputs: tuple[fx.Node | None, ...]
    backward_outputs: tuple[fx.Node | None, ...]
    effects: tuple[fx.Node, ...]
    backward: frozenset[fx.Node]
    forward: frozenset[fx.Node]
    items: frozenset[fx.Node]
    cheap: frozenset[fx.Node]
    narrow: frozenset[fx.Node]
    changed: frozenset[fx.Node]
    device: torch.device

    def bytes_of(self, node: fx.Node) -> int:
        """Memory of a node's tensors as the allocator counts it."""
        return sum(allocated_bytes(t.numel() * t.element_size(), self.device) for t in tensors_of(node.meta.get("val")))


@dataclass(frozen=True)
class Kernel:
    """One kernel: what it reads from memory, what it computes on the way, and what it writes.

    Attributes:
        root: the node whose result is written; None: nothing is, it only returns what it reads.
        reads: items and inputs, in the order of the graph.
        inlined: nodes that are computed on the way, in the order of the graph.
        writes: ``root``, or the parts of its result.
    """

    root: fx.Node | None
    reads: tuple[fx.Node, ...]
    inlined: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]

    @property
    def generated(self) -> bool:
        """Whether Inductor generates its code."""
        return self.root is not None and is_generated(self.root)


def read_joint(module: fx.GraphModule, forward_count: int, static: Collection[int] = ()) -> Joint:
    """Read a joint graph.

    Args:
        module: of Inductor; dead code is removed from it, some calls become two, and gradients are given their
            parameters' strides.
        forward_count: how many of its results the forward returns.
        static: places of the inputs that are parameters or buffers.

    Raises:
        UsageError: it has what a plan cannot express; says what.
    """
    module.graph.eliminate_dead_code()
    split_convolutions(module.graph)
    without_shapes(module.graph)
    convert_gradients(module.graph, forward_count, static)
    module.graph.eliminate_dead_code()
    nodes = list(module.graph.nodes)
    _check(nodes)
    returned = pytree.arg_tree_leaves(*nodes[-1].args)
    outputs = tuple(node if isinstance(node, fx.Node) else None for node in returned)
    backward = _closure((n for n in nodes if n.op == "placeholder" and "tangents" in str(n.target)), lambda n: n.users)
    begun = next((place for place, node in enumerate(nodes) if node in backward and node.op != "placeholder"), None)
    unread = {node for node in nodes[:begun] if waits(node.target) and not node.users}
    effects = tuple(node for node in nodes if _is_effect(node) or node in unread)
    if not backward.isdisjoint(effects):
        raise UsageError(
            "this model changes a tensor in place in its backward, or checks one there, which compile_options cannot "
            "plan; compile it without"
        )
    needed = (node for node in (*outputs[:forward_count], *effects) if node is not None)
    forward = _closure(needed, lambda n: n.all_input_nodes)
    backward |= _closure((n for n in nodes if communicates(n.target) and n not in forward), lambda n: n.users)
    written = dict.fromkeys(node.args[0] for node in effects if name_of(node) == "aten::copy_")
    for given in written:
        if any(reader in backward for reader in readers(given)):
            keep_before_changes(given)
    nodes = list(module.graph.nodes)
    changed = _closure(written, lambda n: [user for user in n.users if is_view(user)])
    devices = [t.device for node in nodes for t in tensors_of(node.meta.get("val"))]
    device = next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
    joint = Joint(
        module.graph, outputs[:forward_count], outputs[forward_count:], effects, backward, forward,
        frozenset(), frozenset(), frozenset(), changed, device,
    )  # fmt: skip
    return _with_items(joint, nodes)


def _check(nodes: Iterable[fx.Node]) -> None:
    for node in nodes:
        values = pytree.tree_leaves(node.meta.get("val"))
        sizes = (size for t in tensors_of(values) for size in (*t.shape, *t.stride()))
        if any(isinstance(v, torch.SymInt | torch.SymFloat | torch.SymBool) for v in (*values, *sizes)):
            raise UsageError(
                f"{node.name} has a size that changes from call to call, and a plan needs fixed sizes; compile with "
                "dynamic=False, and give inputs of one shape"
            )
        known = node.target is operator.getitem or isinstance(node.target, torch._ops.OpOverload) or _is_effect(node)
        if node.op == "call_function" and not known:
            called = node.args[1] if node.target is _IN_ORDER else node.target
            raise UsageError(
                f"this model calls {called}, which compile_options cannot plan; compile its parts before and after "
                "this call, or compile it without compile_options"
            )
        check_collective(node)


def _is_effect(node: fx.Node) -> bool:
    """Whether it changes or checks something, and makes no tensor but a token."""
    if node.target is operator.getitem:
        return _is_effect(node.all_input_nodes[0])
    return name_of(node) in _EFFECTS or (node.target is _IN_ORDER and len(tensors_of(node.meta["val"])) == 1)


def _closure(start: Iterable[fx.Node], neighbours: Any) -> frozenset[fx.Node]:
    """The nodes that can be reached, ``start`` included."""
    found, pending = set[fx.Node](), list(start)
    while pending:
        node = pending.pop()
        if node not in found and node.op != "output":
            found.add(node)
            pending += neighbours(node)
    return frozenset(found)


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read a node's elements, through views."""
    for user in node.users:
        if is_view(user):
            yield from readers(user)
        else:
            yield user


@dataclass(frozen=True)
class _Length:
    """What a kernel calls to compute a node: the longest chain of operators, and calls in all."""

    in_a_row: int
    calls: int

    @staticmethod
    def of(inputs: Sequence[_Length]) -> _Length:
        """Of a node from those of its inputs that are not in memory."""
        return _Length(
            1 + max((given.in_a_row for given in inputs), default=0), 1 + sum(given.calls for given in inputs)
        )


def _with_items(joint: Joint, nodes: list[fx.Node]) -> Joint:
    """Decide which nodes have memory, in the order of the graph: it depends on the bytes that a node is made from."""
    items, cheap, narrow = set[fx.Node](), set[fx.Node](), set[fx.Node]()
    made_from: dict[fx.Node, dict[fx.Node, int]] = {}  # of inlined and cheap nodes, without resident ones
    lengths: dict[fx.Node, _Length] = {}  # of the same
    for node in nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        sources: dict[fx.Node, int] = {}
        for given in node.all_input_nodes:
            if given in items and given not in cheap | narrow:
                sources[given] = joint.bytes_of(given)
            sources.update(made_from.get(given, {}))
            if "tangents" in given.name and given.op == "placeholder":
                sources[given] = joint.bytes_of(given)
        arguments = pytree.arg_tree_leaves(*node.args, **node.kwargs)  # one may be there twice
        length = _Length.of([lengths[given] for given in arguments if isinstance(given, fx.Node) and given in lengths])
        if is_view(node):
            made_from[node], lengths[node] = sources, length
        elif not is_elementwise(node):
            if node not in joint.effects or waits(node.target):
                items.add(node)
        else:
            own, total = joint.bytes_of(node), sum(sources.values())
            few = total <= CHEAP * own
            wide = NARROW * own <= total and node not in joint.backward and bool(own)
            if length.in_a_row > MOST_IN_A_ROW or length.calls > MOST_CALLS:
                items.add(node)
                continue
            if _is_item(joint, node, few, wide):
                items.add(node)
                if not (few or wide) or node in joint.backward or _reads_changed(joint, node):
                    continue
                (cheap if few else narrow).add(node)
            made_from[node], lengths[node] = sources, length
    return replace(joint, items=frozenset(items), cheap=frozenset(cheap), narrow=frozenset(narrow))


def _is_item(joint: Joint, node: fx.Node, few: bool, wide: bool) -> bool:
    """Whether an elementwise result is written to memory."""
    reading = dict.fromkeys(readers(node))
    if _reads_changed(joint, node):  # what it reads is gone when the forward ends
        return True
    for reader in reading:
        if _is_copied_for(node, reader):
            continue
        if reader.op == "output" or reader in joint.effects or not is_generated(reader):
            return True
        in_place = name_of(reader) == "aten::cat" and len(reading) == 1  # it is computed where the concatenation has it
        if name_of(reader) in _GATHERS and node.all_input_nodes and not in_place:
            return True
    late = any(reader in joint.backward for reader in reading)
    if node not in joint.backward and late and wide:
        return True
    return len(reading) > 1 and not few


def _is_copied_for(node: fx.Node, reader: fx.Node) -> bool:
    """Whether a scatter that is called reads a node only for the copy that it writes into."""
    if not _is_called_scatter(reader):
        return False
    first, *others = reader.all_input_nodes
    return viewed(first) is node and all(viewed(other) is not node for other in others)


def viewed(node: fx.Node) -> fx.Node:
    """The node in whose memory a view lies; of any other node itself."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _reads_changed(joint: Joint, node: fx.Node) -> bool:
    return not joint.changed.isdisjoint(node.all_input_nodes)
