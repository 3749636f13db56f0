"""Ways to run a graph that are timed where their prices are alike (`monet_like.inductor.trial`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor import config
from torch.nn import functional as F

import monet_like
from monet_like.inductor import trial
from monet_like.inductor.handed import Handed, handed_over
from monet_like.inductor.menu import menu_of
from monet_like.inductor.partitioner import MenuFound, MenuReader
from monet_like.inductor.planned_graph import PlannedGraph, Settings, with_way
from monet_like.inductor.portfolio import Way
from monet_like.inductor.rehearsal import SETTINGS as SETTINGS_OF_PLANS
from monet_like.inductor.rehearsal import Rehearsed
from monet_like.ir.units import Budget

SETTINGS = Settings(Budget(), quick=True, measured=False)


class _Using(MenuReader):
    """In the place of a partitioner: does something with what Inductor hands over, and ends the compilation."""

    def __init__(self, use: Callable[[Handed], Any]) -> None:
        super().__init__(SETTINGS)
        self.use, self.result = use, None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        self.result = self.use(handed_over(gm, joint_inputs, kwargs, SETTINGS))
        raise MenuFound


def using(function: Callable[..., Any], inputs: Sequence[torch.Tensor], use: Callable[[Handed], Any]) -> Any:
    """What is found about the joint graph of a function."""
    reader = _Using(use)
    options = {**monet_like.compile_options("100%", measured=False), "custom_partitioner_fn": reader}
    torch._dynamo.reset()
    with pytest.raises(Exception, match="MenuFound"):
        torch.compile(function, options=options, fullgraph=True, dynamic=False)(*inputs)
    return reader.result


def as_they_are(module: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Callable[[list[Any]], Any]:
    """In the place of Inductor's code."""
    return lambda given: module(*given)


class Block(nn.Module):
    """Products, a dropout, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.up, self.down = nn.Embedding(20, 8), nn.Linear(8, 32), nn.Linear(32, 20)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        y = F.dropout(torch.tanh(self.up(self.rows(x))), 0.1)
        return F.cross_entropy(self.down(y), targets)


def block() -> tuple[Block, tuple[torch.Tensor, torch.Tensor]]:
    return Block(), (torch.randint(0, 20, (6,)), torch.randint(0, 20, (6,)))


def timed_ways(handed: Handed) -> list[float]:
    """Seconds of PyTorch's partitions and of a plan."""
    count = handed.options["num_fwd_outputs"]
    parts = [part for _, part in handed.own_partitions()]
    parts.append(handed.partition(menu_of(handed)[0]))
    return [trial.seconds_of_step(part, count) for part in parts]


def test_a_step_is_run_with_values_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = block()
    runs: list[int] = []

    def once(function: Callable[[], Any], device: torch.device, **_: Any) -> float:
        function()
        runs.append(len(runs))
        return float(len(runs))

    monkeypatch.setattr(trial, "_compiled", as_they_are)
    monkeypatch.setattr(trial, "seconds_of", once)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = using(model, inputs, timed_ways)
    assert found == [float(n + 1) for n in runs] and len(found) > 1
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def left_as_they_are(handed: Handed) -> tuple[list[float], bool]:
    """Seconds of the ways, and whether what is compiled next has the settings of plans."""
    before = {name: getattr(config, name) for name in SETTINGS_OF_PLANS if hasattr(config, name)}
    return timed_ways(handed), all(getattr(config, name) == value for name, value in before.items())


@pytest.mark.slow
def test_the_code_of_inductor_is_timed_and_its_settings_stay() -> None:
    """PyTorch's own partitions are compiled with Inductor's, plans with their own."""
    model, inputs = block()
    seconds, same = using(model, inputs, left_as_they_are)
    assert len(seconds) > 1 and all(0 < each < 10 for each in seconds) and same


def offsets(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x[ids, torch.arange(ids.shape[0]) % 3]


def positions(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.embedding(mask.cumsum(0) - 1, x)


def positions_in_range(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.embedding((mask.cumsum(0) - 1).clamp(min=0), x)


def beyond(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return x.gather(0, (ids + x.shape[0])[:, None].expand(-1, x.shape[1]) - 1)


def pooled(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(x[None, None], 2).sum(0)


def of_values(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return x[(x[:, 0] * 3).long()]


def chances(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return x * torch.multinomial(x.sigmoid(), 1)


SAFE = [offsets, positions_in_range, pooled]
UNSAFE = {
    positions: "an index of aten::embedding is not known, or might be out of range",
    of_values: "an index of aten::index is not known, or might be out of range",
    chances: "aten::multinomial may do more than to compute",
}


@pytest.mark.parametrize("function", SAFE)
def test_graphs_that_no_value_can_break_are_timed(function: Callable[..., Any]) -> None:
    x, ids = torch.randn(6, 6, requires_grad=True), torch.randint(0, 2, (6,))
    assert using(function, (x, ids), lambda handed: trial.why_untimed(handed.untouched.graph)) == ""


@pytest.mark.parametrize(("function", "reason"), UNSAFE.items())
def test_graphs_that_made_up_values_may_break_are_not(function: Callable[..., Any], reason: str) -> None:
    """On a GPU an index that is out of range ends the process."""
    x, ids = torch.rand(6, 6, requires_grad=True), torch.randint(0, 2, (6,))
    assert using(function, (x, ids), lambda handed: trial.why_untimed(handed.untouched.graph)) == reason


def test_graphs_of_several_processes_are_not() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "a group"))
    assert trial.why_untimed(graph) == "_c10d_functional::all_reduce communicates"


def test_indices_beyond_the_end_are_seen() -> None:
    x, ids = torch.rand(6, 6, requires_grad=True), torch.zeros(6, dtype=torch.long)
    assert using(beyond, (x, ids), lambda handed: trial.why_untimed(handed.untouched.graph)) == ""
    assert "out of range" in using(
        lambda x, ids: beyond(x, ids + 1), (x, ids), lambda handed: trial.why_untimed(handed.untouched.graph)
    )


def ways(*seconds: float) -> list[PlannedGraph]:
    """Ways of one graph that are priced so."""
    model, inputs = block()
    (first, *_) = using(model, inputs, menu_of)
    return [with_way(first, Way(0.5, each, Rehearsed(1, 1, n, (), ()), (), ())) for n, each in enumerate(seconds)]


#: A graph that can be timed.
EMPTY = fx.Graph()


def test_what_is_priced_alike_is_timed_and_the_fastest_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {0: 3.0, 1: 2.0, 2: 5.0, 3: 0.1, 4: 0.1}
    monkeypatch.setattr(trial, "seconds_of_step", lambda way, count: clock[way.way.rehearsed.saved_bytes])
    given = ways(1.0, 1.05, 1.09, 1.095, 1.2)
    found = trial.fastest_timed([*given, given[0]], lambda way: way, EMPTY, 1)
    assert found == replace(given[1], way=replace(given[1].way, seconds=2.0))
    found = trial.fastest_timed([given[0], given[4]], lambda way: way, EMPTY, 1)
    assert found == given[0], "nothing was timed"


def test_the_price_decides_where_nothing_can_be_timed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = ways(1.05, 1.0)

    def fails(*_: Any) -> float:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(trial, "seconds_of_step", fails)
    fastest = partial(trial.fastest_timed, given, lambda way: way, EMPTY, 1)
    with caplog.at_level(logging.INFO, "monet_like"):
        assert fastest() == given[1]
    assert "could not be timed: OutOfMemoryError('no room')" in caplog.text
    monkeypatch.setattr(trial, "seconds_of_step", lambda way, _: way.way.rehearsed.saved_bytes + 1.0)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert fastest() == given[1]
    monkeypatch.undo()
    monkeypatch.setattr(trial, "why_untimed", lambda _: "it may not be run")
    assert fastest() == given[1]
