"""Refuses a backward that computes the gradients of inputs and of parameters apart, as zero-bubble pipelines do.

`torch.distributed.pipelining` hooks the autograd nodes at which the gradients of parameters branch off
(``register_prehook``), asks for the gradients of the inputs alone, and starts from the hooked nodes again later. The
nodes of a schedule's backward hand no gradient from one to the next, so that the second pass would find nothing, and
parameters would stay without gradients.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from ...errors import UsageError

_Function = TypeVar("_Function", bound=type[Any])


def apart(who: str) -> UsageError:
    """The error that refuses it; ``who`` computes so."""
    return UsageError(
        f"{who} computes the gradients of inputs and those of parameters apart (dI and dW, as zero-bubble pipelines "
        "do), and the backward of a schedule makes both in one pass; take ScheduleGPipe, Schedule1F1B or "
        "ScheduleInterleaved1F1B, or leave the model without schedules"
    )


def in_one_pass(function: _Function) -> _Function:
    """Decorate a `torch.autograd.Function` whose nodes must not be started from apart."""
    function._backward_cls.register_prehook = refuse
    return function


def refuse(*_: Any) -> NoReturn:
    """Raise the error.

    Raises:
        UsageError: always.
    """
    raise apart("the training step")
