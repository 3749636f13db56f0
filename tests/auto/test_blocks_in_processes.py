"""Blocks with schedules in several processes: sharded by PyTorch's own `fully_shard`, or with equal parameters in all.

Gradients are compared with those of the same model without schedules. Peaks are compared with what the allocator counts
and with PyTorch's own `FSDPMemTracker`. Gloo's threads let go of buffers a little later than the step does, so that a
measured peak is the least of several steps.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from block_models import CPU, EXACT, Decoder, Layer, Short, assert_same_step, loss_of, plan_briefly, tokens, train
from processes import together
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import monet_like
from monet_like.auto import block_plan, offloaded
from monet_like.auto.block import blocks_of
from monet_like.auto.rehearsal.memory import _resident_bytes
from monet_like.errors import InfeasibleError, UsageError
from monet_like.profile.measure import allocated_peak

OPTIONS: dict[str, Any] = {"mode": EXACT, "loss": loss_of, "effort": "quick"}


def sharded(model: Any, **options: Any) -> nn.Module:
    """The model with every layer and the root sharded."""
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def batch_of(rank: int) -> torch.Tensor:
    return torch.randint(0, 50, (64, 32), generator=torch.Generator().manual_seed(rank))


def assert_same_shards(plain: nn.Module, mine: nn.Module, x: torch.Tensor, seed: int) -> None:
    for model in (plain, mine):
        model.zero_grad()
    assert torch.equal(train(plain, x, seed), train(mine, x, seed))
    for (name, one), other in zip(plain.named_parameters(), mine.parameters(), strict=True):
        assert torch.equal(one.grad.to_local(), other.grad.to_local()), name


def step_peak(model: nn.Module, x: torch.Tensor) -> int:
    """The least of the peaks of five steps."""
    found = []
    for _ in range(5):
        model.zero_grad()
        found.append(allocated_peak(lambda: train(model, x), CPU))
    model.zero_grad()
    return _resident_bytes(model, ((x,), {}), "none", CPU) + min(found)


def tracked_peak(model: nn.Module, x: torch.Tensor) -> int:
    """The peak of a step as PyTorch's tracker counts it: without workspaces of operators."""
    tracker = FSDPMemTracker(model)
    tracker.track_inputs((x,))
    with tracker:
        result = train(model, x)
    model.zero_grad()
    del result
    return tracker.get_tracker_snapshot("peak")[CPU]["Total"]


def _sharded(rank: int, block: Callable[[int], nn.Module], budget: str, options: dict[str, Any]) -> None:
    plan_briefly()
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    plain = Decoder(block)
    mine = monet_like.auto_schedule(copy.deepcopy(plain), memory_budget=budget, blocks="layers.*", **OPTIONS)
    plain, mine = sharded(plain, **options), sharded(mine, **options)
    x = batch_of(rank)
    for seed in range(2):
        assert_same_shards(plain, mine, x, seed)
    plan = monet_like.block_plan(mine)
    assert plan is not None and plan.peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes
    assert any(block.record.schedule.rerun_count for block in blocks_of(mine))
    assert step_peak(mine, x) == pytest.approx(plan.peak_bytes, rel=0.01)
    assert step_peak(plain, x) == pytest.approx(plan.plain_peak_bytes, rel=0.01)
    assert tracked_peak(mine, x) == pytest.approx(plan.peak_bytes, rel=0.01)
    content = [block.record.content() for block in blocks_of(mine)]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, content)
    assert all(theirs == content for theirs in every)
    if rank == 0:
        with pytest.raises(UsageError, match="the model's blocks are sharded by fully_shard"):
            monet_like.unwrap(mine)
        with pytest.raises(UsageError, match=r"layers.0 is sharded already; call auto_schedule first"):
            monet_like.auto_schedule(plain, blocks="layers.*")


def _offloading(rank: int) -> None:
    """With a budget for which copies within a block alone do not do: see `test_offloading_blocks`."""
    plan_briefly()
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    options = {**OPTIONS, "mode": f"{EXACT}_offload", "blocks": "layers.*"}
    plain = Decoder(Layer, 6)

    def least_bytes() -> int:
        with pytest.raises(InfeasibleError) as error:
            train(sharded(monet_like.auto_schedule(copy.deepcopy(plain), memory_budget=1, **options)), batch_of(rank))
        assert error.value.smallest_bytes is not None
        return error.value.smallest_bytes

    with_offloads = least_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloaded, "ROOM", 0.0)
        without = least_bytes()
    assert with_offloads < 0.9 * without
    budget = (with_offloads + without) // 2
    mine = monet_like.auto_schedule(copy.deepcopy(plain), memory_budget=budget, **options)
    plain, mine, x = sharded(plain), sharded(mine), batch_of(rank)
    for seed in range(2):
        assert_same_shards(plain, mine, x, seed)
    plan = monet_like.block_plan(mine)
    assert plan is not None and any(point.offloaded for point in plan.points)
    assert step_peak(mine, x) <= 1.01 * plan.peak_bytes
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [point.offloaded for point in plan.points])
    assert every[0] == every[1]


@pytest.mark.slow
def test_sharded_blocks_offload(tmp_path: Path) -> None:
    together(tmp_path, _offloading, within_seconds=300.0)


def _accumulated_and_alone(rank: int) -> None:
    """Micro-batches without synchronisation, then batches that one process alone has: larger, smaller, of one row."""
    plan_briefly()
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    plain: Any = Decoder()
    mine: Any = monet_like.auto_schedule(copy.deepcopy(plain), memory_budget="80%", blocks="layers.*", **OPTIONS)
    plain, mine = sharded(plain), sharded(mine)
    x = batch_of(rank)

    def both(batches: list[torch.Tensor]) -> None:
        for model in (plain, mine):
            model.zero_grad()
            torch.manual_seed(1)
            for number, batch in enumerate(batches):
                model.set_requires_gradient_sync(number == len(batches) - 1)
                loss_of(model(batch)).backward()
        for (name, one), other in zip(plain.named_parameters(), mine.parameters(), strict=True):
            assert torch.equal(one.grad.to_local(), other.grad.to_local()), name

    both([x[:32], x[32:]])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Short runs as plain PyTorch when it is called with")
        both([batch_of(2)[: 32 * (1 + rank)]])
        both([x[: 1 + 5 * rank]])
        both([x[:8, : 32 - 31 * rank]])
    assert bool(blocks_of(mine)[0]._kept.plain) == (rank == 1)


@pytest.mark.slow
def test_accumulation_and_batches_of_one_process_alone(tmp_path: Path) -> None:
    together(tmp_path, _accumulated_and_alone)


def _kept(rank: int) -> None:
    """The second start of both processes takes the plan of the first one's file, and counts its own rest again."""
    plan_briefly()
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    menus, plans, x = [], [], batch_of(rank)
    own = block_plan.menus_of
    block_plan.menus_of = lambda *args: menus.append(1) or own(*args)
    plain = Decoder()
    for _ in range(2):
        mine = monet_like.auto_schedule(copy.deepcopy(plain), memory_budget="80%", blocks="layers.*", **OPTIONS)
        mine = sharded(mine)
        train(mine, x)
        plans.append(monet_like.block_plan(mine))
    assert len(menus) == (rank == 0)
    assert plans[0].points == plans[1].points and plans[1].peak_bytes <= plans[1].budget_bytes == plans[0].budget_bytes
    assert_same_shards(sharded(plain), mine, x, 1)
    assert step_peak(mine, x) == pytest.approx(plans[1].peak_bytes, rel=0.01)


@pytest.mark.slow
def test_the_second_start_of_processes_reuses_the_plan(tmp_path: Path) -> None:
    together(tmp_path, _kept)


MIXED = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}


@pytest.mark.slow
def test_sharded_blocks_keep_the_budget_with_mixed_precision(tmp_path: Path) -> None:
    together(tmp_path, _sharded, Short, "75%", MIXED, processes=4)


@pytest.mark.slow
def test_parameters_that_stay_gathered(tmp_path: Path) -> None:
    together(tmp_path, _sharded, Layer, "75%", {"reshard_after_forward": False})


def _refused(rank: int) -> None:
    plan_briefly()
    mine = sharded(monet_like.auto_schedule(Decoder(), memory_budget="2%", blocks="layers.*", **OPTIONS))
    with pytest.raises(InfeasibleError, match=r"no schedules of the blocks fit .*give that much") as error:
        train(mine, batch_of(rank))
    assert error.value.smallest_bytes is not None
    wide = Decoder(width=32 + 8 * rank)
    with pytest.raises(UsageError, match=r"layers.0 differs between rank 0 and rank 1, and one plan is made for all"):
        monet_like.auto_schedule(wide, tokens(), blocks="layers.*", memory_budget="90%", **OPTIONS)
    own = monet_like.auto_schedule(wide, tokens(), blocks="layers.*", memory_budget="90%", same_plan=False, **OPTIONS)
    assert monet_like.block_plan(own) is not None
    early = monet_like.auto_schedule(
        Decoder(), tokens(), memory_budget="90%", blocks="layers.*", same_plan=False, **OPTIONS
    )
    with pytest.raises(UsageError, match=r"layers.0 was sharded by fully_shard after its schedule was planned"):
        train(sharded(early), tokens())
    late = monet_like.auto_schedule(Decoder(), memory_budget="90%", blocks="layers.*", **OPTIONS)
    around = FullyShardedDataParallel(late, device_id=CPU, use_orig_params=True)
    with pytest.raises(UsageError, match=r"\(FSDP1\) holds parameters of embedding, .*; take fully_shard \(FSDP2"):
        train(around, tokens())


def _replicated(rank: int, *, static_graph: bool = False) -> None:
    plan_briefly()
    plain = Decoder(Layer)
    options = {**OPTIONS, "memory_budget": "75%", "blocks": "layers.*"}
    if static_graph:  # it counts the gradients of its first step, to wait for as many in each
        late = monet_like.auto_schedule(copy.deepcopy(plain), **options)
        with pytest.raises(UsageError, match="give auto_schedule example inputs, so that it plans before"):
            train(DistributedDataParallel(late, static_graph=True), tokens())
    mine = monet_like.auto_schedule(copy.deepcopy(plain), tokens(), **options)
    plan = monet_like.block_plan(mine)
    plain, mine = (
        DistributedDataParallel(model, bucket_cap_mb=0.05, static_graph=static_graph) for model in (plain, mine)
    )
    x = torch.randint(0, 50, (16, 32), generator=torch.Generator().manual_seed(rank))
    for seed in range(3):
        assert_same_step(plain, mine, x, seed)
    assert plan is not None and any(block.record.schedule.rerun_count for block in blocks_of(mine))


def _refused_and_replicated(rank: int) -> None:
    _refused(rank)
    for static_graph in (False, True):
        torch.manual_seed(0)
        _replicated(rank, static_graph=static_graph)


@pytest.mark.slow
def test_every_process_gets_the_error_and_blocks_under_distributed_data_parallel(tmp_path: Path) -> None:
    together(tmp_path, _refused_and_replicated)


@pytest.mark.slow
def test_the_rest_may_be_compiled() -> None:
    plain, x = Decoder(), tokens()
    mine = monet_like.auto_schedule(copy.deepcopy(plain), x, memory_budget="75%", blocks="layers.*", **OPTIONS)
    compiled = torch.compile(mine, backend="eager")
    plain.zero_grad()
    assert torch.equal(train(plain, x), train(compiled, x))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), mine.parameters(), strict=True))
