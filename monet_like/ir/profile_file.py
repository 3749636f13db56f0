"""Profiles: seconds and workspace bytes of every operator on one device, in a JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ScheduleFileError
from ..files import read_text, write_atomically
from .frames import frame
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
        text = read_text(path, "profile")
        try:
            content: Any = json.loads(text)
        except (ValueError, RecursionError) as error:  # the latter: nested too deeply
            raise ScheduleFileError(f"{path} is not a profile (no JSON: {error}); {_AGAIN}") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ScheduleFileError(f"{path} is not a profile of monet_like; {_AGAIN}")
        version = content.get("version")
        if type(version) is not int or version not in (1, VERSION):
            raise ScheduleFileError(
                f"{path} is a profile of format version {version}, this package reads 1 and {VERSION}; {_AGAIN}"
            )
        try:
            costs = {key: _cost(key, *entry[:2]) for key, entry in content["costs"].items()}
            days = {key: _day(*entry[2:]) for key, entry in content["costs"].items() if len(entry) > 2}
            device, note, versions = content["device"], content["note"], dict(content["versions"])
            settings = dict(content.get("settings", {}))
            if not all(isinstance(text, str) for text in (device, note, *versions.values(), *settings.values())):
                raise TypeError("device, note, versions and settings must be text")
            cublas_bytes = content.get("cublas_bytes", 0)
            if type(cublas_bytes) is not int or not 0 <= cublas_bytes < 2**63:
                raise ValueError(f"cublas_bytes is no number of bytes: {str(cublas_bytes)[:40]}")
            return Profile(device, costs, note, versions, settings, cublas_bytes, days, _scaled(content))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ScheduleFileError(f"{path} is damaged ({error!r}); {_AGAIN}") from None


def _cost(key: str, seconds: Any, workspace_bytes: Any) -> Cost:
    """A cost that can be added up: finite, not negative, and of the right types (JSON knows NaN and true)."""
    if seconds is None and type(workspace_bytes) is int and workspace_bytes == 0:
        return REFUSED
    if type(seconds) not in (int, float) or type(workspace_bytes) is not int:
        raise TypeError(f"the cost of {key} is not a number of seconds and a whole number of bytes")
    if not 0 <= seconds < float("inf") or not 0 <= workspace_bytes < 2**63:
        raise ValueError(f"the cost of {key} is {seconds} s, {workspace_bytes} bytes")
    return Cost(float(seconds), workspace_bytes)


def _scaled(content: Mapping[str, Any]) -> frozenset[str]:
    """Keys of costs, without repetition; none in files of before."""
    found = content.get("scaled", [])
    if not isinstance(found, list) or not all(isinstance(key, str) and key in content["costs"] for key in found):
        raise ValueError(f"scaled is no list of operators: {str(found)[:40]}")
    return frozenset(found)


def _day(text: Any) -> str:
    """A day such as ``2026-11-25``."""
    return date.fromisoformat(text).isoformat()
