"""Runs a real step of a schedule and measures its memory at every task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from ..capture.captured import Captured
from ..capture.example_inputs import Example
from ..ir.display import short_repr
from ..ir.schedule import Schedule
from ..profile.measure import allocated_peaks, have_workspaces
from ..replay.training_step import Step, run_step
from ..replay.verify import resident_bytes, train_step


@dataclass(frozen=True, repr=False)
class Live:
    """Measurements of a real step.

    Attributes:
        bytes: the most memory during every run, in the schedule's order; the optimizer's state and cuBLAS's workspaces included.
        loss_bytes: the most while the loss was computed, between forward and backward.
        device: where, in words.
    """

    __repr__ = short_repr

    bytes: tuple[int, ...]
    loss_bytes: int
    device: str


def live_step(
    model: nn.Module, captured: Captured, schedule: Schedule, example: Example, extra_bytes: int, device: str
) -> Live:
    """Run one training step of ``schedule`` and measure its memory; see `check.train_step`.

    Args:
        model: the captured model; its gradients are removed.
        example: real inputs on the model's device.
        extra_bytes: counted on top: optimizer state, which no step allocates, and cuBLAS's workspaces, which outlive it.
    """
    model.zero_grad(set_to_none=True)
    known: dict[str, torch.Tensor] = {**dict(model.named_parameters(remove_duplicate=False))}
    known |= dict(model.named_buffers(remove_duplicate=False))
    known |= captured.constants.tensors
    parameters, buffers = ([known[name] for name, _ in found] for found in (captured.parameters, captured.buffers))
    before = resident_bytes(model, example) + captured.constants.bytes + extra_bytes

    def step(mark: Callable[[], None]) -> None:
        compiled = Step(captured, schedule, watch=mark)

        def forward(*args: Any, **kwargs: Any) -> Any:
            inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            outputs = run_step(compiled, parameters, buffers, inputs)
            mark()  # here the loss begins
            return outputs

        train_step(forward, example)

    have_workspaces(captured.device)
    peaks = [before + peak for peak in allocated_peaks(step, captured.device)]
    model.zero_grad(set_to_none=True)
    loss = len(schedule.forward) + 1  # the first stretch is before the first run
    return Live((*peaks[1:loss], *peaks[loss + 1 :]), peaks[loss], device)
