"""Where the costs of operators come from: a device's datasheet rates, or a profile file that grows with what is measured."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from ..errors import ScheduleFileError, UsageError, warn_caller
from ..files import check_writable
from ..ir.profile_file import Profile
from ..profile.devices import DEVICES, DeviceLimits
from ..profile.store import keep, store_path

_ROOFLINE = "roofline:"


class Source(Protocol):
    """Known costs, and a place for what is measured."""

    @property
    def known(self) -> Profile | DeviceLimits | None:
        """Before anything is measured: costs of a profile, a device's rates, or None."""

    def save(self, profile: Profile) -> None:
        """Keep a profile for the next plan."""


@dataclass(frozen=True)
class Given:
    """Costs that are given, such as a device's rates; what is measured beside them is not kept."""

    known: Profile | DeviceLimits | None

    def save(self, profile: Profile) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Cached:
    """The profile of a device in the cache folder; all models share it.

    Attributes:
        path: of the file.
        known: its content; None if there is none yet, or a damaged one.
    """

    path: Path
    known: Profile | None

    @staticmethod
    def of(device: torch.device) -> Cached:
        """That of this device with its present settings."""
        path = store_path(device)
        known = None
        with contextlib.suppress(ScheduleFileError):
            known = Profile.load(path)
        return Cached(path, known)

    def save(self, profile: Profile) -> None:
        """Write the file, with what others have added meanwhile; where that fails, say so and go on."""
        with warns_where_not_kept(self.path):
            keep(replace(profile, note=""), self.path)


@dataclass(frozen=True)
class Filed:
    """A profile file that the user names, or ``roofline:DEVICE``.

    Attributes:
        path: of the file to read.
        known: its costs, or the device's rates; None if there is no file yet.
        extended: the file to write what is measured into.
        shared: it is the store of this device: notes on how one model was measured are not of all.
    """

    path: Path
    known: Profile | DeviceLimits | None
    extended: Path
    shared: bool = False

    @staticmethod
    def of(path: Path, extended: Path | None = None, *, shared: bool = False) -> Filed:
        """The source of this name.

        Args:
            extended: None: the file itself.

        Raises:
            UsageError, ScheduleFileError: as `read_costs`.
        """
        return Filed(path, read_costs(path), extended or path, shared)

    def save(self, profile: Profile) -> None:
        """Write a profile into the file, for the next command, with what others have added meanwhile."""
        keep(replace(profile, note="") if self.shared else profile, self.extended)

    @property
    def latest(self) -> Path:
        """The file that has the costs, as far as they are known: the one that was written, if there is one."""
        return self.extended if self.extended.exists() else self.path


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


@contextlib.contextmanager
def warns_where_not_kept(path: Path) -> Iterator[None]:
    """Around what writes into the cache: if that fails, a warning, and work goes on."""
    try:
        yield
    except UsageError as error:
        if path.parent not in _unwritable:
            _unwritable.add(path.parent)
            warn_caller(f"plans are not kept, and every process plans anew: {error}, with $MONET_LIKE_CACHE")
