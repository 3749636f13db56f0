"""Plans of a model's blocks by the model's calls: each training call follows the plan for the next larger one, or is
planned for.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..capture.checks import is_sharded
from ..capture.example_inputs import (
    Example,
    device_of,
    extents_of,
    input_specs,
    is_for_shapes,
    specs_in_words,
    with_length,
)
from ..capture.precision import autocast_name
from ..capture.trace.alone import CAPTURING, is_observed
from ..capture.trees import tensors_of
from ..errors import warn_caller
from ..ir.units import Budget, format_bytes
from ..replay.checks.transforms import check_transforms
from .agreement import processes
from .block import blocks_of
from .block_plan import plan_blocks
from .planning import Settings
from .promise import BlockPlan
from .rehearsal.memory import Blocks, step_of


@dataclass(frozen=True)
class Form:
    """What tells how much memory a call of the model takes.

    Attributes:
        tensors: shape and bytes of an element of each tensor among the arguments, by the argument's place or name.
        autocast: its dtype.
        bytes: of all parameters and buffers.
        trained_bytes: of the parameters that are trained.
    """

    tensors: tuple[tuple[str, tuple[int, ...], int], ...]
    autocast: str
    bytes: int
    trained_bytes: int

    @staticmethod
    def of(model: nn.Module, example: Example) -> Form:
        """The form of a call."""
        args, kwargs = example
        named = (*enumerate(args), *kwargs.items())
        tensors = [(f"{name}[{place}]", leaf) for name, value in named for place, leaf in enumerate(tensors_of(value))]
        looks = tuple((path, extents_of(leaf), leaf.element_size()) for path, leaf in tensors)
        parameters = [*model.parameters()]
        sizes = [_bytes(parameter) for parameter in parameters]
        trained = sum(size for size, parameter in zip(sizes, parameters, strict=True) if parameter.requires_grad)
        of_buffers = sum(map(_bytes, model.buffers()))
        return Form(looks, autocast_name(device_of(model, example)), sum(sizes) + of_buffers, trained)

    def within(self, other: Form) -> bool:
        """Whether a call of this form takes no more memory than one of another form, as far as the form tells."""
        there = {path: (shape, size) for path, shape, size in other.tensors}
        return (
            self.autocast == other.autocast
            and self.bytes <= other.bytes
            and self.trained_bytes <= other.trained_bytes
            and all(path in there and _fits(shape, size, *there[path]) for path, shape, size in self.tensors)
        )

    @property
    def elements(self) -> int:
        """Of all tensors among the arguments."""
        return sum(torch.Size(shape).numel() for _, shape, _ in self.tensors)


def _bytes(tensor: torch.Tensor) -> int:
    return 0 if is_lazy(tensor) else tensor.numel() * tensor.element_size()


def _fits(shape: Sequence[int], size: int, most: Sequence[int], most_size: int) -> bool:
    return size <= most_size and len(shape) == len(most) and all(map(int.__le__, shape, most))


@dataclass(frozen=True)
class _Planned:
    """A plan, the form of the call that it is for, and what each block has of it."""

    form: Form
    plan: BlockPlan
    states: tuple[dict[str, Any], ...]


class CallPlans:
    """The plans of a model's blocks; as a forward pre-hook of the model it chooses between them.

    The first plan's budget in bytes is the budget of all. A larger call is planned for when it comes; if it cannot be,
    its blocks run by schedules of their own within what an earlier plan gives them, or as plain PyTorch. Several
    processes make no new plans during training: a call that one of them sees alone would wait for the others.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings, self._planner = settings, 0  # the thread that plans
        self.plans: list[_Planned] = []
        self.refused: set[Form] = set()

    def __reduce__(self) -> Any:
        return CallPlans, (self.settings,)

    @torch.compiler.disable
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have the blocks follow the plan for this call; make one, if there is none."""
        if self._planner == threading.get_ident() or not model.training or not torch.is_grad_enabled():
            return
        if self._planner:  # stand-ins are in the place of the blocks
            with CAPTURING:
                pass
        if not self.plans or is_observed():
            return
        may_plan = self._may_plan(model)
        if (len(self.plans) == 1 and not may_plan) or is_for_shapes(tensors_of((args, kwargs))):
            return
        form = Form.of(model, (args, kwargs))
        if found := self._for(form):
            self._follow(model, found)
        elif may_plan and form not in self.refused:
            self._plan_or_keep(model, (args, kwargs), form)

    def plan(self, model: nn.Module, example: Example) -> BlockPlan:
        """Plan for a call of the model, and for calls of the lengths that are expected, the largest first.

        Raises:
            InfeasibleError: no schedules fit; says what would.
            CaptureError, UsageError: a block cannot be planned.
        """
        self.plans.clear()
        for length in sorted(self.settings.lengths, reverse=True):
            there = with_length(example, length)
            self._planned(model, there, Form.of(model, there))
        form = Form.of(model, example)
        found = self._for(form)
        if found is None:
            return self._planned(model, example, form)
        self._follow(model, found)
        return found.plan

    def _for(self, form: Form) -> _Planned | None:
        """The plan for the next larger call."""
        return min((p for p in self.plans if form.within(p.form)), key=lambda p: p.form.elements, default=None)

    def _planned(self, model: nn.Module, example: Example, form: Form) -> BlockPlan:
        check_transforms(model, tensors_of(example))
        blocks = tuple(blocks_of(model))
        settings = self.settings
        if self.plans:
            settings = replace(settings, budget=Budget(self.plans[0].plan.budget_bytes))
        with CAPTURING:
            self._planner = threading.get_ident()
            try:
                whole = step_of(model, example, settings.loss, keeps_result=settings.keeps_result)
                plan = plan_blocks(Blocks(model, blocks), whole, settings)
            finally:
                self._planner = 0
        self.plans.append(_Planned(form, plan, tuple(block.plan_state() for block in blocks)))
        return plan

    def _plan_or_keep(self, model: nn.Module, example: Example, form: Form) -> None:
        """Plan during training; without a plan the blocks keep what they have."""
        before = [(block, block.plan_state()) for block in blocks_of(model)]
        inputs = specs_in_words(input_specs(*example))
        try:
            self._planned(model, example, form)
        except BaseException as error:
            for block, state in before:
                block.take_plan(state)
            if not isinstance(error, Exception):
                raise
            self.refused.add(form)
            budget = self.plans[0].plan.budget_bytes
            warn_caller(
                f"no plan of the blocks of {type(model).__name__} for {inputs} within {format_bytes(budget)} ({budget} "
                f"bytes); blocks that find no schedule within their part of an earlier plan run as plain PyTorch, in "
                f"its memory: {error}"
            )

    def _may_plan(self, model: nn.Module) -> bool:
        return self.settings.on_new_input == "plan" and processes() == 1 and not any(map(is_sharded, model.modules()))

    def _follow(self, model: nn.Module, found: _Planned) -> None:
        blocks = blocks_of(model)
        if len(blocks) == len(found.states) and blocks[0]._block_plan is not found.plan:
            for block, state in zip(blocks, found.states, strict=True):
                block.take_plan(state)
                block._block_plan = found.plan


def plans_of(model: nn.Module) -> CallPlans | None:
    """The plans of a model's blocks."""
    return next((hook for hook in model._forward_pre_hooks.values() if isinstance(hook, CallPlans)), None)
