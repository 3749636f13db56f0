"""Refuses calls that ask for more than a backward: forward-mode derivatives, the transforms of ``torch.func``, and
saved tensors that may be changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import _CloneArgBeforeMutateMode
from torch.utils import _python_dispatch

from ...errors import UsageError


def check_transforms(model: torch.nn.Module, inputs: Iterable[torch.Tensor]) -> None:
    """Check that a call is to have a backward and nothing else.

    Raises:
        UsageError: it is inside a transform of ``torch.func`` or ``allow_mutation_on_saved_tensors()``, or a tensor has
            a tangent of forward-mode derivatives.
    """
    asked = "under a transform of torch.func (vmap, grad, jvp, ...)"
    if any(map(_copies_before_writes, _python_dispatch._get_current_dispatch_mode_stack())):
        asked = "inside torch.autograd.graph.allow_mutation_on_saved_tensors()"
    elif torch._C._functorch.peek_interpreter_stack() is None:
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


def _copies_before_writes(mode: object) -> bool:
    return isinstance(mode, _CloneArgBeforeMutateMode)


@contextmanager
def own_tensors_alone() -> Iterator[None]:
    """For a backward, which writes into tensors of its own alone: none has to be copied before.

    Inside ``allow_mutation_on_saved_tensors()`` PyTorch looks at every write, and fails where an operator calls the
    tensor that it writes into anything but ``out``.
    """
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    if not any(map(_copies_before_writes, modes)):
        yield
        return
    for _ in modes:
        _python_dispatch._pop_mode()
    others = [mode for mode in modes if not _copies_before_writes(mode)]
    try:
        for mode in others:
            _python_dispatch._push_mode(mode)
        yield
    finally:
        for _ in others:
            _python_dispatch._pop_mode()
        for mode in modes:
            _python_dispatch._push_mode(mode)
