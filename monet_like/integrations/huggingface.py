"""Hugging Face's Trainer by a callback: ``Trainer(model, callbacks=[MemoryBudget("60%")])``.

Only the forward of the model changes, and only while the Trainer trains. So the model stays what it is for everything else:
checkpoints, `save_pretrained`, adapters, `generate`, the Hub. A model wrapped by `auto_schedule` or `ScheduleWrapper` may be
given to the Trainer as well.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from ..auto.auto_schedule import AutoSchedule, auto_schedule
from ..errors import UsageError


class MemoryBudget(TrainerCallback):
    """Plans the training steps of a Trainer's model within a memory budget.

    Args:
        memory_budget: of the whole step: ``"8 GB"``, bytes as an int, or ``"60%"`` of plain PyTorch's peak.
        options: the other arguments of `auto_schedule`, such as ``mode`` and ``optimizer``.

    Attributes:
        wrapper: of the model that is, or was last, trained; its ``record`` is the schedule. None before training.

    The plan is made at the first step, for the inputs of that step. Evaluation and generation run the model as it is.
    """

    def __init__(self, memory_budget: str | int = "60%", **options: Any) -> None:
        self.memory_budget, self.options = memory_budget, options
        self.wrapper: AutoSchedule | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Schedule the model's training steps from now on."""
        model = others["model"]
        _restore(model)  # left by an earlier training that failed
        wrapper = auto_schedule(model, memory_budget=self.memory_budget, **self.options)
        if not isinstance(wrapper, AutoSchedule):
            raise UsageError(
                "the callback gives the whole model one schedule; for blocks call auto_schedule before the Trainer"
            )
        self.wrapper = wrapper
        _schedule(model, self.wrapper)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Give the model its own forward back."""
        _restore(others["model"])


#: The attribute that holds what ``model.forward`` was: (whether the instance had one, the function).
_BEFORE = "_monet_like_forward"


def _schedule(model: nn.Module, wrapper: AutoSchedule) -> None:
    """Let ``model`` train by the wrapper's schedule: its forward is replaced."""
    own, running = model.forward, False

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal running
        if running or not model.training or not torch.is_grad_enabled():  # the wrapper itself calls the model
            return own(*args, **kwargs)
        running = True
        wrapper.__dict__["training"] = True
        try:
            return wrapper(*args, **kwargs)
        finally:
            running = False

    model.__dict__[_BEFORE] = "forward" in model.__dict__, own
    scheduled: Any = torch.compiler.disable(forward, reason="a monet_like schedule runs as it is")
    scheduled.__signature__ = inspect.signature(own)
    model.__dict__["forward"] = scheduled


def _restore(model: nn.Module) -> None:
    """Undo `_schedule`."""
    if _BEFORE not in model.__dict__:
        return
    in_instance, own = model.__dict__.pop(_BEFORE)
    if in_instance:
        model.__dict__["forward"] = own
    else:
        del model.__dict__["forward"]
