"""What the registry of the zoo knows: files, schedules, and budgets that cannot be met."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .catalogue import PROFILES


@dataclass(frozen=True)
class ZooFile:
    """A file with schedules.

    Attributes:
        path: within the registry's folder, with ``/``.
        sha256, bytes: of its content.
    """

    path: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Listed:
    """A schedule of the zoo.

    Attributes:
        name: model, batch and budget, such as ``resnet50_184_10.00``.
        profile: the target of the plan: a device of `roofline.DEVICES`, or a machine.
        kind: ``roofline``: datasheet rates; ``measured``: operators ran on that device.
        profile_source: ``roofline:a100 version 1``, or a profile's file within the folder.
        device: ``cuda`` or ``cpu``, for which the program was captured.
        captured_there: captured on such a device; else as on it, without one.
        path: of the file that has it, as `ZooFile.path`.
        model, batch, mode: as the command line takes them.
        inputs: dtype and shape of every input.
        budget_bytes, peak_bytes, plain_peak_bytes: of the step; the peaks predicted.
        seconds, plain_seconds: predicted, from the profile.
        bound_seconds, gap, bound_kind: the proven bound; None: there is none.
        solver: the planner: ``counted`` (the same schedule again at every build), or a solver's name.
        solve_seconds: how long that took.
        torch: the version it was captured with.
        fingerprint: of the program.
    """

    name: str
    profile: str
    kind: str
    profile_source: str
    device: str
    captured_there: bool
    path: str
    model: str
    batch: int
    inputs: tuple[str, ...]
    mode: str
    budget_bytes: int
    peak_bytes: int
    seconds: float
    plain_peak_bytes: int
    plain_seconds: float
    bound_seconds: float | None
    gap: float | None
    bound_kind: str
    solver: str
    solve_seconds: float
    torch: str
    fingerprint: str

    @property
    def full_name(self) -> str:
        """``resnet50_184_10.00@a100``."""
        return f"{self.name}@{self.profile}"

    @property
    def overhead(self) -> float:
        """Time beyond plain PyTorch's, as a share of it; negative: less."""
        return self.seconds / self.plain_seconds - 1 if self.plain_seconds else 0.0


@dataclass(frozen=True)
class Refused:
    """A budget for which there is no schedule.

    Attributes:
        proven: none exists; else none was found.
        smallest_bytes: a budget for which one is known, or None.
        reason: in words.
        fingerprint: of the program.
    """

    name: str
    profile: str
    budget_bytes: int
    plain_peak_bytes: int
    proven: bool
    smallest_bytes: int | None
    reason: str
    fingerprint: str

    @property
    def full_name(self) -> str:
        """As `Listed.full_name`."""
        return f"{self.name}@{self.profile}"


def place(row: Listed | Refused) -> tuple[bool, int, str]:
    """Measured before estimated, then as the catalogue has the profiles."""
    known = PROFILES.index(row.profile) if row.profile in PROFILES else len(PROFILES)
    return not (isinstance(row, Listed) and row.kind == "measured"), known, row.profile


def shorter(name: str) -> tuple[str, str]:
    """``resnet50_184_10.00`` → ``resnet50_184`` and ``resnet50``."""
    with_batch = name.rpartition("_")[0]
    return with_batch, with_batch.rpartition("_")[0]


def in_order(listed: Listed) -> tuple[Any, ...]:
    return listed.model, listed.batch, -listed.budget_bytes, place(listed)


@dataclass(frozen=True)
class Rows:
    """The content of the file."""

    files: tuple[ZooFile, ...]
    schedules: tuple[Listed, ...]
    refused: tuple[Refused, ...]


def check_file(file: ZooFile) -> None:
    if not all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", part) for part in file.path.split("/")):
        raise ValueError(f"path {file.path!r} is not within the folder")
    if not re.fullmatch(r"[0-9a-f]{64}", file.sha256):
        raise ValueError(f"sha256 {file.sha256!r} is none")
