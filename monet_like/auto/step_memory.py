"""Memory of a model's training step without what its blocks do, counted by rehearsals."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from ..capture.captured import allocated_bytes
from ..capture.example_inputs import Example, device_of
from ..compiler.request import OPTIMIZERS
from ..errors import UsageError
from ..plan.blocks import Moment
from ..profile.measure import allocated_stretches, have_workspaces
from ..replay.rehearsal import Event, Rehearsal, counted, held_values
from ..replay.verify import unsaved_loss
from .agreement import from_all
from .block_wrapper import BlockSchedule


@dataclass(frozen=True)
class Blocks:
    """A model and its blocks."""

    model: nn.Module
    blocks: tuple[BlockSchedule, ...]

    @property
    def names(self) -> list[str]:
        """Of the blocks."""
        return [block._block_name for block in self.blocks]


@dataclass(frozen=True)
class Rehearsed:
    """The result of a rehearsal.

    Attributes:
        moments: of the step; ``base_bytes`` is the largest of all processes.
        calls: how often each block runs.
        held: by block, see `held_values`.
    """

    moments: list[Moment]
    calls: tuple[int, ...]
    held: Mapping[int, frozenset[int]]


class StepMemory:
    """Counts the memory of one training step by rehearsals of it.

    A rehearsal runs the model with stand-ins for its blocks (`monet_like.replay.rehearsal`), the loss and the backward.
    Afterwards gradients, buffers and the state of random numbers are what they were.

    Args:
        example: arguments of the model.
        optimizer: whose state to count, see `OPTIMIZERS`.
        loss: from the model's result to a scalar; None: the result's own ``loss``, or one that takes no memory.
        together: count the largest of all processes.

    Raises:
        UsageError: the optimizer is unknown, or steps in the backward.
    """

    def __init__(
        self, of: Blocks, example: Example, optimizer: str, loss: Callable[[Any], torch.Tensor] | None, together: bool
    ) -> None:
        self.of, self.example, self.loss, self.together = of, example, loss, together
        self.device = device_of(of.model)
        _check_hooks(of.model)
        self.resident_bytes = _resident_bytes(of.model, example, optimizer, self.device)

    def rehearsed(self, kept: Sequence[Collection[int]] | None) -> Rehearsed:
        """Rehearse the step.

        Args:
            kept: the inputs and results that each block keeps, as values of its program; None: all of them.
        """
        events: list[Event] = []

        def run(mark: Callable[[], None]) -> Any:
            rehearsal = Rehearsal(kept, mark)
            for number, block in enumerate(self.of.blocks):
                block._block_number, block._rehearsal = number, rehearsal
            try:
                result = self.of.model(*self.example[0], **self.example[1])
                total = (self.loss or _loss)(result)
                total.backward()
            finally:
                for block in self.of.blocks:
                    block._rehearsal = None
                events.extend(rehearsal.events)
            return result, total

        have_workspaces(self.device)
        with _undone(self.of.model, self.example, self.device):
            stretches = allocated_stretches(run, self.device)
        mine = counted(events, stretches, self.of.names, self.resident_bytes)
        every = from_all([moment.base_bytes for moment in mine], together=self.together)
        moments = [replace(m, base_bytes=max(base)) for m, base in zip(mine, zip(*every, strict=True), strict=True)]
        forwards = [event.call.block for event in events if event.kind == "forward"]
        calls = tuple(forwards.count(number) for number in range(len(self.of.blocks)))
        return Rehearsed(moments, calls, held_values(events, stretches))


def _loss(result: Any) -> torch.Tensor:
    """The scalar that a result has as its loss, or else one of all its tensors that saves nothing.

    Raises:
        UsageError: nothing in the result has a gradient.
    """
    own = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(own, torch.Tensor) and own.requires_grad and own.numel() == 1:
        return own
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not tensors:
        raise UsageError(
            "the model's result has no tensor with a gradient; give auto_schedule a loss= that makes one of it"
        )
    return tensors[0] if len(tensors) == 1 and tensors[0].numel() == 1 else unsaved_loss(tensors)


def _check_hooks(model: nn.Module) -> None:
    """Refuse optimizers that step in the backward: in a rehearsal they would step, too.

    Raises:
        UsageError: there are such hooks.
    """
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UsageError(
                f"{name} has a hook that runs when its gradient is there, as of an optimizer that steps in the backward; blocks are "
                "planned with steps of their own, so register such hooks after auto_schedule has planned (give it example inputs)"
            )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor's part in this process."""
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor


def _resident_bytes(model: nn.Module, example: Example, optimizer: str, device: torch.device) -> int:
    """Bytes of parameters, buffers, inputs and the optimizer's state in this process; each storage counts once."""
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"optimizer {optimizer!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
    inputs = (leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor))
    tensors = map(_local, (*model.parameters(), *model.buffers(), *inputs))
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    trained = [_local(p) for p in model.parameters() if p.requires_grad]
    state = sum(map(OPTIMIZERS[optimizer].state_bytes, trained))
    return sum(allocated_bytes(size, device) for size in sizes.values()) + state


@contextlib.contextmanager
def _undone(model: nn.Module, example: Example, device: torch.device) -> Iterator[None]:
    """Put gradients, buffers and random numbers back to what they were."""
    inputs = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor) and leaf.is_leaf]
    grads = [(tensor, tensor.grad) for tensor in (*model.parameters(), *inputs)]
    buffers = [
        (module._buffers, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    for tensor, _ in grads:
        tensor.grad = None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        for tensor, grad in grads:
            tensor.grad = grad
        with torch.no_grad():
            for there, name, buffer, before in buffers:
                there[name] = buffer.copy_(before)
