"""One block of memory for a whole step: reserved before the allocator has fragmented the memory, or cut by a plan."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from ...errors import MonetError, UsageError
from ...ir.schedule_file import ScheduleRecord
from ...ir.units import format_bytes
from ...profile.measure import have_workspaces
from ..wrapper import ScheduleWrapper
from .arena import Arena, arena_library


def reserve(schedule: str | Path | ScheduleRecord, device: torch.device | str | None = None) -> int:
    """Allocate and free one block as large as a schedule's step needs beyond the memory that is allocated now.

    To be called before the first step, with the model on its device. PyTorch's allocator keeps the block and cuts the
    step's tensors from it; else it asks the driver for blocks of many sizes, some of which fit nothing later on. What
    fits into no gap of the block is still taken beside it (docs/faq.md, Fragmentation). cuBLAS's workspaces are taken
    before the block, so that they lie beside it.

    Args:
        schedule: a schedule file, or a loaded `ScheduleRecord`.
        device: default: the current CUDA device, or the CPU where there is none.

    Returns:
        Bytes of the block; 0 on a device without a caching allocator.

    Raises:
        MonetError: so much is not free.
        ScheduleFileError: the file is unreadable.
    """
    record = schedule if isinstance(schedule, ScheduleRecord) else ScheduleRecord.load(Path(schedule))
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type != "cuda":
        return 0
    torch._C._cuda_clearCublasWorkspaces()  # they are taken anew, beside the block
    wanted = max(0, record.peak_bytes - record.cublas_bytes - torch.cuda.memory_allocated(place))
    torch.cuda.empty_cache()
    try:
        have_workspaces(place)
        torch.empty(wanted, dtype=torch.uint8, device=place)
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info(place)
        raise MonetError(
            f"the schedule needs {format_bytes(wanted)} more on {place}, where {format_bytes(free)} of "
            f"{format_bytes(total)} are free; end what else uses it, or solve for a smaller budget"
        ) from None
    return wanted


def place_memory(model: nn.Module) -> None:
    """Have a model's training steps cut their tensors from one block of memory, each at a place that is chosen ahead.

    What the allocator takes from the device then hardly exceeds the schedule's peak: the steps' tensors of a MiB and
    more come from the block, all others from PyTorch's allocator as before. Results do not change. The model's first
    two steps run without: they show what a step allocates.

    Args:
        model: a `ScheduleWrapper`, or what `monet_like.auto_schedule` returns without ``blocks``; on a CPU or a GPU.

    Raises:
        UsageError: another model, one with ``cuda_graphs=True``, or the library is not compiled.
    """
    if not isinstance(model, ScheduleWrapper) or not model.plans_its_memory:
        raise UsageError(
            f"place_memory was given a {type(model).__name__}; it takes a ScheduleWrapper, or a model of auto_schedule "
            "without blocks"
        )
    if model._graphs is not None and model._graphs.always:
        raise UsageError("place_memory was given a model with cuda_graphs=True, whose tensors have places anyway")
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    arena_library(device.type)
    model._graphs = None
    if model._arena is None:
        model._arena = Arena()
