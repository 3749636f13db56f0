"""Switches cuDNN on or off for a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def cudnn_enabled(enabled: bool) -> Iterator[None]:
    """`torch.backends.cudnn.flags` also reads the settings for TF32, and refuses to after the new ones were used."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = enabled
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before
