"""Tensor parallelism: parts whose parameters are not split train by schedules; the others are refused in words."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from block_models import plan_briefly
from processes import together
from torch import nn

from monet_like import auto_schedule
from monet_like.auto.blocks import block_plan
from monet_like.capture.lower.step import capture
from monet_like.errors import CaptureError, UsageError

pytestmark = pytest.mark.slow
QUICK: dict[str, Any] = {"mode": "inplace_multiway_newnode", "effort": "quick", "memory_budget": "90%"}


class Layer(nn.Module):
    """A part that is whole in each process, and a part that is split."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))
        self.split = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.whole(x)
        return x + self.split(x)


def parallel() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(3)))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        parallelize_module(layer.split, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _trains(rank: int, blocks: str | None) -> None:
    plan_briefly(setattr)
    model = parallel()
    mine = auto_schedule(copy.deepcopy(model), blocks=blocks, **QUICK)
    optimizers = [torch.optim.Adam(net.parameters(), 1e-2) for net in (model, mine)]
    for step in range(3):
        results = []
        for net, optimizer in zip((model, mine), optimizers, strict=True):
            torch.manual_seed(step)
            x = torch.randn(32, 16)
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            results.append((loss.detach(), torch.get_rng_state()))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
    ours = mine.state_dict()
    assert all(torch.equal(local(tensor), local(ours[name])) for name, tensor in model.state_dict().items())
    plan = block_plan(mine)
    assert plan.peak_bytes < plan.plain_peak_bytes


@pytest.mark.parametrize("blocks", ["*.whole", None], ids=["named", "found"])
def test_parts_that_are_whole_train_as_without(blocks: str | None, tmp_path: Path) -> None:
    together(tmp_path, _trains, blocks)


def _refused(rank: int) -> None:
    model, x = parallel(), torch.randn(4, 16)
    with pytest.raises(UsageError, match=r"has parameters that are split among processes .* the parts that are not"):
        auto_schedule(model, blocks="*.split", **QUICK)
    with pytest.raises(CaptureError, match=r"split among processes \(DTensor.* plan the parts that are not split"):
        capture(model, (x,))


def test_what_is_split_is_refused(tmp_path: Path) -> None:
    together(tmp_path, _refused)
