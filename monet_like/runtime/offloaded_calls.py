"""Keeps what calls of a model's blocks need for their backward: on the host meanwhile, or as a copy.

The values of a call leave when its forward has ended, while the next block's forward runs; when that has ended, the
device waits for the copies and lets go of the values. They come back while the backward of the call after it runs, for
which the order of the forwards is turned round. Whatever order calls and backwards really have, each backward gets its
own values; the order decides about time and memory alone.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import MonetError, warn_caller
from .offload import fetch_end, fetched_in_parts, may_be_sent, send_end, sent_in_parts
from .streamed_weights import quietly

#: Smaller values are not worth a copy: it takes less time than to start it.
LEAST_BYTES = 2**16


@dataclass(frozen=True)
class _OnHost:
    """A value on the host: its bytes in parts, and what is made of them again."""

    parts: list[Tensor]
    like: tuple[Sequence[int], Sequence[int], torch.dtype, torch.device]


class OffloadedCall:
    """The offloaded values of one call, by their places among what it keeps. They begin to leave at once.

    What finds no room on the host stays on the device.
    """

    def __init__(self, values: Mapping[int, Tensor]) -> None:
        self._here = dict(values)
        self._leaving: dict[int, int] = {}  # to the host: the version of each when the copy began
        self._coming = False
        self._there: dict[int, _OnHost] = {}
        self.changed = False  # a value was, while it was copied
        for place, value in values.items():
            try:
                parts = sent_in_parts(value)
            except MonetError as error:
                warn_caller(f"a block keeps what it was to offload on the device: {error}")
                break
            self._leaving[place] = value._version
            self._there[place] = _OnHost(parts, (value.shape, value.stride(), value.dtype, value.device))

    def sent(self) -> None:
        """Let go of the values that leave; what the device does next waits for their copies."""
        leaving = [*self._leaving]
        self._end_sending()
        for place in leaving:
            del self._here[place]

    def _end_sending(self) -> None:
        for place, version in self._leaving.items():
            send_end(self._here[place], self._there[place].parts[-1])
            self.changed = self.changed or self._here[place]._version != version
        self._leaving.clear()

    def come(self) -> None:
        """Have the values come back."""
        if not self._leaving and not self._coming:
            away = {place: value for place, value in self._there.items() if place not in self._here}
            self._here |= {place: fetched_in_parts(value.parts, *value.like) for place, value in away.items()}
            self._coming = bool(away)

    def taken(self, *, again: bool) -> dict[int, Tensor]:
        """The values, by place, for the backward.

        Args:
            again: another backward will want them.

        Raises:
            RuntimeError: as autograd's for a saved tensor that was changed.
        """
        self.come()
        self._end_sending()
        if self.changed:
            raise RuntimeError(_CHANGED)
        if self._coming:
            for place in self._there:
                fetch_end(self._here[place])
        self._coming = False
        found = dict(self._here)
        if again:
            for place in self._there:
                del self._here[place]
        else:
            self._here.clear()
            self._there.clear()
        return found


class OffloadedCalls:
    """The calls of a model's blocks whose backward has not come yet, in the order of their forwards."""

    def __init__(self) -> None:
        self._calls: list[weakref.ref[OffloadedCall]] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        return OffloadedCalls, ()

    def forward_ended(self, values: Mapping[int, Tensor]) -> OffloadedCall:
        """A block's forward has ended: the values of the call before are gone now, and its own leave.

        Args:
            values: by place; none: of a block that offloads nothing.
        """
        with self._lock, quietly():
            self._calls[:] = [there for there in self._calls if there() is not None]
            if self._calls and (last := self._calls[-1]()) is not None:
                last.sent()
            call = OffloadedCall({place: value.detach() for place, value in values.items()})
            self._calls.append(weakref.ref(call))
            return call

    def taken(self, call: OffloadedCall, *, again: bool) -> dict[int, Tensor]:
        """`OffloadedCall.taken`; those of the call before it begin to come."""
        with self._lock, quietly():
            found = call.taken(again=again)
            place = next((n for n, there in enumerate(self._calls) if there() is call), 0)
            if place and (before := self._calls[place - 1]()) is not None:
                before.come()
            self._calls[:] = [there for there in self._calls if there() is not call]
            return found


class Keeping:
    """How one call of a block keeps what its step's backward needs.

    Args:
        calls: of the model's blocks; None: none offloads anything.
        offloaded: values of the block's program that wait on the host.
        copied: those that the rest of the model changes: there is a copy of them.
    """

    def __init__(self, calls: OffloadedCalls | None, offloaded: Collection[int], copied: Collection[int]) -> None:
        self._calls, self._offloaded, self._copied = calls, offloaded, copied
        self._call: OffloadedCall | None = None

    def left(self, values: Sequence[int], kept: Sequence[Tensor]) -> list[Tensor | None]:
        """What stays on the device of what a forward keeps: tensors of these values."""
        both = list(zip(values, kept, strict=True))
        stay: list[Tensor | None] = [_copy(own) if value in self._copied else own for value, own in both]
        if self._calls is not None:
            leave = {n: own for n, (value, own) in enumerate(both) if value in self._offloaded and may_be_sent(own)}
            self._call = self._calls.forward_ended(leave)
            stay = [None if place in leave else own for place, own in enumerate(stay)]
        return stay

    def back(self, left: Sequence[Tensor | None], *, again: bool) -> list[Any]:
        """All that the forward has kept, for the backward; ``again``: another backward will want it."""
        if self._calls is None or self._call is None:
            return list(left)
        found = self._calls.taken(self._call, again=again)
        return [found.get(place, own) for place, own in enumerate(left)]


class KeepingSaved:
    """How one call of a compiled block keeps what its graph saves: by hooks of autograd, since nobody else knows it.

    Whatever is kept comes back as it was, so that a wrong guess about what others hold costs time or memory alone.

    Args:
        calls: of the model's blocks.
        most_bytes: what may wait on the host.
    """

    def __init__(self, calls: OffloadedCalls, most_bytes: int) -> None:
        self._calls, self._most_bytes = calls, most_bytes
        self._here: list[tuple[Tensor, int] | None] = []  # with their versions; None: it has left
        self._back: dict[int, Tensor] = {}
        self._call: OffloadedCall | None = None

    def saving(self) -> AbstractContextManager[Any]:
        """Within it the graph is called."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def ended(self, lone: Iterable[Tensor], held: Iterable[Tensor]) -> None:
        """The call has ended: what only its backward will read leaves.

        Args:
            lone: inputs that exist only while the block keeps them.
            held: other inputs, parameters, buffers and results.
        """
        first, others = ({_storage(tensor) for tensor in some} for some in (lone, held))
        saved = [tensor for tensor, _ in filter(None, self._here)]
        storages = [_storage(tensor) for tensor in saved]
        times = Counter(storages)
        may = [
            place
            for place, (tensor, storage) in enumerate(zip(saved, storages, strict=True))
            if storage not in others and times[storage] == 1 and may_be_sent(tensor)
        ]
        sizes = [(storages[place] in first, saved[place].nbytes) for place in may]
        leave = {may[n]: saved[may[n]] for n in those_that_leave(sizes, self._most_bytes)}
        self._call = self._calls.forward_ended(leave)
        self._here = [None if place in leave else own for place, own in enumerate(self._here)]

    def _pack(self, tensor: Tensor) -> int:
        self._here.append((tensor.detach(), tensor._version))  # a result itself would hold the graph that holds it
        return len(self._here) - 1

    def _unpack(self, place: int) -> Tensor:
        own = self._here[place]
        begins = place not in self._back if own is None else not (place or self._back)
        if begins and self._call is not None:
            again = torch._C._autograd._get_current_graph_task_keep_graph()
            self._back = self._calls.taken(self._call, again=again)
        if own is None:
            return self._back.pop(place)
        tensor, version = own
        if tensor._version != version:
            raise RuntimeError(_CHANGED)
        return tensor


def those_that_leave(sizes: Sequence[tuple[bool, int]], most_bytes: int) -> list[int]:
    """The places of saved values that wait on the host: inputs first, then the largest, as far as there is room.

    Args:
        sizes: of each value whether it is an input, and its bytes.
    """
    found: list[int] = []
    for place in sorted(range(len(sizes)), key=lambda place: (not sizes[place][0], -sizes[place][1])):
        size = sizes[place][1]
        if LEAST_BYTES <= size <= most_bytes:
            found.append(place)
            most_bytes -= size
    return found


def hooks_are_free() -> bool:
    """Whether nobody else has hooks for what autograd saves, or forbids them."""
    autograd: Any = torch._C._autograd
    return autograd._saved_tensors_hooks_is_enabled() and autograd._top_saved_tensors_default_hooks(True) is None


def _storage(tensor: Tensor) -> int:
    """What tensors that share memory have in common; 0: they have none that is one storage."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else 0


_CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: an input or a "
    "result of a block, after the block's forward; change a copy of it"
)


def _copy(tensor: Tensor) -> Tensor:
    with quietly():
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return made.copy_(tensor)
