"""`plan_step`: plans the blocks of a model for a training step that the caller runs: of a pipeline, or of several
micro-steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from ..errors import UsageError
from ..replay.checks.one_pass import apart
from .block import blocks_of
from .blocks import plan_and_keep, plan_no_more
from .promise import BlockPlan
from .rehearsal.memory import WholeStep


def plan_step(model: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> BlockPlan:
    """Plan the blocks of ``model`` for a training step that is more than one call of the model and its backward.

    The step is rehearsed as it is. Each call of a block whose forward has ended and whose backward has not carries what
    its schedule keeps, so that all micro-batches in flight count. Everything that can be reached from the model and
    the step is afterwards what it was; gradients that exist already count, and are added to.

    Args:
        model: what `auto_schedule` returned with ``blocks`` and without example inputs; in training mode. For a
            pipeline: the stage's module, or a `torch.nn.ModuleList` of several stages' modules.
        step: runs all forwards and backwards between two steps of the optimizer, and not the optimizer: the method
            ``step`` of a schedule of `torch.distributed.pipelining`, or a function with a loop over micro-steps. It is
            called three to seven times.
        args, kwargs: what ``step`` is called with.

    Returns:
        What the schedules promise for this process. In a pipeline (``same_plan=False``) each process has a plan of its
        own, all must call this, and an error of one is raised in all.

    Raises:
        UsageError: the model has no such blocks, or is in eval mode; the pipeline's schedule computes gradients of
            inputs and of parameters apart.
        InfeasibleError: no schedules fit; says what would.
        CaptureError: a block cannot be captured.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise UsageError(f"{type(model).__name__} has no blocks with schedules; give auto_schedule blocks=")
    if not model.training:
        raise UsageError("the model is in eval mode; call model.train() before plan_step")
    _check_whole_backward(step)
    settings = blocks[0]._block_settings
    if settings.sharing == "alone":
        settings = replace(settings, sharing="own")
    plan_no_more(model)
    return plan_and_keep(model, WholeStep(step, (args, kwargs), given=True), settings)


def _check_whole_backward(step: Callable[..., Any]) -> None:
    """Refuse a pipeline whose schedule has actions ``I`` and ``W``, before any process waits for another.

    A function that calls the schedule hides it: then the rehearsal notices (`monet_like.auto.rehearsal.stand_ins`).
    """
    schedule = getattr(step, "__self__", None)
    orders = getattr(schedule, "pipeline_order", None) or {}
    actions = [action for order in orders.values() for action in order if action]
    actions += [part for action in actions for part in getattr(action, "sub_actions", None) or ()]
    if any(action.computation_type.value in ("I", "W") for action in actions):
        raise apart(type(schedule).__name__)
