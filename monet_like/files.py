"""Files on disk: written whole or not at all, and read without ever running what they say."""

from __future__ import annotations

import contextlib
import io
import numbers
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

from .errors import ScheduleFileError, UsageError

#: No schedule or profile is near this; a larger file is not read into memory.
LARGEST_BYTES = 256 * 2**20


def cache_folder() -> Path:
    """Where plans and profiles are kept: ``$MONET_LIKE_CACHE``, or ``~/.cache/monet_like``."""
    return Path(os.environ.get("MONET_LIKE_CACHE") or Path.home() / ".cache" / "monet_like")


def shipped_folder(name: str) -> Path | None:
    """``csrc`` or ``solutions``: at the root of a checkout, inside an installed package; None where it is not."""
    package = Path(__file__).resolve().parent
    in_checkout = (package.parent / "pyproject.toml").exists()  # else the parent is site-packages
    folder = (package.parent if in_checkout else package) / name
    return folder if folder.is_dir() else None


def check_writable(path: Path) -> None:
    """Fail early, before hours of work, if ``path`` could not be written.

    Raises:
        UsageError: names the directory and the reason.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):  # as `write_atomically` will
            pass
        is_directory = path.is_dir()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another place") from None
    if is_directory:
        raise UsageError(f"cannot write {path}: it is a directory; give the name of a file")


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary file beside ``path``, then rename: readers see the old file or the new one.

    Raises:
        UsageError: it cannot be written, the disk is full.
    """
    check_writable(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        if isinstance(error, OSError):
            raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
        raise


def read_bytes(path: Path, what: str) -> bytes:
    """The content of a file that should be a ``what``.

    Raises:
        ScheduleFileError: missing, unreadable, or far too large.
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # a device has no end
            raise ScheduleFileError(f"{path} is no regular file; give the name of a {what} file")
        if path.stat().st_size > LARGEST_BYTES:
            raise ScheduleFileError(f"{path} is too large to be a {what} ({path.stat().st_size} bytes)")
        return path.read_bytes()
    except FileNotFoundError:
        raise ScheduleFileError(f"there is no {what} file {path}; make one with solve.py, or give another") from None
    except OSError as error:
        raise ScheduleFileError(f"cannot read {path}: {error.strerror or error}") from None


def read_text(path: Path, what: str) -> str:
    """As `read_bytes`, decoded."""
    try:
        return read_bytes(path, what).decode()
    except UnicodeDecodeError:
        raise ScheduleFileError(f"{path} is not a {what}: it is not text") from None


class _PlainUnpickler(pickle.Unpickler):
    """Reads builtins only: any reference to a class or function, by whatever opcode, is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise ScheduleFileError(f"it names {module}.{name}, and a schedule holds plain data only")

    def persistent_load(self, pid: Any) -> Any:
        raise ScheduleFileError("it holds a persistent reference, and a schedule holds plain data only")


def dump_plain(content: Any) -> bytes:
    """A pickle of plain builtins (protocol 4), which `load_plain` will read.

    Raises:
        TypeError: ``content`` holds something that is neither plain nor stands for something plain.
    """
    return pickle.dumps(_plain(content), protocol=4)


def _plain(content: Any) -> Any:
    """Builtins only: PyTorch's version (a str) and numpy's numbers are pickled with their classes."""
    if content is None or isinstance(content, bool):
        return content
    if isinstance(content, dict):
        return {_plain(key): _plain(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    if isinstance(content, str):
        return str(content)
    if isinstance(content, numbers.Integral):
        return int(content)
    if isinstance(content, numbers.Real):
        return float(content)
    raise TypeError(f"{type(content).__name__} is not plain data")


def load_plain(data: bytes, path: Path) -> Any:
    """The content of a pickle that holds nothing but dicts, lists, tuples, strings, numbers, booleans and None.

    Raises:
        ScheduleFileError: truncated, no pickle, or holding anything else; nothing in the file is ever called.
    """
    import pickletools

    refused = {
        "GLOBAL",
        "STACK_GLOBAL",
        "INST",
        "OBJ",
        "NEWOBJ",
        "NEWOBJ_EX",
        "REDUCE",
        "BUILD",
        "EXT1",
        "EXT2",
        "EXT4",
    }
    try:
        for opcode, argument, _ in pickletools.genops(data):  # before anything is built
            if opcode.name in refused or "PERSID" in opcode.name:
                raise ScheduleFileError(
                    f"{path} is refused: a schedule holds plain data only, and this file has {opcode.name} {argument or ''}".strip()
                )
            if "PUT" in opcode.name and int(argument or 0) > len(data):  # pickle would allocate a table up to it
                raise ScheduleFileError(f"{path} is refused: it has the memo index {argument}")
        return _PlainUnpickler(io.BytesIO(data)).load()
    except ScheduleFileError:
        raise
    except Exception as error:  # pickletools and pickle raise whatever the bytes provoke
        raise ScheduleFileError(f"{path} is not a schedule file, or is cut short: {error}") from None
