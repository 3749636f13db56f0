"""Gradients that leave a step: of parameters and inputs, each with a storage of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...ir.program import Call, Ref
from ..captured import Tensor, contiguous_strides
from .values import Values, empty_call


def collect_gradients(
    lowering: Values, found: list[tuple[Any, fx.Node]]
) -> tuple[list[tuple[int, Tensor]], list[tuple[int, Tensor]]]:
    """Parameter and input gradients, each with a storage of its own.

    Args:
        found: the tracer's name of a parameter or an input, and the node that makes its gradient.

    Returns:
        (index into ``parameters``, gradient) and (position among the inputs, gradient), in the order of the slots.
    """
    position = {name: index for index, (name, _) in enumerate(lowering.parameters)}
    owned: set[int] = set()
    parameters: list[tuple[int, Tensor]] = []
    inputs: list[tuple[int, Tensor]] = []
    for target, node in found:
        tensor = lowering.tensor(node)
        value = tensor.value
        of_input = type(target).__name__ == "PlainAOTInput"
        given = lowering.metas[lowering.inputs[target.idx]].empty() if of_input else None
        if given is not None and not _accumulates_as_it_is(lowering.result_of(node), given):
            tensor = _as_accumulated(lowering, node, given, tensor)
        elif value in owned or lowering.values[value].kind != "backward" or value in lowering.tangent_of.values():
            tensor = _cloned(lowering, node, tensor)
        owned.add(tensor.value)
        if type(target).__name__ == "ParamAOTInput":
            parameters.append((position[lowering.first_name[target.target]], tensor))
        else:
            inputs.append((target.idx, tensor))
    return in_slot_order(lowering, parameters), in_slot_order(lowering, inputs)


def in_slot_order(lowering: Values, gradients: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    """Gradients sorted by the slots that make them."""
    made = {value: index for index, slot in enumerate(lowering.slots) for value in slot.writes}
    return sorted(gradients, key=lambda g: made[g[1].value])


def _cloned(lowering: Values, node: fx.Node, tensor: Tensor) -> Tensor:
    """A copy of a gradient whose storage is another gradient's, or the caller's."""
    value = lowering.new_value(
        f"{node.name}.copy{len(lowering.values)}", "backward", torch.empty_like(lowering.nodes[node].result)
    )
    clone = Call("aten.clone.default", (tensor.ref,), (), (Ref(value),))
    lowering.slots.append(lowering.make_task(lowering.values[value].name, (*tensor.calls, clone), (value,)))
    return Tensor(Ref(value), value)


def _as_accumulated(lowering: Values, node: fx.Node, given: torch.Tensor, tensor: Tensor) -> Tensor:
    """A copy of the gradient of an input, in the layout in which PyTorch accumulates it.

    Without it autograd would make that copy, in memory that no schedule counts.
    """
    gradient = lowering.result_of(node)
    dense = torch.ops.aten.is_non_overlapping_and_dense(given)
    strides = given.stride() if dense else contiguous_strides(given.shape)
    like = torch.empty_strided(given.shape, strides, dtype=gradient.dtype, device=gradient.device)
    value = lowering.new_value(f"{node.name}.accumulated", "backward", like)
    empty = empty_call(lowering.metas[value], Ref(value))
    copy = Call("aten.copy_.default", (Ref(value), tensor.ref), (), ())
    lowering.slots.append(lowering.make_task(lowering.values[value].name, (*tensor.calls, empty, copy), (value,)))
    return Tensor(Ref(value), value)


def _accumulates_as_it_is(gradient: torch.Tensor, leaf: torch.Tensor) -> bool:
    """Whether autograd takes a gradient for ``leaf.grad`` as it lies (torch's ``obeys_layout_contract``)."""
    if not torch.ops.aten.is_non_overlapping_and_dense(leaf):
        return gradient.is_contiguous()
    extents = zip(gradient.shape, gradient.stride(), leaf.stride(), strict=True)
    return all(stride == own if extent != 1 else stride != 0 for extent, stride, own in extents)


def delayable_slots(lowering: Values, gradients: Sequence[tuple[int, Tensor]]) -> dict[int, str]:
    """Slots whose gradients can be delayed to the end of the backward, with the parameter whose gradient each makes.

    Such a slot writes the whole gradient of one parameter and nothing else, and no other slot reads it.
    """
    fixed = {value for slot in lowering.slots for value in slot.reads} | lowering.drawn
    writer = {value: index for index, slot in enumerate(lowering.slots) for value in slot.writes}
    uses = Counter(index for index, _ in gradients)
    return {
        writer[tensor.value]: lowering.parameters[index][0]
        for index, tensor in gradients
        if uses[index] == 1 and tensor.value not in fixed and len(lowering.slots[writer[tensor.value]].writes) == 1
    }
