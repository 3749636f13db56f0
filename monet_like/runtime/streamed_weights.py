"""Frozen weights of a model's blocks in the host's memory, brought to the device while a block runs.

A frozen weight is only read, so it travels one way: to the device before the block's forward, and again before its
backward. On the device there is one ring of slots of one size, allocated once; a slot holds the weights of one block.
While a block runs, those of the next blocks are copied by a stream of its own. On CUDA the host's memory is pinned, and
two kinds of events keep order: a block waits until its copy has ended (`_Slot.filled`), and a copy waits until each
stream has computed the block whose slot it takes (`_Slot.read`). On a CPU both memories are the host's; copies are
made, too.

The model's tensors stay the same objects: their ``data`` is a slot while their block runs, and else the host's memory.
So ``state_dict``, ``save_pretrained`` and ``load_state_dict`` see the host's. What autograd's graph holds of these
objects follows. A plain forward with gradients may save views of them, which do not: see
`monet_like.runtime.streamed_block`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import warn_caller
from ..ir.units import format_bytes
from .frozen_weights import Place, Weight, aligned, host_bytes, host_memory, more_on_host, placed, slot_bytes

Stage = Literal["forward", "backward"]

#: The device on which a streamed tensor is computed with.
_homes: Any = WeakTensorKeyDictionary()
_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]


def computed_on(tensor: Tensor) -> torch.device:
    """The device on which a model computes with a tensor of its own, wherever it lies now."""
    found: torch.device = _homes.get(tensor, tensor.device)
    return found


@dataclass(eq=False)
class _Slot:
    """A place of the ring.

    Attributes:
        block: whose weights are in it; None: it is empty.
        places: for the weights of each block; made with the slot, because PyTorch's sanitizer of streams takes it for
            writing when a tensor is made in given memory.
        versions: of the block's tensors when they were copied.
        filled: an event: the copy has ended.
        read: by stream, an event: it has computed the block for the last time.
    """

    bytes: Tensor
    block: int | None = None
    places: dict[int, list[Place]] = field(default_factory=dict)
    versions: tuple[int, ...] = ()
    filled: Any = None
    read: dict[Any, Any] = field(default_factory=dict)


class WeightStream:
    """The streamed weights of a model's blocks, the ring, and the order in which blocks run; empty at first.

    Args:
        device: that computes.

    Attributes:
        weights: by block; the others are resident.
        provisional: no plan has said yet which weights are streamed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.provisional = device, False
        self.weights: dict[int, list[Weight]] = {}
        self.running: dict[int, tuple[_Slot, int]] = {}  # by block: where it lies, and how many calls run
        self._host: dict[int, list[Place]] = {}
        self._given: dict[int, torch.device] = {}
        self._lock = threading.RLock()
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._slots: list[_Slot] = []
        self.arrange((), 0, 1)

    def more_on_host(self, weights: Mapping[int, Sequence[Weight]]) -> int:
        """Bytes of the host that `keep` takes."""
        new = [weight for block, own in weights.items() if block not in self.weights for weight in own]
        return more_on_host(new, self.device)

    def keep(self, weights: Mapping[int, Sequence[Weight]]) -> None:
        """Stream these weights, by block, and no others: some move to the host, others from it to the device. The ring
        has to be arranged anew.
        """
        new = {block: own for block, own in weights.items() if block not in self.weights}
        self._slots.clear()
        with quietly():
            for block, own in new.items():
                self._given |= {id(tensor): tensor.device for weight in own for tensor in weight.tensors}
                self._host[block] = [self._to_host(weight) for weight in own]
                self.weights[block] = list(own)
        for block, own in list(self.weights.items()):
            wanted = weights.get(block, ())
            if others := [weight for weight in own if weight not in wanted]:
                self.release(block, others)
        self.provisional = False

    def arrange(self, visits: Sequence[tuple[int, Stage]], slots: int, ahead: int) -> None:
        """Make the ring.

        Args:
            visits: (block, stage) in the order in which a step runs them; how early weights come depends on it alone.
            slots: of the ring, each for the weights of one block.
            ahead: for so many visits after the one that runs weights are copied meanwhile, as far as there are slots.
        """
        self.ahead, self._stages = ahead, [stage for _, stage in visits]
        self._visits = {
            True: [block for block, _ in visits],
            False: [block for block, stage in visits if stage == "forward"],
        }
        self._position, self._trains = {True: -1, False: -1}, True
        self._slots.clear()
        self.slot_bytes = max(map(slot_bytes, self.weights.values()), default=0)
        with quietly():
            ring = torch.empty(slots * self.slot_bytes, dtype=torch.uint8, device=self.device)
            if self._copies is not None:
                ring.record_stream(self._copies)  # its memory is used again only after the last copy
            self._slots = [self._slot(part) for part in (ring.split(self.slot_bytes) if self.slot_bytes else ())]

    @property
    def host_bytes(self) -> int:
        """Of the host's memory that the weights take."""
        return sum(host_bytes(weight.bytes, self.device) for own in self.weights.values() for weight in own)

    @property
    def ring_bytes(self) -> int:
        """Of the device's memory that the ring takes."""
        return len(self._slots) * self.slot_bytes

    def _to_host(self, weight: Weight) -> Place:
        """Move a weight to the host; the model's tensors lie there then."""
        host = host_memory(weight.bytes, self.device)
        source: Any = weight.tensors[0].untyped_storage()
        host.untyped_storage().copy_(source)
        place = placed(weight.tensors, host.untyped_storage())
        lie(weight.tensors, place.tensors)
        for tensor in weight.tensors:
            _homes[tensor] = self.device
        return place

    def _read(self, slot: _Slot) -> None:
        """Have the next copy into a slot wait for what the present stream was given to compute."""
        if self._copies is not None:
            stream = torch.cuda.current_stream(self.device)
            slot.read[stream] = stream.record_event()

    # ---- a block runs ----

    @contextmanager
    def there(self, block: int, stage: Stage, *, trains: bool = True) -> Iterator[None]:
        """Have the weights of a block on the device while it runs.

        Args:
            trains: a forward whose backward will follow, or that backward: which block is next depends on it.
        """
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:  # nothing is computed
            yield
            return
        with self._lock:
            slot, calls = self.running.get(block, (None, 0))
            if slot is None:
                with quietly():
                    slot = self._come(block, stage, trains)
                    self.switch(block, self._host[block], slot.places[block])
            if self._copies is not None:  # each call on its own stream
                torch.cuda.current_stream(self.device).wait_event(slot.filled)
            self.running[block] = slot, calls + 1
        try:
            yield
        finally:
            with self._lock:
                slot, calls = self.running.pop(block)
                if calls > 1:
                    self.running[block] = slot, calls - 1
                elif block in self.weights:  # or else they were released meanwhile
                    with quietly():
                        self._go(block, slot)
                self._read(slot)

    def _come(self, block: int, stage: Stage, trains: bool) -> _Slot:
        """The slot that a block's weights come to; those of later blocks are on their way, too."""
        if self._advance(block, stage, trains):  # what wrote through ``.data`` since has left no trace
            self._forget()
        slot = self._slot_of(block)
        if slot is None or slot.versions != self.versions(block):
            slot = self._fill(slot or self._place(block), block)
        self.running[block] = slot, 0
        for distance in range(1, self.ahead + 1):
            self._prefetch(distance, trains)
        del self.running[block]
        return slot

    def _go(self, block: int, slot: _Slot) -> None:
        """A block's weights are no longer read; what was written into them goes to the host."""
        if slot.versions != (versions := self.versions(block)):
            for host, place in zip(self._host[block], slot.places[block], strict=True):
                host.whole.copy_(place.whole)
            slot.versions = versions
        self.switch(block, slot.places[block], self._host[block])
        self._take_over(block)

    def versions(self, block: int) -> tuple[int, ...]:
        """Of a block's tensors: another number after each change in place."""
        return tuple(tensor._version for weight in self.weights[block] for tensor in weight.tensors)

    def take_over(self, block: int) -> None:
        """Follow tensors that were given other memory, shape or dtype (``weight.data = other``), if no call runs."""
        with self._lock, quietly():
            if block not in self.running:
                self._take_over(block)

    def _take_over(self, block: int) -> None:
        gone = []
        for number, (weight, host) in enumerate(zip(self.weights[block], self._host[block], strict=True)):
            if all(map(_lies_as, weight.tensors, host.tensors)):
                continue
            form = torch.empty_like(weight.tensors[0], device="meta")  # as a copy of it would be
            if len(weight.tensors) > 1 or form.nbytes > weight.bytes:
                gone.append(weight)
                continue
            self._host[block][number] = host = placed([form], host.whole.untyped_storage())
            host.tensors[0].copy_(weight.tensors[0])
            lie(weight.tensors, host.tensors)
            for slot in self._slots:
                slot.places[block][number] = placed([form], slot.places[block][number].whole.untyped_storage())
                slot.versions = () if slot.block == block else slot.versions
        if gone:
            size = format_bytes(sum(tensor.nbytes for weight in gone for tensor in weight.tensors))
            warn_caller(
                f"{gone[0].name} was given more data than its place on the host can hold, so it is not streamed and "
                f"stays on the device: {size} more than planned"
            )
            self.release(block, gone)

    def _slot_of(self, block: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.block == block), None)

    def switch(self, block: int, before: Sequence[Place], where: Sequence[Place]) -> None:
        """Let the model's tensors lie elsewhere, but for those that were given other data than that before."""
        for weight, old, new in zip(self.weights[block], before, where, strict=True):
            for tensor, there, view in zip(weight.tensors, old.tensors, new.tensors, strict=True):
                if _lies_as(tensor, there):
                    lie([tensor], [view])

    # ---- the ring ----

    def _fill(self, slot: _Slot, block: int) -> _Slot:
        """Copy a block's weights into a slot, after the block that was in it has been computed."""
        slot.block, slot.versions = block, self.versions(block)
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            if self._copies is not None:
                for event in slot.read.values():
                    self._copies.wait_event(event)
                slot.read.clear()
            for host, place in zip(self._host[block], slot.places[block], strict=True):
                place.whole.copy_(host.whole, non_blocking=True)
            slot.filled = None if self._copies is None else self._copies.record_event()
        return slot

    def _slot(self, memory: Tensor) -> _Slot:
        """A slot with places for the weights of each block, each in a storage of its own, as they have been."""
        slot = _Slot(memory)
        for block, own in self.weights.items():
            start, slot.places[block] = memory.data_ptr(), []
            for weight, host in zip(own, self._host[block], strict=True):
                storage: Any = torch._C._construct_storage_from_data_pointer(start, self.device, weight.bytes)
                slot.places[block].append(placed(host.tensors, storage))
                start += aligned(weight.bytes)
        self._read(slot)
        return slot

    def _place(self, block: int) -> _Slot:
        """A slot for a block that runs now."""
        slot = self._victim(0)
        if slot is None:  # all are in use at once, which no plan has foreseen
            slot = self._slot(torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.device))
            self._slots.append(slot)
        return slot

    def _victim(self, beyond: int, trains: bool = True) -> _Slot | None:
        """The slot that is needed last, and later than ``beyond`` visits from now."""
        free = [slot for slot in self._slots if slot.block not in self.running]
        if not free:
            return None
        slot = max(free, key=lambda slot: self._next(slot.block, trains))
        return slot if self._next(slot.block, trains) > beyond else None

    def _next(self, block: int | None, trains: bool) -> int:
        """After how many visits a block runs again, as far as is known."""
        order, here = self._visits[trains], self._position[trains]
        ahead = range(1, len(order) + 1)
        return next((d for d in ahead if order[(here + d) % len(order)] == block), len(order) + 1)

    def _advance(self, block: int, stage: Stage, trains: bool) -> bool:
        """Note where in the step this visit is: the next place from the last one on.

        Returns:
            Whether a training step or an evaluation begins.
        """
        order, here = self._visits[trains], self._position[trains]
        begins, self._trains = trains is not self._trains, trains
        for distance in range(len(order)):
            place = (here + distance) % len(order)
            if order[place] == block and (not trains or self._stages[place] == stage):
                self._position[trains] = place
                return begins or place < here + (stage == "forward")  # a backward comes in parts
        return begins

    def _forget(self) -> None:
        """Take no slot for filled but those of blocks that run."""
        for slot in self._slots:
            slot.block = slot.block if slot.block in self.running else None

    def _prefetch(self, distance: int, trains: bool) -> None:
        order = self._visits[trains]
        place = self._position[trains] + distance
        if place >= len(order):  # the next step copies all anew
            return
        block = order[place]
        if block not in self.weights or self._slot_of(block) is not None:
            return
        self._take_over(block)
        slot = self._victim(distance, trains)
        if slot is not None and block in self.weights:
            self._fill(slot, block)

    # ---- without the ring ----

    def release(self, block: int, weights: Iterable[Weight] | None = None, *, given: bool = False) -> None:
        """Stream some weights of a block no longer.

        Args:
            weights: None: all.
            given: put each where it was before it was streamed, else on the device.
        """
        with self._lock, quietly():
            own = list(self.weights[block] if weights is None else weights)
            here = self.running[block][0].places[block] if block in self.running else self._host[block]
            for weight, place in zip(self.weights[block], here, strict=True):
                if weight not in own:
                    continue
                to = self._given[id(weight.tensors[0])] if given else self.device
                if all(map(_lies_as, weight.tensors, place.tensors)):
                    made = torch.empty(weight.bytes, dtype=torch.uint8, device=to)
                    made.untyped_storage().copy_(place.whole.untyped_storage())
                    lie(weight.tensors, placed(place.tensors, made.untyped_storage()).tensors)
                else:  # each has data of its own
                    lie(weight.tensors, [tensor.detach().to(to, copy=True) for tensor in weight.tensors])
                for tensor in weight.tensors:
                    _homes.pop(tensor, None)
            kept = [place for place, weight in enumerate(self.weights[block]) if weight not in own]
            self._host[block] = [self._host[block][place] for place in kept]
            self.weights[block] = [self.weights[block][place] for place in kept]
            for slot in self._slots:
                if slot.block == block:
                    slot.block = None
                    self._read(slot)  # just now, if the block runs
                slot.places[block] = [slot.places[block][place] for place in kept]
            if not kept:
                del self.weights[block], self._host[block]

    def to_device(self, block: int, place: int) -> torch.UntypedStorage:
        """A copy of a weight on the device."""
        with quietly():
            made = torch.empty(self.weights[block][place].bytes, dtype=torch.uint8, device=self.device)
            made.copy_(self._host[block][place].whole, non_blocking=True)
        return made.untyped_storage()


def _lies_as(tensor: Tensor, view: Tensor) -> bool:
    """Whether a tensor has the memory of another one, in its shape and dtype."""
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) == (
        view.data_ptr(), view.dtype, view.shape, view.stride(),
    )  # fmt: skip


def lie(tensors: Iterable[Tensor], where: Iterable[Tensor]) -> None:
    """Let tensors have the memory of others."""
    for tensor, view in zip(tensors, where, strict=True):
        _DATA(tensor, view)


@contextmanager
def quietly() -> Iterator[None]:
    """Run operators of our own, which have no gradient and are no inference, whoever calls."""
    with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
        yield
