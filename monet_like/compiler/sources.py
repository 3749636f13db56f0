"""Where the costs of operators come from: a device's datasheet rates, or a profile file that grows with what is
measured.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from ..errors import ScheduleFileError, UsageError, warn_caller
from ..files import check_writable
from ..ir.profile_file import Profile
from ..profile import store
from ..profile.devices import DEVICES, DeviceLimits, limits_of

_ROOFLINE = "roofline:"


class Source(Protocol):
    """Known costs, and a place for what is measured."""

    @property
    def known(self) -> Profile | DeviceLimits | None:
        """Before anything is measured: costs of a profile, a device's rates, or None."""

    def save(self, profile: Profile) -> None:
        """Keep a profile for the next plan."""


class Saved(Protocol):
    """What is kept in the cache as a file: a schedule, or a plan of blocks."""

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""


@dataclass(frozen=True)
class Given:
    """Costs that are given, such as a device's rates; what is measured beside them is not kept."""

    known: Profile | DeviceLimits | None

    def save(self, profile: Profile) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Cached:
    """The store of a device's costs in the cache folder; all models, scripts and commands share it.

    Attributes:
        path: of the file (`monet_like.profile.store`).
        known: its content; None if there is none yet, or a damaged one.
    """

    path: Path
    known: Profile | None

    @staticmethod
    def of(device: torch.device) -> Cached:
        """That of this device with its present settings."""
        path, known = store.store_path(device), None
        with contextlib.suppress(ScheduleFileError):
            known = Profile.load(path)
        return Cached(path, known)

    def save(self, profile: Profile) -> None:
        """Add a profile to the file; where that fails, say so and go on.

        Its note tells of one model, so it is left out.
        """
        keep(replace(profile, note=""), self.path)

    @property
    def latest(self) -> Path | None:
        """The file, if it is there."""
        return self.path if self.path.exists() else None


@dataclass(frozen=True)
class Filed:
    """A profile file that the user names, or ``roofline:DEVICE``.

    Attributes:
        path: of the file to read.
        known: its costs, or the device's rates; None if there is no file yet.
        extended: the file to write what is measured into.
    """

    path: Path
    known: Profile | DeviceLimits | None
    extended: Path

    @staticmethod
    def of(path: Path, extended: Path | None = None) -> Filed:
        """The source of this name.

        Args:
            extended: None: the file itself.

        Raises:
            UsageError, ScheduleFileError: as `read_costs`.
        """
        return Filed(path, read_costs(path), extended or path)

    def save(self, profile: Profile) -> None:
        """Write a profile into the file, for the next command, with what others have added meanwhile."""
        store.keep(profile, self.extended)

    @property
    def latest(self) -> Path | None:
        """The file that has the costs, as far as they are known: the one that was written, if there is one; or the
        rates.
        """
        if self.extended.exists():
            return self.extended
        return self.path if is_roofline(self.path) or self.path.exists() else None


def capability_of(known: Profile | DeviceLimits | None) -> tuple[int, int] | None:
    """Compute capability of the GPU that costs are of; None: not known."""
    limits = limits_in(known)
    return None if limits is None else limits.capability


def limits_in(known: Profile | DeviceLimits | None) -> DeviceLimits | None:
    """The data sheet of the device that costs are of; None: not known."""
    return limits_of(known.device) if isinstance(known, Profile) else known


def is_roofline(name: object) -> bool:
    """Whether this asks for datasheet rates (``roofline:DEVICE``) instead of a file."""
    return str(name).startswith(_ROOFLINE)


def read_costs(path: Path) -> Profile | DeviceLimits | None:
    """Read costs: the rates of a device for ``roofline:a100``, else the profile in a file; None if there is no file.

    Raises:
        UsageError: an unknown device name, or a folder that cannot be written to.
        ScheduleFileError: the file is no profile.
    """
    if not is_roofline(path):
        check_writable(path)
        return Profile.load(path) if path.exists() else None
    name = str(path).removeprefix(_ROOFLINE)
    if name not in DEVICES:
        raise UsageError(f"there is no roofline for {name!r}; choose one of {', '.join(DEVICES)}")
    return DEVICES[name]


#: Cache folders that could not be written to; each is said once.
_unwritable: set[Path] = set()


def keep(found: Profile | Saved, path: Path) -> None:
    """Write a schedule or a plan of blocks into the cache, or add a profile to the one there.

    If that fails, warn; work goes on.
    """
    try:
        if isinstance(found, Profile):
            store.keep(found, path)
        else:
            found.save(path)
    except UsageError as error:
        if path.parent not in _unwritable:
            _unwritable.add(path.parent)
            warn_caller(
                f"costs and plans are not kept, and every process makes them anew: {error}, with $MONET_LIKE_CACHE"
            )
