"""Rehearsals on fake tensors count what rehearsals on real ones do, and are left where fakes cannot answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from block_models import EXACT, Decoder, loss_of, tokens
from torch import nn

import monet_like
from monet_like.auto.block import blocks_of
from monet_like.auto.blocks import plan_no_more
from monet_like.auto.rehearsal import fake as rehearsal_on_fakes
from monet_like.auto.rehearsal.fake import _Counting, fake_stretches, none_left
from monet_like.auto.rehearsal.memory import Blocks, Rehearsed, StepMemory, WholeStep, step_of
from monet_like.capture.captured import fake_mode
from monet_like.errors import CaptureError


class Skips(nn.Module):
    """Gradients are summed over skip connections, normalisations have workspaces, and random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(3))
        self.drop, self.end = nn.Dropout(0.3), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)), inplace=True)
        wide = self.layers[0](x)
        narrow = self.layers[1](F.max_pool2d(wide, 2))
        narrow = self.layers[2](narrow) + narrow * F.softmax(narrow, 1)
        up = self.drop(F.interpolate(narrow, scale_factor=2, mode="bilinear"))
        return self.end(F.gelu(torch.cat([up, wide + x], 1))).std(dim=1)


class Tied(Decoder):
    """One weight at both ends, a mean of all blocks' results, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        self.places, self.batch_norm = nn.Parameter(torch.zeros(1, 32, 32)), nn.BatchNorm1d(32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.places
        x = x * torch.sigmoid(x) + x.mean(1, keepdim=True)
        results = []
        for layer in self.layers:
            x = layer(x)
            results.append(x)
        x = self.normalised(sum(results) / len(results))
        return self.head(self.norm(torch.where(x > 0, x, x.exp()))).logsumexp(-1)

    def normalised(self, x: torch.Tensor) -> torch.Tensor:
        return self.batch_norm(x.transpose(1, 2).contiguous()).transpose(1, 2)


class Cast(Tied):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(tokens)


class Transposed(Tied):
    """The gradient of batch norm lies otherwise than PyTorch's fake tensors say."""

    def normalised(self, x: torch.Tensor) -> torch.Tensor:
        return self.batch_norm(x.transpose(1, 2)).transpose(1, 2)


class Indexed(Decoder):
    """The gradient of an index fills zeros in place."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)[:, torch.arange(32)] + x.topk(32, -1).values * 2
        return self.head(x)


class Checkpoints(Decoder):
    """A checkpoint keeps the state of the random generator."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        wide = torch.utils.checkpoint.checkpoint(lambda x: x.sin().exp(), self.embedding(tokens), use_reentrant=False)
        return self.head(self.layers[0](wide))


class Asks(Decoder):
    """The rest of the model asks for a value."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens + 0 if (tokens == 1).any() else tokens)


class Shares(Decoder):
    """NumPy changes a buffer in place, which no operator shows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.numpy()[0] += 1
        return super().forward(tokens)


def entropy(result: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(result.flatten(0, 1), tokens().flatten(), label_smoothing=0.1)


def add_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def rehearsed(
    make: Callable[[], nn.Module], x: torch.Tensor, loss: Any, before: Callable[[nn.Module], None], *, fake: bool
) -> tuple[list[Rehearsed], bool]:
    """Three rehearsals, and whether they were on fake tensors."""
    torch.manual_seed(0)
    model = make()
    monet_like.auto_schedule(model, blocks="layers.*", mode="inplace_multiway_newnode")
    plan_no_more(model)
    before(model)
    blocks = tuple(blocks_of(model))
    memory = StepMemory(Blocks(model, blocks), step_of(model, ((x,), {}), loss), "none", "alone")
    if not fake:
        memory._leave_fakes()
    memory.rehearsed(None)  # captures, which may take memory of their own
    found = [memory.rehearsed(kept) for kept in (None, [()] * len(blocks))]
    memory.close()
    return found, memory._fakes is not None


IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)


@pytest.mark.slow(but=["skips", "asks"])
@pytest.mark.parametrize(
    ("make", "x", "loss", "before", "on_fakes"),
    [
        pytest.param(Skips, IMAGES, None, lambda _: None, True, id="skips"),
        pytest.param(Decoder, tokens(), entropy, lambda _: None, True, id="entropy"),
        pytest.param(Tied, tokens(), loss_of, lambda _: None, True, id="tied"),
        pytest.param(Tied, tokens(), loss_of, add_gradients, True, id="gradients that are added to"),
        pytest.param(Transposed, tokens(), loss_of, lambda _: None, True, id="transposed"),
        pytest.param(Cast, tokens(), loss_of, lambda _: None, True, id="autocast"),
        pytest.param(Indexed, tokens(), loss_of, lambda _: None, True, id="indexed"),
        pytest.param(Checkpoints, tokens(), loss_of, lambda _: None, True, id="checkpoints"),
        pytest.param(Asks, tokens(), loss_of, lambda _: None, False, id="asks"),
        pytest.param(Shares, tokens(), loss_of, lambda _: None, False, id="shares memory"),
    ],
)
def test_fakes_count_what_real_tensors_take(
    make: Callable[[], nn.Module], x: torch.Tensor, loss: Any, before: Callable[[nn.Module], None], on_fakes: bool
) -> None:
    (fake, on), (real, _) = (rehearsed(make, x, loss, before, fake=fake) for fake in (True, False))
    assert on == on_fakes
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


def test_sums_of_gradients_are_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As autograd's are; the comparison sees it if they are not."""
    monkeypatch.setattr(_Counting, "_adds_in_place", lambda *_: False)
    (fake, _), (real, _) = (rehearsed(Skips, IMAGES, None, lambda _: None, fake=fake) for fake in (True, False))
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
        rehearsed(Follows, tokens(), loss_of, lambda _: None, fake=True)


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
