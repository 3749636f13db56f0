"""Reads and writes files: writes are atomic, and reading never runs code from a file."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

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
    """Check, before hours of work, that ``path`` can be written.

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
    """The kind of file that a path leads to (`stat.S_IFREG` and so on); None if nothing is there."""
    try:
        return stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return None


def _is_stream(kind: int | None) -> bool:
    """Whether it takes what is written as it comes, such as ``/dev/null`` or a pipe; to replace it would destroy it."""
    return kind in (stat.S_IFCHR, stat.S_IFIFO)


def _followed(path: Path) -> Path:
    """The target of ``path`` if that is a symbolic link, so that the link itself stays."""
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
