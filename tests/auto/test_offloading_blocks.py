"""Blocks that have what they carry on the host meanwhile, on a CPU, where copies lie in files: against plain PyTorch to
the bit, and against what the allocator counts.
"""

from __future__ import annotations

import copy
import random
from contextlib import suppress
from typing import Any

import pytest
import torch
from block_models import EXACT, Decoder, Short, assert_same_step, loss_of, measured_peak, plan_of, tokens, train
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import monet_like
from monet_like.auto import block_plan, offloaded
from monet_like.auto.block import blocks_of
from monet_like.auto.block_calls import CallPlans
from monet_like.errors import InfeasibleError, MonetError
from monet_like.runtime import offloaded_calls
from monet_like.runtime.frozen_weights import host_bytes
from monet_like.runtime.offload import host_parts
from monet_like.runtime.offloaded_calls import OffloadedCalls

OPTIONS: dict[str, Any] = {"mode": f"{EXACT}_offload", "loss": loss_of, "effort": "quick", "blocks": "layers.*"}
X = tokens(32, 64)


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder(blocks=6)


def least_bytes(model: nn.Module) -> int:
    """The smallest budget for which there are schedules."""
    with pytest.raises(InfeasibleError) as error:
        monet_like.auto_schedule(copy.deepcopy(model), X, memory_budget=1, **OPTIONS)
    assert error.value.smallest_bytes is not None
    return error.value.smallest_bytes


@pytest.fixture(scope="module")
def budget() -> int:
    """For which blocks have to offload, since copies within a block alone do not do."""
    with_offloads = least_bytes(decoder())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloaded, "ROOM", 0.0)
        without = least_bytes(decoder())
    assert with_offloads < 0.9 * without
    return (with_offloads + without) // 2


@pytest.fixture(scope="module")
def scheduled(budget: int) -> nn.Module:
    """A planned model, to be copied."""
    return monet_like.auto_schedule(decoder(), X, memory_budget=budget, **OPTIONS)


def test_a_step_is_exact_and_needs_what_is_predicted(scheduled: nn.Module, budget: int) -> None:
    mine, plain, plan = copy.deepcopy(scheduled), decoder(), plan_of(scheduled)
    assert sum(point.offloaded_bytes > 0 for point in plan.points) > 2
    for seed in (1, 2):
        assert_same_step(plain, mine, X, seed)
    assert 0.99 * plan.peak_bytes <= measured_peak(mine, X) <= plan.peak_bytes <= budget


def test_no_more_is_offloaded_than_the_host_has_room_for(
    scheduled: nn.Module, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = sum(point.offloaded_bytes for point in plan_of(scheduled).points) // 2
    monkeypatch.setattr(offloaded, "available_bytes", lambda: int(room / offloaded.ROOM))
    with suppress(InfeasibleError):
        model = monet_like.auto_schedule(decoder(), X, memory_budget=budget, **OPTIONS)
        assert sum(point.offloaded_bytes for point in plan_of(model).points) <= room


def test_the_next_start_takes_the_plan_from_the_cache_if_the_host_has_room(
    budget: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = monet_like.auto_schedule(decoder(), X, memory_budget=budget, **OPTIONS)
    with caplog.at_level("INFO", logger="monet_like"):
        again = monet_like.auto_schedule(decoder(), X, memory_budget=budget, **OPTIONS)
    assert "of activations on the host until the backward; reused" in caplog.text
    assert plan_of(again).points == plan_of(first).points
    assert_same_step(decoder(), again, X)
    monkeypatch.setattr(offloaded, "available_bytes", lambda: 2**16)
    with pytest.raises(InfeasibleError):
        monet_like.auto_schedule(decoder(), X, memory_budget=budget, **OPTIONS)


def backwards(model: nn.Module, order: str) -> None:
    """Two calls, then their backwards in some order."""
    torch.manual_seed(1)
    first, second = loss_of(model(X)), loss_of(model(X[:, :-1]) if order == "another form" else model(X))
    if order == "together":
        (first + second).backward()
    elif order == "kept":
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
    elif order == "one alone":
        second.backward()
    else:
        first.backward()
        second.backward()


@pytest.mark.parametrize("order", ["together", "kept", "one alone", "first in, first out", "another form"])
def test_calls_and_backwards_in_any_order_are_exact(scheduled: nn.Module, order: str) -> None:
    mine, plain = copy.deepcopy(scheduled), decoder()
    for model in (mine, plain):
        model.zero_grad()
        backwards(model, order)
    for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)
    assert_same_step(plain, mine, X)


def test_what_cannot_be_pinned_is_not_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(offloaded, "can_pin", lambda counts, _: found.append(sum(counts)) or not found[-1])
    with pytest.warns(UserWarning, match="could not be pinned, so the plan offloads none"):
        model = monet_like.auto_schedule(decoder(), X, memory_budget="50%", **OPTIONS)
    assert found[0] > 0 and found[1:] == [0]
    assert not any(point.offloaded for point in plan_of(model).points)
    assert_same_step(decoder(), model, X)


def test_what_finds_no_room_stays_on_the_device(scheduled: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, count = offloaded_calls.sent_in_parts, [0]

    def full(value: torch.Tensor) -> list[torch.Tensor]:
        count[0] += 1
        if count[0] % 3 == 0:
            raise MonetError("the disk is full")
        return sent(value)

    mine, plain = copy.deepcopy(scheduled), decoder()
    train(mine, X)
    monkeypatch.setattr(offloaded_calls, "sent_in_parts", full)
    with pytest.warns(UserWarning, match="keeps what it was to offload on the device: the disk is full"):
        assert_same_step(plain, mine, X)


def test_a_call_that_is_not_planned_for_offloads_within_what_its_block_has(
    scheduled: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with several processes, which plan nothing during training."""
    monkeypatch.setattr(CallPlans, "_may_plan", lambda *_: False)
    mine: Any = copy.deepcopy(scheduled)
    plain, plan = decoder(), plan_of(scheduled)
    for model in (mine, plain):
        for layer in model.layers:
            layer.dropout.p = 0.0
    assert_same_step(plain, mine, X)
    records = [block._block_records for block in blocks_of(mine)]
    assert all(records) and any(record.offloaded for own in records for record in own)
    assert measured_peak(mine, X) <= plan.peak_bytes


def test_a_copy_trains_and_a_plan_of_another_form_follows(scheduled: nn.Module) -> None:
    mine = copy.deepcopy(copy.deepcopy(scheduled))
    assert len({id(block._offloads) for block in blocks_of(mine)}) == 1
    assert blocks_of(mine)[0]._offloads is not blocks_of(scheduled)[0]._offloads
    assert_same_step(decoder(), mine, X)


@pytest.mark.parametrize("seed", range(10))
def test_each_backward_gets_its_own_values(seed: int) -> None:
    """Calls in any order: values are equal, and gone from the device once the next forward has ended."""
    draw, calls = random.Random(seed), OffloadedCalls()
    waiting: list[tuple[Any, dict[int, torch.Tensor], list[StorageWeakRef]]] = []
    for _ in range(40):
        if draw.random() < 0.55:
            values = {place: torch.randn(3, draw.randint(1, 50)).t() for place in range(draw.randint(0, 3))}
            copies = {place: value.clone() for place, value in values.items()}
            storages = [StorageWeakRef(value.untyped_storage()) for value in values.values()]
            call = calls.forward_ended(values)
            del values
            if waiting:
                assert all(storage.expired() for storage in waiting[-1][2])
            waiting.append((call, copies, storages))
        elif waiting:
            call, copies, _ = waiting.pop(draw.choice([-1, -1, draw.randrange(len(waiting))]))
            for again in (True, False) if draw.random() < 0.3 else (False,):
                found = calls.taken(call, again=again)
                assert found.keys() == copies.keys()
                assert all(torch.equal(found[p], copies[p]) for p in copies)
                assert all(found[p].stride() == copies[p].stride() for p in copies)
            assert calls.taken(call, again=False) == {}  # nothing is held any longer


def test_values_come_back_while_the_backward_after_them_runs() -> None:
    calls = OffloadedCalls()
    first, second = (calls.forward_ended({0: torch.randn(4)}) for _ in range(2))
    assert not first._here and second._here  # the second one leaves still
    calls.taken(second, again=False)
    assert first._here


class Masked(nn.Module):
    """A block that is given a mask that needs a gradient, as all others are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = Short(width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x * mask)
        return y


class Kept(nn.Module):
    """Blocks that all get one mask, which is computed; and each block's input is kept by what follows, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.scale = nn.Embedding(50, 32), nn.Parameter(torch.ones(32))
        self.layers = nn.ModuleList(Masked(32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.scale.sigmoid().expand(*x.shape, 32).contiguous()
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, mask).exp().tanh()
        return x


def test_an_input_that_others_hold_is_not_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """``tanh`` keeps its result, and every block gets the mask: to offload these frees nothing."""
    found: list[Any] = []
    lone = offloaded.lone_in_all
    monkeypatch.setattr(block_plan, "lone_in_all", lambda *given: found.append(lone(*given)) or found[-1])
    model = monet_like.auto_schedule(Kept(), X, memory_budget="90%", **OPTIONS)
    assert [len(own) for own in found[0].values()] == [1, 0, 0, 0]  # the embedding's result
    assert_same_step(Kept(), model, X)


@pytest.mark.parametrize("count", [1, 2**20, 2**20 + 1, 3 * 2**16, 2**24 - 1, 123_456_789])
def test_parts_of_pinned_memory_are_powers_of_two_and_little_is_wasted(count: int) -> None:
    """PyTorch rounds each part up to a power of two; on a CPU there is one part."""
    *whole, last = parts = host_parts(count, torch.device("cuda"))
    assert sum(parts) == count and len(parts) <= 4
    assert all(part == host_bytes(part, torch.device("cuda")) for part in whole)
    assert sum(host_bytes(part, torch.device("cuda")) for part in (*whole, last)) <= count * 16 / 15
    assert host_parts(count, torch.device("cpu")) == [count]


def test_a_value_that_is_changed_while_it_leaves_is_an_error_as_in_plain_pytorch() -> None:
    calls, value = OffloadedCalls(), torch.zeros(4)
    call = calls.forward_ended({0: value})
    value.add_(1)
    calls.forward_ended({})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        calls.taken(call, again=False)
