"""Models on the meta device: for a capture their tensors are replaced by fake ones of the CPU, which have no memory
either.

So a model of any size is planned for a GPU that is not here, without its weights: ``with torch.device("meta"): model =
Net()``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..captured import fake_mode
from ..example_inputs import Example, device_of
from ..trees import map_tensors, tensors_of

_CPU = torch.device("cpu")


def traced_device(model: nn.Module, example: Example | None = None) -> torch.device:
    """The device on which a model is traced: its own, or that of its inputs; the CPU for a model on the meta device."""
    device = device_of(model, example)
    return _CPU if device.type == "meta" else device


def is_meta(model: nn.Module) -> bool:
    """Whether a parameter or buffer of the model is on the meta device."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@contextlib.contextmanager
def as_fakes(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Replace the meta tensors of a model and of its arguments by fake tensors of the CPU; the model's come back
    afterwards.

    Yields:
        The arguments. Models without meta tensors are left as they are.
    """
    if not is_meta(model):
        yield args, dict(kwargs)
        return
    modes = [t.fake_mode for t in tensors_of((args, dict(kwargs))) if isinstance(t, FakeTensor)]
    mode = modes[0] if modes else fake_mode()
    known: dict[int, torch.Tensor] = {}
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            tensors: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for members in tensors:
                for name, tensor in members.items():
                    if tensor is not None and tensor.is_meta:
                        stack.callback(members.__setitem__, name, tensor)
                        members[name] = known.setdefault(id(tensor), _fake(tensor, mode))
        yield map_tensors(lambda tensor: _of_mode(tensor, mode), (args, dict(kwargs)))


def _of_mode(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """An argument as a fake tensor of ``mode``."""
    if isinstance(tensor, FakeTensor):
        return tensor
    return _fake(tensor, mode) if tensor.is_meta else mode.from_tensor(tensor, static_shapes=True)


def _fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_CPU)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
