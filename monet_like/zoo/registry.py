"""The registry: which schedules there are, what each was made for and promises, and the sha256 of its file.

A JSON file beside the schedule files. Nothing of it is ever run, and no path in it leads out of its folder.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import ScheduleFileError, UsageError
from ..files import read_bytes, read_text, shipped_folder, write_atomically
from .catalogue import PROFILES

FORMAT = "monet_like zoo"
VERSION = 1
FILE_NAME = "registry.json"
PREFIX = "zoo:"
#: A folder with a registry and files to use instead of those that come with the package.
FOLDER_VARIABLE = "MONET_LIKE_ZOO"


@dataclass(frozen=True)
class Listed:
    """A schedule of the zoo.

    Attributes:
        name: model, batch and budget, such as ``resnet50_184_10.00``.
        profile: what it was planned for: a device of `roofline.DEVICES`, or a machine.
        kind: ``roofline``: datasheet rates; ``measured``: operators ran on that device.
        profile_source: ``roofline:a100 version 1``, or a profile's file within the folder.
        device: ``cuda`` or ``cpu``: what the program was captured as.
        captured_there: captured on such a device; else as on it, without one.
        path: of the file within the registry's folder, with ``/``.
        sha256, bytes: of the file.
        model, batch, mode: what it is for, as the command line takes them.
        inputs: dtype and shape of every input.
        budget_bytes, peak_bytes, plain_peak_bytes: of the step; the peaks predicted.
        seconds, plain_seconds: predicted, from the profile.
        bound_seconds, gap, bound_kind: what is proven; None: nothing.
        solver: what was asked to plan: ``counted`` (the same schedule again at every build), or a solver's name.
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
    sha256: str
    bytes: int
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


@dataclass(frozen=True)
class Registry:
    """All schedules of a folder, in the order of the catalogue."""

    folder: Path
    files: tuple[Listed, ...] = ()
    refused: tuple[Refused, ...] = ()

    @staticmethod
    def load(folder: Path) -> Registry:
        """Read a folder's registry.

        Raises:
            UsageError: there is none.
            ScheduleFileError: damaged, or of another version.
        """
        path = folder / FILE_NAME
        if not path.is_file():
            raise UsageError(
                f"there is no zoo in {folder}: it has no {FILE_NAME}; give its folder as ${FOLDER_VARIABLE}, or make one "
                "with monet-like zoo build"
            )
        text = read_text(path, "registry")
        try:
            content: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ScheduleFileError(f"{path} is not a registry (no JSON: {error})") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ScheduleFileError(f"{path} is not a registry of monet_like's zoo")
        if content.get("version") != VERSION:
            raise ScheduleFileError(
                f"{path} is a registry of version {content.get('version')!r}, this package reads {VERSION}"
            )
        try:
            files = tuple(_listed(row) for row in content["files"])
            refused = tuple(_row(Refused, row) for row in content["refused"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ScheduleFileError(f"{path} is damaged ({error}); build the zoo again") from None
        return Registry(folder, files, refused)

    def save(self) -> None:
        """Write the folder's registry, whole or not at all."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "files": [asdict(listed) for listed in self.files],
            "refused": [asdict(refused) for refused in self.refused],
        }
        write_atomically(self.folder / FILE_NAME, (json.dumps(content, indent=1) + "\n").encode())

    def find(self, text: str, *, device: str = "", near: str = "") -> Listed:
        """The schedule that ``text`` names, with or without ``zoo:`` and ``@profile``.

        Args:
            device: without ``@profile``, only schedules captured as on such a device (``cpu``, ``cuda``) will do.
            near: the profile to prefer then.

        Raises:
            UsageError: there is none; says which there are, or which names are near.
        """
        name, at, profile = text.removeprefix(PREFIX).partition("@")
        same = [listed for listed in self.files if listed.name == name]
        if not same:
            raise UsageError(self._unknown(name))
        if at:
            found = [listed for listed in same if listed.profile == profile]
            if not found:
                there = ", ".join(listed.profile for listed in same)
                raise UsageError(f"the zoo has {name} not for {profile!r}, but for {there}")
            return found[0]
        fitting = [listed for listed in same if device in ("", listed.device)]
        if not fitting:
            there = ", ".join(f"@{listed.profile}" for listed in same)
            raise UsageError(
                f"the zoo has {name} for {there}, all captured as on {same[0].device}, and the model is on {device}; "
                f'move the model, or plan for {device}: monet-like solve "{same[0].model}" {same[0].batch} '
                f"{same[0].budget_bytes / 2**30:.2f} {same[0].mode}"
            )
        return min(fitting, key=lambda listed: (listed.profile != near, _place(listed)))

    def _unknown(self, name: str) -> str:
        refused = [r for r in self.refused if r.name == name]
        if refused:
            least = max((r.smallest_bytes or 0) for r in refused)
            hint = f"; {least / 2**30:.2f} GB would do" if least else ""
            return f"no schedule {name} in the zoo: {'proven not to exist' if refused[0].proven else 'none was found'}{hint}"
        names = sorted({listed.name for listed in self.files})
        near = difflib.get_close_matches(name, names, 4, 0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "monet-like zoo list shows what there is"
        return f"the zoo has no {name!r}; {hint}"

    def check(self, listed: Listed) -> Path:
        """The file of a schedule, if it is here and is what the registry says.

        Raises:
            ScheduleFileError: missing, or with another content.
        """
        path = self.folder / listed.path
        data = read_bytes(path, "schedule")
        if len(data) != listed.bytes or hashlib.sha256(data).hexdigest() != listed.sha256:
            raise ScheduleFileError(
                f"{path} is not the file that the registry names ({listed.bytes} bytes, sha256 {listed.sha256[:12]}…); "
                "get it again with monet-like zoo download, or build the zoo again"
            )
        return path

    def with_file(self, listed: Listed) -> Registry:
        """The registry with one more file, instead of what it had for that name and profile."""
        rest = [f for f in self.files if f.full_name != listed.full_name]
        refused = tuple(r for r in self.refused if (r.name, r.profile) != (listed.name, listed.profile))
        return dataclasses.replace(self, files=tuple(sorted([*rest, listed], key=_order)), refused=refused)

    def with_refused(self, refused: Refused) -> Registry:
        """The registry with one more budget that cannot be met."""
        rest = [r for r in self.refused if (r.name, r.profile) != (refused.name, refused.profile)]
        files = tuple(f for f in self.files if (f.name, f.profile) != (refused.name, refused.profile))
        rows = sorted([*rest, refused], key=lambda r: (r.name, r.profile))
        return dataclasses.replace(self, files=files, refused=tuple(rows))

    def without(self, rows: Collection[Listed | Refused]) -> Registry:
        """The registry without some of its rows; their files stay where they are."""
        files = tuple(f for f in self.files if f not in rows)
        return dataclasses.replace(self, files=files, refused=tuple(r for r in self.refused if r not in rows))


def zoo_folder() -> Path:
    """Where the zoo is: ``$MONET_LIKE_ZOO``, ``solutions/`` of a checkout, or what was installed with the package.

    Raises:
        UsageError: nowhere.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        return Path(given)
    shipped = shipped_folder("solutions")
    if shipped is None:
        raise UsageError(f"this installation has no zoo; give its folder as ${FOLDER_VARIABLE}")
    return shipped


def _place(listed: Listed) -> tuple[int, int]:
    """Measured before estimated, then as the catalogue has the profiles."""
    return listed.kind != "measured", PROFILES.index(listed.profile) if listed.profile in PROFILES else len(PROFILES)


def _order(listed: Listed) -> tuple[Any, ...]:
    return listed.model, listed.batch, -listed.budget_bytes, _place(listed), listed.profile


def _row(kind: Any, row: Any) -> Any:
    """A row of the file with just the fields of ``kind``, of their types."""
    values = {}
    for field in dataclasses.fields(kind):
        value = row[field.name]
        allowed: dict[str, tuple[type, ...]] = {
            "str": (str,),
            "int": (int,),
            "bool": (bool,),
            "float": (float, int),
            "float | None": (float, int, type(None)),
            "int | None": (int, type(None)),
            "tuple[str, ...]": (list,),
        }
        if type(value) not in allowed[str(field.type)]:
            raise TypeError(f"{field.name} is a {type(value).__name__}, not {field.type}")
        if isinstance(value, list):
            value = tuple(_text(item) for item in value)
        values[field.name] = value
    return kind(**values)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a list of texts holds a {type(value).__name__}")
    return value


def _listed(row: Any) -> Listed:
    listed: Listed = _row(Listed, row)
    parts: Sequence[str] = listed.path.split("/")
    if not all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*", part) for part in parts):
        raise ValueError(f"path {listed.path!r} is not within the folder")
    if not re.fullmatch(r"[0-9a-f]{64}", listed.sha256):
        raise ValueError(f"sha256 {listed.sha256!r} is none")
    return listed
