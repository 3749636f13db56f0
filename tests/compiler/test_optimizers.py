"""Bytes of optimizers' states and temporaries, against PyTorch's own optimizers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from monet_like.compiler.request import OPTIMIZERS, optimizer_bytes
from monet_like.errors import UsageError
from monet_like.profile.measure import allocated_peak

KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, foreach=False),
    "adam_fused": lambda p: torch.optim.Adam(p, fused=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, fused=True),
}
#: Counters of steps and other small tensors.
SMALL = 4096


@pytest.mark.parametrize("name", KINDS)
def test_states_and_temporaries_are_those_of_pytorchs_optimizers(name: str) -> None:
    model = nn.Sequential(nn.Linear(300, 200, bias=False), nn.Linear(200, 100, bias=False))
    optimizer = KINDS[name](model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values() if t.dim())
    assert found == optimizer_bytes(model, name)
    temporary = optimizer_bytes(model, name, in_backward=True) - optimizer_bytes(model, name)
    assert temporary == OPTIMIZERS[name].temporaries * 300 * 200 * 4
    rise = allocated_peak(optimizer.step, torch.device("cpu"))
    assert temporary <= rise <= temporary + SMALL


def test_states_in_managed_memory_are_not_counted() -> None:
    model = nn.Linear(300, 200)
    assert optimizer_bytes(model, "paged_adamw8bit") == 0 < optimizer_bytes(model, "adamw8bit")


def test_states_of_8_bits_have_a_scale_for_each_block_and_small_ones_stay() -> None:
    model = nn.Sequential(nn.Linear(100, 64), nn.Linear(64, 2))
    large, small = 100 * 64, 64 + 64 * 2 + 2
    assert optimizer_bytes(model, "adamw8bit") == 2 * (large + 4 * 25) + 2 * 4 * small
    model[0].weight.requires_grad_(False)
    assert optimizer_bytes(model, "adamw8bit") == 2 * 4 * small


def test_an_unknown_optimizer_is_refused() -> None:
    with pytest.raises(
        UsageError, match="optimizer 'lion' is unknown; choose one of none, sgd, momentum, adam, adamw, "
    ):
        optimizer_bytes(nn.Linear(2, 2), "lion")
