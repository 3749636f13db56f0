"""Inputs of a traced graph: parameters, buffers, the model's inputs, incoming gradients and constants become values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from ...errors import CaptureError
from ..captured import TensorMeta
from ..constants import constant_name
from ..trace.flat_module import HELD, FlatModule
from ..trace.graph_edits import replace_uses
from .values import NodeResult, Values, args_of, storage_of


def add_placeholder(lowering: Values, node: fx.Node) -> None:
    """A parameter, a buffer, an input of the model or an incoming gradient becomes a value.

    Raises:
        CaptureError: an input of another kind, such as a number that varies.
    """
    desc = node.meta["desc"]
    fake = node.meta["val"]
    kind = type(desc).__name__
    if not isinstance(fake, torch.Tensor):
        raise CaptureError(f"input {node.name} is a {type(fake).__name__}; only tensors may vary between steps")
    if kind in ("ParamAOTInput", "BufferAOTInput"):
        lowering.nodes[node] = _resident(lowering, desc.target, kind == "ParamAOTInput", fake)
    elif kind == "SubclassGetAttrAOTInput":
        lowering.nodes[node] = _part(lowering, desc, fake)
    elif kind == "PlainAOTInput":
        value = lowering.new_value(f"input{desc.idx}", "input", fake)
        lowering.inputs[desc.idx] = value
        lowering.nodes[node] = NodeResult(fake, False, value)
    elif kind == "TangentAOTInput" and type(desc.output).__name__ == "PlainAOTOutput":
        position = desc.output.idx
        value = lowering.new_value(f"tangent{position}", "backward", fake)
        lowering.tangent_of[position] = value
        lowering.nodes[node] = NodeResult(fake, True, value)
        lowering.unread_tangents[node] = position
    elif kind == "TangentAOTInput":
        _add_tangent_of_changed(lowering, node, desc.output)
    elif kind == "ViewBaseAOTInput":
        raise CaptureError(
            f"{type(lowering.flat.model).__name__}.forward changes a tensor in place that shares its memory with "
            "another input, buffer or parameter of this call; give a clone"
        )
    else:
        raise CaptureError(f"the traced graph has an input of a kind that is not supported: {desc}")


def _add_tangent_of_changed(lowering: Values, node: fx.Node, output: Any) -> None:
    """The incoming gradient of the new contents of an input that the forward changes in place."""
    if not node.users:
        return
    changed = getattr(output, "mutated_input", output)
    key = changed.idx if hasattr(changed, "idx") else getattr(changed, "target", None)
    if key in lowering.flat.changed_without_gradient and _without_tangent(node):
        return  # for autograd the caller's tensor is the same one before and after
    if type(changed).__name__ != "PlainAOTInput":
        name = lowering.flat.tensor(changed.target)[0] if hasattr(changed, "target") else changed
        raise CaptureError(
            f"{type(lowering.flat.model).__name__}.forward changes {name} in place, and gradients flow through what it "
            "becomes; compute it anew instead (x = x.relu(), not x.relu_()), or change it under torch.no_grad() (for "
            "an Embedding: max_norm=None)"
        )
    position = sum(type(d).__name__ == "PlainAOTOutput" for d in lowering.output.meta["desc"]) + len(lowering.written)
    fake = node.meta["val"]
    lowering.written[changed.idx] = position
    lowering.tangent_of[position] = value = lowering.new_value(f"tangent{position}", "backward", fake)
    lowering.nodes[node] = NodeResult(fake, True, value)


def _without_tangent(node: fx.Node) -> bool:
    """Remove an incoming gradient from all sums it is added in; False, and nothing is done, if it is used otherwise."""
    if any(user.target is not torch.ops.aten.add.Tensor or len(args_of(user)) != 2 for user in node.users):
        return False
    for user in list(node.users):
        (other,) = (arg for arg in args_of(user) if arg is not node)
        replace_uses(user, cast(fx.Node, other))
        user.graph.erase_node(user)
    return True


def changes_one_given_twice(graph: fx.Graph, flat: FlatModule, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a traced forward changes in place a tensor that was given several times, and is several in the trace."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    changed = (getattr(desc, "mutated_input", None) for desc in output.meta["desc"])
    inputs = (tensors[cast(Any, desc).idx] for desc in changed if type(desc).__name__ == "PlainAOTInput")
    return any(not flat.is_one(tensor) and sum(tensor is other for other in tensors) > 1 for tensor in inputs)


def lay_out_tangent(lowering: Values, node: fx.Node, position: int) -> None:
    """Give an incoming gradient its result's layout in eager PyTorch, where the trace gave it the traced result's."""
    pairs = zip(args_of(lowering.output)[0], lowering.output.meta["desc"], strict=True)
    (output,) = (out for out, d in pairs if type(d).__name__ == "PlainAOTOutput" and d.idx == position)
    if output not in lowering.nodes:  # a view that the trace makes later
        return
    tangent, told, result = lowering.nodes[node].result, output.meta["val"], lowering.nodes[output].result
    if tangent.stride() != told.stride() or result.stride() == told.stride():
        return
    if not torch.ops.aten.is_non_overlapping_and_dense(result):
        return
    laid_out = torch.empty_strided(result.shape, result.stride(), dtype=tangent.dtype, device=tangent.device)
    value = lowering.tangent_of[position]
    lowering.metas[value] = TensorMeta.of(laid_out)
    lowering.values[value] = replace(lowering.values[value], spec=str(lowering.metas[value]))
    lowering.storages[storage_of(laid_out)] = value
    lowering.owners.append(laid_out)
    lowering.nodes[node] = NodeResult(laid_out, True, value)


def _resident(lowering: Values, target: str, parameter: bool, fake: torch.Tensor) -> NodeResult:
    """The node of a parameter or buffer. A tensor with several names, such as a tied weight, is one value."""
    name, tensor = lowering.flat.tensor(target)
    first, known = lowering.named.setdefault(id(tensor), (name, NodeResult(fake, False)))
    lowering.first_name[target] = first
    if first == name:
        known.value = lowering.new_value(name, "parameter" if parameter else "buffer", fake)
        (lowering.parameters if parameter else lowering.buffers).append((name, known.value))
        if target.startswith(HELD):
            lowering.constants[name] = tensor
    return known


def _part(lowering: Values, desc: Any, fake: torch.Tensor) -> NodeResult:
    """The node of a tensor that a parameter or buffer of a tensor subclass consists of, such as the scales of int8
    weights.

    Raises:
        CaptureError: it is part of an input of the model.
    """
    path: list[str] = []
    while type(desc).__name__ == "SubclassGetAttrAOTInput":
        path.insert(0, desc.attr)
        desc = desc.base
    if type(desc).__name__ not in ("ParamAOTInput", "BufferAOTInput"):
        raise CaptureError(
            f"{desc.expr()} is of a tensor subclass, and a schedule takes plain tensors; pass the tensors that it "
            "consists of"
        )
    name, tensor = lowering.flat.tensor(desc.target)
    for attribute in path:
        tensor = getattr(tensor, attribute)
    name = ".".join((name, *path))
    first, known = lowering.named.setdefault(id(tensor), (name, NodeResult(fake, False)))
    if first == name:
        known.value = lowering.new_value(name, "parameter", fake)
        lowering.parameters.append((name, known.value))
        lowering.constants[name] = tensor
    return known


def _foreign(model: torch.nn.Module, argument: Any) -> str:
    """Why an operator's argument that is neither a tensor nor plain data is refused."""
    if isinstance(argument, torch.Generator):
        return (
            f"{type(model).__name__}.forward draws random numbers from a torch.Generator of its own, whose state a "
            "schedule does not replay; draw from PyTorch's own (without generator=), or give the noise as an argument"
        )
    return (
        f"{type(model).__name__}.forward gives an operator a {type(argument).__name__}, and a schedule's operators "
        "take tensors and numbers; give the tensors that it consists of"
    )


def add_attribute(lowering: Values, node: fx.Node) -> None:
    """An attribute of the graph becomes a value: a tensor made in the forward from numbers, or read in the backward
    only.

    Raises:
        CaptureError: it requires a gradient and is not registered, or is no tensor.
    """
    tensor = getattr(lowering.graph.owning_module, str(node.target))
    if node.target in lowering.attributes:
        lowering.nodes[node] = lowering.nodes[lowering.attributes[str(node.target)]]
        return
    learned = isinstance(tensor, torch.Tensor) and tensor.requires_grad and not lowering.in_backward
    # The backward reads it, by a checkpoint or a custom function, as the forward does.
    if id(tensor) in lowering.named and not learned:
        lowering.nodes[node] = lowering.named[id(tensor)][1]
        return
    if not isinstance(tensor, torch.Tensor):
        raise CaptureError(_foreign(lowering.flat.model, tensor))
    if learned:
        raise CaptureError(
            f"{type(lowering.flat.model).__name__}.forward reads a tensor that requires a gradient, and that is not "
            "registered, or is given to code that a trace does not see; register it: nn.Parameter as an attribute, "
            "nn.ModuleList or nn.ParameterList in place of a list"
        )
    lowering.attributes[str(node.target)] = node
    fake = node.meta["val"]
    name = constant_name(
        len(lowering.flat.held._parameters) + len(lowering.flat.held._buffers) + len(lowering.attributes) - 1
    )
    value = lowering.new_value(name, "buffer", fake)
    lowering.buffers.append((name, value))
    lowering.constants[name] = tensor
    lowering.nodes[node] = NodeResult(fake, False, value)
