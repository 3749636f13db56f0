"""Copies on the host by a stream of their own, in pinned memory. Skipped without a GPU."""

from __future__ import annotations

import pytest
import torch
from offload_cases import MODELS, taken
from replays import record_for
from training import twin

from monet_like.capture.lower.step import capture
from monet_like.plan import store_all
from monet_like.plan.random_schedules import random_schedule
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.runtime import offload
from monet_like.variants import admitted

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_what_comes_back_are_the_bits(dtype: torch.dtype) -> None:
    x = (torch.randn(64, 3, 33, 31, device=CUDA) * 9).to(dtype).to(memory_format=torch.channels_last)
    for _ in range(20):
        copy = offload.send(x)
        back = offload.fetch(copy, x.shape, x.stride(), dtype, CUDA)
        assert copy.is_pinned() and back.stride() == x.stride()
        assert torch.equal(back, x)


def test_copies_beside_the_rest() -> None:
    """Much is computed, and memory used again, while copies are under way; none of it reaches them."""
    a = torch.randn(2048, 2048, device=CUDA)
    for seed in range(10):
        x = torch.full((4096, 4096), float(seed), device=CUDA)
        sending = offload.send_start(x)
        for _ in range(8):
            a = torch.tanh(a @ a)
        copy = offload.send_end(x, sending)
        shape, stride = x.shape, x.stride()
        del x
        torch.zeros(4096, 4096, device=CUDA).add_(1)
        landing = offload.fetch_start(copy, shape, stride, torch.float32, CUDA)
        for _ in range(8):
            a = torch.tanh(a @ a)
        assert bool((offload.fetch_end(landing) == seed).all())
    torch.cuda.synchronize()
    assert all(event.query() for event, _ in offload._under_way)


def test_no_more_is_pinned_where_the_host_is_ahead() -> None:
    """The device is kept from the copies of each step; the next step has its pinned memory."""
    given = [torch.full((2**18,), float(n), device=CUDA) for n in range(4)]
    pinned = list[int]()
    for _ in range(3):
        torch.cuda._sleep(50_000_000)
        copies = [offload.send(x) for x in given]
        while copies:
            copy = copies.pop()
            x = given[len(copies)]
            offload.fetch(copy, x.shape, x.stride(), x.dtype, CUDA)
        pinned.append(torch.cuda.host_memory_stats()["allocated_bytes.current"])
    assert len(set(pinned)) == 1


@pytest.mark.parametrize("name", ["layers", "default_layout", "channels_last"])
def test_any_schedule_gives_what_keeping_all_gives(name: str) -> None:
    """Kept or copied: gradients agree to what CUDA's own operators leave open."""
    model, args = MODELS[name]()
    model, args = model.to(CUDA), tuple(tensor.detach().to(CUDA) for tensor in args)
    captured = admitted(capture(model, args), "offload")
    outcomes = []
    for seed in (None, 0, 1, 2, 3):
        schedule = store_all(captured.program)
        if seed is not None:
            schedule = random_schedule(captured.program, seed, drop=0.6, others=0.7)
            assert any(taken(captured, schedule))
        record = record_for(captured, schedule, "offload", (model, args, {}))
        wrapped = ScheduleWrapper(twin(model), record, example=(args, {}), captured=captured)
        result = wrapped(*args)
        result.square().mean().backward()
        outcomes.append([result.detach(), *(p.grad for p in wrapped.parameters())])
    for other in outcomes[1:]:
        for one, another in zip(outcomes[0], other, strict=True):
            torch.testing.assert_close(one, another, rtol=1e-4, atol=1e-6)
