"""Checks of a model before it is traced: lazy, sharded or meta-device parameters, batch norms without momentum."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import CaptureError, UsageError

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def check_initialized(model: nn.Module, *, planned: bool = False) -> None:
    """Refuse a model whose parameters or buffers have no shapes yet, or no memory.

    Args:
        planned: for a device that is not here: no memory is needed.

    Raises:
        UsageError: a lazy module has not seen an input yet, or a tensor is on the meta device.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not planned and not is_lazy(tensor) and tensor.is_meta:
            raise UsageError(
                f"{name} of {type(model).__name__} is on the meta device, where tensors have no values; build the model on the "
                "device that it will train on, or call model.to_empty(device=...) and load its weights; to plan it as it is, name a GPU "
                "that is not here (roofline:h100)"
            )
    for name, module in model.named_modules():
        if any(map(is_lazy, (*module._parameters.values(), *module._buffers.values()))):
            raise UsageError(
                f"{name or type(model).__name__} is a lazy module whose parameters have no shapes yet; call the model once on "
                "an example first"
            )


def check_unsharded(model: nn.Module) -> None:
    """Refuse a model with sharded parameters: a schedule holds only one process's own operators.

    Raises:
        CaptureError: a module has them.
    """
    for name, module in model.named_modules():
        if any(hasattr(parameter, "device_mesh") for parameter in module._parameters.values()):
            raise CaptureError(
                f"{name or type(model).__name__} has sharded parameters, which are gathered while the step runs; shard "
                "around it: fully_shard(ScheduleWrapper(model, ...))"
            )


def check_momentum(model: nn.Module) -> None:
    """Refuse a batch norm with ``momentum=None``, whose averaging factor depends on the number of earlier steps.

    Raises:
        CaptureError: the model is training and has one.
    """
    for name, module in model.named_modules():
        averaging = isinstance(module, _BATCH_NORMS) and module.training and module.track_running_stats
        if averaging and module.momentum is None:
            raise CaptureError(
                f"{name or type(model).__name__} has momentum=None, so its average depends on how many steps there were; give "
                "it a number, such as momentum=0.1"
            )
