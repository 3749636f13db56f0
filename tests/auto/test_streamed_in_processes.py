"""Streamed weights in two processes: replicated by `DistributedDataParallel`, where each streams its own copy; sharded
ones are refused.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from block_models import loss_of, plan_briefly, plan_of, train
from processes import together
from streamed_models import adapted_decoder, adapted_short
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import monet_like
from monet_like.auto import streamed
from monet_like.auto.block import blocks_of
from monet_like.errors import MonetError, UsageError
from monet_like.runtime import frozen_weights as weights_of

pytestmark = pytest.mark.slow
OPTIONS: dict[str, Any] = {"exact": True, "effort": "quick", "loss": loss_of, "memory_budget": "80%", "weights": "auto"}


def decoder() -> nn.Module:
    return adapted_decoder(block=adapted_short)


def batch_of(rank: int) -> torch.Tensor:
    return torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(rank))


def replicated(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.01)


#: How the two come together.
ORDERS: dict[str, Callable[[nn.Module, torch.Tensor], nn.Module]] = {
    "around a plan": lambda model, x: replicated(monet_like.auto_schedule(model, x, **OPTIONS)),
    "around": lambda model, _: replicated(monet_like.auto_schedule(model, **OPTIONS)),
    "before": lambda model, _: monet_like.auto_schedule(replicated(model), **OPTIONS),
}


def trained(model: Any, x: torch.Tensor) -> list[Any]:
    """Losses and gradients of four steps, each of two micro-batches of which the first is not synchronised."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    torch.manual_seed(5)
    found: list[Any] = []
    for _ in range(4):
        for part in range(2):
            with nullcontext() if part else model.no_sync():
                loss = loss_of(model(x.roll(part)))
                loss.backward()
            found.append(loss.item())
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


def _replicated(rank: int, order: str) -> None:
    plan_briefly()
    streamed.host_rate = lambda _: 1e9 * (1 + rank)  # each process measures another one
    plain, x = decoder(), batch_of(rank)
    mine = ORDERS[order](copy.deepcopy(plain), x)
    found, expected = trained(mine, x), trained(replicated(plain), x)
    assert len(found) == len(expected) > 8
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(found, expected, strict=True))
    scheduled = mine if order == "before" else mine.module
    plan = plan_of(scheduled)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (plan.points, plan.seconds))
    assert every[0] == every[1]
    names = [b._block_name for b, point in zip(blocks_of(scheduled), plan.points, strict=True) if point.ahead]
    left_alone = list(scheduled._ddp_params_and_buffers_to_ignore)
    assert names and {name.rpartition("layers.")[2][0] for name in left_alone} == {name[-1] for name in names}
    assert not any(dict(scheduled.named_parameters())[name].requires_grad for name in left_alone)
    dict(scheduled.named_parameters())[left_alone[0]].requires_grad_()
    assert list(scheduled._ddp_params_and_buffers_to_ignore) == left_alone[1:]
    assert not hasattr(monet_like.unwrap(scheduled), "_ddp_params_and_buffers_to_ignore")


@pytest.mark.parametrize("order", ORDERS)
def test_every_process_streams_its_own_copy(order: str, tmp_path: Path) -> None:
    together(tmp_path, _replicated, order)


def sharded(model: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def _refused(rank: int) -> None:
    plan_briefly()
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    x = batch_of(rank)
    other = decoder()
    with torch.no_grad():
        other.layers[1].up.base.weight[3, 4] += rank
    with pytest.raises(UsageError, match=r"the frozen weight weight of 8192 bytes is another one in rank 0 than in"):
        monet_like.auto_schedule(other, x, **OPTIONS)
    available, own = weights_of.available_bytes, sum(p.nbytes for p in other.layers.parameters() if not p.requires_grad)
    weights_of.available_bytes = lambda: int(1.5 * own)
    with pytest.raises(MonetError, match=r"weights of .* in 2 processes are to be kept in memory of the host"):
        monet_like.auto_schedule(decoder(), x, **OPTIONS)
    weights_of.available_bytes = available
    with pytest.raises(UsageError, match="weights that are whole in each process, and FSDPDecoder is sharded"):
        train(sharded(monet_like.auto_schedule(decoder(), **OPTIONS)), x)
    with pytest.raises(UsageError, match="is sharded already; call auto_schedule first"):
        monet_like.auto_schedule(sharded(decoder()), **OPTIONS)
    planned = monet_like.auto_schedule(decoder(), x, **OPTIONS)
    with pytest.raises(UsageError, match="was sharded by fully_shard after its schedule was planned"):
        train(sharded(planned), x)


def test_shards_and_weights_that_differ_are_refused(tmp_path: Path) -> None:
    together(tmp_path, _refused)
