"""Profiles: seconds and workspace bytes of every operator on one device, in a JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from ..errors import ScheduleFileError
from ..files import write_atomically
from .frames import frame
from .json_fields import read_as, read_headed
from .program import REFUSED, Cost

if TYPE_CHECKING:
    import pandas

FORMAT = "monet_like profile"
#: 2: a cost says on which day it was measured. Files of version 1 are read, too.
VERSION = 2


_AGAIN = "give another, or, if it was one, delete it to measure again"


@dataclass(frozen=True)
class Profile:
    """Costs of operators on one device, by `Task.cost`.

    Attributes:
        device: the device of the measurement, such as ``cpu: AMD EPYC, 2 threads`` or ``roofline: h100``.
        costs: seconds and workspace of every operator; `REFUSED` what does not run there, in the file without seconds.
        note: how, in words: at which batch, and whether scaled.
        versions: of the libraries that ran.
        settings: of PyTorch and the environment that they ran with (`monet_like.profile.settings`); empty: not known.
        cublas_bytes: size of cuBLAS's workspaces there (`monet_like.profile.cublas`); 0 in files that do not say.
        scaled: operators whose costs were measured at a smaller batch: times hold, workspaces are a guess.
        days: when each operator was measured, as ``2026-11-25``; none for what was estimated, or is from an old file.
    """

    device: str
    costs: Mapping[str, Cost]
    note: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    cublas_bytes: int = 0
    days: Mapping[str, str] = field(default_factory=dict)
    scaled: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        note = f", {self.note.partition(' (')[0]}" if self.note else ""
        return f"Profile({len(self.costs)} operators on {self.device}{note})"

    def to_frame(self) -> pandas.DataFrame:
        """One row per operator: its name as `Task.cost`, seconds and workspace; ``seconds`` is inf if it does not run
        there.
        """
        rows = ((key, cost.seconds, cost.workspace_bytes) for key, cost in self.costs.items())
        return frame({"cost": "object", "seconds": "float64", "workspace_bytes": "int64"}, rows)

    def merged(self, older: Profile) -> Profile:
        """Add the costs that only an older profile has; an unlike one, of another device or other
        settings, adds none.
        """
        if (older.device, older.settings) != (self.device, self.settings):
            return self
        scaled = self.scaled | (older.scaled - self.costs.keys())
        return replace(self, costs={**older.costs, **self.costs}, days={**older.days, **self.days}, scaled=scaled)

    def measured_on(self, keys: Iterable[str]) -> str:
        """The day on which these operators were measured, or the first and the last; "" where no file says."""
        days = sorted({self.days[key] for key in keys if key in self.days})
        return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""

    def save(self, path: Path) -> None:
        """Write the file; an interrupted write leaves the old one."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        content["costs"] = {
            key: [None if cost == REFUSED else cost.seconds, cost.workspace_bytes, *self._day(key)]
            for key, cost in sorted(self.costs.items())
        }
        content["scaled"] = sorted(self.scaled & self.costs.keys())
        del content["days"]
        write_atomically(path, json.dumps(content, indent=0).encode())

    def _day(self, key: str) -> list[str]:
        return [self.days[key]] if key in self.days else []

    @staticmethod
    def load(path: Path) -> Profile:
        """Read a profile.

        Raises:
            ScheduleFileError: missing, not a profile, or of another version.
        """
        content = read_headed(path, "profile", FORMAT, (1, VERSION), _AGAIN)
        try:
            found = read_as(content, _Content)
            if extra := found.scaled - found.costs.keys():
                raise ValueError(f"scaled names {min(extra)[:40]!r}, which has no cost")
            costs = {key: entry.cost(key) for key, entry in found.costs.items()}
        except ValueError as error:
            raise ScheduleFileError(f"{path} is damaged ({error}); {_AGAIN}") from None
        days = {key: entry.day.isoformat() for key, entry in found.costs.items() if entry.day}
        names = ("device", "note", "versions", "settings", "cublas_bytes", "scaled")
        return Profile(costs=costs, days=days, **{name: getattr(found, name) for name in names})


_Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _Entry(Struct, array_like=True, forbid_unknown_fields=True):
    """An operator's cost in a file, and the day of its measurement; no seconds: it does not run there."""

    seconds: Annotated[float, Meta(ge=0)] | None
    workspace_bytes: _Bytes
    day: date | None = None

    def cost(self, key: str) -> Cost:
        """The cost of the operator ``key``."""
        if self.seconds is None and self.workspace_bytes:
            raise ValueError(f"{key[:40]!r} has a workspace and no seconds")
        return REFUSED if self.seconds is None else Cost(self.seconds, self.workspace_bytes)


class _Content(Struct):
    """A file's fields; those with a default are in none of the oldest files."""

    device: str
    costs: dict[str, _Entry]
    note: str
    versions: dict[str, str]
    settings: dict[str, str] = {}
    cublas_bytes: _Bytes = 0
    scaled: frozenset[str] = frozenset()
