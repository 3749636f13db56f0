"""Downloads files of the zoo into a cache: resumed if interrupted, and checked against the registry's sha256.

The registry that came with the package says what a file must be; the server is not trusted. Pooch keeps the cache and
checks the hash; how bytes are fetched is here, because Pooch does not go on with a download that broke off.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from ..errors import ScheduleFileError, UsageError
from ..files import cache_folder, check_writable
from ..ir.schedule_file import ScheduleRecord
from .registry import Registry, ZooFile, read_file, zoo_folder

#: Where files are, such as ``https://example.org/zoo``; the registry's paths follow.
URL_VARIABLE = "MONET_LIKE_ZOO_URL"
#: Seconds for a connection, and between two pieces of an answer.
TIMEOUTS = (10.0, 30.0)
#: Seconds for a file in all, and bytes a second for which a large file has more: a server may send a byte now and then.
LONGEST_SECONDS, SLOWEST_BYTES_PER_SECOND = 120.0, 20_000
#: How often a download that breaks off is taken up again, and the seconds before, which double.
ATTEMPTS, PAUSE = 4, 0.5
CHUNK_BYTES = 1024  # bytes before an end in the middle of a piece are lost

#: Called with bytes so far and bytes in all.
Progress = Callable[[int, int], None]


def base_url(given: str | None = None) -> str:
    """The address to download from, without a slash at its end.

    Raises:
        UsageError: none is known, or it is not of the web.
    """
    text = (given or os.environ.get(URL_VARIABLE) or "").strip().rstrip("/")
    if not text:
        raise UsageError(f"there is no address to download from; give --base-url, or set {URL_VARIABLE}")
    try:
        parts = urlsplit(text)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # "[" without "]", a port that is no number
        known = False
    if not known:
        raise UsageError(f"{text!r} is not an address to download from; give one such as https://example.org/zoo")
    return text


def cached_path(file: ZooFile) -> Path:
    """The path of a downloaded file in the cache."""
    return cache_folder() / "zoo" / file.path


def find_record(text: str, *, device: str = "", near: str = "", url: str | None = None) -> ScheduleRecord:
    """Load a schedule of the zoo from its folder, the cache or the address; its file is checked.

    Raises:
        UsageError: no such schedule, or it is not here and there is no address.
        ScheduleFileError: a file is not what the registry says, or cannot be got.
    """
    registry = Registry.load(zoo_folder())
    listed = registry.find(text, device=device, near=near)
    if (registry.folder / listed.path).exists():
        return registry.record(listed)
    cached = replace(registry, folder=cache_folder() / "zoo")
    with suppress(ScheduleFileError):
        return cached.record(listed)
    download(registry.file_of(listed), url)
    return cached.record(listed)


def download(file: ZooFile, url: str | None = None, progress: Progress | None = None) -> Path:
    """Download a file, unless it is in the cache.

    Args:
        url: the address; default: ``$MONET_LIKE_ZOO_URL``.

    Raises:
        UsageError: no address, or the cache cannot be written.
        ScheduleFileError: it is not there, is not what the registry says, or broke off; run again to go on.
    """
    import pooch

    target = cached_path(file)
    check_writable(target)
    source = f"{base_url(url)}/{file.path}"
    part = target.with_name(f".{target.name}.{file.sha256[:16]}.part")
    pooch.utils.get_logger().setLevel("ERROR")
    try:
        pooch.retrieve(
            source,
            known_hash=f"sha256:{file.sha256}",
            fname=target.name,
            path=target.parent,
            downloader=_Resuming(file.bytes, part, progress),
        )
    except ValueError as error:  # pooch raises it for another hash; UsageError is one too
        if isinstance(error, UsageError):
            raise
        part.unlink(missing_ok=True)
        raise ScheduleFileError(
            f"{source} is not the file that the registry names (sha256 {file.sha256[:12]}…); it was not kept"
        ) from None
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror or error}") from None
    part.unlink(missing_ok=True)
    return _checked(file)


def _checked(file: ZooFile) -> Path:
    """The cached file, if its hash is the registry's and it can be loaded."""
    path = Registry(cache_folder() / "zoo").check(file)
    read_file(path)
    return path


class _Resuming:
    """A downloader for Pooch that resumes interrupted downloads."""

    def __init__(self, size: int, part: Path, progress: Progress | None) -> None:
        self.size, self.part, self.progress = size, part, progress
        self.seconds = max(LONGEST_SECONDS, size / SLOWEST_BYTES_PER_SECOND)
        self.ends = time.monotonic() + self.seconds

    def __call__(self, url: str, output_file: str, pooch: Any) -> None:
        with open(self.part, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another process may be at it
            if file.seek(0, os.SEEK_END) > self.size:
                file.truncate(0)
            self._fetch(url, file)
            shutil.copyfile(self.part, output_file)

    def _fetch(self, url: str, file: IO[bytes]) -> None:
        import requests

        reason = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                reason = self._attempt(url, file)
            except requests.RequestException as error:
                reason = _told(error)
            file.flush()
            if os.fstat(file.fileno()).st_size == self.size:
                return
            if time.monotonic() > self.ends:
                break
        done = os.fstat(file.fileno()).st_size
        raise ScheduleFileError(
            f"{url} broke off after {done} of {self.size} bytes ({reason}); run again to go on from there"
        )

    def _attempt(self, url: str, file: IO[bytes]) -> str:
        """One request; returns why it may have ended early."""
        import requests

        have = file.seek(0, os.SEEK_END)
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUTS) as answer:
            if answer.status_code >= 500 or answer.status_code == 429:
                return f"status {answer.status_code}"
            if answer.status_code == 416:  # nothing from there on: begin again
                file.truncate(0)
                return "status 416"
            if answer.status_code not in (200, 206):
                raise ScheduleFileError(f"{url} cannot be got: status {answer.status_code} {answer.reason}")
            if answer.status_code == 200 or not answer.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                file.truncate(0)  # the whole file comes
                have = 0
                if answer.status_code == 206:
                    return "it sent another part than was asked for"
            for chunk in answer.iter_content(CHUNK_BYTES):
                if time.monotonic() > self.ends:
                    return f"it took more than {self.seconds:.0f} s"
                have += len(chunk)
                if have > self.size:
                    file.truncate(0)
                    raise ScheduleFileError(f"{url} is larger than the {self.size} bytes that the registry names")
                file.write(chunk)
                if self.progress:
                    self.progress(have, self.size)
        return "the answer ended early"


def _told(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else ""
    return f"{type(error).__name__}: {text[:120]}" if text else type(error).__name__
