"""Files on disk: written whole or not at all, and read without ever running what they say."""

from __future__ import annotations

import contextlib
import errno
import io
import numbers
import os
import pickle
import stat
import tempfile
from pathlib import Path
from typing import Any

from .errors import ScheduleFileError, UsageError
from .interrupts import put_off

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
        kind = _kind(path)
        if _is_stream(kind):
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        elif kind in (None, stat.S_IFREG):
            target = _followed(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            with put_off(), tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
                pass  # as `write_atomically` will
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another place") from None
    if kind not in (None, stat.S_IFREG) and not _is_stream(kind):
        what = {stat.S_IFDIR: "a directory", stat.S_IFSOCK: "a socket"}.get(kind or 0, "a device with blocks")
        raise UsageError(f"cannot write {path}: it is {what}; give the name of a file")


def _kind(path: Path) -> int | None:
    """What kind of thing a path leads to (`stat.S_IFREG` and so on); None: nothing is there."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return None


def _is_stream(kind: int | None) -> bool:
    """Whether it takes what is written as it comes, such as ``/dev/null`` or a pipe; to replace it would destroy it."""
    return kind in (stat.S_IFCHR, stat.S_IFIFO)


def _followed(path: Path) -> Path:
    """The file itself, where ``path`` is a link to it, which stays."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary file beside ``path``, then rename: readers see the old file or the new one.

    A link is followed. A character device or a pipe is written to as it is. Ctrl-C waits until the file is whole.

    Raises:
        UsageError: it cannot be written, the disk is full, nobody reads the pipe.
    """
    check_writable(path)
    with put_off():
        if _is_stream(_kind(path)):
            _write_to_stream(path, content)
        else:
            _replace(_followed(path), content)


def _write_to_stream(path: Path, content: bytes) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # a pipe that nobody reads would block for ever
        with os.fdopen(handle, "wb") as file:
            os.set_blocking(handle, True)
            file.write(content)
    except OSError as error:
        reason = "nobody reads from it" if error.errno == errno.ENXIO else error.strerror or error
        raise UsageError(f"cannot write {path}: {reason}") from None


def _replace(path: Path, content: bytes) -> None:
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
