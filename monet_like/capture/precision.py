"""Names of autocast dtypes and memory layouts, as schedule files record them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import nn

#: Dtypes of autocast; "": autocast is off.
AUTOCASTS = ("", "bfloat16", "float16")
#: Memory layouts by name; "" is every other one.
LAYOUTS = {"channels_last": torch.channels_last, "channels_last_3d": torch.channels_last_3d}
#: Their names by the number of dimensions that they are for.
_BY_DIMENSIONS = {4: "channels_last", 5: "channels_last_3d"}


def autocast_name(device: torch.device) -> str:
    """The dtype that autocast is active with on ``device``, or ""."""
    if not torch.is_autocast_enabled(device.type):
        return ""
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")


def autocast_as(name: str, device: torch.device) -> AbstractContextManager[None]:
    """Autocast with the dtype of that name; "" switches autocast off."""
    return torch.autocast(device.type, getattr(torch, name or "bfloat16"), enabled=bool(name))


def layout_of(tensor: torch.Tensor) -> str:
    """The name of a tensor's memory layout: ``channels_last``, ``channels_last_3d``, or "" for all others."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return ""
    name = _BY_DIMENSIONS.get(tensor.dim(), "")
    return name if name and tensor.is_contiguous(memory_format=LAYOUTS[name]) else ""


def weights_layout(model: nn.Module) -> str:
    """The layout of a model's first parameter with a named one, or "".

    (1x1 filters are row-major as well, so they have none.)
    """
    return next(filter(None, map(layout_of, model.parameters())), "")


def in_layout(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor converted to the layout of that name; unchanged if its number of dimensions does not fit."""
    fits = _BY_DIMENSIONS.get(tensor.dim()) == name
    return tensor.contiguous(memory_format=LAYOUTS[name]) if fits else tensor
