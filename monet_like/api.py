"""One line for people in a hurry: `auto_schedule`."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from .compiler import Request, compile_schedule
from .errors import UsageError
from .precision import autocast_name
from .profile_data import Profile
from .profiler import device_name, device_slug, versions
from .replay import ScheduleWrapper, device_of
from .schedule_file import ScheduleRecord
from .units import parse_bytes

#: Everything that is exact.
ALL_VARIANTS = "inplace_conv_multiway_newnode"


def cache_folder() -> Path:
    """Where plans and profiles are kept: ``$MONET_LIKE_CACHE``, or ``~/.cache/monet_like``."""
    return Path(os.environ.get("MONET_LIKE_CACHE") or Path.home() / ".cache" / "monet_like")


def auto_schedule(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory_budget: str | int = "8 GB",
    mode: str = ALL_VARIANTS,
    solver: str = "HIGHS",
    time_limit_seconds: float = 60.0,
    gap: float = 0.01,
    optimizer: str = "none",
) -> ScheduleWrapper:
    """Capture, profile, plan and wrap ``model`` so that its training step fits ``memory_budget``.

    Args:
        model: in training mode, on the device it will train on.
        args, kwargs: example inputs; a tensor, or a tuple of arguments.
        memory_budget: of the whole step: ``"8 GB"``, bytes as an int, or ``"60%"`` of plain PyTorch's peak.
        mode: which variants may be used; see `monet_like.mode`.
        solver, time_limit_seconds, gap: for the integer program.
        optimizer: whose state to count: none, sgd, momentum or adam.

    Returns:
        The wrapped module: same arguments, same results, same gradients. Plans and profiles are cached, so a
        second call with the same model, inputs and budget solves nothing.

    Raises:
        UsageError: an argument is wrong.
        InfeasibleError: no schedule fits; the message says what would.
        CaptureError: the model cannot be captured.
    """
    example = (args if isinstance(args, tuple) else (args,), dict(kwargs or {}))
    if not model.training:
        raise UsageError("the model is in eval mode; call model.train() before auto_schedule")
    device = device_of(model)
    request = Request(
        model, example, mode, type(model).__qualname__, False, optimizer, "milp", solver, time_limit_seconds, gap,
        autocast=autocast_name(device),
    )  # fmt: skip
    budget = _budget(memory_budget)
    folder = cache_folder()
    place = folder / f"schedule_{_digest(request, memory_budget, device)}.pkl"
    if place.exists():
        return ScheduleWrapper(model, ScheduleRecord.load(place), example=example)
    store = folder / f"profile_{device_slug(device)}_{torch.__version__}.json"
    compiled = compile_schedule(
        request,
        budget,
        device,
        profile=Profile.load(store) if store.exists() else None,
        save_profile=lambda found: found.save(store),
    )
    compiled.record.save(place)
    return ScheduleWrapper(model, compiled.record, example=example, captured=compiled.captured)


def _budget(memory_budget: str | int) -> Any:
    """Bytes, or a function from plain PyTorch's peak to bytes."""
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, str | int):
        raise UsageError(f'memory_budget {memory_budget!r} must be like "8 GB", bytes as an int, or "60%"')
    if isinstance(memory_budget, int):
        if memory_budget < 1:
            raise UsageError(f"memory_budget {memory_budget} bytes must be more than 0")
        return memory_budget
    percent = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*%\s*", memory_budget)
    if percent is None:
        return parse_bytes(memory_budget)
    share = float(percent.group(1)) / 100
    if share <= 0:
        raise UsageError(f"memory_budget {memory_budget!r} must be more than 0 %")
    return lambda plain_peak_bytes: int(share * plain_peak_bytes)


def _digest(request: Request, memory_budget: str | int, device: torch.device) -> str:
    """A name for everything the plan depends on, short of tracing: structure, shapes, budget, versions."""
    digest = hashlib.sha256()
    for name, tensor in (*request.model.named_parameters(), *request.model.named_buffers()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.stride()}{tensor.dtype}{tensor.requires_grad}".encode())
    digest.update("".join(f"{type(m).__name__}{m.training}{m.extra_repr()}" for m in request.model.modules()).encode())
    for leaf in pytree.tree_leaves(request.example):
        is_tensor = isinstance(leaf, torch.Tensor)
        digest.update(
            f"{tuple(leaf.shape)}{leaf.stride()}{leaf.dtype}{leaf.requires_grad}".encode()
            if is_tensor
            else repr(leaf).encode()
        )
    rest = (
        memory_budget,
        request.mode,
        request.optimizer,
        request.gap,
        device_name(device),
        request.autocast,
        versions(),
    )
    digest.update(repr(rest).encode())
    return digest.hexdigest()[:24]
