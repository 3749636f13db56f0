"""Captures in several threads: one at a time, and other threads run plain PyTorch meanwhile."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from any_schedule import AnySchedule
from torch import nn
from torch.utils.checkpoint import checkpoint

from monet_like.capture.lower.step import capture


class Net(nn.Module):
    """Reads an attribute, and has a part that runs under PyTorch's own checkpointing, which sets the
    generator's state.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last, self.scale = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(lambda x: self.first(x).tanh() * self.scale, x, use_reentrant=False)
        return self.last(self.norm(y))


def trained(called: nn.Module, seed: int, steps: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(called.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        called(torch.randn(5, 6, generator=generator)).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in called.parameters()]


def in_threads(*work: Callable[[], Any]) -> list[Any]:
    """The results; an error of any is raised."""
    results: list[Any] = [None] * len(work)

    def run(place: int) -> None:
        try:
            results[place] = work[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def of_pytorch() -> list[Any]:
    """Everything of PyTorch's that a capture changes while it lasts."""
    classes = (nn.Module, torch.Tensor, torch.autograd.Function, torch.distributions.Distribution)
    return [
        *(dict(vars(one)) for one in classes),
        torch.get_rng_state,
        torch.random.set_rng_state,
        vars(torch.utils.checkpoint).copy(),
    ]


def test_two_threads_capture_at_once() -> None:
    plain = [trained(Net(), seed) for seed in range(2)]
    before = of_pytorch()
    for repetition in range(3):
        models = [AnySchedule(Net(), repetition) for _ in range(2)]
        found = in_threads(*(functools.partial(trained, model, seed) for seed, model in enumerate(models)))
        torch.testing.assert_close(found, plain, rtol=0, atol=0)
        assert [model.captures for model in models] == [1, 1]
    assert all(a is b if callable(a) else a == b for a, b in zip(of_pytorch(), before, strict=True))


def test_two_captures_by_hand() -> None:
    models = [Net() for _ in range(4)]
    found = in_threads(*(functools.partial(capture, model, (torch.randn(5, 6),)) for model in models))
    assert len({captured.program.fingerprint for captured in found}) == 1


def test_threads_of_one_model_capture_it_once() -> None:
    called = AnySchedule(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    x = torch.randn(5, 6)
    results = in_threads(*[lambda: called(x).detach()] * 3)
    assert called.captures == 1
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_another_thread_runs_plain_pytorch_while_one_captures() -> None:
    """In the middle of the trace, and to its end; what it reads is no guard of the capture's."""
    expected, model, others = trained(Net(), 0), Net(), Net()
    inside, done = threading.Event(), threading.Event()
    found: list[Any] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert done.wait(60)
        return nn.functional.linear(x, model.first.weight)

    model.forward = forward  # type: ignore[method-assign]

    def plain() -> None:
        try:
            assert inside.wait(60)
            state = torch.get_rng_state()
            found.append(trained(others, 0))
            torch.set_rng_state(state)
        finally:
            done.set()

    captured, _ = in_threads(lambda: capture(model, (torch.randn(5, 6),)), plain)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=0)
    assert captured.reads is not None
    assert not any(module is others for module, _ in captured.reads.roots.others.values())


def test_a_step_waits_while_another_thread_captures_the_model() -> None:
    """Meanwhile the tracer's tensors stand in the place of the model's."""
    inside, begun = threading.Event(), threading.Event()

    class Waits(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) == 4:
                inside.set()
                assert begun.wait(60)
                time.sleep(0.2)  # a step that does not wait would run now
            return super().forward(x).tanh()

    def step() -> torch.Tensor:
        assert inside.wait(60)
        begun.set()
        return called(x)

    model, x, smaller = Waits(6, 6), torch.randn(5, 6), torch.randn(4, 6)
    called = AnySchedule(model)
    called(x).sum().backward()
    found = in_threads(lambda: called(smaller), step)
    assert called.captures == 2
    torch.testing.assert_close(found, [model(smaller), model(x)], rtol=0, atol=0)
