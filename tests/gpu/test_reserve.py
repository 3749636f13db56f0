"""The block that `reserve` takes. Skipped without a GPU."""

from __future__ import annotations

import pytest
import torch

import monet_like
from monet_like.errors import MonetError
from monet_like.ir.schedule import Schedule
from monet_like.ir.schedule_file import ScheduleRecord

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


def record(peak_bytes: int) -> ScheduleRecord:
    return ScheduleRecord(
        Schedule((), (), ()), "test", (), "normal", 1, "", "", {}, peak_bytes, 0.0, 0, 0.0, "none", "made"
    )


def test_one_block_that_the_step_is_cut_from() -> None:
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    kept = torch.empty(2**20, device="cuda")
    wanted = 2**30 - torch.cuda.memory_allocated()
    assert monet_like.reserve(record(2**30)) == wanted
    assert monet_like.reserve(record(2**30)) == wanted  # cuBLAS has its workspaces now, which no schedule counts
    reserved = torch.cuda.memory_reserved()
    assert reserved >= 2**30 - 2**22
    parts = [torch.empty(2**24, dtype=torch.uint8, device="cuda") for _ in range(40)]
    assert torch.cuda.memory_reserved() == reserved
    del kept, parts


def test_more_than_there_is_says_what_is_free() -> None:
    with pytest.raises(MonetError, match=r"needs .* more on cuda.* are free; end what else uses it"):
        monet_like.reserve(record(2**50))
