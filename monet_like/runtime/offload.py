"""Copies values to the host and back, bit by bit, for the tasks of `variants/offload.py`.

On CUDA a copy lies in pinned memory and is made by a stream of its own, in the order in which copies were started;
the computing stream waits for events, and the host once in a step (`_catch_up`). On a CPU, where memory and host are
one, it lies in a memory-mapped file without a name, which is gone as soon as nothing holds the copy, and a thread makes
it.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import MonetError, warn_caller
from ..ir.units import MIB, format_bytes

#: A file is written and read in pieces of this size, so that no more of it is in the process's memory at once.
_PIECE_BYTES = 8 * MIB
#: Parts of a value on the host at most: with pinned memory in powers of two at most a fifteenth of it is not used.
_PARTS = 4
#: Tensors of which CUDA still makes copies, or into which it does, each with the event of its end: their memory must
#: not be reused before.
_under_way: list[tuple[Any, Tensor]] = []
#: Devices to which values were copied back since the latest copy to the host.
_came_back: set[torch.device] = set()


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
        host = _on_host(flat.numel(), x.device)
        host.done = _copy_beside(host, flat, x)  # type: ignore[attr-defined]
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
    return fetched_in_parts([host], size, stride, dtype, device)


def fetch_end(made: Tensor) -> Tensor:
    """Wait for the contents of ``made``."""
    _wait(made, made.device)
    return made


def sent_in_parts(x: Tensor) -> list[Tensor]:
    """As `send_start`, in parts on the host that end together: `send_end` takes the last one.

    Of pinned memory PyTorch takes powers of two, so a whole would take up to twice its bytes (`host_parts`).
    """
    if x.device.type != "cuda":
        return [send_start(x)]
    flat = _flat(x)
    _catch_up(x.device)
    parts = [_pinned(count) for count in host_parts(flat.numel(), x.device)]
    for part, source in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
        parts[-1].done = _copy_beside(part, source, x)  # type: ignore[attr-defined]
    return parts


def fetched_in_parts(
    parts: Sequence[Tensor], size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """As `fetch_start`, from the parts that `sent_in_parts` has made."""
    made = torch.empty_strided(size, stride, dtype=dtype, device=device)
    for part, to in zip(parts, _flat(made).split([part.numel() for part in parts]), strict=True):
        if device.type == "cuda":
            made.done = _copy_beside(to, part, made)  # type: ignore[attr-defined]
        else:
            made.done = _thread().submit(_copy_by_pieces, [to, part, part])  # type: ignore[attr-defined]
    return made


def host_parts(count: int, device: torch.device) -> list[int]:
    """Bytes of the parts in which ``count`` bytes lie on the host: powers of two but for the last; on a CPU one."""
    parts: list[int] = []
    while count and len(parts) < _PARTS - 1 and device.type == "cuda":
        parts.append(1 << (count.bit_length() - 1))
        count -= parts[-1]
    return [*parts, count] if count else parts


def can_pin(counts: Iterable[int], device: torch.device) -> bool:
    """Whether values of so many bytes find room on the host together; PyTorch keeps the memory for them."""
    try:
        pinned = [_pinned(part) for count in counts for part in host_parts(count, device) if device.type == "cuda"]
    except MonetError:
        return False
    del pinned
    return True


def may_be_sent(x: Tensor) -> bool:
    """Whether a tensor covers its storage without gaps, and counts its changes."""
    if x.layout is not torch.strided or is_traceable_wrapper_subclass(x):
        return False
    if x.is_conj() or x.is_neg() or x.is_inference():
        return False
    dense: bool = torch.ops.aten.is_non_overlapping_and_dense.default(x)
    return dense and x.nbytes == x.untyped_storage().nbytes()


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


def _on_host(count: int, device: torch.device) -> Tensor:
    """`_pinned`; memory that the system may move where none can be pinned: copies take longer, and training goes on."""
    _catch_up(device)
    try:
        return _pinned(count)
    except MonetError as error:
        warn_caller(f"a copy on the host is not in pinned memory, and takes longer: {error}")
        return torch.empty(count, dtype=torch.uint8)


@cache
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)


def _catch_up(device: torch.device) -> None:
    """Before a step's first copy to the host, wait for the copies back of the step before.

    PyTorch gives their pinned memory out again only when they have ended. A host that is a step ahead of the device
    would pin as much once more.
    """
    if device in _came_back:
        _came_back.discard(device)
        _stream(device).synchronize()


def _copy_beside(to: Tensor, source: Tensor, held: Tensor) -> Any:
    """Copy on the device's stream for copies, after all work that was queued before; the event of its end.

    ``held``, the tensor of the device, is held until that is certainly over.
    """
    stream = _stream(held.device)
    stream.wait_stream(torch.cuda.current_stream(held.device))
    with torch.cuda.stream(stream), torch.no_grad():
        to.copy_(source, non_blocking=True)
        event = stream.record_event()
    if to.device.type == "cuda":
        _came_back.add(held.device)
    _under_way[:] = [(other, tensor) for other, tensor in _under_way if not other.query()]
    _under_way.append((event, held))
    return event


def _wait(tensor: Any, device: torch.device) -> None:
    """Have later work on ``device`` wait for the copy into ``tensor``."""
    done = tensor.done
    del tensor.done
    if isinstance(done, Future):
        done.result()
        return
    torch.cuda.current_stream(device).wait_event(done)
    held = next((other for event, other in _under_way if event is done), None)
    _under_way[:] = [(event, other) for event, other in _under_way if other is not held]  # other parts ended before


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
