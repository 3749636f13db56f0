"""Reads words that a user typed: a device, a dtype, a batch, a shape."""

from __future__ import annotations

import torch

from ..errors import UsageError


def read_device(text: str) -> torch.device:
    """Read a device: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``.

    Raises:
        UsageError: no such device here.
    """
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        raise UsageError(f"device {text!r} is unknown; give auto, cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"device {text!r} is not supported; give auto, cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"device {text!r} is not there: PyTorch sees {torch.cuda.device_count()} CUDA devices")
    return device


def absent_device(text: str) -> torch.device | None:
    """Read a CUDA device that this machine does not have, for planning only."""
    return torch.device("cuda", 0) if text in ("cuda", "cuda:0") and not torch.cuda.is_available() else None


def read_dtype(text: str) -> torch.dtype:
    """Read a floating-point dtype by its name.

    Raises:
        UsageError: unknown or not floating.
    """
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        raise UsageError(f"dtype {text!r} is unknown; give float32, float64, bfloat16 or float16")
    return dtype


def parse_batch(text: str) -> int:
    """Read a batch size.

    Raises:
        UsageError: not a whole number of at least 1.
    """
    if not text.isdecimal() or len(text) > 300 or int(text) < 1:
        raise UsageError(f"batch {text[:40]!r} must be a whole number of at least 1, such as 184")
    return int(text)


def shortened(count: int) -> str:
    """Shorten a number of many digits for an error message."""
    text = str(count)
    return text if len(text) <= 20 else f"{text[:12]}… ({len(text)} digits)"


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    """Read a shape such as ``3,224,224`` or ``3x224x224``; None stays None.

    Raises:
        UsageError: not a list of positive whole numbers.
    """
    if text is None:
        return None
    parts = text.replace("x", ",").strip("()[] ").split(",")
    if not all(part.strip().isdecimal() and len(part) < 300 and int(part) > 0 for part in parts):
        raise UsageError(
            f"input shape {text[:60]!r} must be positive whole numbers without the batch, such as 3,224,224"
        )
    return tuple(int(part) for part in parts)
