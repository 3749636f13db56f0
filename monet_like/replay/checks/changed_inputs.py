"""Inputs and buffers that a forward changes in place, as ``x.relu_()`` does: the caller's own tensor changes, too.

The program computes the new contents beside the old, and copies them in when the forward ends. So nothing may read such
a tensor later as it was, and no other tensor of the step may lie in the same memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from ...errors import UsageError

if TYPE_CHECKING:
    from ...capture.captured import Captured


def check_changeable(captured: Captured, residents: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Check that the tensors which the forward changes in place may be changed.

    Args:
        residents: parameters, buffers and inputs.

    Raises:
        RuntimeError: PyTorch's own, of a leaf that requires a gradient.
        UsageError: another resident shares their memory.
    """
    there = [tensor.untyped_storage()._cdata for tensor in residents]
    storages = dict(zip(_values(captured), there, strict=True)) if len(set(there)) < len(there) else {}
    uses = Counter(storages.values())
    for value, storage in storages.items():
        if value in captured.changed and uses[storage] > 1:
            raise UsageError(
                f"the forward changes {captured.program.values[value].name} in place, and another input, buffer or "
                "parameter of this call shares its memory; give a clone"
            )
    for position in captured.written:
        if inputs[position].requires_grad and inputs[position].is_leaf:
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")


def are_given_alike(captured: Captured, residents: Sequence[torch.Tensor]) -> bool:
    """Whether what the forward changes in place is one tensor with another resident where it was in the capture."""
    if captured.changed.isdisjoint(captured.inputs):
        return True
    tensors: dict[int, int] = {}
    values: dict[int, set[int]] = {}
    for value, tensor in zip(_values(captured), residents, strict=True):
        if tensors.setdefault(value, id(tensor)) != id(tensor):
            return False
        values.setdefault(id(tensor), set()).add(value)
    return all(len(several) == 1 or captured.changed.isdisjoint(several) for several in values.values())


def _values(captured: Captured) -> Iterator[int]:
    """Of all residents."""
    yield from (value for _, value in (*captured.parameters, *captured.buffers))
    yield from captured.inputs
