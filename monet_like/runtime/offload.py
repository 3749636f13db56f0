"""Copies values to the host and back, bit by bit, for the tasks of `variants/offload.py`.

On CUDA a copy lies in pinned memory and is made by a stream of its own, in the order in which copies were started;
the computing stream waits for events, the host for nothing. On a CPU, where memory and host are one, it lies in a
memory-mapped file without a name, which is gone as soon as nothing holds the copy, and a thread makes it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..errors import MonetError
from ..ir.units import MIB, format_bytes

#: A file is written and read in pieces of this size, so that no more of it is in the process's memory at once.
_PIECE_BYTES = 8 * MIB
#: Buffers that CUDA is still writing, each with the event of its end: their memory must not be reused before.
_under_way: list[tuple[Any, Tensor]] = []


def send(x: Tensor) -> Tensor:
    """A copy of ``x`` on the host: uint8 [bytes], in memory order. Later work on the device waits for it.

    Args:
        x: any shape and dtype; covers its storage without gaps.

    Raises:
        MonetError: there is no room for it.
    """
    return send_end(x, send_start(x))


def send_start(x: Tensor) -> Tensor:
    """As `send`, but the copy is there only after `send_end`; until then ``x`` has to stay."""
    flat = _flat(x)
    if x.device.type == "cuda":
        host = _pinned(flat.numel())
        _copy_beside(host, flat, x.device)
    else:
        host = _mapped(flat.numel())
        host.done = _thread().submit(_copy_by_pieces, [host, flat, host])  # type: ignore[attr-defined]
    return host


def send_end(x: Tensor, host: Tensor) -> Tensor:
    """Wait for the copy ``host`` of ``x``, which may be released then."""
    _wait(host, x.device)
    return host


def fetch(host: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The tensor that `send` was given, restored from its copy. Later work on the device waits for it."""
    return fetch_end(fetch_start(host, size, stride, dtype, device))


def fetch_start(
    host: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """As `fetch`, but the contents are there only after `fetch_end`."""
    made = torch.empty_strided(size, stride, dtype=dtype, device=device)
    flat = _flat(made)
    if device.type == "cuda":
        _copy_beside(flat, host, made.device, made)
    else:
        made.done = _thread().submit(_copy_by_pieces, [flat, host, host])  # type: ignore[attr-defined]
    return made


def fetch_end(made: Tensor) -> Tensor:
    """Wait for the contents of ``made``."""
    _wait(made, made.device)
    return made


def _flat(x: Tensor) -> Tensor:
    """The storage of a tensor without gaps, as bytes."""
    return x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)


# ---- CUDA ----


def _pinned(count: int) -> Tensor:
    """uint8 [count] of the host's memory that stays where it is, from PyTorch's cache of such memory."""
    try:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise MonetError(
            f"a copy on the host needs {format_bytes(count)} of pinned memory: {str(error).splitlines()[0]}; "
            "free some of the host's memory, or plan without the mode word offload"
        ) from None


@cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def _copy_beside(to: Tensor, source: Tensor, device: torch.device, made: Tensor | None = None) -> None:
    """Copy on the device's stream for copies, after all work that was queued before.

    ``made``, a tensor of the device that is written to, is held until that is certainly over.
    """
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream), torch.no_grad():
        to.copy_(source, non_blocking=True)
        event = stream.record_event()
    holder = to if made is None else made
    holder.done = event  # type: ignore[attr-defined]
    _under_way[:] = [(other, tensor) for other, tensor in _under_way if not other.query()]
    if made is not None:
        _under_way.append((event, made))


def _wait(tensor: Any, device: torch.device) -> None:
    """Have later work on ``device`` wait for the copy into ``tensor``."""
    done = tensor.done
    del tensor.done
    if isinstance(done, Future):
        done.result()
        return
    torch.cuda.current_stream(device).wait_event(done)
    _under_way[:] = [(event, other) for event, other in _under_way if event is not done]


# ---- CPU ----


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="monet_like host copies")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_thread.cache_clear)  # threads do not survive a fork


def _mapped(count: int) -> Tensor:
    """uint8 [count] in a file without a name."""
    try:
        with tempfile.TemporaryFile(prefix="monet_like") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, count)  # no room is an error here, not a crash later
            else:
                file.truncate(count)
            mapping = mmap.mmap(file.fileno(), count)
    except OSError as error:
        raise MonetError(
            f"a copy on the host needs a file of {format_bytes(count)} in {tempfile.gettempdir()}: {error.strerror}; "
            "set TMPDIR to a folder with more room, or plan without the mode word offload"
        ) from None
    host = torch.frombuffer(mapping, dtype=torch.uint8)
    host.mapping = mapping  # type: ignore[attr-defined]
    return host


def _copy_by_pieces(given: list[Tensor]) -> None:
    """Copy to the first tensor from the second; pages of the file, which the third is, leave this process's memory.

    The list is emptied, so that this thread holds no tensor once the others are told that the copy is there.
    """
    to, source, host = given
    given.clear()
    mapping = getattr(host, "mapping", None)
    with torch.no_grad():
        for start in range(0, to.numel(), _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, to.numel())
            to[start:stop].copy_(source[start:stop])
            if mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
                mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)
