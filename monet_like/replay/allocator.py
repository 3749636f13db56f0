"""Reserves one block of GPU memory for a whole step, before the caching allocator has fragmented the memory."""

from __future__ import annotations

from pathlib import Path

import torch

from ..errors import MonetError
from ..ir.schedule_file import ScheduleRecord
from ..ir.units import format_bytes
from ..profile.measure import have_workspaces


def reserve(schedule: str | Path | ScheduleRecord, device: torch.device | str | None = None) -> int:
    """Allocate and free one block as large as a schedule's step needs beyond the memory that is allocated now.

    To be called before the first step, with the model on its device. PyTorch's allocator keeps the block and cuts the
    step's tensors from it; else it asks the driver for blocks of many sizes, some of which fit nothing later on. What fits
    into no gap of the block is still taken beside it (docs/faq.md, Fragmentation). cuBLAS's workspaces are taken before
    the block, so that they lie beside it.

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
