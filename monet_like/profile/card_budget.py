"""A memory budget of "card": what is free on the device, less a reserve."""

from __future__ import annotations

import torch
from torch import nn

from ..capture.example_inputs import Example
from ..capture.resident import resident_parts
from ..errors import UsageError
from ..ir.units import GIB, MIB, Budget, format_bytes
from .devices import DeviceLimits

#: Of a card's memory, what a step may not use: pieces between tensors, libraries, and on an absent card CUDA's context.
RESERVED_SHARE, RESERVED_BYTES = 0.05, GIB
RESERVE_IN_WORDS = f"{100 * RESERVED_SHARE:g} % of each card, at least {format_bytes(RESERVED_BYTES)},"
#: What is free differs by a few MB from start to start; plans in the cache are for whole multiples of this.
_UNIT = 256 * MIB


def reserve_of(total_bytes: int) -> int:
    """What a step may not use of a card with so much memory."""
    return max(RESERVED_BYTES, int(RESERVED_SHARE * total_bytes))


def obtainable_bytes(device: torch.device) -> int:
    """What all tensors of this process together can have on a GPU: what is free, and what the allocator has."""
    unused, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return min(unused + reserved, int(total * torch.cuda.get_per_process_memory_fraction(device)))


def on_card(
    budget: Budget,
    device: torch.device,
    model: nn.Module,
    example: Example = ((), {}),
    *,
    absent: DeviceLimits | None = None,
) -> Budget:
    """The budget in bytes if it is "card", else the budget.

    Args:
        model, example: the step's; their parameters, buffers, gradients and inputs are on the device already. All else
            that is allocated there is not free.
        absent: the card that is planned for where it is not here; all of its memory is free.

    Raises:
        UsageError: the device is no GPU, or nothing is free.
    """
    if not budget.is_card:
        return budget
    if absent is not None and absent.memory_bytes:
        total = free = absent.memory_bytes
    elif absent is None and device.type == "cuda":
        total = torch.cuda.mem_get_info(device)[1]
        parts = (part for part in resident_parts(model, example) if part.device == device)
        own = sum(part.untyped_storage().nbytes() for part in parts)
        free = obtainable_bytes(device) - torch.cuda.memory_allocated(device) + own
    else:
        where = absent.name if absent is not None else device.type
        raise UsageError(
            f'memory_budget "card" is what is free on a GPU, and this step is for {where}, whose memory is not known; '
            'give an amount such as "8 GB", or a share such as "60%"'
        )
    usable = free - reserve_of(total)
    if usable < _UNIT:
        raise UsageError(
            f"of {format_bytes(total)} on the card {format_bytes(free)} are free for this step, less than the reserve "
            f"and {format_bytes(_UNIT)}; free some memory, or give an amount"
        )
    return Budget(usable // _UNIT * _UNIT)
