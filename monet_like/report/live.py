"""Runs a real step of a schedule and measures its memory at every task."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..capture.captured import Captured
from ..capture.example_inputs import Example
from ..capture.trees import tensors_of
from ..ir.display import short_repr
from ..ir.schedule import Schedule
from ..profile.measure import allocated_peaks, have_workspaces
from ..replay.training_step import CompiledStep, run_step
from ..replay.verify.steps import resident_bytes, step_seconds, train_step

#: Timed steps; one more warms up.
STEPS = 3


@dataclass(frozen=True, repr=False)
class Live:
    """Measurements of a real step.

    Attributes:
        bytes: the most memory during every run, in the schedule's order; the optimizer's state and cuBLAS's workspaces
            included.
        loss_bytes: the most while the loss was computed, between forward and backward.
        device: where, in words.
        seconds: of a step without measuring memory, the median of a few.
    """

    __repr__ = short_repr

    bytes: tuple[int, ...]
    loss_bytes: int
    device: str
    seconds: float = 0.0


def live_step(
    model: nn.Module, captured: Captured, schedule: Schedule, example: Example, extra_bytes: int, device: str
) -> Live:
    """Run one training step of ``schedule`` and measure its memory, then some more for their time; see
    `verify.train_step`.

    Args:
        model: the captured model; its gradients and buffers are afterwards what they were before.
        example: real inputs on the model's device.
        extra_bytes: counted on top: optimizer state, which no step allocates, and cuBLAS's workspaces, which outlive
            it.
    """
    with _left_alone(model):
        return _measured(model, captured, schedule, example, extra_bytes, device)


@contextlib.contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Put gradients, buffers and the random number generators back at the end."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = sorted({tensor.get_device() for tensor, _ in gradients if tensor.is_cuda})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            for parameter, gradient in gradients:
                parameter.grad = gradient


class _Scheduled(nn.Module):
    """A model whose forward is a function of ours."""

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def _measured(
    model: nn.Module, captured: Captured, schedule: Schedule, example: Example, extra_bytes: int, device: str
) -> Live:
    model.zero_grad(set_to_none=True)
    known: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    known |= dict(model.named_buffers(remove_duplicate=False))
    known |= captured.constants.tensors
    parameters, buffers = ([known[name] for name, _ in found] for found in (captured.parameters, captured.buffers))
    before = resident_bytes(model, example) + captured.constants.bytes + extra_bytes

    def stepped(compiled: CompiledStep, args: Any, kwargs: Any) -> Any:
        inputs = tensors_of((args, kwargs))
        return run_step(compiled, parameters, buffers, inputs)

    def step(mark: Callable[[], None]) -> None:
        compiled = CompiledStep(captured, schedule, watch=mark)

        def forward(*args: Any, **kwargs: Any) -> Any:
            outputs = stepped(compiled, args, kwargs)
            mark()  # here the loss begins
            return outputs

        train_step(forward, example)

    have_workspaces(captured.device)
    peaks = [before + peak for peak in allocated_peaks(step, captured.device)]
    model.zero_grad(set_to_none=True)
    unwatched = CompiledStep(captured, schedule)
    scheduled = _Scheduled(model, lambda *args, **kwargs: stepped(unwatched, args, kwargs))
    (seconds,) = step_seconds([(scheduled, example)], captured.device, STEPS)
    loss = len(schedule.forward) + 1  # the first stretch is before the first run
    return Live((*peaks[1:loss], *peaks[loss + 1 :]), peaks[loss], device, seconds)
