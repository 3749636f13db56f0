"""SyncBatchNorm in real processes: as batch norm over all their batches at once, and as itself unscheduled,
to the bit.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import assert_same, step, together
from sync_batch_norm_cases import MODE, Net, images, made
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import monet_like
from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.compiler.request import Request
from monet_like.compiler.sources import Given
from monet_like.errors import CaptureError, ScheduleFileError
from monet_like.ir.program import Program, Task
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.job.job import Job
from monet_like.nn.sync_batch_norm import convert_sync_batchnorm
from monet_like.ops.sync_batch_norm import COMMUNICATING
from monet_like.plan.random_schedules import random_schedule
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.variants import admitted

CPU = torch.device("cpu")
GATHER, REDUCE = (f"monet_like.sync_batch_norm_{name}.default" for name in ("gather", "all_reduce"))


# ---- one process ----


@pytest.fixture(scope="module")
def captured() -> Captured:
    return admitted(capture(nn.SyncBatchNorm.convert_sync_batchnorm(Net()), (images(),), processes=2), MODE)


def communications(program: Program, name: str) -> list[int]:
    return [i for i, task in enumerate(program.tasks) if any(call.op == name for call in task.calls)]


def test_what_communicates_is_done_once_whatever_the_schedule(captured: Captured) -> None:
    program = captured.program
    gathers = communications(program, GATHER)
    assert len(gathers) == 4
    assert all(program.tasks[i].runs == "first" for i in gathers)
    for seed in range(4):
        schedule = random_schedule(program, seed, drop=0.9)
        assert [i for i in schedule.forward if i in gathers] == gathers
        assert not {i for again in schedule.again for i in again} & set(gathers)
        assert any(program.tasks[i].name.startswith("sync") for again in schedule.again for i in again)
    reduces = [ways for ways in program.slots if any(c.op == REDUCE for way in ways for c in way.calls)]
    assert len(reduces) == 4
    assert all(len(ways) == 1 for ways in reduces)


def test_the_same_program_for_every_number_of_processes_and_class(captured: Captured) -> None:
    other = admitted(capture(convert_sync_batchnorm(Net()), (images(3),), processes=7), MODE)
    assert other.program.fingerprint == captured.program.fingerprint


def test_the_name_of_the_group_is_no_part_of_the_fingerprint(captured: Captured) -> None:
    """Plans are made without processes, where it has none."""
    program = captured.program

    def named(task: Task) -> Task:
        calls = (replace(c, args=(*c.args[:-1], "7")) if c.op in COMMUNICATING else c for c in task.calls)
        return replace(task, calls=tuple(calls))

    slots = tuple(tuple(map(named, slot)) for slot in program.slots)
    other = replace(program, tasks=tuple(map(named, program.tasks)), slots=slots)
    assert other.tasks != program.tasks and other.slots != program.slots
    assert other.fingerprint == program.fingerprint


@pytest.mark.slow
def test_it_is_measured_and_planned_without_a_group() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Net())
    request = Request(model, ((images(),), {}), MODE, strategy="heuristic", profile_batch=4, processes=2)
    # On one thread some operators need more workspace: 81 % is then the least.
    compiled = Job(request, CPU, Given(None)).plan("85%")
    assert compiled.record.counts["processes"] == 2
    assert compiled.record.peak_bytes <= 0.85 * compiled.ready.plain.peak_bytes
    gathered = [
        task
        for task in compiled.ready.captured.program.every_task()
        if any(c.op in (GATHER, REDUCE) for c in task.calls)
    ]
    assert len(gathered) == 8
    assert all(compiled.ready.costs[task.cost].seconds > 0 for task in gathered)
    model.norms[1].momentum = 0.3
    with pytest.raises(ScheduleFileError, match="for SyncBatchNorm among 2 processes: start their process group first"):
        ScheduleWrapper(model, compiled.record)


@pytest.mark.slow
def test_alone_it_is_batch_norm() -> None:
    x, plain = images(), Net()
    plain.norms[1].momentum = 0.3  # a plain average cannot be captured alone: batch norm asks for a number
    record = made(plain, x, processes=None)[0]
    for convert in (nn.SyncBatchNorm.convert_sync_batchnorm, convert_sync_batchnorm):
        model, ours = copy.deepcopy(plain), ScheduleWrapper(convert(copy.deepcopy(plain)), record)
        for each in (model, ours):
            step(each, x, seed=0)
        assert_same(model, ours)


def test_a_batch_without_elements_is_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"needs at least one element in every process, got an input of \[0, 3, 8, 8\]"
    ):
        capture(nn.Sequential(convert_sync_batchnorm(nn.BatchNorm2d(3))), (images(0),), processes=2)


# ---- two processes ----


def _against_batch_norm(rank: int, records: list[ScheduleRecord]) -> None:
    """Batches of 3 and 2, each process by a schedule of its own, of another mode's program."""
    plain = Net().double()
    ours = ScheduleWrapper(convert_sync_batchnorm(copy.deepcopy(plain)), records[rank])
    parallel = DistributedDataParallel(ours, bucket_cap_mb=0.001)
    for _ in range(2):
        x = images(5, torch.float64)
        for model, part, share in ((plain, x, 0.5), (parallel, x[:3] if rank == 0 else x[3:], 1.0)):
            model.zero_grad()
            (share * model(part).square().sum()).backward()
        for (name, one), other in zip(plain.named_parameters(), ours.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                torch.testing.assert_close(other.grad, one.grad, rtol=1e-10, atol=1e-11, msg=name)
        for one, other in zip(plain.buffers(), ours.buffers(), strict=True):
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-13)
    plain.eval(), parallel.eval()
    torch.testing.assert_close(parallel(x), plain(x), rtol=1e-10, atol=1e-11)


@pytest.mark.slow
def test_as_batch_norm_over_all_batches(tmp_path: Path) -> None:
    model, x = convert_sync_batchnorm(Net().double()), images(4, torch.float64)
    together(tmp_path, _against_batch_norm, made(model, x, modes=("normal", f"conv_{MODE}")))


def _against_itself(rank: int, records: list[ScheduleRecord], alone: ScheduleRecord, cache: str) -> None:
    os.environ["MONET_LIKE_CACHE"] = f"{cache}/{rank}"
    base = Net(dropout=0.2)
    plain = DistributedDataParallel(convert_sync_batchnorm(copy.deepcopy(base)), bucket_cap_mb=0.001)
    scheduled = ScheduleWrapper(convert_sync_batchnorm(copy.deepcopy(base)), records[rank])
    planned = monet_like.auto_schedule(
        convert_sync_batchnorm(copy.deepcopy(base)), memory_budget="85%", mode=MODE, time_limit_seconds=2.0
    )
    if rank == 0:  # where one process plans, it waits for no other
        planned.prepare(images())
    others = [DistributedDataParallel(ours, bucket_cap_mb=0.001) for ours in (scheduled, planned)]
    torch.manual_seed(rank)
    batches = [images() for _ in range(2)]
    for turn, x in enumerate(batches):
        for model in (plain, *others):
            model.zero_grad(set_to_none=turn % 2 == 0)
            step(model, x, seed=10 * turn + rank)
        for ours in others:
            assert_same(plain, ours)
    for model in (plain, *others):
        with model.no_sync():
            step(model, batches[0], seed=50 + rank)
        step(model, batches[1], seed=60 + rank)
    for ours in others:
        assert_same(plain, ours)

    # Another group, and PyTorch's own class, which has no forward on a CPU and no place in DDP there.
    both, mine = dist.new_group([0, 1]), [dist.new_group([r]) for r in range(2)][rank]
    apart = convert_sync_batchnorm(copy.deepcopy(base))
    theirs = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(base), both)
    for model in (apart, theirs := ScheduleWrapper(theirs, records[rank])):
        step(model, batches[1], seed=rank)
    assert_same(apart, theirs)

    # A group of one is batch norm.
    base.norms[1].momentum = 0.3
    one = ScheduleWrapper(convert_sync_batchnorm(copy.deepcopy(base), mine), alone)
    for model in (base, one):
        step(model, batches[1], seed=rank)
    assert_same(base, one)

    with pytest.raises(ScheduleFileError, match="SyncBatchNorm is among 2 processes here: solve with --processes 2"):
        ScheduleWrapper(convert_sync_batchnorm(copy.deepcopy(base)), alone)


@pytest.mark.slow
def test_as_itself_unscheduled(tmp_path: Path) -> None:
    """In buckets of a kilobyte, whose reductions go between those of the statistics."""
    model, x = convert_sync_batchnorm(Net(0.2)), images()
    plain = Net(0.2)
    plain.norms[1].momentum = 0.3
    alone = made(plain, x, processes=None)[0]
    together(tmp_path, _against_itself, made(model, x), alone, str(tmp_path))
