"""The memory of plain PyTorch's own step: what eager mode keeps and frees, not what a captured program would."""

from __future__ import annotations

from typing import Any

import torch

from ...capture.captured import Captured, fake_mode, let_go_of_tensors
from ...capture.guards.side_effects import generators_restored
from ...capture.precision import autocast_as
from ...capture.trace.alone import observed
from ...capture.trees import tensors_of
from ...compiler.request import Request
from ...profile.cublas import measured_bytes, multiplies
from ...profile.measure import have_workspaces
from ..agreement import in_counted_forward
from ..kept_state import State
from .fake import NotOnFakes, fake_stretches, none_left
from .graphs import OwnGraph
from .memory import loss_of, needs_real, without_hooks
from .stand_ins import without_saved_tensors_hooks


@none_left()
def plain_peak(request: Request, captured: Captured) -> int | None:
    """Bytes at the peak of one call of the model and the backward of its loss, counted on fake tensors.

    A program holds what plain PyTorch holds only nearly: a checkpoint inside of the model, for one, is not in it.

    Args:
        captured: the step, for its answers to questions about values, and what is resident.

    Returns:
        None: fake tensors do not tell, see `needs_real`, `in_counted_forward` and `NotOnFakes`; or the step is on
        several devices, whose memory a program counts together.
    """
    model, device = request.model, captured.device
    if request.optimizer_in_backward or needs_real(model) or in_counted_forward() or captured.on_several_devices:
        return None
    made: list[int] = []  # bytes of a loss that is not the model's

    def step(_: Any) -> Any:
        own = OwnGraph(model, *request.example)
        args, kwargs = own.example
        with autocast_as(request.autocast, device):
            result = model(*args, **kwargs)
            loss = loss_of(result)
            if not any(loss is tensor for tensor in tensors_of(result)):
                made.append(loss.nbytes)  # and as much for its gradient
        torch.clear_autocast_cache()
        with autocast_as("", device):
            own.backward(loss)
        return result, loss

    have_workspaces(device)  # before operators are measured
    state, mode = State([model, request.example], memory=False), fake_mode()
    try:
        with observed(), generators_restored(device), without_saved_tensors_hooks():
            without_hooks(model)
            for parameter in model.parameters():
                parameter.grad = None
            stretches = fake_stretches(step, mode, device, captured.answers)
    except NotOnFakes:
        return None
    finally:
        state.put_back()
        let_go_of_tensors(mode)
    resident = captured.program.resident_bytes + request.optimizer_bytes - 2 * sum(made)
    if multiplies(captured.plain.every_task()):
        resident += measured_bytes(device)
    return resident + max(stretch.peak_bytes for stretch in stretches)
