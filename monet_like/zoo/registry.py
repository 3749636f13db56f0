"""The registry: which schedules there are, what each was made for and promises, and the sha256 of every file.

A JSON file beside the files with the schedules. Nothing of it is ever run, and no path in it leads out of its folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import MonetError, ScheduleFileError, UsageError
from ..files import read_bytes, shipped_folder, write_atomically
from ..ir.display import short_repr
from ..ir.frames import frame_of
from ..ir.json_fields import read_as, read_headed
from ..ir.schedule_file import FORMAT as SCHEDULE_FORMAT
from ..ir.schedule_file import ScheduleRecord
from . import model_file
from .rows import Listed, Refused, Rows, ZooFile, check_file, in_order, place, shorter

if TYPE_CHECKING:
    import pandas

FORMAT = "monet_like zoo"
#: 2: files hold all schedules of a model.
VERSION = 2
FILE_NAME = "registry.json"
PREFIX = "zoo:"
#: A folder with a registry and files to use instead of those that come with the package.
FOLDER_VARIABLE = "MONET_LIKE_ZOO"


@dataclass(frozen=True, repr=False)
class Registry:
    """All schedules of a folder, by model, budget and profile."""

    __repr__ = short_repr

    folder: Path
    schedules: tuple[Listed, ...] = ()
    refused: tuple[Refused, ...] = ()
    files: tuple[ZooFile, ...] = ()

    @property
    def rows(self) -> list[Listed | Refused]:
        """All that is known of any budget."""
        return [*self.schedules, *self.refused]

    def to_frame(self) -> pandas.DataFrame:
        """One row per schedule, by the fields of `Listed`: for what it is, and what it promises."""
        return frame_of(Listed, self.schedules)

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
                f"there is no zoo in {folder}: it has no {FILE_NAME}; give its folder as ${FOLDER_VARIABLE}, or make "
                "one with monet-like zoo build"
            )
        content = read_headed(path, "zoo registry", FORMAT, (VERSION,), "build the zoo again")
        try:
            rows = read_as(content, Rows)
            for file in rows.files:
                check_file(file)
            if lost := {listed.path for listed in rows.schedules} - {file.path for file in rows.files}:
                raise ValueError(f"it names no file {min(lost)!r}")
        except ValueError as error:
            raise ScheduleFileError(f"{path} is damaged ({error}); build the zoo again") from None
        return Registry(folder, rows.schedules, rows.refused, rows.files)

    def save(self) -> None:
        """Write the folder's registry, whole or not at all: a line for every file and schedule."""
        parts = [f'{{\n "format": {json.dumps(FORMAT)},\n "version": {VERSION}']
        for name in ("files", "schedules", "refused"):
            rows = ",\n".join(f"  {json.dumps(asdict(row))}" for row in getattr(self, name))
            parts.append(f' "{name}": [\n{rows}\n ]')
        write_atomically(self.folder / FILE_NAME, (",\n".join(parts) + "\n}\n").encode())

    def find(self, text: str, *, device: str = "", near: str = "") -> Listed:
        """The schedule that ``text`` names, with or without ``zoo:`` and ``@profile``.

        Args:
            device: without ``@profile``, only schedules captured as on such a device (``cpu``, ``cuda``) will do.
            near: the profile to prefer then.

        Raises:
            UsageError: there is none; says which there are, or which names are near.
        """
        name, at, profile = text.removeprefix(PREFIX).partition("@")
        same = [listed for listed in self.schedules if listed.name == name]
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
        return min(fitting, key=lambda listed: (listed.profile != near, place(listed)))

    def of_model(self, text: str) -> list[Listed]:
        """The schedules of a model, named as ``resnet50`` or ``resnet50_184``, with or without ``@profile``."""
        name, at, profile = text.removeprefix(PREFIX).partition("@")
        of_name = [listed for listed in self.schedules if name in shorter(listed.name)]
        return [listed for listed in of_name if not at or listed.profile == profile]

    def _unknown(self, name: str) -> str:
        refused = [r for r in self.refused if r.name == name]
        if refused:
            least = max((r.smallest_bytes or 0) for r in refused)
            hint = f"; {least / 2**30:.2f} GB would do" if least else ""
            return (
                f"no schedule {name} in the zoo: "
                f"{'proven not to exist' if refused[0].proven else 'none was found'}{hint}"
            )
        names = sorted({listed.name for listed in self.schedules})
        near = difflib.get_close_matches(name, names, 4, 0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "monet-like zoo list shows what there is"
        return f"the zoo has no {name!r}; {hint}"

    def file_of(self, listed: Listed) -> ZooFile:
        """The file that has a schedule."""
        return next(file for file in self.files if file.path == listed.path)

    def check(self, file: ZooFile) -> Path:
        """Where a file is, if it is here and is what the registry says.

        Raises:
            ScheduleFileError: missing, or with another content.
        """
        path = self.folder / file.path
        if _described(self.folder, file.path) != file:
            raise ScheduleFileError(
                f"{path} is not the file that the registry names ({file.bytes} bytes, sha256 {file.sha256[:12]}…); "
                "get it again with monet-like zoo download, or build the zoo again"
            )
        return path

    def record(self, listed: Listed) -> ScheduleRecord:
        """A schedule, from its file, which is checked.

        Raises:
            ScheduleFileError: the file is missing, or with another content.
        """
        path = self.check(self.file_of(listed))
        records = read_file(path)
        found = records.get(listed.full_name, records.get(""))
        if found is None:
            raise ScheduleFileError(f"{path} has no schedule {listed.full_name}; build the zoo again")
        return found

    def with_schedule(self, listed: Listed, record: ScheduleRecord | None = None) -> Registry:
        """The registry with one more schedule, instead of what it had for that name and profile.

        Args:
            record: to be written into the schedule's file, which others may be in, too; None: the file is there.
        """
        rest = [other for other in self.schedules if other.full_name != listed.full_name]
        refused = tuple(other for other in self.refused if other.full_name != listed.full_name)
        changed = dataclasses.replace(self, schedules=tuple(sorted([*rest, listed], key=in_order)), refused=refused)
        return changed._rewritten({listed.path}, {} if record is None else {listed.full_name: record})

    def with_refused(self, refused: Refused) -> Registry:
        """The registry with one more budget that cannot be met."""
        rest = self.without(row for row in self.rows if row.full_name == refused.full_name)
        rows = sorted([*rest.refused, refused], key=lambda row: (row.name, row.profile))
        return dataclasses.replace(rest, refused=tuple(rows))

    def without(self, rows: Iterable[Listed | Refused]) -> Registry:
        """The registry without some of its rows, and files without these schedules; files that become empty are
        removed.
        """
        gone = list(rows)
        changed = dataclasses.replace(
            self,
            schedules=tuple(listed for listed in self.schedules if listed not in gone),
            refused=tuple(refused for refused in self.refused if refused not in gone),
        )
        return changed._rewritten({row.path for row in gone if isinstance(row, Listed)}, {})

    def _rewritten(self, paths: Collection[str], new: Mapping[str, ScheduleRecord]) -> Registry:
        """Write files anew with the schedules that the registry has in them, and drop those that are in no file.

        Args:
            new: schedules that are not in their files yet, by full name.
        """
        files = {file.path: file for file in self.files}
        lost: list[Listed] = []
        for path in paths:
            wanted = [listed for listed in self.schedules if listed.path == path]
            if not _holds_one(self.folder / path):
                known = self._readable(files.get(path)) | dict(new)
                lost += [listed for listed in wanted if listed.full_name not in known]
                records = {listed.full_name: known[listed.full_name] for listed in wanted if listed.full_name in known}
                if records:
                    model_file.save(self.folder / path, records)
                wanted = [listed for listed in wanted if listed not in lost]
            files.pop(path, None)
            if wanted:
                files[path] = _described(self.folder, path)
            else:
                (self.folder / path).unlink(missing_ok=True)
        return dataclasses.replace(
            self,
            schedules=tuple(listed for listed in self.schedules if listed not in lost),
            files=tuple(sorted(files.values(), key=lambda file: file.path)),
        )

    def _readable(self, file: ZooFile | None) -> dict[str, ScheduleRecord]:
        """The schedules of a file; none, if it is not what the registry says."""
        try:
            return {} if file is None else read_file(self.check(file))
        except ScheduleFileError:
            return {}


def read_file(path: Path) -> dict[str, ScheduleRecord]:
    """All schedules of a file, by full name; one that holds a single schedule has it under "".

    Raises:
        ScheduleFileError: missing or damaged.
    """
    return {"": ScheduleRecord.load(path)} if _holds_one(path) else model_file.load(path)


def _holds_one(path: Path) -> bool:
    """Whether a file holds one schedule rather than all of a model; False where it is no such file."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_bytes())
        return isinstance(content, dict) and content.get("format") == SCHEDULE_FORMAT
    return False


def _described(folder: Path, path: str) -> ZooFile:
    if not (folder / path).exists():
        raise ScheduleFileError(
            f"there is no {folder / path}; get it with monet-like zoo download, or build the zoo again"
        )
    data = read_bytes(folder / path, "zoo")
    return ZooFile(path, hashlib.sha256(data).hexdigest(), len(data))


def zoo_folder() -> Path:
    """Where the zoo is: ``$MONET_LIKE_ZOO``, ``solutions/`` of a checkout, or what was installed with the package.

    Raises:
        UsageError: nowhere.
    """
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given)
    shipped = shipped_folder("solutions")
    if shipped is None:
        raise UsageError(f"this installation has no zoo; give its folder as ${FOLDER_VARIABLE}")
    return shipped


def is_zoo_file(path: Path) -> bool:
    """Whether ``path`` is a file of a zoo: a registry, or a schedule's or a profile's file that one names."""
    path = Path(os.path.realpath(path))
    for folder in path.parents:
        if not (folder / FILE_NAME).is_file():
            continue
        with contextlib.suppress(MonetError):  # a file of that name may be something else
            registry = Registry.load(folder)
            names = {FILE_NAME, *(file.path for file in registry.files)}
            names.update(listed.profile_source for listed in registry.schedules)
            if path.relative_to(folder).as_posix() in names:
                return True
    return False


def check_not_registered(path: Path) -> None:
    """Check that writing ``path`` changes nothing that a zoo's registry names.

    Raises:
        UsageError: it would.
    """
    if is_zoo_file(path):
        raise UsageError(
            f"{path} belongs to the zoo, whose registry names it; give another name with --out, or run in another "
            "folder"
        )
