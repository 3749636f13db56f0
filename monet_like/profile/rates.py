"""The rates of this device, from two measurements of some milliseconds: a matrix product, and a copy."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from .devices import DEVICES, DeviceLimits, known_limits
from .measure import seconds_of
from .settings import settings_digest

#: Rows and columns of the product, and elements of the copy (float32).
_ROWS, _ELEMENTS = 768, 2**23


def limits_like(device: torch.device) -> DeviceLimits:
    """Rates like the device's, to tell the longer of two operators: its datasheet's, or those of another
    of its kind.
    """
    if device.type != "cuda":
        return DEVICES["cpu"]
    return known_limits(torch.cuda.get_device_name(device)) or DEVICES["a100"]


def measured_limits(device: torch.device) -> DeviceLimits:
    """`limits_like`, with the arithmetic and the memory traffic that are measured here.

    Convolutions and 16-bit products keep their ratio to products of float32. A process measures once for each device
    under the same settings, such as the number of threads.
    """
    return _measured(device, settings_digest(device))


@functools.cache
def _measured(device: torch.device, _settings: str) -> DeviceLimits:
    like = limits_like(device)
    with torch.no_grad(), torch._C._DisableAutocast():
        square = torch.ones(_ROWS, _ROWS, device=device)
        source = torch.ones(_ELEMENTS, device=device)
        target = torch.empty_like(source)
        product = seconds_of(lambda: square @ square, device, repeats=4)
        copy = seconds_of(lambda: target.copy_(source), device, repeats=4)
    arithmetic = 2 * _ROWS**3 / product / like.flops_per_second
    return replace(
        like,
        flops_per_second=like.flops_per_second * arithmetic,
        convolution_flops_per_second=like.convolution_flops_per_second * arithmetic,
        half_flops_per_second=like.half_flops_per_second * arithmetic,
        bytes_per_second=2 * source.nbytes / copy,
        source="measured here: a product and a copy",
    )


#: Bytes of the copy from the host that is measured.
_LINK_BYTES = 2**26


def host_rate(device: torch.device) -> float:
    """Bytes a second of copies from pinned memory of the host; measured once in a process."""
    return _host_rate(device, settings_digest(device))


@functools.cache
def _host_rate(device: torch.device, _settings: str) -> float:
    source = torch.ones(_LINK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device)
    seconds = seconds_of(lambda: target.copy_(source, non_blocking=True), device, repeats=4)
    return _LINK_BYTES / seconds if seconds > 0 else limits_like(device).host_bytes_per_second
