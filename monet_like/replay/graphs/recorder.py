"""Records functions, so that what they do on a GPU is done again by one launch: CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch

from ...profile.card_budget import obtainable_bytes
from ...torch_versions import release
from .copies import Tensors

#: Does once more what was recorded; returns its results, which lie at the same places every time.
Replay = Callable[[], Tensors]


class Recorder(Protocol):
    """Records functions that compute with tensors.

    Attributes:
        alignment_bytes: kernels may be chosen by whether an address is a multiple of so much, at most.
        fails_safely: whether the process goes on after a recording that has failed.
        pool_bytes: what was taken of the device for what is recorded.
    """

    alignment_bytes: int
    fails_safely: bool
    pool_bytes: int

    def stream(self) -> object | None:
        """On which stream work is done now; None: a replay cannot be part of it."""

    def session(self) -> AbstractContextManager[None]:
        """While this is entered, functions are recorded."""

    def record(self, function: Callable[[], Tensors]) -> Replay:
        """Record a function.

        Its results, and what it keeps of its tensors, the functions that are recorded after it may read. What they
        have freed they may overwrite.
        """

    def seconds(self) -> float:
        """A clock, read when all work is done."""

    def free_bytes(self, beside: int) -> int:
        """What the device can still give.

        Args:
            beside: bytes that this process will have beside those it has now; or what it had at most so far, if that
                is more.
        """


class CudaRecorder:
    """CUDA graphs of one device; their tensors lie in a pool of their own, which is freed with the last of them."""

    #: cuBLASLt chooses by alignments of up to 256 bytes; PyTorch's own kernels by up to 32.
    alignment_bytes = 256
    #: PyTorch 2.11 ends the process when the graph of a capture that has failed is freed ("The graph should be
    #: registered to the state").
    fails_safely = release() >= (2, 14)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool, self.pool_bytes = torch.cuda.graph_pool_handle(), 0

    def stream(self) -> object | None:
        """The current stream; None while it is being captured by somebody else."""
        return None if torch.cuda.is_current_stream_capturing() else torch.cuda.current_stream(self._device)

    @contextmanager
    def session(self) -> Iterator[None]:
        """On a stream of its own, which is not the default stream, as a capture must be.

        cuBLAS's workspace of that stream is taken within the first capture that needs it, and is given back at the
        end: it then lies in the pool, where nobody else gets it, also if all workspaces are freed (`reserve`).
        """
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # the pool cannot use what other tensors have left
        torch._C._cuda_clearCublasWorkspaces()
        stream, before = torch.cuda.Stream(self._device), torch.cuda.memory_reserved(self._device)
        try:
            with torch.cuda.stream(stream):
                yield
            self.pool_bytes = torch.cuda.memory_reserved(self._device) - before
        except BaseException:
            _have_generators_left_capture(stream)
            raise
        finally:
            torch._C._cuda_clearCublasWorkspaces()

    def record(self, function: Callable[[], Tensors]) -> Replay:
        """Capture a graph. Nothing is computed and nothing drawn.

        PyTorch itself registers the default generator: its kernels then read seed and offset from memory, which each
        replay sets to those of the generator, and the generator moves on by what the graph draws. So the masks are
        those of the same operators without a graph.
        """
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads may allocate
        try:
            found = function()
        except BaseException:
            with suppress(Exception):  # the capture is invalid, which the first error says better
                graph.capture_end()
            raise
        graph.capture_end()
        results = _not_owning(found)

        def replay() -> Tensors:
            graph.replay()
            return results

        return replay

    def seconds(self) -> float:
        """Of the host."""
        torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def free_bytes(self, beside: int) -> int:
        """Of the device's free memory and what the allocator has."""
        most = max(torch.cuda.memory_allocated(self._device) + beside, torch.cuda.max_memory_allocated(self._device))
        return obtainable_bytes(self._device) - most


def _not_owning(found: Tensors) -> Tensors:
    """The same tensors in the same memory, which they do not keep from being used by the graphs captured next."""
    storages: dict[int, Any] = {}
    others: Tensors = []
    for tensor in found:
        if tensor is None:
            others.append(None)
            continue
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        if at not in storages:
            made = torch._C._construct_storage_from_data_pointer(at, tensor.device, storage.nbytes())
            storages[at] = made
        other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        others.append(other.set_(storages[at], tensor.storage_offset(), tensor.shape, tensor.stride()))
    return others


def _have_generators_left_capture(stream: torch.cuda.Stream) -> None:
    """After a capture that has failed, the generators believe that they are captured still, until another has ended."""
    with suppress(Exception), torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=stream.device)
        graph.capture_end()
