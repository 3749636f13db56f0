"""Fields of dataclasses in files: written under a header, and read with every field checked by its annotation."""

from __future__ import annotations

import hashlib
import json
import math
import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..errors import ScheduleFileError
from ..files import read_text, write_atomically

_Read = TypeVar("_Read")


def headed(record: Any, form: str, version: int, *, without: str) -> dict[str, Any]:
    """The fields of a dataclass as the head of a file's content: format, version, and all but the field ``without``."""
    fields = {name: value for name, value in vars(record).items() if name != without}
    return {"format": form, "version": version, **fields}


def write_lines(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file's content as JSON, one line per field, whole or not at all."""
    members = ",\n".join(f"{json.dumps(name)}: {json.dumps(value, default=_plain)}" for name, value in content.items())
    write_atomically(path, f"{{\n{members}\n}}\n".encode())


def write_with_digest(path: Path, content: Mapping[str, Any]) -> None:
    """As `write_lines`, with a digest of the content, by which `read_with_digest` notices a changed number."""
    write_lines(path, {**content, "sha256": digest_of_fields(content)})


def _plain(number: Any) -> Any:
    """A number of NumPy's, such as a solver gives, as Python's."""
    if isinstance(number, numbers.Real):
        return int(number) if isinstance(number, numbers.Integral) else float(number)
    raise TypeError(f"{type(number).__name__} is not plain data")


def digest_of_fields(content: Mapping[str, Any]) -> str:
    """Of a file's content, so that a changed number is noticed."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=_plain).encode()).hexdigest()


def read_headed(path: Path, what: str, form: str, versions: Sequence[int], advice: str) -> dict[str, Any]:
    """The content of a JSON file, whose header is checked.

    Args:
        what: the kind of file, for people, such as ``profile``.
        form, versions: of the header: the format's name, and which versions of it can be read.
        advice: what to do with another file.

    Raises:
        ScheduleFileError: missing, no JSON, or of another format or version.
    """
    try:
        content: Any = json.loads(read_text(path, what))
    except (ValueError, RecursionError) as error:  # the latter: nested too deeply
        raise ScheduleFileError(f"{path} is not a {what} (no JSON: {error}); {advice}") from None
    if not isinstance(content, dict) or content.get("format") != form:
        raise ScheduleFileError(f"{path} is not a {what} of monet_like; {advice}")
    version, known = content.get("version"), " and ".join(map(str, versions))
    if type(version) is not int or version not in versions:
        raise ScheduleFileError(f"{path} is a {what} of format version {version}, this package reads {known}; {advice}")
    return content


def read_file_as(path: Path, kind: type[_Read], what: str, form: str, version: int, advice: str) -> _Read:
    """A JSON file as what ``kind`` says; arguments as of `read_headed`.

    Raises:
        ScheduleFileError: it is unreadable or no such file.
    """
    content = read_headed(path, what, form, (version,), advice)
    try:
        return read_as(content, kind)
    except ValueError as error:
        raise ScheduleFileError(f"{path} is no {what} of monet_like: {error}; {advice}") from error


def read_with_digest(path: Path, kind: type[_Read], what: str, form: str, version: int) -> _Read:
    """What `write_with_digest` has written; arguments as of `read_headed`.

    Raises:
        ScheduleFileError: missing, damaged, of another format or version.
    """
    content = read_headed(path, what, form, (version,), "delete it")
    try:
        if content.pop("sha256", None) != digest_of_fields(content):
            raise ValueError("its content has another digest than it says")
        return read_as(content, kind)
    except ValueError as error:
        raise ScheduleFileError(f"{path} is damaged ({error}); delete it") from None


def read_as(content: Any, kind: type[_Read]) -> _Read:
    """Builtins that were read from a file as what ``kind`` says, such as a dataclass; other fields than its own are
    left out.

    Lists become tuples, and a whole number is a float, too. Errors name the field, and do not show the value, which may
    be huge.

    Raises:
        ValueError: a field is missing or has another type; a whole number is negative or has more than 300 digits;
            another number is not finite; a text cannot be printed.
    """
    found = msgspec.convert(content, kind)
    _check_shown(msgspec.to_builtins(found, str_keys=True), "$")
    return found


def _check_shown(value: Any, path: str) -> None:
    """Refuse what could not be shown or counted, in builtins at that path."""
    wrong = ""
    if isinstance(value, dict):
        for name, part in value.items():
            _check_shown(name, f"{path}[...]")
            _check_shown(part, f"{path}.{str(name)[:40]}")
    elif isinstance(value, (list, tuple)):
        for place, part in enumerate(value):
            _check_shown(part, f"{path}[{place}]")
    elif isinstance(value, str):
        wrong = "" if value.isprintable() else "text that cannot be printed"
    elif isinstance(value, int) and value.bit_length() > 1000:  # more than a float can hold
        wrong = "a number of more than 300 digits"
    elif (isinstance(value, int) and value < 0) or (isinstance(value, float) and not math.isfinite(value)):
        wrong = str(value)
    if wrong:
        raise ValueError(f"Expected a number or text that can be used, got {wrong} - at `{path}`")
