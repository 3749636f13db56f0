"""Rehearsals on fake tensors count what rehearsals on real ones do, and are left where fakes cannot answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_models import EXACT, Decoder, loss_of, tokens
from rehearsals import REHEARSALS, Rehearsal
from torch import nn

import monet_like
from monet_like.auto.block import blocks_of
from monet_like.auto.blocks import plan_no_more
from monet_like.auto.rehearsal import fake as rehearsal_on_fakes
from monet_like.auto.rehearsal.fake import _Counting, fake_stretches, none_left
from monet_like.auto.rehearsal.memory import Blocks, StepMemory, WholeStep
from monet_like.capture.captured import fake_mode
from monet_like.errors import CaptureError


@pytest.mark.slow(but=["skips", "asks", "asks of activations"])
@pytest.mark.parametrize("step", REHEARSALS.values(), ids=REHEARSALS)
def test_fakes_count_what_real_tensors_take(step: Rehearsal) -> None:
    before = step.x.clone()
    (fake, on), (real, _) = (step.rehearsed(fake=fake) for fake in (True, False))
    assert on == step.on_fakes and torch.equal(step.x, before)
    assert [each.step.moments for each in fake] == [each.step.moments for each in real]
    assert [each.held for each in fake] == [each.held for each in real]


@pytest.mark.parametrize("forgetful", [True, False], ids=["nothing is left", "a result is left"])
def test_steps_that_are_given_are_on_fakes(forgetful: bool) -> None:
    """Two micro-batches, the second of which adds to the first one's gradients; what a run leaves behind is there in
    the next one.
    """
    found = []
    for fake in (True, False):
        torch.manual_seed(0)
        model = Decoder()
        monet_like.auto_schedule(model, blocks="layers.*", mode="inplace_multiway_newnode")
        plan_no_more(model)
        left: list[torch.Tensor] = []

        def step(x: torch.Tensor, model: nn.Module = model, left: list[torch.Tensor] = left) -> None:
            for half in x.chunk(2):
                loss = loss_of(model(half))
                loss.backward()
            left[:] = [] if forgetful else [loss.detach().expand(100).clone()]

        blocks = tuple(blocks_of(model))
        memory = StepMemory(Blocks(model, blocks), WholeStep(step, ((tokens(),), {}), given=True), "none", "own")
        if not fake:
            memory._leave_fakes()
        assert (memory._fakes is not None) == fake
        memory.rehearsed(None)
        found.append([memory.rehearsed(kept) for kept in (None, [()] * len(blocks))])
        memory.close()
        assert not left and all(parameter.grad is None for parameter in model.parameters())
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "error:Error detected")
def test_anomaly_detection_asks_no_fake_for_its_values() -> None:
    """It would end the rehearsal on fakes, and print a trace of an error that is not the user's."""
    before, _ = REHEARSALS["skips"].rehearsed(fake=True)
    with torch.autograd.detect_anomaly():
        found, on = REHEARSALS["skips"].rehearsed(fake=True)
        assert torch.is_anomaly_enabled()
    assert on and [each.step.moments for each in found] == [each.step.moments for each in before]


def test_sums_of_gradients_are_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As autograd's are; the comparison sees it if they are not."""
    monkeypatch.setattr(_Counting, "_adds_in_place", lambda *_: False)
    (fake, _), (real, _) = (REHEARSALS["skips"].rehearsed(fake=fake) for fake in (True, False))
    assert [each.step.moments for each in fake] != [each.step.moments for each in real]


@pytest.mark.parametrize("freed", [True, False])
def test_caches_are_searched_only_if_something_is_left(freed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a step has made when all that it changed is put back."""
    searched: list[None] = []
    monkeypatch.setattr(rehearsal_on_fakes, "_empty_caches", lambda: searched.append(None))
    kept: list[torch.Tensor] = []
    with none_left():
        fake_stretches(lambda _: kept.append(torch.ones(3) + 1), fake_mode(), torch.device("cpu"))
        assert not searched
        if freed:
            kept.clear()
    assert bool(searched) != freed


class Follower(nn.Module):
    """A block that moves a weight to other memory in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(32, 32), nn.Linear(32, 32).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.other.weight.data = 0.9 * self.other.weight.data + 0.1 * self.own.weight.data
        return self.own(x) + self.other(x)


class Follows(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Follower()])


def test_captures_within_a_rehearsal_see_what_others_do() -> None:
    """Such as assignments, which no operator shows."""
    with pytest.raises(CaptureError, match=r"assigns a tensor's \.data"):
        Rehearsal(Follows).rehearsed(fake=True)


class AsksLast(Decoder):
    """The rest of the model asks for a value when its last weight has been cast."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result = super().forward(tokens)
        return result * 0 if result.isnan().any() else result


def plain_and_planned(
    make: Callable[[], Any], loss: Callable[[nn.Module], torch.Tensor], share: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The loss and the gradients of a first step: plain PyTorch's, and with blocks that are planned in it."""
    results = []
    for wrap in (False, True):
        torch.manual_seed(0)
        model = make().train()
        if wrap:
            monet_like.auto_schedule(model, memory_budget=share, mode=EXACT, effort="quick", blocks=model.layers)
        found = loss(model)
        found.backward()
        results.append([found.detach(), *(p.grad for p in model.parameters())])
    plain, planned = results
    return plain, planned


@pytest.mark.parametrize("kind", [Decoder, AsksLast])
def test_no_cast_of_a_rehearsal_is_left_in_the_callers_region(kind: type[Decoder]) -> None:
    """Autocast keeps casts of weights, such as the head's, until its region ends, in which the first call plans."""

    def loss(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model(tokens()))

    assert all(map(torch.equal, *plain_and_planned(kind, loss, "90%")))


class Overwritten(nn.Module):
    """What a block makes is changed in place outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers, self.end = nn.Linear(8, 8), nn.ModuleList([nn.LayerNorm(8)]), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(F.relu(self.layers[0](self.stem(x)), inplace=True))


def test_blocks_whose_results_are_changed_in_place() -> None:
    x = torch.randn(4, 8)
    found = plain_and_planned(Overwritten, lambda model: model(x).square().mean(), "100%")
    assert all(map(torch.equal, *found))


def test_a_checkpoint_around_the_model_counts_nothing_of_a_rehearsal() -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        return loss_of(torch.utils.checkpoint.checkpoint(model, tokens(), use_reentrant=False))

    assert all(map(torch.equal, *plain_and_planned(Decoder, loss, "100%")))
