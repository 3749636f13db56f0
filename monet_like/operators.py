"""From the operator names in a program's calls to the functions that run."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from .errors import CaptureError


def get_rng_state(device: str) -> torch.Tensor:
    """The state of the device's default generator; for CUDA it is kept on the host and needs no synchronisation."""
    if device == "cpu":
        return torch.get_rng_state()
    return torch.cuda.get_rng_state(torch.device(device))


def set_rng_state(device: str, state: torch.Tensor) -> None:
    """Put the device's default generator back into ``state``."""
    if device == "cpu":
        torch.set_rng_state(state)
    else:
        torch.cuda.set_rng_state(state, torch.device(device))


_OURS: dict[str, Callable[..., Any]] = {
    "operator.getitem": operator.getitem,
    "monet_like.get_rng_state": get_rng_state,
    "monet_like.set_rng_state": set_rng_state,
}


@cache
def resolve(name: str) -> Callable[..., Any]:
    """The function behind a qualified operator name such as ``aten.convolution.default``.

    Raises:
        CaptureError: this PyTorch has no such operator.
    """
    if name in _OURS:
        return _OURS[name]
    op = overload(name)
    return getattr(op, "_op", op)  # the C++ function itself: one Python frame less for every call


def overload(name: str) -> Any:
    """The operator of a qualified name, with its schema and tags.

    Raises:
        CaptureError: this PyTorch has no such operator.
    """
    namespace, packet, kind = name.split(".")
    if namespace == "monet_like":
        from . import kernels

        kernels.load()
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), kind)
    except AttributeError:
        raise CaptureError(f"operator {name} does not exist in PyTorch {torch.__version__}") from None
