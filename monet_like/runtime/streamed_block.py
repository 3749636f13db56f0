"""One block with streamed weights: brings them, keeps them, lets go of them, and runs the block as plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import UsageError, warn_caller
from ..ir.units import format_bytes
from .frozen_weights import Weight, placed
from .streamed_weights import Stage, WeightStream, quietly

Change = Callable[[Tensor], Tensor]


class Streamed:
    """The streamed weights of one block.

    Args:
        block: its number in the stream.
    """

    def __init__(self, stream: WeightStream, block: int) -> None:
        self.stream, self.block = stream, block

    @property
    def weights(self) -> list[Weight]:
        """Empty if none is streamed any more."""
        return self.stream.weights.get(self.block, [])

    def there(self, stage: Stage = "backward", *, trains: bool = True) -> Any:
        """As `WeightStream.there`, with the weights that are still streamed."""
        if self.weights:
            self.stream.take_over(self.block)
        return self.stream.there(self.block, stage, trains=trains) if self.weights else nullcontext()

    def trained(self) -> list[Weight]:
        """The weights that require a gradient now."""
        return [weight for weight in self.weights if any(tensor.requires_grad for tensor in weight.tensors)]

    def release(self, weights: Iterable[Weight] | None = None, *, given: bool = False) -> None:
        """As `WeightStream.release`."""
        if self.weights:
            self.stream.release(self.block, weights, given=given)

    def stay_resident(self, those: list[Weight] | None, block: str) -> None:
        """Stream weights no longer, with a warning.

        Args:
            those: None: all of them, because plain PyTorch runs the block.
            block: its name, for people.
        """
        what = those or self.weights
        size = format_bytes(sum(weight.bytes for weight in what))
        if those is None:
            why = f"{block} runs as plain PyTorch with quantised weights, so they stay on the device"
        else:
            why = f"{those[0].name} of {block} is trained now, and a weight that is trained is not streamed"
        warn_caller(f"{why}: {size} more than planned")
        self.release(those)

    @property
    def runs(self) -> bool:
        """Whether the block runs now, with its weights on the device."""
        return self.block in self.stream.running

    def holds(self, tensor: Tensor) -> bool:
        """Whether a result of the block, which runs now, is a view of a weight, whose place another block takes."""
        if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor) or not self.runs:
            return False
        there = tensor.untyped_storage().data_ptr()
        slot, _ = self.stream.running[self.block]
        return any(place.whole.data_ptr() == there for place in slot.places[self.block])

    def but_streamed(self, change: Change) -> Change:
        """The change of a module's tensors but for streamed ones, which ``to`` their device and dtype leaves alone."""
        mine = {id(own) for weight in self.weights for own in (weight.owner, *weight.tensors)}
        return lambda tensor: tensor if id(tensor) in mine else change(tensor)

    def check_change(self, change: Change, name: str) -> None:
        """Check that streamed weights may stay where they are in such a change.

        Args:
            name: of the block, for people.

        Raises:
            UsageError: it changes dtype or device.
        """
        for weight in self.weights:
            here = torch.empty(0, dtype=weight.owner.dtype, device=self.stream.device)
            there = change(here)
            if (there.dtype, there.device) != (here.dtype, here.device):
                raise UsageError(
                    f"{weight.name} of {name} is streamed from the host to {here.device} as {here.dtype}, and "
                    f"cannot become {there.dtype} on {there.device}; take the schedules off first "
                    "(monet_like.unwrap), convert, and plan again"
                )

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """Let the block, whose weights are `there`, run as plain PyTorch with gradients, for which autograd may save
        views of its weights.

        They lie in memory of their own meanwhile. What autograd saves of it is noted as a place in a weight, and is
        copied to the device again when the backward asks for it. Only dense parameters can be told so.
        """
        stream, block = self.stream, self.block
        with quietly():
            slot, _ = stream.running[block]
            copies = [placed(w.tensors, stream.to_device(block, place)) for place, w in enumerate(self.weights)]
            stream.switch(block, slot.places[block], copies)
            before = stream.versions(block)
        places = {copy.whole.untyped_storage()._cdata: place for place, copy in enumerate(copies)}

        def pack(tensor: Tensor) -> Any:
            strided = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
            place = places.get(tensor.untyped_storage()._cdata) if strided else None
            if place is None:
                return tensor
            return place, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            place, dtype, *lies = packed
            return torch.empty(0, dtype=dtype, device=stream.device).set_(stream.to_device(block, place), *lies)

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            with quietly():
                if stream.versions(block) != before:
                    for place, copy in zip(slot.places[block], copies, strict=True):
                        place.whole.copy_(copy.whole)
                stream.switch(block, copies, slot.places[block])
