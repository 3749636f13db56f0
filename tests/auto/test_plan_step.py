"""`plan_step`: steps of several micro-batches, in one process, against plain PyTorch and what the allocator counts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from block_models import CPU, EXACT, Decoder, Layer, loss_of, tokens
from torch import nn

import monet_like
from monet_like.auto.block import blocks_of
from monet_like.errors import UsageError
from monet_like.profile.measure import allocated_peak
from monet_like.replay.verify.steps import resident_bytes

Step = Callable[[nn.Module, torch.Tensor], Any]


def one_after_the_other(model: nn.Module, x: torch.Tensor) -> None:
    """Gradient accumulation: every micro-batch adds its gradients to those of the ones before."""
    for part in x.chunk(3):
        loss_of(model(part)).backward()


def all_in_flight(model: nn.Module, x: torch.Tensor) -> None:
    """All forwards before the first backward, as in GPipe."""
    losses = [loss_of(model(part)) for part in x.chunk(3)]
    while losses:
        losses.pop(0).backward()


def two_in_flight(model: nn.Module, x: torch.Tensor) -> None:
    """The backward of a micro-batch after the forward of the next one, as in 1F1B."""
    waiting: list[torch.Tensor] = []
    for part in x.chunk(3):
        waiting.append(loss_of(model(part)))
        if len(waiting) == 2:
            waiting.pop(0).backward()
    waiting.pop().backward()


def wrapped(plain: nn.Module, budget: str | int, **options: Any) -> Any:
    return monet_like.auto_schedule(
        copy.deepcopy(plain), memory_budget=budget, blocks="layers.*", mode=EXACT, effort="quick", **options
    )


def assert_same(step: Step, plain: nn.Module, mine: nn.Module, x: torch.Tensor) -> None:
    for seed in range(2):
        for model in (plain, mine):
            torch.manual_seed(seed)
            step(model, x)
        for (name, one), other in zip(plain.named_parameters(), mine.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad), name


def measured(step: Step, model: nn.Module, x: torch.Tensor, *, clear: bool = True) -> int:
    """Bytes that a step needs at most, all that exists before it included."""
    if clear:
        model.zero_grad()
    grads = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    return resident_bytes(model, ((x,), {})) + grads + allocated_peak(lambda: step(model, x), CPU)


#: A step, a model, tokens and a budget. With few tokens gradients are most of the memory.
STEPS: list[tuple[Step, Callable[[], nn.Module], tuple[int, int], str]] = [
    (one_after_the_other, lambda: Decoder(Layer, 2, 64), (6, 8), "98%"),
    (all_in_flight, lambda: Decoder(blocks=2), (12, 16), "75%"),
    (two_in_flight, lambda: Decoder(Layer, 2), (12, 16), "75%"),
]


@pytest.mark.slow(but=["all_in_flight"])
@pytest.mark.parametrize(("step", "model", "size", "budget"), STEPS, ids=[step[0].__name__ for step in STEPS])
def test_micro_batches_in_flight_are_counted(
    step: Step, model: Callable[[], nn.Module], size: tuple[int, int], budget: str
) -> None:
    plain, x = model(), tokens(*size)
    mine = wrapped(plain, budget)
    plan = monet_like.plan_step(mine, lambda data: step(mine, data), x)
    assert plan == monet_like.block_plan(mine)
    assert all(p.grad is None for p in mine.parameters())
    assert any(block.record.schedule.rerun_count for block in blocks_of(mine))
    assert_same(step, plain, mine, x)
    assert measured(step, mine, x) == plan.peak_bytes <= plan.budget_bytes
    assert measured(step, plain, x) == plan.plain_peak_bytes


@pytest.mark.slow
def test_a_model_that_has_trained_follows_its_new_plan() -> None:
    """Planned for another step, its blocks take the new schedules and not those that were compiled before."""
    plain, x = Decoder(Layer, 2), tokens(12, 16)
    mine = wrapped(plain, "75%")
    earlier = None
    for step in (all_in_flight, one_after_the_other):
        plan = monet_like.plan_step(mine, lambda data, _step=step: _step(mine, data), x)
        assert_same(step, plain, mine, x)
        assert measured(step, mine, x) == plan.peak_bytes <= plan.budget_bytes
        mine.zero_grad(), plain.zero_grad()
        records = [block.record.schedule for block in blocks_of(mine)]
        assert records != earlier
        earlier = records


@pytest.mark.slow
def test_gradients_that_exist_are_counted() -> None:
    """Planning in the middle of gradient accumulation counts the gradients, and leaves them as they are."""
    plain, x = Decoder(blocks=2), tokens(8, 16)
    once: Step = lambda model, data: loss_of(model(data)).backward()  # noqa: E731
    once(plain, x)
    mine = copy.deepcopy(plain)
    for one, other in zip(plain.parameters(), mine.parameters(), strict=True):
        one.grad[..., 0] = -0.0
        other.grad = one.grad.clone()
    mine = monet_like.auto_schedule(
        mine, x, memory_budget="85%", blocks="layers.*", mode=EXACT, effort="quick", loss=loss_of
    )
    for one, other in zip(plain.parameters(), mine.parameters(), strict=True):
        assert torch.equal(one.grad.view(torch.int32), other.grad.view(torch.int32))
    plan = monet_like.block_plan(mine)
    assert measured(once, mine, x, clear=False) == plan.peak_bytes <= plan.budget_bytes
    for model in (plain, mine):
        model.zero_grad()
    assert_same(once, plain, mine, x)


def test_wrong_calls_are_refused() -> None:
    mine = wrapped(Decoder(blocks=1), "90%")
    with pytest.raises(UsageError, match="Decoder has no blocks with schedules; give auto_schedule blocks="):
        monet_like.plan_step(Decoder(blocks=1), lambda: None)
    with pytest.raises(UsageError, match=r"the model is in eval mode; call model\.train"):
        monet_like.plan_step(mine.eval(), lambda: None)
    with pytest.raises(UsageError, match="the training step of Decoder calls none of its blocks"):
        monet_like.plan_step(mine.train(), lambda: None)
