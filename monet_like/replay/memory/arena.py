"""Places what a training step allocates: in one block of memory that is hardly larger than the step's peak.

PyTorch's allocators do not know what comes next. The blocks that they keep are cut where the next tensor does not fit,
and what they hold grows far above what is allocated; on a CPU, pages are given back to the system and made anew in
every step. A training step allocates the same every time: here its second run is recorded, offsets are chosen
(`monet_like.replay.memory.placement`), and from the third on csrc/arena hands them out.
"""

from __future__ import annotations

import ctypes
import logging
import math
import time
import weakref
from array import array
from functools import cache
from types import TracebackType
from typing import Any

import torch

from ...build import fits_this_torch, library_path
from ...errors import UsageError
from ...ir.units import format_bytes
from ...plan.local_search.native import storage_of
from .placement import Lifetime, place

_log = logging.getLogger("monet_like")

#: The step that is recorded: the first also makes what lasts, such as workspaces of libraries.
RECORDED = 2
#: Autograd's thread may still be freeing what the step before has left: so many seconds are given to it, in so many
#: parts. A trainer that keeps tensors is waited for in vain, and not more often than so.
WAIT_SECONDS, WAIT_PARTS, MOST_WAITS_IN_VAIN = 0.002, 20, 3
#: A step that is not like the recorded one is recorded again, at most so often.
MOST_RECORDINGS = 4


class Arena:
    """The blocks of memory of one model's training steps, one for each device that it is on."""

    def __init__(self) -> None:
        self._blocks: dict[torch.device, _Block] = {}

    def memory_of(self, device: torch.device) -> StepMemory:
        """The memory of a training step on a device."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._blocks:
            self._blocks[device] = _Block(device)
        return StepMemory(self._blocks[device])


class _Block:
    """One block of memory, for all training steps of a model on a device.

    Attributes:
        heights: bytes that each of its plans needs.
        bytes: its size; 0: it has no memory now.
    """

    def __init__(self, device: torch.device) -> None:
        self.library, self.device = arena_library(device.type), device
        self.number = self.library.arena_add_block()
        weakref.finalize(self, self.library.arena_drop_block, self.number)
        self.heights: dict[int, int] = {}
        self.bytes = 0

    def take(self) -> bool:
        """Take as much memory as the largest plan needs; False: there is not so much, or tensors lie in what it has."""
        return self._fill(max(self.heights.values(), default=0))

    def give_back(self) -> bool:
        """Give the memory back; False: tensors lie in it."""
        return self._fill(0)

    def _fill(self, wanted: int) -> bool:
        if wanted == self.bytes:
            return True
        done = self.library.arena_fill(self.number, self.device.index or 0, wanted)
        if done:
            self.bytes = wanted if done > 0 else 0
        return bool(done > 0)


class StepMemory:
    """Where one training step's tensors lie.

    Attributes:
        placed_bytes: of the block, that this step needs; 0 before it is known.
    """

    def __init__(self, block: _Block) -> None:
        self._block, self._library = block, block.library
        self._plan = self._library.arena_add_plan()
        weakref.finalize(self, self._library.arena_drop_plan, self._plan)
        weakref.finalize(self, block.heights.pop, self._plan, None)
        self._steps = self._recordings = 0
        self._recording = self._had_memory = False
        self._seen: list[Lifetime] = []
        self._waits_in_vain = 0
        self.placed_bytes = 0

    @property
    def counts(self) -> tuple[int, int]:
        """How many allocations of a MiB or more got their place in the latest step, and how many were other ones."""
        found = (ctypes.c_int64 * 2)()
        self._library.arena_counts(self._plan, found)
        return found[0], found[1]

    def forward(self) -> _Within:
        """A context for the forward, with which a step begins."""
        self._steps += 1
        self._wait()
        if self._recording:
            self._place()
        elif self._is_to_be_recorded() and self._block.give_back():
            self._library.arena_record(self._plan, 1)
            self._recording, self._recordings = True, self._recordings + 1
        if not self._recording:
            self._had_memory = self.placed_bytes <= self._block.bytes or self._block.take()
        return _Within(self, anew=True)

    def backward(self) -> _Within:
        """A context for a part of the backward."""
        return _Within(self, anew=False)

    def _wait(self) -> None:
        """Wait until nothing of the step before lies in the block."""
        for _ in range(WAIT_PARTS if self._waits_in_vain < MOST_WAITS_IN_VAIN else 0):
            if not self._library.arena_taken(self._block.number):
                self._waits_in_vain = 0
                return
            time.sleep(WAIT_SECONDS / WAIT_PARTS)
        self._waits_in_vain += 1

    def _is_to_be_recorded(self) -> bool:
        """Whether the step that begins is the first to be recorded, or the one before was not like the recorded one."""
        if self._recordings == 0:
            return self._steps == RECORDED
        return self._had_memory and self.counts[1] > 0 and self._recordings < MOST_RECORDINGS

    def _place(self) -> None:
        """Choose offsets for what was recorded."""
        time.sleep(WAIT_SECONDS)
        self._recording = False
        self._library.arena_record(self._plan, 0)
        made = self._recorded()
        # Some live longer in some steps than in others.
        if [one.bytes for one in made] == [one.bytes for one in self._seen]:
            made = [max(pair, key=_life) for pair in zip(made, self._seen, strict=True)]
        self._seen = made
        inside = [i for i, one in enumerate(made) if one.end >= 0]
        found = place([made[i] for i in inside])
        offsets = array("q", [-1] * len(made))
        for i, offset in zip(inside, found.offsets, strict=True):
            offsets[i] = offset
        self._library.arena_place(self._plan, storage_of(offsets))
        self.placed_bytes = self._block.heights[self._plan] = found.height
        if not self._block.take():
            _log.warning("%s for the training step cannot be taken in one block", format_bytes(found.height))
            return
        _log.info(
            "%d tensors of the training step are placed in %s, %.1f %% above the most that lives at one time",
            len(inside), format_bytes(found.height), 100 * (found.height / max(found.least_bytes, 1) - 1),
        )  # fmt: skip

    def _recorded(self) -> list[Lifetime]:
        """What the latest recorded step allocated; the end is -1 where it was not freed before the next step."""
        count = self._library.arena_count(self._plan)
        sizes, ends = array("q", bytes(8 * count)), array("q", bytes(8 * count))
        self._library.arena_read(self._plan, storage_of(sizes), storage_of(ends))
        return [Lifetime(size, begin, end) for begin, (size, end) in enumerate(zip(sizes, ends, strict=True))]


def _life(one: Lifetime) -> float:
    return one.end if one.end >= 0 else math.inf


class _Within:
    """While this is entered, the thread's allocations belong to a training step.

    After a forward so do those on the same stream until the backward begins: the loss's.
    """

    __slots__ = ("_anew", "_memory")

    def __init__(self, memory: StepMemory, *, anew: bool) -> None:
        self._memory, self._anew = memory, anew

    def __enter__(self) -> None:
        memory = self._memory
        block = memory._block
        memory._library.arena_enter(memory._plan, block.number, block.device.index or 0, self._anew)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._memory._library.arena_leave(self._anew and kind is None)


@cache
def arena_library(kind: str) -> Any:
    """The compiled arena for a kind of device, in front of PyTorch's allocator from now on.

    Raises:
        UsageError: there is none.
    """
    parts = {"cpu": "arena", "cuda": "arena_cuda"}
    if kind not in parts:
        raise UsageError(f"memory can be placed on a CPU or a CUDA device, not on {kind}")
    if not fits_this_torch(parts[kind]):
        raise UsageError(
            f"the library that places memory is not there, or not for torch {torch.__version__}, which it must be "
            "compiled for; run python -m monet_like.build"
        )
    loaded = ctypes.CDLL(str(library_path(parts[kind])))
    for name in ("arena_add_plan", "arena_add_block", "arena_count", "arena_taken"):
        getattr(loaded, name).restype = ctypes.c_int64
    for name, *arguments in (
        ("arena_drop_plan", ctypes.c_int64), ("arena_drop_block", ctypes.c_int64), ("arena_count", ctypes.c_int64),
        ("arena_taken", ctypes.c_int64),
        ("arena_record", ctypes.c_int64, ctypes.c_int), ("arena_read", ctypes.c_int64, ctypes.c_void_p,
        ctypes.c_void_p),
        ("arena_place", ctypes.c_int64, ctypes.c_void_p), ("arena_counts", ctypes.c_int64, ctypes.c_void_p),
        ("arena_fill", ctypes.c_int64, ctypes.c_int, ctypes.c_int64),
        ("arena_leave", ctypes.c_int), ("arena_enter", ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_int),
    ):  # fmt: skip
        getattr(loaded, name).argtypes = arguments
    if kind == "cuda":
        torch.cuda.init()
    if not loaded.arena_install():
        raise UsageError(f"another allocator than PyTorch's own has {kind.upper()} memory, and memory cannot be placed")
    return loaded
