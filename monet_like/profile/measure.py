"""Measures the memory and time of functions: exact allocator counts, and least wall seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library writes to stderr otherwise

import torch

#: What marks are called among the profiler's events.
_MARK = "monet_like.mark"


def allocated_peak(function: Callable[[], Any], device: torch.device) -> int:
    """Bytes by which allocations rise above where they stood, at most, while ``function`` runs.

    On CUDA what is asked of the caching allocator, not rounded up to its blocks; on a CPU every allocation and release
    that PyTorch's allocator reports, operator temporaries included. The function runs once and its result is dropped.
    """
    return max(allocated_peaks(lambda _: function(), device))


def allocated_peaks(function: Callable[[Callable[[], None]], Any], device: torch.device) -> list[int]:
    """As `allocated_peak`, separately for every stretch of the function.

    Args:
        function: called with a function that ends one stretch and begins the next.

    Returns:
        One more than there were marks: bytes above where they stood when the first stretch began.
    """
    return [stretch.peak_bytes for stretch in allocated_stretches(function, device)]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Memory of a stretch of a function, in bytes above where allocations stood when the function began.

    Attributes:
        peak_bytes: the most that was allocated in it.
        end_bytes: what was allocated when it ended.
    """

    peak_bytes: int
    end_bytes: int


def allocated_stretches(function: Callable[[Callable[[], None]], Any], device: torch.device) -> list[Stretch]:
    """As `allocated_peaks`, with what was allocated when each stretch ended.

    The last one ends when the function has returned, its result still alive.
    """
    return _cuda_stretches(function, device) if device.type == "cuda" else _cpu_stretches(function)


def _cuda_stretches(function: Callable[[Callable[[], None]], Any], device: torch.device) -> list[Stretch]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)

    def requested(which: str) -> int:
        return int(torch.cuda.memory_stats(device).get(f"requested_bytes.all.{which}", 0))

    before = requested("current")
    found: list[Stretch] = []

    def mark() -> None:  # blocks are handed out when an operator is called, so there is nothing to wait for
        found.append(Stretch(requested("peak") - before, requested("current") - before))
        torch.cuda.reset_peak_memory_stats(device)

    result = function(mark)
    torch.cuda.synchronize(device)
    mark()
    del result
    return found


def have_workspaces(device: torch.device) -> None:
    """Have cuBLAS allocate its workspaces: one for the thread of the forward, and one for autograd's.

    It takes them from PyTorch's allocator in the first product of either thread; else the first step would seem to need
    them. Sums of a product and a bias are cuBLASLt's, which has another of 1 MiB before PyTorch 2.14. Their sizes:
    `monet_like.profile.cublas`.
    """
    if device.type == "cuda":
        with torch.enable_grad(), torch.autocast("cuda", enabled=False):
            x = torch.ones(8, 8, device=device, requires_grad=True)
            torch.nn.functional.linear(x @ x, x, x[0]).sum().backward()
            torch.cuda.synchronize(device)


def _cpu_stretches(function: Callable[[Callable[[], None]], Any]) -> list[Stretch]:
    def mark() -> None:
        with torch.profiler.record_function(_MARK):
            pass

    # `torch.profiler.profile` would also make a Python object of every event, which takes longer than the function.
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        result = function(mark)
    del result
    assert profile.kineto_results is not None
    events = [e for e in profile.kineto_results.events() if e.name() in ("[memory]", _MARK)]
    found: list[Stretch] = []
    peak = level = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == _MARK:
            found.append(Stretch(peak, level))
            peak = level
        else:
            level += event.nbytes()
            peak = max(peak, level)
    return [*found, Stretch(peak, level)]


def seconds_of(
    function: Callable[[], Any],
    device: torch.device,
    *,
    before: Callable[[], object] = lambda: None,
    repeats: int = 2,
    enough_seconds: float = 0.1,
    of_launches: bool = False,
) -> float:
    """Least wall seconds of some calls.

    Args:
        before: called before every call, and not timed; such as a `CacheState`.
        repeats: at most so many calls.
        enough_seconds: no further call once they took so long in all.
        of_launches: on a GPU, with the CPU's time of a call added: it takes so long that many such calls leave the GPU
            without work.
    """
    found: list[float] = []
    while len(found) < repeats and sum(found) < enough_seconds:
        found.append(_timed(function, device, before, of_launches=of_launches))
    return min(found)


def _timed(
    function: Callable[[], Any], device: torch.device, before: Callable[[], object], *, of_launches: bool
) -> float:
    before()
    if device.type == "cuda":
        with torch.cuda.device(device):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(_LEAD_CYCLES)  # what is launched meanwhile runs without a gap
            start.record()
            started = time.perf_counter()
            function()
            launched = time.perf_counter() - started
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 + (launched if of_launches else 0.0)
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


#: For so many cycles of the GPU's clock, about a millisecond, the CPU launches ahead of it.
_LEAD_CYCLES = 2_000_000
