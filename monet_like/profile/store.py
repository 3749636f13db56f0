"""The store of measured costs: one file for every device and its settings, whoever measured them."""

from __future__ import annotations

import contextlib
from datetime import date
from pathlib import Path

import torch

from ..errors import ScheduleFileError
from ..files import cache_folder
from ..ir.profile_file import Profile
from .devices import device_slug
from .settings import settings_digest


def store_path(device: torch.device) -> Path:
    """The file in the cache that keeps what was measured on this device under the present settings and versions."""
    return cache_folder() / f"profile_{device_slug(device)}_{settings_digest(device)}.json"


def keep(profile: Profile, path: Path) -> None:
    """Write a profile, with the costs that other processes have written there since it was read.

    Raises:
        UsageError: it cannot be written.
    """
    with contextlib.suppress(ScheduleFileError):  # none is there, or a damaged one
        profile = profile.merged(Profile.load(path))
    profile.save(path)


def today() -> str:
    """The day, such as ``2026-11-25``, for `Profile.days`."""
    return date.today().isoformat()
