"""Steps whose tensors lie where a plan puts them compute the same bits, whatever a trainer does with the tensors."""

from __future__ import annotations

import copy
import functools
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import trainers
from torch import nn
from trainers import accumulated, called, gradients, images

import monet_like
from monet_like.build import library_path
from monet_like.capture.captured import Captured
from monet_like.compiler.request import Request
from monet_like.compiler.sources import Given
from monet_like.errors import UsageError
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.job.job import Job
from monet_like.profile.devices import DEVICES
from monet_like.replay.memory.arena import MOST_RECORDINGS, RECORDED, StepMemory
from monet_like.replay.wrapper import ScheduleWrapper

if not library_path("arena").exists():
    pytest.skip("the library that places memory is not compiled", allow_module_level=True)

MIB, CPU = 2**20, torch.device("cpu")


class Net(nn.Module):
    """Activations of 2 and 3 MiB at 8 images, dropout, and a weight of 3 MiB."""

    images = (8, 3, 64, 64)

    def __init__(self, p: float = 0.2) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 24, 3, padding=1)
        self.drop, self.last = nn.Dropout(p), nn.Linear(24 * 8 * 8, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.second(self.first(x).relu()).relu())
        return x * self.last(nn.functional.avg_pool2d(x, 8).flatten(1)).mean(1)[:, None, None, None]


@functools.cache
def planned(p: float) -> tuple[Net, ScheduleRecord, Captured]:
    """A model, a schedule that recomputes, and what the model was captured as."""
    torch.manual_seed(0)
    model = Net(p)
    request = Request(model, ((images(model),), {}), "inplace_multiway_newnode", strategy="heuristic")
    found = Job(request, CPU, Given(DEVICES["cpu"])).plan("85%")
    return model, found.record, found.ready.captured


def pair(p: float = 0.2) -> tuple[ScheduleWrapper, ScheduleWrapper]:
    """The same model twice, with a schedule that recomputes; the second one's memory is placed."""
    model, record, captured = planned(p)
    example = (images(model),), {}
    usual, placed = (
        ScheduleWrapper(copy.deepcopy(model), record, example=example, captured=captured) for _ in range(2)
    )
    monet_like.place_memory(placed)
    return usual, placed


def memories(model: ScheduleWrapper) -> list[StepMemory]:
    return [each.step.memory for each in model._kept if each.step.memory]


def memory(model: ScheduleWrapper) -> StepMemory:
    (one,) = memories(model)
    return one


def steps(model: nn.Module, count: int) -> Iterator[torch.Tensor]:
    """Training steps with an optimizer; yields every loss."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for number in range(count):
        loss = called(model, number).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


def test_the_bits_are_the_same_and_every_large_tensor_has_its_place(caplog: pytest.LogCaptureFixture) -> None:
    usual, placed = pair()
    with caplog.at_level(logging.INFO, "monet_like"):
        for number, (mine, theirs) in enumerate(zip(steps(usual, 6), steps(placed, 6), strict=True), 1):
            assert torch.equal(mine, theirs)
            assert equal(usual, placed)
            there, missed = memory(placed).counts
            assert (there > 5 and missed == 0) if number > RECORDED else there == 0
    assert placed.record is not None
    assert 0 < memory(placed).placed_bytes <= placed.record.peak_bytes
    assert "tensors of the training step are placed in" in caplog.text


def test_the_block_is_as_small_as_the_step_allows() -> None:
    """Two tensors of 2 MiB and a MiB live at once: nothing is left over."""
    _, placed = pair()
    list(steps(placed, 4))
    seen = memory(placed)._seen
    assert all(one.bytes >= MIB and one.end > one.begin for one in seen)
    at_once = max(sum(one.bytes for one in seen if one.begin <= t < one.end) for t in range(len(seen)))
    assert memory(placed).placed_bytes == at_once


def kept_later(model: nn.Module) -> Iterator[torch.Tensor]:
    """Results and gradients that no step outlived while it was recorded, and from then on all do."""
    for number in range(8):
        result = called(model, number)
        result.sum().backward()
        if number > RECORDED + 1:
            yield from (result.detach(), *(p.grad for p in model.parameters() if p.grad is not None))
        del result
        model.zero_grad()


def no_backward_at_first(model: nn.Module) -> Iterator[torch.Tensor]:
    for number in range(8):
        result = called(model, number)
        if number > 3:
            result.sum().backward()
        yield result.detach().clone()
    yield from gradients(model)


def large_loss(result: torch.Tensor) -> torch.Tensor:
    """A loss that allocates three times 4 MiB in its forward, and more in its backward."""
    spread = result.mean() * torch.ones(MIB)
    return (spread.square() + spread).sin().mean()


def another_net_in_between(model: nn.Module) -> Iterator[torch.Tensor]:
    """Between forward and backward, or after a forward without one, other tensors are allocated and kept."""
    torch.manual_seed(0)
    other = nn.Linear(1024, 1024)
    for number in range(9):
        result = called(model, number)
        if number % 3:
            other(torch.randn(512 * (number % 3), 1024)).square().sum().backward()
            yield from gradients(other)
        if number != 4:
            large_loss(result).backward()
        yield result.detach()
        model.zero_grad()
    yield from model.parameters()


TRAINERS = [*trainers.TRAINERS, kept_later, no_backward_at_first, another_net_in_between]


@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.__name__)
def test_whatever_the_trainer_does(trainer: Callable[[nn.Module], Iterator[torch.Tensor]]) -> None:
    usual, placed = pair()
    for mine, theirs in zip([*trainer(usual)], [*trainer(placed)], strict=True):
        assert torch.equal(mine, theirs)
    assert all(found._recordings <= MOST_RECORDINGS for found in memories(placed))
    assert any(found.placed_bytes for found in memories(placed))


def test_the_loss_between_forward_and_backward_has_its_places() -> None:
    _, small = pair()
    list(steps(small, 4))
    usual, placed = pair()
    for number in range(RECORDED + 4):
        if number == RECORDED + 2:
            extra = torch.empty(0)
        found = []
        for net in (usual, placed):
            net.zero_grad()
            result = called(net, number)
            if number == RECORDED + 2:  # of the loss's tensors none has its place then, and of the schedule's every one
                extra = torch.empty(3 * MIB, dtype=torch.uint8)
            large_loss(result).backward()
            found.append(gradients(net))
        assert all(map(torch.equal, *found))
        if number >= RECORDED:
            there, missed = memory(placed).counts
            of_schedule = memory(small).counts[0]
            if number == RECORDED + 2:
                assert there >= of_schedule
                assert missed > 0
            elif number <= RECORDED + 1:
                assert there >= of_schedule + 6
                assert missed == 0
    del extra


def test_tensors_that_outlive_their_places_are_left_out() -> None:
    """With gradients that stay, every other step frees them late; what is recorded again is then right for both."""
    _, placed = pair()
    assert [*accumulated(placed)]
    for _ in range(4):
        placed(images(placed)).sum().backward()
    assert memory(placed).counts[0] > 0
    assert memory(placed).counts[1] == 0


def test_a_block_outlives_its_model_while_tensors_lie_in_it() -> None:
    usual, placed = pair()
    found = []
    for model in (usual, placed):
        for number in range(4):
            model.zero_grad()
            called(model, number).sum().backward()
        found.append([p.grad for p in model.parameters()])
    lying = [g.clone() for g in found[1] if g is not None]
    del placed, model
    more = [torch.full((MIB,), 7.0) for _ in range(20)]  # they would overwrite memory that was given back
    assert all(torch.equal(a, b) for a, b in zip(found[1], lying, strict=True) if a is not None)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if a is not None and b is not None)
    del more


def test_copies_and_pickles_have_no_part_in_it() -> None:
    _, placed = pair()
    list(steps(placed, 4))
    for other in (copy.deepcopy(placed), pickle.loads(pickle.dumps(placed))):
        assert other._arena is None
        for mine, theirs in zip(steps(copy.deepcopy(placed), 2), steps(other, 2), strict=True):
            assert torch.equal(mine, theirs)


def test_threads_have_plans_of_their_own() -> None:
    """Random masks are drawn from one generator, so the models have none here; all else as if each trained alone.

    Each forward ends before any loss is computed.
    """
    usual, first = pair(p=0.0)
    second = copy.deepcopy(first)
    monet_like.place_memory(second)
    wanted = undisturbed(usual, threading.Barrier(1))
    both = threading.Barrier(2, timeout=60)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(undisturbed, (first, second), (both, both)))
    for mine in found:
        assert all(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True))
    alone = copy.deepcopy(first)
    monet_like.place_memory(alone)
    undisturbed(alone, threading.Barrier(1))
    assert memory(first).counts == memory(second).counts == memory(alone).counts
    assert memory(alone).counts[0] > 0


def undisturbed(model: nn.Module, all_ran: threading.Barrier) -> list[torch.Tensor]:
    losses = []
    for number in range(6):
        result = model(images(model, number))
        all_ran.wait()
        loss = result.square().mean()
        loss.backward()
        losses += [loss.detach(), model.last.weight.grad]  # type: ignore[union-attr, list-item]
        model.zero_grad()
    return losses


def test_what_cannot_be_placed_is_said() -> None:
    with pytest.raises(UsageError, match="place_memory was given a Net; it takes a ScheduleWrapper"):
        monet_like.place_memory(Net())
    blocks = monet_like.auto_schedule(nn.Sequential(Net()), memory_budget="80%", blocks=["0"])
    with pytest.raises(UsageError, match="it takes a ScheduleWrapper, or a model of auto_schedule without blocks"):
        monet_like.place_memory(next(m for m in blocks.modules() if isinstance(m, ScheduleWrapper)))


def test_a_device_on_which_nothing_can_be_placed_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one to which the model moves in the middle of its training."""
    usual, placed = pair()

    def refuse(kind: str) -> None:
        raise UsageError(f"memory can be placed on a CPU or a CUDA device, not on {kind}")

    monkeypatch.setattr("monet_like.replay.memory.arena.arena_library", refuse)
    with pytest.warns(
        UserWarning, match="the memory of Net's steps is placed no longer: memory can be placed on a CPU"
    ) as told:
        found = [squared(model) for model in (usual, placed) for _ in range(2)]
    assert len(told) == 1
    assert found[:2] == found[2:]


def squared(model: nn.Module) -> float:
    torch.manual_seed(0)
    loss = model(images(model)).square().mean()
    loss.backward()
    return loss.item()
