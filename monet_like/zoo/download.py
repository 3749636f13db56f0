"""Downloads files of the zoo into a cache, and checks them against the registry's sha256.

The registry that came with the package says what a file must be; the server is not trusted.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import ScheduleFileError, UsageError
from ..files import cache_folder, check_writable, write_atomically
from ..ir.schedule_file import ScheduleRecord
from .registry import Registry, read_file, zoo_folder
from .rows import ZooFile

#: Where files are, such as ``https://example.org/zoo``; the registry's paths follow.
URL_VARIABLE = "MONET_LIKE_ZOO_URL"
#: Seconds for a connection, and between two pieces of an answer.
TIMEOUTS = (10.0, 30.0)
#: Seconds for a file in all, and bytes a second for which a large file has more: a server may send a byte now and then.
LONGEST_SECONDS, SLOWEST_BYTES_PER_SECOND = 120.0, 20_000
#: How often a server that fails is asked again, and the seconds before, which double.
RETRIES, PAUSE = 3, 0.5
CHUNK_BYTES = 2**14


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


def download(file: ZooFile, url: str | None = None) -> Path:
    """Download a file, unless it is in the cache.

    Args:
        url: the address; default: ``$MONET_LIKE_ZOO_URL``.

    Raises:
        UsageError: no address, or the cache cannot be written.
        ScheduleFileError: it is not there, is not what the registry says, or broke off.
    """
    target, cached = cached_path(file), Registry(cache_folder() / "zoo")
    with suppress(ScheduleFileError):
        return cached.check(file)
    check_writable(target)
    source = f"{base_url(url)}/{file.path}"
    data = _fetched(source, file.bytes)
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise ScheduleFileError(
            f"{source} is not the file that the registry names (sha256 {file.sha256[:12]}…); it was not kept"
        )
    write_atomically(target, data)
    read_file(target)
    return target


def _fetched(url: str, size: int) -> bytes:
    """The content of an address.

    Raises:
        ScheduleFileError: it is not there, is larger than ``size`` bytes, or does not come whole within a time.
    """
    import requests
    from requests.adapters import HTTPAdapter, Retry

    seconds = max(LONGEST_SECONDS, size / SLOWEST_BYTES_PER_SECOND)
    ends, data, reason = time.monotonic() + seconds, bytearray(), "the answer ended early"
    retries = Retry(RETRIES, backoff_factor=PAUSE, status_forcelist=(429, *range(500, 600)), raise_on_status=False)
    try:
        with requests.Session() as session:
            session.mount(url, HTTPAdapter(max_retries=retries))
            with session.get(url, headers={"Accept-Encoding": "identity"}, stream=True, timeout=TIMEOUTS) as answer:
                if answer.status_code != 200:
                    raise ScheduleFileError(f"{url} cannot be got: status {answer.status_code} {answer.reason}")
                for chunk in answer.iter_content(CHUNK_BYTES):
                    data += chunk
                    if len(data) > size:
                        raise ScheduleFileError(f"{url} is larger than the {size} bytes that the registry names")
                    if time.monotonic() > ends:
                        reason = f"it took more than {seconds:.0f} s"
                        break
    except requests.RequestException as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"
    if len(data) < size:
        raise ScheduleFileError(f"{url} broke off after {len(data)} of {size} bytes ({reason}); run again")
    return bytes(data)
