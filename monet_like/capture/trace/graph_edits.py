"""Edits of a traced graph: restores literals and views, removes needless copies, moves it to another device."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import CaptureError
from ..annotations import called_in_place
from ..held_tensors import foreign_memory

_ATEN = torch.ops.aten
#: What the trace makes of a write into a part of a tensor, and what is that part.
WRITES_OF_PARTS: dict[Any, Any] = {
    _ATEN.slice_scatter.default: _ATEN.slice.Tensor,
    _ATEN.select_scatter.default: _ATEN.select.int,
    _ATEN.diagonal_scatter.default: _ATEN.diagonal.default,
    _ATEN.as_strided_scatter.default: _ATEN.as_strided.default,
}
#: In the meta of nodes that read others than in the trace.
_EDITED = "monet_like_edited"


def replace_uses(node: fx.Node, other: fx.Node) -> None:
    """Have the users of ``node`` read ``other``, and note that what they make may differ from the trace."""
    for user in node.users:
        user.meta[_EDITED] = True
    node.replace_all_uses_with(other)


def reads_others(node: fx.Node) -> bool:
    """Whether a node reads others than in the trace."""
    return _EDITED in node.meta


def restore_literals(module: fx.GraphModule) -> None:
    """Restore literal numbers where tracing made tensors of them, which are attributes that the graph copies.

    ``x * torch.tensor(2.0)`` is such a one, and with PyTorch 2.11, though not 2.15, also ``x[:2] = 2.0``.
    """
    aten = torch.ops.aten
    for node in module.graph.find_nodes(op="get_attr"):
        constant = getattr(module, node.target)
        if not isinstance(constant, torch.Tensor):
            continue
        if constant.dim():
            _without_copies(node, constant)
            continue
        with _disable_current_modes():
            number = constant.item()
        for copied in [user for user in node.users if user.target is aten.lift_fresh_copy.default]:
            for user in list(copied.users):
                if user.target is aten.fill.Tensor and user.args[1] is copied:
                    user.target, user.args = aten.fill.Scalar, (user.args[0], number)
            if copied.users:
                like: dict[str, Any] = {"dtype": constant.dtype, "device": constant.device, "pin_memory": False}
                with module.graph.inserting_before(copied):
                    literal = module.graph.call_function(aten.full.default, ([], number), like)
                copied.replace_all_uses_with(literal, propagate_meta=True)
            module.graph.erase_node(copied)
        if not node.users:
            module.graph.erase_node(node)


def _without_copies(node: fx.Node, constant: torch.Tensor) -> None:
    """Remove the copies of a tensor that the forward makes from numbers, but for those that the caller gets to see."""
    for copied in [user for user in node.users if user.target is torch.ops.aten.lift_fresh_copy.default]:
        foreign = not constant.untyped_storage().resizable()
        if foreign and any(called_in_place(user) and user.args[0] is copied for user in copied.users):
            raise foreign_memory()
        if reaches_output(copied):
            copied.target = torch.ops.aten.clone.default
        else:
            replace_uses(copied, node)
            node.graph.erase_node(copied)


def reaches_output(node: fx.Node) -> bool:
    """Whether the caller gets to see a node's storage: through itself or through views of it."""
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user.op == "output":
                return True
            if user.target is operator.getitem or getattr(user.target, "is_view", False):
                pending.append(user)
    return False


def restore_views(module: fx.GraphModule) -> None:
    """Replace ``_unsafe_view`` by ``view``: PyTorch 2.15 traces some reshapes as the former, 2.14 as the latter.

    So a model is the same program with both, and its reshapes are seen to move no bytes.
    """
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten._unsafe_view.default):
        node.target = torch.ops.aten.view.default


def drop_copies_of_parts(module: fx.GraphModule) -> None:
    """Write into a part of a tensor what is to be there, not a copy of it.

    ``part.copy_(x)`` is traced as a copy that lies as the part does, gaps and all, and a write of that into the whole.
    """
    for node in module.graph.find_nodes(op="call_function", target=_ATEN.copy.default):
        source: Any = node.args[1]
        made, given = node.meta["val"], source.meta["val"]
        alike = (made.shape, made.dtype, made.device) == (given.shape, given.dtype, given.device)
        if alike and all(user.target in WRITES_OF_PARTS and user.args[0] is not node for user in node.users):
            replace_uses(node, source)
            module.graph.erase_node(node)


def drop_idle_writes(module: fx.GraphModule) -> None:
    """Remove writes of a part of a tensor into itself, such as the second one of ``x[0] += y``.

    Python adds to the part in place, and then assigns it.
    """
    for node in list(module.graph.nodes):
        if node.target in WRITES_OF_PARTS and is_part(node.args[1], node):
            replace_uses(node, node.args[0])
            module.graph.erase_node(node)


def is_part(node: fx.Node, write: fx.Node) -> bool:
    """Whether a node is a view of the part that ``write``, of `WRITES_OF_PARTS`, writes into."""
    whole, _, *where = write.args
    of_part = node.target is WRITES_OF_PARTS[write.target]
    return of_part and _alike((*node.args, node.kwargs), (whole, *where, write.kwargs))


def _alike(one: Any, other: Any) -> bool:
    """Whether two arguments of nodes are equal, or the same views of the same tensor."""
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, fx.Node) and isinstance(other, fx.Node) and one is not other:
        is_view = one.target is other.target and getattr(one.target, "is_view", False)
        return is_view and _alike((*one.args, one.kwargs), (*other.args, other.kwargs))
    return bool(one == other)


def drop_tokens(module: fx.GraphModule) -> None:
    """Call operators that must run in order, such as the check of ``torch.linalg.inv``, as any others, without
    PyTorch's tokens.

    A program's forward runs in the order of the trace, see `lower_effect`.
    """
    (output,) = module.graph.find_nodes(op="output")
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects):
        token, op, *args = node.args
        with module.graph.inserting_before(node):
            plain = module.graph.call_function(op, tuple(args), node.kwargs)
        made = tuple(node.meta["val"])[1:]
        plain.meta = {**node.meta, "val": made if len(op._schema.returns) > 1 else made[0], "in_order": True}
        for user in [user for user in node.users if user.target is operator.getitem]:
            if user.args[1] == 0:
                user.replace_all_uses_with(token)
            elif len(op._schema.returns) > 1:
                user.args = (plain, user.args[1] - 1)
                continue
            else:
                user.replace_all_uses_with(plain)
            module.graph.erase_node(user)
        module.graph.erase_node(node)
    kept = [
        (out, d) for out, d in zip(output.args[0], output.meta["desc"], strict=True) if "Token" not in type(d).__name__
    ]
    output.args, output.meta["desc"] = ([out for out, _ in kept],), [d for _, d in kept]
    for node in module.graph.find_nodes(op="placeholder"):
        if "Token" in type(node.meta["desc"]).__name__:
            module.graph.erase_node(node)


def move_graph(graph: fx.Graph, mode: FakeTensorMode, target: torch.device) -> None:
    """Have a graph that was traced on another device run on ``target``: its inputs, and the tensors that it makes.

    Raises:
        CaptureError: it has an operator that only a CPU has.
    """

    def there(leaf: Any) -> Any:
        return target if isinstance(leaf, torch.device) else leaf

    with mode:
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr") and isinstance(fake := node.meta["val"], torch.Tensor):
                elements = fake.untyped_storage().nbytes() // fake.dtype.itemsize
                storage = torch.empty(elements, dtype=fake.dtype, device=target)
                node.meta["val"] = storage.as_strided(fake.shape, fake.stride(), fake.storage_offset())
            elif node.op == "call_function":
                if "for_cpu" in str(node.target) or "mkldnn" in str(node.target):
                    raise CaptureError(f"{node.target} is an operator of the CPU; capture this model on {target}")
                node.args = fx.node.map_aggregate(node.args, there)
                node.kwargs = fx.node.map_aggregate(node.kwargs, there)
