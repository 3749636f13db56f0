"""Rehearsals of blocks change nothing: all state is walked before and after, by a walk that shares no code with the
package's.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monet_like
from monet_like.auto.block import blocks_of
from monet_like.auto.blocks import plan_no_more
from monet_like.auto.kept_state import State
from monet_like.auto.rehearsal import memory
from monet_like.auto.rehearsal.memory import Blocks, StepMemory, step_of
from monet_like.capture.guards.holders import Attributes
from monet_like.errors import UsageError

CALLS = 0
X = torch.linspace(-1, 1, 32).reshape(4, 8)


def state_of(*roots: Any) -> list[Any]:
    """All that hangs on some objects as plain data, in the order in which it is found."""
    numbers: dict[int, int] = {}
    kept: list[Any] = []
    found: list[Any] = []
    waiting = deque(roots)

    def number(value: Any) -> Any:
        if value is None or isinstance(
            value, bool | int | float | str | bytes | torch.Size | torch.dtype | torch.device
        ):
            return repr(value)
        if id(value) not in numbers:
            numbers[id(value)] = len(numbers)
            kept.append(value)
            waiting.append(value)
        return numbers[id(value)]

    while waiting:
        value = waiting.popleft()
        number(value)
        found.append(
            (type(value).__name__, [(label, number(part)) for label, part in parts_of(value)], *own_state(value))
        )
    return found


def parts_of(value: Any) -> Iterator[tuple[Any, Any]]:
    if type(value).__module__.startswith("monet_like"):
        return
    if isinstance(value, dict):
        yield from ((f"key {n}", part) for n, item in enumerate(value.items()) for part in item)
    elif isinstance(value, list | tuple | deque):
        yield from enumerate(value)
    elif isinstance(value, types.FunctionType):
        yield from enumerate(cell.cell_contents for cell in value.__closure__ or ())
    elif isinstance(value, types.MethodType):
        yield from (("self", value.__self__), ("function", value.__func__))
    elif not isinstance(value, type | types.ModuleType):
        yield from getattr(value, "__dict__", {}).items()
        yield from ((name, getattr(value, name, None)) for name in getattr(type(value), "__slots__", ()))
    if isinstance(value, torch.Tensor):
        yield from (("grad", value.grad if value.is_leaf else None), ("hooks", value._backward_hooks))


def own_state(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        content = value.to_dense() if value.layout is not torch.strided else value
        return (
            value.untyped_storage().data_ptr() if content is value else 0,
            value.requires_grad,
            content.detach().numpy().tobytes(),
        )
    if isinstance(value, np.ndarray):
        return (value.tobytes(),)
    if isinstance(value, set):
        return (sorted(map(repr, value)),)
    if isinstance(value, random.Random):
        return (value.getstate(),)
    if isinstance(value, torch.Generator):
        return (value.get_state().numpy().tobytes(),)
    if isinstance(value, np.random.Generator):
        return (repr(value.bit_generator.state),)
    return ()


class Model(nn.Module):
    """A block, and code around it that does something beside computing."""

    calls = 0

    def __init__(self, beside: Callable[[Model, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))])
        self.other = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))
        self.beside = beside
        self.notes: dict[str, Any] = {
            "list": [1],
            "deque": deque([1], 2),
            "set": {1},
            "array": np.zeros(3),
            "bytes": bytearray(2),
        }
        self.rng = torch.Generator().manual_seed(1), random.Random(1), np.random.default_rng(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.beside(self, x)
        return self.layers[0](self.other(x))


def no_grad(function: Callable[[Model, torch.Tensor], Any]) -> Callable[[Model, torch.Tensor], Any]:
    return torch.no_grad()(function)


def momentum_by_data(model: Model, x: torch.Tensor) -> None:
    for parameter in model.other.parameters():
        parameter.data = parameter.data * 0.5 + 1


def through_data(model: Model, x: torch.Tensor) -> None:
    model.layers[0].get_submodule("0").weight.data.mul_(0.5)  # of the block, and seen by no version counter


@no_grad
def in_place(model: Model, x: torch.Tensor) -> None:
    model.other.weight.mul_(0.5)
    model.seen.add_(x.mean(0))


def parameter_replaced(model: Model, x: torch.Tensor) -> None:
    model.other.weight = nn.Parameter(model.other.weight.detach() + 1)
    model.register_buffer("late", x)


def frozen(model: Model, x: torch.Tensor) -> None:
    model.other.bias.requires_grad_(False)
    model.eval()
    model.train()
    model.other.eval()


def attributes(model: Model, x: torch.Tensor) -> None:
    global CALLS
    CALLS += 1
    Model.calls += 1
    model.notes["list"].append(2)
    model.notes["deque"].append(2)
    model.notes["set"].add(2)
    model.notes["array"] += 1
    model.notes["bytes"][0] += 1
    model.notes[len(model.notes)] = x
    model.last = x


def generators(model: Model, x: torch.Tensor) -> None:
    model.rng[1].random(), model.rng[2].random(), torch.rand(2, generator=model.rng[0])
    torch.rand(2), random.random(), np.random.rand()


def hook_steps(model: Model, x: torch.Tensor) -> None:
    """A hook that an optimizer steps in, registered by the forward itself."""
    optimizer = torch.optim.Adam(model.other.parameters())

    def step(gradient: torch.Tensor) -> None:
        model.other.bias.grad = torch.ones(8)
        optimizer.step()

    model.optimizer = optimizer
    model.other.weight.register_hook(step)


def gradients(model: Model, x: torch.Tensor) -> None:
    model.other.weight.grad = torch.ones(8, 8) if model.other.weight.grad is None else model.other.weight.grad + 1
    model.layers[0].get_submodule("0").bias.grad = None


def input_changed(model: Model, x: torch.Tensor) -> None:
    x.add_(1)


KINDS = [
    momentum_by_data, through_data, in_place, parameter_replaced, frozen, attributes, generators, hook_steps,
    gradients, input_changed,
]  # fmt: skip


def rehearsed(beside: Callable[[Model, torch.Tensor], Any], *, given: bool = False) -> bool:
    """Whether a rehearsal leaves everything as it was; ``given``: as of `plan_step`."""
    torch.manual_seed(0)
    model, x = Model(beside), X.clone()
    model.layers[0][0].bias.grad = torch.ones(16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer.step()
    target = {"count": 0}

    def loss(result: torch.Tensor) -> torch.Tensor:
        target["count"] += 1
        return result.square().mean()

    monet_like.auto_schedule(model, blocks="layers.*", mode="inplace_multiway_newnode")
    plan_no_more(model)  # the rehearsals here are the only ones
    global_state = random.getstate, np.random.get_state, torch.get_rng_state
    plain = model.layers[0]._model

    def now() -> list[Any]:
        there = [vars(module) for module in model.modules() if module not in blocks_of(model)]
        state = state_of(there, plain, loss, optimizer, x, [repr(state()) for state in global_state])
        return [*state, CALLS, Model.calls, [repr(p.data_ptr()) for p in model.parameters()]]

    before = now()
    step = replace(step_of(model, ((x,), {}), loss), given=given)
    memory = StepMemory(Blocks(model, tuple(blocks_of(model))), step, "none", "alone")
    memory.rehearsed(None)
    memory.rehearsed([()])
    memory.close()
    differing = [pair for pair in zip(before, now(), strict=False) if pair[0] != pair[1]]
    return not differing and len(before) == len(now())


@pytest.mark.parametrize(
    "beside", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.slow(rare=2)) for kind in KINDS[1:])]
)
def test_a_rehearsal_changes_nothing(
    beside: Callable[[Model, torch.Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rehearsed(beside)
    assert rehearsed(beside, given=True)
    monkeypatch.setattr(memory, "needs_real", lambda _: True)
    assert rehearsed(beside, given=True)  # on real tensors
    monkeypatch.setattr(State, "put_back", lambda self: "")
    assert not rehearsed(beside)  # so the comparison sees this kind of change


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.weight = 0, nn.Parameter(torch.ones(8))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.seen.add_(1)
        return x * self.weight


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda module: torch.jit.trace(module, X)])
def test_what_torchscript_holds_is_put_back(compiled: Callable[[nn.Module], Any]) -> None:
    part = compiled(Counting())
    model = nn.Sequential(nn.Sequential(part))
    kept = State([model])
    seen, count = part.seen.clone(), getattr(part, "count", None)
    model(X).sum().backward()
    part.weight.data.zero_()
    assert not torch.equal(part.seen, seen)
    kept.put_back()
    assert torch.equal(part.weight, torch.ones(8)) and part.weight.grad is None
    assert torch.equal(part.seen, seen) and getattr(part, "count", None) == count


def test_an_iterator_that_cannot_go_back_is_refused() -> None:
    batches = iter([X] * 50)
    with pytest.raises(
        UsageError, match=r"takes values from a list_iterator, and the rehearsals .* give the values as arguments"
    ):
        rehearsed(lambda model, x: next(batches))
    numbered = itertools.count()
    with pytest.raises(UsageError, match="takes values from a count"):
        rehearsed(lambda model, x: next(numbered))
    loader = iter(torch.utils.data.DataLoader([1] * 50))
    with pytest.raises(UsageError, match="takes values from a _SingleProcessDataLoaderIter"):
        rehearsed(lambda model, x: next(loader))
    zipped = zip([1] * 50, [2] * 50, strict=True)
    with pytest.raises(UsageError, match="takes values from a list_iterator"):
        rehearsed(lambda model, x: next(zipped))


def test_ctrl_c_while_state_is_put_back_leaves_none_of_a_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.BatchNorm1d(3)
    state = State([model])
    model(torch.arange(12.0).view(4, 3))
    put_back, pressed = Attributes.put_back, []

    def pressed_once(self: Attributes, then: Any) -> None:
        if not pressed:
            pressed.append(self)
            raise KeyboardInterrupt
        put_back(self, then)

    monkeypatch.setattr(Attributes, "put_back", pressed_once)
    with pytest.raises(KeyboardInterrupt):
        state.put_back()
    assert pressed
    assert (model.running_mean == 0).all()
    assert model.num_batches_tracked == 0


FORWARDS = 0
WEIGHTS: dict[int, torch.Tensor] = {}


@functools.lru_cache
def rows_of(count: int) -> tuple[torch.Tensor, ...]:
    return (torch.linspace(0.5, 1, count)[:, None],)


class Remembering(nn.Module):
    """Nothing but its class leads to the global variables that its forward changes."""

    def __init__(self, rows: Callable[[int], tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))])
        Remembering.rows = staticmethod(rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global FORWARDS
        FORWARDS += 1
        weight = WEIGHTS.setdefault(len(x), torch.linspace(1, 2, len(x))[:, None])
        return self.layers[0](x * weight * self.rows(len(x))[0])


@pytest.mark.parametrize("blocks", [None, "layers.*"])
def test_what_forwards_keep_globally_is_put_back(blocks: str | None) -> None:
    global FORWARDS
    FORWARDS = 0
    WEIGHTS.clear()
    rows_of.cache_clear()
    model = Remembering(rows_of)
    plain = copy.deepcopy(model)
    planned = monet_like.auto_schedule(model, memory_budget="1 GB", exact=True, effort="quick", blocks=blocks)
    result = planned(X)
    assert FORWARDS == 1
    assert [type(kept) for kept in (*WEIGHTS.values(), *rows_of(len(X)))] == [torch.Tensor] * 2
    assert torch.equal(result, plain(X))


def test_caches_of_packages_keep_no_fake_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "package_with_a_cache.py"
    package.parent.mkdir()
    package.write_text(
        "import functools, torch\n\nCACHE = {}\n\n"
        "@functools.lru_cache\ndef cached(count):\n    return (torch.linspace(0.5, 1, count)[:, None],)\n\n"
        "def rows(count):\n    return cached(count)[0] * CACHE.setdefault(count, torch.ones(1)), CACHE[count]\n"
    )
    monkeypatch.syspath_prepend(package.parent)
    rows = importlib.import_module("package_with_a_cache").rows
    model = Remembering(rows)
    planned = monet_like.auto_schedule(model, memory_budget="1 GB", exact=True, effort="quick", blocks="layers.*")
    assert type(planned(X)) is torch.Tensor
    assert [type(kept) for kept in rows(len(X))] == [torch.Tensor] * 2
