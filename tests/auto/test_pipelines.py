"""Blocks with schedules in the stages of a pipeline (`torch.distributed.pipelining`), in processes with gloo.

Gradients are compared with those of the same pipeline without schedules, peaks with what the allocator counts. Gloo's
threads let go of buffers a little later than the step does, so that a measured peak is the least of several steps.
"""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from block_models import CPU, EXACT, Layer, plan_briefly
from processes import together
from streamed_models import adapted_layer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining._backward import stage_backward_input
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

import monet_like
from monet_like.auto.block import blocks_of
from monet_like.auto.rehearsal.memory import _resident_bytes
from monet_like.errors import CaptureError, InfeasibleError, UsageError
from monet_like.profile.measure import allocated_stretches

OPTIONS: dict[str, Any] = {"mode": EXACT, "effort": "quick", "blocks": "layers.*", "same_plan": False}
MICRO_BATCHES = 4


class Stage(nn.Module):
    """The blocks of one process; the first stage has the embedding, the last one the head."""

    def __init__(
        self, block: Callable[[int], nn.Module], blocks: int, first: bool, last: bool, width: int = 32
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width) if first else nn.Identity()
        self.layers = nn.ModuleList(block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 50) if last else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.randint(0, 50, (8 * MICRO_BATCHES, 33), generator=torch.Generator().manual_seed(0))
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def arguments(rank: int, length: int = 32) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of ``schedule.step``: the first stage gets the batch, the last one the target."""
    tokens, target = (each[:, :length] for each in batch())
    return ((tokens,), {}) if rank == 0 else ((), {"target": target} if rank == dist.get_world_size() - 1 else {})


def scheduled(kind: Any, module: nn.Module, micro_batches: int = MICRO_BATCHES) -> Any:
    """A schedule of a pipeline whose stage in this process is ``module``."""
    stage = PipelineStage(module, dist.get_rank(), dist.get_world_size(), CPU)
    return kind(stage, micro_batches, loss_fn=loss_fn)


def step(schedule: Any, modules: nn.Module, seed: int, given: Any) -> list[float]:
    """A step without gradients from before. What it returns are the losses, in the last process."""
    modules.zero_grad()
    torch.manual_seed(seed)
    losses: list[torch.Tensor] = []
    schedule.step(*given[0], losses=losses, **given[1])
    return [loss.item() for loss in losses]


def assert_same_pipeline(one: Any, other: Any, plain: nn.Module, mine: nn.Module, given: Any = None) -> None:
    """Losses and gradients of two pipelines are equal bit by bit, dropout's masks included."""
    given = given or arguments(dist.get_rank())
    for seed in range(2):
        assert step(one, plain, seed, given) == step(other, mine, seed, given)
        for (name, a), b in zip(plain.named_parameters(), mine.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None) == (not a.requires_grad), name
            assert a.grad is None or torch.equal(a.grad, b.grad), name


def measured_peak(make: Callable[[nn.Module], Any], modules: nn.Module, given: Any = None) -> int:
    """The least of the peaks of four steps, with what the first step of the pipeline leaves behind."""
    given = given or arguments(dist.get_rank())

    def run(mark: Callable[[], None]) -> Any:
        schedule = make(modules)
        for seed in range(5):
            step(schedule, modules, seed, given)
            modules.zero_grad()
            gc.collect()
            mark()
        return schedule

    modules.zero_grad()
    peaks = [stretch.peak_bytes for stretch in allocated_stretches(run, CPU)[1:5]]
    return _resident_bytes(modules, given, "none", CPU) + min(peaks)


def check(make: Callable[[nn.Module], Any], plain: nn.Module, budget: str, blocks: str = "layers.*") -> Any:
    """Plan a copy of the process's modules and compare it with them; returns it."""
    args, kwargs = arguments(dist.get_rank())
    mine: Any = monet_like.auto_schedule(copy.deepcopy(plain), memory_budget=budget, **{**OPTIONS, "blocks": blocks})
    schedule = make(mine)
    plan = monet_like.plan_step(mine, schedule.step, *args, **kwargs)
    assert all(p.grad is None for p in mine.parameters())
    assert_same_pipeline(make(plain), schedule, plain, mine)
    assert plan.peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes
    assert any(block.record.schedule.rerun_count for block in blocks_of(mine))
    assert measured_peak(make, mine) == pytest.approx(plan.peak_bytes, rel=0.01)
    assert measured_peak(make, plain) == pytest.approx(plan.plain_peak_bytes, rel=0.01)
    return mine


def stage_of(rank: int, stages: int, blocks: int) -> Stage:
    return Stage(Layer, blocks, rank == 0, rank == stages - 1)


def _one_stage_each(rank: int) -> None:
    """Ranks have different blocks. Those of one are alike, and each finds schedules of its own."""
    plan_briefly()
    torch.manual_seed(rank)
    plain = stage_of(rank, 2, 2 + rank)
    in_flight = []
    for kind in (ScheduleGPipe, Schedule1F1B):
        mine = check(partial(scheduled, kind), plain, "75%")
        in_flight.append(monet_like.block_plan(mine).plain_peak_bytes)
    assert in_flight[0] > in_flight[1]  # all four micro-batches, and at most 2 - rank


@pytest.mark.slow
def test_gpipe_and_1f1b(tmp_path: Path) -> None:
    together(tmp_path, _one_stage_each)


def _streamed(rank: int) -> None:
    """Frozen weights of each process's stage come from the host: no other schedule fits, however long a copy takes."""
    plan_briefly()
    torch.manual_seed(rank)
    plain, given = Stage(adapted_layer, 4 + rank, rank == 0, rank == 1, width=256), arguments(rank, length=2)
    on_device = monet_like.auto_schedule(copy.deepcopy(plain), memory_budget="60%", **OPTIONS)
    with pytest.raises(InfeasibleError):
        monet_like.plan_step(on_device, scheduled(Schedule1F1B, on_device).step, *given[0], **given[1])
    mine = monet_like.auto_schedule(copy.deepcopy(plain), memory_budget="60%", weights="auto", **OPTIONS)
    schedule = scheduled(Schedule1F1B, mine)
    plan = monet_like.plan_step(mine, schedule.step, *given[0], **given[1])
    assert any(point.ahead for point in plan.points)
    assert_same_pipeline(scheduled(Schedule1F1B, plain), schedule, plain, mine, given)


@pytest.mark.slow
def test_stages_with_streamed_weights(tmp_path: Path) -> None:
    together(tmp_path, _streamed)


def several(kind: Any, modules: nn.Module) -> Any:
    """A schedule with several stages in each process: those of process r are r, r + 2 and so on."""
    rank, count = dist.get_rank(), 2 * len(list(modules))
    stages = [PipelineStage(module, rank + 2 * n, count, CPU) for n, module in enumerate(modules)]
    return kind(stages, MICRO_BATCHES, loss_fn=loss_fn)


def _several_stages_each(rank: int) -> None:
    plan_briefly()
    torch.manual_seed(rank)
    plain = nn.ModuleList(stage_of(rank + 2 * n, 4, 1) for n in range(2))
    mine = check(partial(several, ScheduleInterleaved1F1B), plain, "80%", blocks="*.layers.*")
    args, kwargs = arguments(rank)
    zero_bubble = several(ScheduleInterleavedZeroBubble, mine)
    with pytest.raises(
        UsageError, match=r"ScheduleInterleavedZeroBubble computes the gradients of inputs and those of param"
    ):
        monet_like.plan_step(mine, zero_bubble.step, *args, **kwargs)
    _hidden_zero_bubble(rank)


def _hidden_zero_bubble(rank: int) -> None:
    """A function that calls the schedule: it is refused when its step was rehearsed, in the first process, too."""
    args, kwargs = arguments(rank)
    modules = nn.ModuleList(stage_of(rank + 2 * n, 4, 1) for n in range(2))
    mine = monet_like.auto_schedule(modules, memory_budget="80%", **{**OPTIONS, "blocks": "*.layers.*"})
    pipeline = several(ScheduleInterleavedZeroBubble, mine)
    with pytest.raises(UsageError, match="the training step computes the gradients of inputs and those of parameters"):
        monet_like.plan_step(mine, lambda *given, **named: pipeline.step(*given, **named), *args, **kwargs)
    assert monet_like.block_plan(mine) is None and all(p.grad is None for p in mine.parameters())


def _refused(rank: int) -> None:
    args, kwargs = arguments(rank)
    little: Any = monet_like.auto_schedule(stage_of(rank, 2, 1), memory_budget="99%" if rank == 0 else "2%", **OPTIONS)
    with pytest.raises(InfeasibleError, match=r"no schedules of the blocks fit .*give that much") as found:
        monet_like.plan_step(little, scheduled(ScheduleGPipe, little).step, *args, **kwargs)
    assert ("found by the process with rank 1, whose step needs this one" in str(found.value)) == (rank == 0)
    same = monet_like.auto_schedule(stage_of(rank, 2, 1), memory_budget="90%", **{**OPTIONS, "same_plan": True})
    with pytest.raises(
        UsageError, match=r"give all the same shapes, or same_plan=False|give auto_schedule same_plan=False"
    ):
        monet_like.plan_step(same, scheduled(Schedule1F1B, same).step, *args, **kwargs)
    odd: Any = monet_like.auto_schedule(stage_of(rank, 2, 1), memory_budget="90%", **OPTIONS)
    if rank == 1:
        odd.layers[0]._model.register_forward_pre_hook(lambda _, given: given[0][given[0] > 0].sum() * 0 + given[0])
    with pytest.raises(CaptureError):
        monet_like.plan_step(odd, scheduled(ScheduleGPipe, odd).step, *args, **kwargs)


def _several_stages_each_and_refused(rank: int) -> None:
    _several_stages_each(rank)
    _refused(rank)


@pytest.mark.slow
def test_several_stages_in_each_process_and_what_is_refused(tmp_path: Path) -> None:
    together(tmp_path, _several_stages_each_and_refused, within_seconds=240.0)


def _before_planning(rank: int) -> None:
    model = monet_like.auto_schedule(stage_of(rank, 1, 1), memory_budget="90%", **OPTIONS)
    tokens, target = batch()
    with pytest.raises((RuntimeError, UsageError)) as error:
        scheduled(ScheduleGPipe, model).step(tokens, target=target)
    assert re.search(
        r"Stage is a stage of a pipeline .*call monet_like.plan_step\(model, schedule.step", told(error.value)
    )


def told(error: BaseException) -> str:
    """The messages of an error and its causes."""
    return str(error) + (told(error.__cause__) if error.__cause__ else "")


@pytest.mark.slow
def test_a_step_before_planning_is_refused(tmp_path: Path) -> None:
    together(tmp_path, _before_planning, processes=1, within_seconds=60.0)


def test_gradients_apart_are_refused() -> None:
    """As `torch.distributed.pipelining` computes them in zero-bubble schedules; parameters would stay without
    gradients.
    """
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    mine = monet_like.auto_schedule(layer, x, memory_budget="100%", mode=EXACT, effort="quick")
    for module in (nn.Linear(4, 4), mine):
        result = module(x)
        run = partial(stage_backward_input, [result], [torch.ones_like(result)], [x], module.parameters())
        if module is mine:
            with pytest.raises((RuntimeError, UsageError)) as error:  # PyTorch 2.11 asks for the hook earlier
                run()
            assert "the training step computes the gradients of inputs and those of parameters apart" in told(
                error.value
            )
        else:
            assert run()[0][0] is not None


def _sharded_stages(rank: int) -> None:
    """Two stages of two processes each, which shard the stage's parameters and have batches of their own."""
    plan_briefly()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))
    stage, shard = mesh["stages"].get_local_rank(), mesh["shards"].get_local_rank()
    tokens, target = ((part + shard) % 50 for part in batch())
    given: Any = ((tokens,), {}) if stage == 0 else ((), {"target": target})

    def pipeline(module: nn.Module) -> Any:
        group = mesh["stages"].get_group()
        return Schedule1F1B(PipelineStage(module, stage, 2, CPU, group=group), MICRO_BATCHES, loss_fn=loss_fn)

    torch.manual_seed(stage)
    plain = stage_of(stage, 2, 2)
    mine: Any = monet_like.auto_schedule(copy.deepcopy(plain), memory_budget="75%", **OPTIONS)
    for module in (plain, mine):
        for part in (*module.layers, module):
            fully_shard(part, mesh=mesh["shards"], reshard_after_forward=False)
    schedule, usual = pipeline(mine), pipeline(plain)
    plan = monet_like.plan_step(mine, schedule.step, *given[0], **given[1])
    assert any(block.record.schedule.rerun_count for block in blocks_of(mine))
    for seed in range(2):
        assert step(usual, plain, seed + shard, given) == step(schedule, mine, seed + shard, given)
        for (name, a), b in zip(plain.named_parameters(), mine.parameters(), strict=True):
            assert a.grad.to_local().numel() < a.numel() or a.numel() == 1, name
            assert torch.equal(a.grad.to_local(), b.grad.to_local()), name
    # A block's gathered parameters, which gloo's threads may release late, count once more or less.
    late = sum(p.numel() * 4 for p in plain.layers[0].parameters())
    for module, predicted in ((mine, plan.peak_bytes), (plain, plan.plain_peak_bytes)):
        peak = measured_peak(pipeline, module, given)
        assert abs(peak - predicted) <= 0.01 * predicted + 2 * late
    assert plan.peak_bytes <= plan.budget_bytes


@pytest.mark.slow
def test_stages_that_are_sharded(tmp_path: Path) -> None:
    together(tmp_path, _sharded_stages, processes=4, within_seconds=300.0)
