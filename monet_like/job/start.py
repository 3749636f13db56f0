"""`problem`: from a model and its inputs to a job."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..capture.absent_gpu.attention import check_attention
from ..capture.precision import autocast_name
from ..capture.trace.meta_tensors import is_meta, traced_device
from ..compiler.progress import Progress
from ..compiler.request import Request, optimizer_bytes
from ..compiler.sources import Cached, Filed, Given, Source, capability_of, is_roofline
from ..compiler.words import absent_device, read_device
from ..errors import UsageError
from ..ir.defaults import MODE
from ..ir.mode import parse_mode
from ..ir.profile_file import Profile
from ..profile.devices import DeviceLimits
from .job import Job


def problem(
    model: nn.Module,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    device: str | torch.device | None = None,
    profile: str | Path | Profile | DeviceLimits | None = None,
    mode: str = MODE,
    optimizer: str = "none",
    optimizer_in_backward: bool = False,
    ablation: bool = False,
    autocast: str | None = None,
    attention: str = "",
    verbose: bool | None = None,
) -> Job:
    """Capture a model's training step; the start of everything that this package knows about it.

    Args:
        model: in training mode, on the device it will train on; or on the meta device, to plan for a GPU that is not
            here.
        args, kwargs: example inputs; a tensor, or a tuple of arguments.
        device: what to plan for. None: the model's own device, whose operators are measured when a cost is first asked
            for. ``"roofline:a100"``: the datasheet rates of this card, and nothing is measured; it need not be here.
            ``"cuda"`` where there is none: the step is captured as on a GPU, and ``profile`` says what it costs.
        profile: costs instead of measurements: a profile, its file (which is extended by what is measured), or
            ``"roofline:a100"``. None: the cache that `auto_schedule` has, too.
        mode: which variants may be used; see `monet_like.ir.mode`.
        optimizer: whose state to count; a key of `monet_like.compiler.request.OPTIMIZERS`, such as adamw.
        optimizer_in_backward: hooks of the training loop step and free each gradient in the backward, so not all
            gradients exist at once; see `auto_schedule`.
        ablation: choose operators only, recompute nothing.
        autocast: dtype of ``torch.autocast``, such as ``"bfloat16"``; "": none; None: the one that is on now.
        attention: kind of attention that PyTorch takes: flash, efficient, cudnn or math; "": its own choice.
        verbose: show progress on stderr; None: if that is a terminal or a notebook.

    Raises:
        UsageError: an argument is wrong, or the model is in eval mode.
        CaptureError: the model cannot be captured.
    """
    if not model.training:
        raise UsageError("the model is in eval mode; call model.train() before monet_like.problem")
    parse_mode(mode)
    optimizer_bytes(model, optimizer)
    check_attention(attention)
    positional = args if isinstance(args, tuple) else () if args is None else (args,)
    example = positional, dict(kwargs or {})
    here = traced_device(model, example)
    target, source = _where(here, device, profile, is_meta(model))
    request = Request(
        model, example, mode, type(model).__qualname__, ablation, optimizer,
        autocast=autocast_name(here) if autocast is None else autocast, target=target, attention=attention,
        optimizer_in_backward=optimizer_in_backward,
    )  # fmt: skip
    job = Job(request, here, source, progress=lambda: Progress(quiet=verbose is False))
    _ = job.captured
    return job


def _where(
    here: torch.device,
    device: str | torch.device | None,
    profile: str | Path | Profile | DeviceLimits | None,
    without_memory: bool,
) -> tuple[torch.device | None, Source]:
    """The device to capture for, if it is not the model's own, and where costs come from."""
    if is_roofline(device):
        if profile is not None:
            raise UsageError(f"device {device!r} says what operators cost, so leave profile out")
        device, profile = None, str(device)
    target = None
    if device is not None:
        target = absent_device(str(device)) if profile is not None else None
        if target is None and read_device(str(device)) not in (here, torch.device(here.type)):
            raise UsageError(
                f"the model is on {here} and device is {str(device)!r}; move the model, or leave device out"
            )
    if profile is None:
        source: Source = Cached.of(here)
    else:
        source = Given(profile) if isinstance(profile, Profile | DeviceLimits) else Filed.of(Path(profile))
    if without_memory and target is None:
        target = absent_device("cuda") if capability_of(source.known) is not None else None
        if target is None:
            raise UsageError(
                "the model is on the meta device, where nothing can be measured; plan it for a GPU that is not here, "
                "such as "
                'device="roofline:h100", or build it on the device that it will train on'
            )
    return target, source
