"""Files of the zoo: one readable JSON file holds all schedules of a model at one batch.

A line for every schedule, with the fields of a schedule file. Fields that all of them share stand once, above. Nothing
in such a file can run: it is read as JSON, and every schedule then as a schedule file is (`ScheduleRecord.of_content`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ScheduleFileError
from ..files import write_atomically
from ..ir.json_fields import read_headed
from ..ir.schedule_file import ScheduleRecord

FORMAT = "monet_like zoo model"
VERSION = 1
#: How file names end.
SUFFIX = ".json"
#: Fields that stand once where all schedules have the same.
_SHARED = (
    *("format", "version", "model", "inputs", "mode", "ablation", "fingerprint", "made_last", "versions", "autocast"),
    *("layout", "optimizer", "optimizer_bytes", "cublas_bytes", "solver", "status", "bound_seconds", "gap"),
    *("bound_kind", "solve_seconds"),
)


def save(path: Path, records: Mapping[str, ScheduleRecord]) -> None:
    """Write a file with schedules by their full names (``resnet50_184_10.00@a100``), whole or not at all."""
    contents = {name: record.content() for name, record in records.items()}
    first = next(iter(contents.values()), {})
    shared = {f: first[f] for f in _SHARED if f in first and all(c[f] == first[f] for c in contents.values())}
    own = {
        name: {f: content[f] for f in sorted(content.keys() - shared, key=_place)} for name, content in contents.items()
    }
    lines = [
        "{",
        f' "format": {json.dumps(FORMAT)},',
        f' "version": {VERSION},',
        ' "shared": {',
        _members(shared, "  "),
        " },",
        ' "schedules": {',
        _members(own, "  "),
        " }",
        "}\n",
    ]
    write_atomically(path, "\n".join(lines).encode())


def _place(field: str) -> tuple[bool, str]:
    """Order of fields: fields for people first, lists of task numbers last."""
    return field in ("forward", "again", "ways"), field


def _members(values: Mapping[str, Any], indent: str) -> str:
    """Write a JSON object with one line for each member."""
    return ",\n".join(f"{indent}{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())


def load(path: Path) -> dict[str, ScheduleRecord]:
    """Read a file's schedules, by their full names.

    Raises:
        ScheduleFileError: missing, of another format or version, or damaged.
    """
    content = read_headed(path, "zoo file", FORMAT, (VERSION,), "build the zoo again")
    shared, schedules = content.get("shared"), content.get("schedules")
    if not isinstance(shared, dict) or not isinstance(schedules, dict):
        raise ScheduleFileError(f"{path} is damaged: it has no schedules; build the zoo again")
    found = {}
    for name, own in schedules.items():
        if not isinstance(own, dict):
            raise ScheduleFileError(f"{path} is damaged: {name} is no schedule; build the zoo again")
        found[name] = ScheduleRecord.of_content({**shared, **own}, f"{path}, {name},")
    return found
