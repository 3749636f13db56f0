"""Layers under FSDP2 whose forwards are compiled within a plan."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from block_models import EXACT, Decoder, Layer, loss_of, plan_of, tokens
from compiled import uncompiled
from processes import together
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import monet_like
from benchmarks.unrun_kernels import unrun_kernels
from monet_like.auto import block_plan
from monet_like.auto.block import BlockSchedule, blocks_of
from monet_like.auto.rehearsal.memory import _resident_bytes as resident_bytes
from monet_like.export.graph_plans import _run_as_it_is
from monet_like.inductor import compiled_call
from monet_like.profile.measure import allocated_peak

COMPILED = {"backend": "inductor", "effort": "quick", "verbose": False}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """One process of its own group."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_forwards_of_sharded_layers_are_planned_once() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh()) for _ in range(3)]
    plain, x = nn.Sequential(nn.Linear(32, 32), *layers), torch.randn(256, 32)
    model = copy.deepcopy(plain)
    options = monet_like.compile_options("70%", calls=3, quick=True, measured=False)
    for layer in model[1:]:
        layer.forward = torch.compile(layer.forward, backend=uncompiled(options), dynamic=False)
    for part in (*model[1:], model):
        fully_shard(part)
    for _ in range(2):
        for net in (plain, model):
            net(x).square().mean().backward()
    (graph,) = options["custom_partitioner_fn"].graphs
    assert graph.saved_bytes < sum(256 * width * 4 for width in (64, 64, 32))  # as without a plan, results included
    for (name, parameter), sharded in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, sharded.grad.full_tensor(), msg=name)


@pytest.fixture
def model_of_blocks(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Graphs run operator by operator. Without dropout: PyTorch before 2.14 does not compile it so that it draws the
    same.
    """
    monkeypatch.setattr(compiled_call, "_without_donations", _run_as_it_is)
    torch._dynamo.reset()
    return _without_masks()


def same(plain: nn.Module, model: nn.Module, x: torch.Tensor) -> None:
    for _ in range(2):
        for net in (plain, model):
            torch.manual_seed(1)
            net(x).square().mean().backward()
    for (name, parameter), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        grad = other.grad.full_tensor() if hasattr(other.grad, "full_tensor") else other.grad
        torch.testing.assert_close(parameter.grad, grad, msg=name)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("mode", [EXACT, f"{EXACT}_offload"])
def test_sharded_blocks_of_a_plan_are_compiled(
    model_of_blocks: nn.Module, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take points of Inductor's graphs, for which their weights are whole."""
    menus, menu_of = [], block_plan.compiled_menu

    def menu(block: BlockSchedule, *others: Any) -> Any:
        before = [*block.parameters()]
        menus.append(menu_of(block, *others))
        assert all(one is other for one, other in zip(block.parameters(), before, strict=True))
        return menus[-1]

    monkeypatch.setattr(block_plan, "compiled_menu", menu)
    plain, x = model_of_blocks, tokens(32, 64)
    model = monet_like.auto_schedule(
        copy.deepcopy(plain), memory_budget="70%", blocks="layers.*", mode=mode, **COMPILED
    )
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    same(plain, model, x)
    assert all(kept.step.compiled for block in blocks_of(model) for kept in block._kept)
    assert {*plan_of(model).points} <= {point for menu in menus for point in menu}
    assert any(point.copies for point in plan_of(model).points) == mode.endswith("offload")


def _without_masks() -> nn.Module:
    torch.manual_seed(0)
    model = Decoder(Layer)
    for layer in model.layers:
        layer.dropout.p = 0.0
    return model


def _sharded(model: nn.Module, **options: Any) -> nn.Module:
    for part in (*model.layers, model):
        fully_shard(part, **options)
    return model


def _step_of_two(rank: int) -> None:
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    options = {**COMPILED, "blocks": "layers.*", "loss": loss_of, "mode": EXACT, "memory_budget": "70%"}
    plain, mine = _sharded(_without_masks()), _sharded(monet_like.auto_schedule(_without_masks(), **options))
    with mock.patch.object(compiled_call, "_without_donations", _run_as_it_is):
        for model in (plain, mine):
            loss_of(model(tokens(32, 64).roll(rank, 1))).backward()
    for (name, one), other in zip(plain.named_parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(one.grad.to_local(), other.grad.to_local(), msg=name)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mine = _sharded(monet_like.auto_schedule(_without_masks(), **options), mp_policy=policy)
    x, peaks = tokens(64, 64), []
    with unrun_kernels():
        loss_of(mine(x)).backward()
        for _ in range(4):
            mine.zero_grad()
            peaks.append(allocated_peak(lambda: loss_of(mine(x)).backward(), x.device))
    assert all(kept.step.compiled for block in blocks_of(mine) for kept in block._kept)
    plan, there = plan_of(mine), resident_bytes(mine, ((x,), {}), "none", x.device)
    assert 0.9 * plan.peak_bytes <= there + min(peaks) <= plan.peak_bytes <= plan.budget_bytes


@pytest.mark.slow
def test_sharded_blocks_of_two_processes_have_plain_gradients_within_the_plan(tmp_path: Path) -> None:
    together(tmp_path, _step_of_two)


@pytest.mark.usefixtures("alone")
def test_one_graph_serves_all_buckets_of_ddp(model_of_blocks: nn.Module) -> None:
    plain, x = model_of_blocks, tokens()
    model = monet_like.auto_schedule(copy.deepcopy(plain), memory_budget="80%", **COMPILED)
    same(plain, nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01), x)
    assert [len(kept.step.compiled.graphs) for kept in model._kept] == [1]
