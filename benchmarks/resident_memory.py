"""Resident memory of this process, as Linux counts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def resident_peak(function: Callable[[], Any]) -> int:
    """Bytes by which this process's resident memory rises above where it stood, at most, while ``function`` runs.

    Linux only: the kernel's own high-water mark, reset before. It is exact only if freed memory goes back to the
    system at once: start the process with ``MALLOC_MMAP_THRESHOLD_=65536`` and ``MALLOC_TRIM_THRESHOLD_=0``, which
    makes it many times slower.
    """
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status_bytes("VmRSS")
    function()
    return status_bytes("VmHWM") - before


def status_bytes(field: str) -> int:
    """A line of /proc/self/status that is a size, such as VmRSS or VmData (Linux only)."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
