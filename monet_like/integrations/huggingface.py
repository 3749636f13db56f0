"""Hugging Face's Trainer by a callback: ``Trainer(model, callbacks=[MemoryBudget("60%")])``.

Only the forward of the model changes, or of its blocks, and only while the Trainer trains. So the model stays what it
is for everything else: checkpoints, `save_pretrained`, adapters, `generate`, the Hub. A model wrapped by
`auto_schedule` or `ScheduleWrapper` may be given to the Trainer as well.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from ..auto.auto_schedule import AutoSchedule, auto_schedule
from ..auto.block import blocks_of
from ..auto.block_plan import BlockPlan
from ..auto.blocks import BlockNames, block_plan, unwrap
from ..replay.stand_in import caching_config


class MemoryBudget(TrainerCallback):
    """Plans the training steps of a Trainer's model within a memory budget.

    Args:
        memory_budget: of the whole step: ``"8 GB"``, bytes as an int, or ``"60%"`` of plain PyTorch's peak.
        blocks: give each of these modules a schedule of its own, such as ``model.model.layers``; see `auto_schedule`.
            For deep models: equal blocks are captured and planned once.
        options: the other arguments of `auto_schedule`, such as ``mode``, ``backend`` and ``optimizer``.

    Attributes:
        wrapper: of the model that is, or was last, trained; its ``record`` is the schedule. None before training, and
            with ``blocks``.
        plan: what the schedules of the blocks promise. None before the first step, and without ``blocks``.

    The plan is made at the first step, for the inputs of that step. Evaluation and generation run the model as it is.
    """

    def __init__(self, memory_budget: str | int = "60%", *, blocks: BlockNames | None = None, **options: Any) -> None:
        self.memory_budget, self.blocks, self.options = memory_budget, blocks, options
        self.wrapper: AutoSchedule | None = None
        self.plan: BlockPlan | None = None
        self._cache = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Schedule the model's training steps from now on."""
        model = others["model"]
        self.on_train_end(args, state, control, **others)  # of an earlier training that failed
        if self.blocks is not None:
            self._use_cache(model, False)
            # The Trainer holds the loss alone while the backward runs.
            options = {"keeps_result": False, **self.options}
            try:
                auto_schedule(model, memory_budget=self.memory_budget, blocks=self.blocks, **options)
            except BaseException:
                self._use_cache(model, True)
                raise
            return
        wrapper = auto_schedule(model, memory_budget=self.memory_budget, **self.options)
        assert isinstance(wrapper, AutoSchedule)
        self.wrapper = wrapper
        _schedule(model, self.wrapper)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Have the plan that the first step has made."""
        if self.plan is None and self.blocks is not None:
            self.plan = block_plan(others["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Give the model its own forward, or its own blocks, back."""
        model = others["model"]
        _restore(model)
        if self.blocks is not None and blocks_of(model):
            unwrap(model)
            self._use_cache(model, True)

    def _use_cache(self, model: nn.Module, wanted: bool) -> None:
        """Let the model's decoder fill a cache of keys and values, or not: in training it is another object in every
        step.
        """
        if not wanted:
            self._cache = caching_config(model)
        if self._cache:
            config: Any = functools.reduce(getattr, self._cache.split("."), model)
            config.use_cache = wanted


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
