"""Captures in several threads: one at a time, and other threads run plain PyTorch meanwhile."""

from __future__ import annotations

import copy
import functools
import random
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from any_schedule import AnySchedule
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import monet_like
from monet_like.capture.lower.step import capture
from monet_like.capture.trace.alone import quiet
from monet_like.errors import CaptureError


class Net(nn.Module):
    """Reads an attribute, and has a part under PyTorch's checkpointing, which sets the generator's state."""

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
    with ThreadPoolExecutor(len(work)) as pool:
        return [each.result() for each in [pool.submit(one) for one in work]]


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


class Meets(nn.Module):
    """Each of its forwards in the thread that made it may stop, to let another thread go on."""

    def __init__(self, inside: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.drop, self.inside = nn.Linear(6, 6), nn.Dropout(), inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inside()
        return self.drop(self.layer(x)).tanh()


def warned() -> int:
    """How many warnings of one are shown, by filters as they are."""
    told: list[str] = []
    own, warnings.showwarning = warnings.showwarning, lambda message, *_: told.append(str(message))
    try:
        warnings.warn_explicit("told", UserWarning, "elsewhere.py", 1)
    finally:
        warnings.showwarning = own
    return len(told)


#: What other threads do while one captures.
ELSEWHERE: dict[str, Callable[[], Any]] = {
    "draws": lambda: torch.randn(3).tolist(),
    "seeds": lambda: torch.manual_seed(7).initial_seed(),
    "Python draws": lambda: random.sample(range(100), 5),
    "NumPy draws": lambda: numpy.random.rand(3).tolist(),
    "loads": lambda: [batch[0].tolist() for batch in DataLoader(TensorDataset(torch.arange(8)), 3, shuffle=True)],
    "trains": lambda: trained(Net(), 1),
    "warns": warned,
}


def beside(made: Callable[[nn.Module], nn.Module], elsewhere: Callable[[], Any]) -> list[Any]:
    """What a thread finds that begins in the middle of another one's first forward, and what the latter trains."""
    inside, done = threading.Event(), threading.Event()

    def meet() -> None:
        inside.set()
        assert done.wait(60)

    def other() -> Any:
        try:
            assert inside.wait(60)
            return elsewhere()
        finally:
            done.set()

    random.seed(3)
    numpy.random.seed(3)
    called = made(Meets(meet))
    found = in_threads(other, lambda: trained(called, 0))
    return [*found, torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()]  # type: ignore


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.filterwarnings("default")
def test_what_another_thread_does_in_the_middle_of_a_trace_is_its_own(name: str) -> None:
    """Its random numbers are no reason to refuse the model, and none of them comes twice."""
    plain = beside(lambda model: model, ELSEWHERE[name])
    ours = beside(AnySchedule, ELSEWHERE[name])
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)


@pytest.mark.parametrize("draw", [random.random, lambda: numpy.random.rand(), lambda: torch.manual_seed(5)])
def test_a_forward_that_draws_is_refused_beside_other_threads(draw: Callable[[], Any]) -> None:
    """And its generators are as before."""
    ended = threading.Event()
    idle = threading.Thread(target=ended.wait)
    idle.start()
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore
    try:
        model = Meets(draw)
        torch.set_rng_state(before[0])
        with pytest.raises(CaptureError, match="and a schedule would not; draw random numbers"):
            capture(model, (torch.ones(5, 6),))
    finally:
        ended.set()
        idle.join()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before[1:]  # type: ignore


def test_filters_of_warnings_are_as_before() -> None:
    before = [*warnings.filters]
    with quiet():
        warnings.warn("not told", stacklevel=1)
        assert in_threads(warned) == [1]
    assert warnings.filters == before


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


class Deep(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.slow
def test_blocks_are_planned_in_one_thread_at_a_time() -> None:
    """Of different models, and of one model that two threads call first."""
    plain = [trained(Deep(seed), seed) for seed in range(3)]
    quick: Any = {"memory_budget": "100%", "effort": "quick", "exact": True, "verbose": False}
    models = [Deep(seed) for seed in range(3)]
    called = [monet_like.auto_schedule(model, blocks=model.layers, **quick) for model in models]
    ready = threading.Barrier(3)

    def work(seed: int) -> list[torch.Tensor]:
        ready.wait(60)
        return trained(called[seed], seed)

    torch.testing.assert_close(in_threads(*(functools.partial(work, seed) for seed in range(3))), plain, rtol=0, atol=0)
    model = Deep(5)
    shared = copy.deepcopy(model)
    both = monet_like.auto_schedule(shared, blocks=shared.layers, **quick)
    x = torch.randn(5, 6)
    first, second = in_threads(*[lambda: (ready.wait(60), both(x).detach())[1]] * 2, ready.wait)[:2]
    assert torch.equal(first, model(x)) and torch.equal(second, model(x))
