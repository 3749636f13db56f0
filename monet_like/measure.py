"""Measuring memory and time of whatever runs: exact allocator counts, and medians of wall time."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library writes to stderr otherwise

import torch

#: What marks are called among the profiler's events.
_MARK = "monet_like.mark"


def allocated_peak(function: Callable[[], Any], device: torch.device) -> int:
    """Bytes by which allocations rise above where they stood, at most, while ``function`` runs.

    On CUDA the caching allocator's own counter; on a CPU every allocation and release that PyTorch's allocator
    reports, operator temporaries included. The function runs once and its result is dropped.
    """
    return max(allocated_peaks(lambda _: function(), device))


def allocated_peaks(function: Callable[[Callable[[], None]], Any], device: torch.device) -> list[int]:
    """As `allocated_peak`, for every stretch by itself.

    Args:
        function: called with a function that ends one stretch and begins the next.

    Returns:
        One more than there were marks: bytes above where they stood when the first stretch began.
    """
    return _cuda_peaks(function, device) if device.type == "cuda" else _cpu_peaks(function)


def _cuda_peaks(function: Callable[[Callable[[], None]], Any], device: torch.device) -> list[int]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    peaks: list[int] = []

    def mark() -> None:  # blocks are handed out when an operator is called, so there is nothing to wait for
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
        torch.cuda.reset_peak_memory_stats(device)

    function(mark)
    torch.cuda.synchronize(device)
    mark()
    return peaks


def _cpu_peaks(function: Callable[[Callable[[], None]], Any]) -> list[int]:
    def mark() -> None:
        with torch.profiler.record_function(_MARK):
            pass

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        function(mark)
    kineto = profile.profiler
    assert kineto is not None and kineto.kineto_results is not None
    events = [e for e in kineto.kineto_results.events() if e.name() in ("[memory]", _MARK)]
    peaks, level = [0], 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == _MARK:
            peaks.append(level)
        else:
            level += event.nbytes()
            peaks[-1] = max(peaks[-1], level)
    return peaks


def seconds_of(
    function: Callable[[], Any],
    device: torch.device,
    *,
    before: Callable[[], object] = lambda: None,
    repeats: int = 5,
    enough_seconds: float = 0.25,
) -> float:
    """Median wall seconds of a call, after one to warm up.

    Args:
        before: called before every call, and not timed; such as a `CacheEviction`.
        repeats: at most so many timed calls.
        enough_seconds: no further call once they took so long in all.
    """
    _timed(function, device, before)
    found: list[float] = []
    while len(found) < repeats and sum(found) < enough_seconds:
        found.append(_timed(function, device, before))
    return statistics.median(found)


def _timed(function: Callable[[], Any], device: torch.device, before: Callable[[], object]) -> float:
    before()
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


#: In units of the second-level caches: so much lies between two uses of a value in a step, about. With it the operators of
#: ResNet-50 at batch 2 and MobileNetV2 at batch 4 add up to what a step of theirs takes to within 6 %, those of MobileNetV2
#: at batch 16 to 8 to 11 % less; with twice as much to 20 % more and 3 % more. Where every operator finds its inputs in the
#: cache it is 24 to 30 % less. (CPU seconds of one thread, 128 pixels, turns taken.)
_EVICTED = 4


class CacheEviction:
    """Called before an operator, it leaves the caches much as a training step does: with other things in them."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            size = int(torch.cuda.get_device_properties(device).L2_cache_size)
        else:
            size = _second_level_bytes() * torch.get_num_threads()
        self._other = torch.zeros(_EVICTED * size // 4, device=device)

    def __call__(self) -> None:
        self._other.add_(1.0)


def _second_level_bytes() -> int:
    """Of one core's cache; where the system does not tell (other than Linux), what is usual."""
    try:
        with open("/sys/devices/system/cpu/cpu0/cache/index2/size") as file:
            return int(file.read().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return 2**21


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
