"""Refuses calls that ask for more than a backward: forward-mode derivatives, and the transforms of ``torch.func``."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd import forward_ad

from ...errors import UsageError


def check_transforms(model: torch.nn.Module, inputs: Iterable[torch.Tensor]) -> None:
    """Check that a call is to have a backward and nothing else.

    Raises:
        UsageError: it is inside a transform of ``torch.func``, or a tensor has a tangent of forward-mode derivatives.
    """
    asked = "under a transform of torch.func (vmap, grad, jvp, ...)"
    if torch._C._functorch.peek_interpreter_stack() is None:
        if forward_ad._current_level < 0:
            return
        tensors = (*inputs, *model.parameters(), *model.buffers())
        if all(forward_ad.unpack_dual(tensor).tangent is None for tensor in tensors):
            return
        asked = "with tangents of forward-mode derivatives"
    raise UsageError(
        f"{type(model).__name__} was called {asked}, and a schedule has a backward alone; call the model that the "
        "schedule wraps"
    )
