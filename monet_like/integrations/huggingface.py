"""Hugging Face's Trainer by a callback: ``Trainer(model, callbacks=[MemoryBudget("60%")])``.

Only the forward of the model changes, or of its blocks, and only while the Trainer trains. So the model stays what it
is for everything else: checkpoints, `save_pretrained`, adapters, `generate`, the Hub. A model wrapped by
`auto_schedule` or `ScheduleWrapper` may be given to the Trainer as well.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainerCallback

from ..auto.auto_schedule import AutoSchedule
from ..auto.block import blocks_of
from ..auto.blocks import BlockNames, block_plan, schedule_blocks, unwrap
from ..auto.planning import Planning, Settings
from ..auto.promise import BlockPlan
from ..replay.stand_in import caching_config

if TYPE_CHECKING:
    from typing_extensions import Unpack


class MemoryBudget(TrainerCallback):
    """Plans the training steps of a Trainer's model within a memory budget.

    Args:
        memory_budget: of the whole step: ``"8 GB"``, bytes as an int, ``"60%"`` of plain PyTorch's peak, or
            ``"card"``: what is free on the GPU; see `auto_schedule`.
        blocks: give each of these modules a schedule of its own, such as ``model.model.layers``; see `auto_schedule`.
            For deep models: equal blocks are captured and planned once.
        exact, optimizer, planning: see `auto_schedule`.

    Attributes:
        wrapper: of the model that is, or was last, trained; its ``record`` is the schedule. None before training, and
            with ``blocks``.
        plan: what the schedules of the blocks, or of the parts that were found, promise. None before the first step,
            and where the whole model has a schedule.

    The plan is made at the first step, for the inputs of that step. Evaluation and generation run the model as it is.

    Raises:
        UsageError: an argument is wrong.
    """

    def __init__(
        self,
        memory_budget: str | int = "60%",
        *,
        exact: bool | None = None,
        blocks: BlockNames | None = None,
        optimizer: str = "none",
        **planning: Unpack[Planning],
    ) -> None:
        self.by_blocks = blocks is not None or planning.get("weights", "device") != "device"
        if self.by_blocks:
            planning = {"keeps_result": False, **planning}  # the Trainer holds the loss alone while the backward runs
        self.settings = Settings.of(memory_budget, exact, optimizer, planning, blocks=self.by_blocks)
        self.blocks = blocks
        self.wrapper: AutoSchedule | None = None
        self.plan: BlockPlan | None = None
        self._cache = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Schedule the model's training steps from now on."""
        model = others["model"]
        self.on_train_end(args, state, control, **others)  # of an earlier training that failed
        if self.by_blocks:
            self._use_cache(model, False)
            try:
                schedule_blocks(model, None, None, self.blocks, self.settings)
            except BaseException:
                self._use_cache(model, True)
                raise
            return
        self.wrapper = AutoSchedule(model, self.settings)
        _schedule(model, self.wrapper)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Have the plan that the first step has made."""
        if self.plan is None and blocks_of(others["model"]):
            self.plan = block_plan(others["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Give the model its own forward, or its own blocks, back."""
        model = others["model"]
        _restore(model)
        if blocks_of(model):
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
