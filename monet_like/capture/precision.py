"""Autocast and memory layout: what a schedule was made for beside shapes and dtypes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn

#: What autocast can be active with; "": it is not active.
AUTOCASTS = ("", "bfloat16", "float16")
#: Memory layouts by name; "" is every other one.
LAYOUTS = {"channels_last": torch.channels_last, "channels_last_3d": torch.channels_last_3d}


def autocast_name(device: torch.device) -> str:
    """The dtype that autocast is active with on ``device``, or ""."""
    if not torch.is_autocast_enabled(device.type):
        return ""
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")


def autocast_as(name: str, device: torch.device) -> AbstractContextManager[None]:
    """Autocast with the dtype of that name, or, for "", none whatever is active."""
    return torch.autocast(device.type, getattr(torch, name or "bfloat16"), enabled=bool(name))


def layout_of(tensor: torch.Tensor) -> str:
    """``channels_last`` or ``channels_last_3d`` where a tensor lies so and not in row-major order; else ""."""
    if tensor.is_contiguous():
        return ""
    dims = {4: "channels_last", 5: "channels_last_3d"}
    name = dims.get(tensor.dim(), "")
    return name if name and tensor.is_contiguous(memory_format=LAYOUTS[name]) else ""


def weights_layout(model: nn.Module) -> str:
    """The layout of the first of a model's parameters that has one; 1x1 filters have none."""
    return first_layout(model.parameters())


def first_layout(tensors: Iterable[torch.Tensor]) -> str:
    """The layout of the first tensor that has one, or ""."""
    return next(filter(None, map(layout_of, tensors)), "")


def in_layout(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor in the layout of that name, where it has as many dimensions."""
    fits = tensor.dim() == {"channels_last": 4, "channels_last_3d": 5}.get(name)
    return tensor.contiguous(memory_format=LAYOUTS[name]) if fits else tensor
