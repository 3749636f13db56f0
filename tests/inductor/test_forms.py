"""Models that are compiled within a budget and called in several forms: no later call ends the training."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiled import uncompiled
from torch import nn

import monet_like
from monet_like.inductor.planned_graph import PlannedGraph

WIDTH = 64


class Two(nn.Module):
    """Two parts, between which a graph ends if there are two graphs."""

    def __init__(self, graphs: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.graphs = graphs
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh())
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[0](x)
        if self.graphs == 2:
            torch._dynamo.graph_break()
        return self.parts[1](x)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiled:
    """A model that is compiled within a budget, beside itself as it is."""

    def __init__(self, budget: str | int, graphs: int = 1, **settings: Any) -> None:
        self.plain = Two(graphs)
        model, self.options = copy.deepcopy(self.plain), monet_like.compile_options(budget, quick=True, measured=False)
        self.model: Any = torch.compile(model, backend=uncompiled(self.options), **settings)

    def step(self, rows: int) -> list[str]:
        """Check a step's gradients; what it warns of."""
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for model in (self.plain, self.model):
                model.zero_grad()
                model(x).square().mean().backward()
        for one, other in zip(self.plain.parameters(), self.model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        return [str(each.message) for each in caught if "another form" in str(each.message)]

    @property
    def graphs(self) -> list[PlannedGraph]:
        return self.options["custom_partitioner_fn"].graphs


def peak(rows: int) -> int:
    """With nothing recomputed."""
    model = Compiled("100%", dynamic=False)
    model.step(rows)
    torch._dynamo.reset()
    return model.graphs[0].peak_bytes


@pytest.mark.parametrize("graphs", [1, 2])
def test_every_form_has_the_whole_budget(graphs: int) -> None:
    """But for what the part before it holds, in the same form."""
    budget = peak(512)
    model = Compiled(budget, graphs, dynamic=False)
    for rows in (512, 300, 512, 200):
        assert model.step(rows) == []
    assert len(model.graphs) == 3 * graphs
    for first in model.graphs[::graphs]:
        assert first.step_bytes == budget
    for first, second in zip(model.graphs[::2], model.graphs[1::2], strict=True) if graphs == 2 else ():
        assert second.step_bytes == budget - first.held_bytes


def test_of_a_percentage_a_smaller_form_has_what_the_first_has() -> None:
    model = Compiled("70%", dynamic=False)
    for rows in (512, 64):
        assert model.step(rows) == []
    first, second = model.graphs
    assert second.step_bytes == first.step_bytes >= second.plain.peak_bytes


def test_a_form_that_does_not_fit_runs_with_the_least_memory() -> None:
    budget = int(0.9 * peak(512))
    model = Compiled(budget, dynamic=False)
    assert model.step(512) == []
    (warning,) = model.step(2048)
    assert "least memory that is known" in warning and "the smallest known budget is" in warning
    assert model.step(512) == model.step(2048) == []
    _, large = model.graphs
    assert budget < large.peak_bytes <= large.step_bytes < large.plain.peak_bytes


def test_a_graph_whose_sizes_change_runs_by_pytorchs_own_partition() -> None:
    model = Compiled("80%")
    assert model.step(512) == []
    (warning,) = model.step(300)
    assert "torch.compile's own partition" in warning and "dynamic=False" in warning
    assert model.step(200) == model.step(512) == []
    assert len(model.graphs) == 1


def test_equal_parts_are_no_forms_of_each_other() -> None:
    model, budget = Two(2), 2 * peak(512)
    options = monet_like.compile_options(budget, quick=True, measured=False)
    for part in model.parts:
        part.forward = torch.compile(part.forward, backend=uncompiled(options), dynamic=False)
    for rows in (512, 300):
        model.parts[1](model.parts[0](torch.randn(rows, WIDTH))).sum().backward()
    graphs: list[PlannedGraph] = options["custom_partitioner_fn"].graphs
    first, second = graphs[::2], graphs[1::2]
    assert [graph.step_bytes for graph in first] == [budget, budget]
    assert [graph.step_bytes for graph in second] == [budget - graph.held_bytes for graph in first]


def test_a_first_call_that_does_not_fit_is_refused() -> None:
    with pytest.raises(Exception, match="no schedule fits"):
        Compiled(10_000, dynamic=False).step(512)
