"""Kernels that write into the memory of what they read last, saved tensors included: counted by the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled import SCALARS, peaks, planned
from torch import nn
from torch._functorch import config

from monet_like.inductor.in_place import settled
from monet_like.inductor.planned_graph import PlannedGraph
from monet_like.ir.schedule import Schedule
from monet_like.ir.simulate import simulate
from monet_like.replay.verify.steps import train_step

LOGITS = 4 * 256 * 512


class Head(nn.Module):
    """The end of a language model: nothing is larger than the logits, whose gradient is made from them alone."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(32, 512)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.last(x), ids)


class Normed(nn.Module):
    """Products, each scaled by its own mean and shifted: the forward needs a product no more once it is shifted."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x = torch.tanh(x - x.mean(0)) @ layer.weight
        return x.square().mean()


class Turned(nn.Module):
    """Products whose halves are exchanged: Inductor gives the memory of a concatenation to nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            left, right = layer(x).chunk(2, -1)
            x = torch.cat((-right, left), -1).sin()
        return x.square().mean()


def head() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Head(), (torch.randn(256, 32), torch.randint(0, 512, (256,)))


def normed() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Normed(), (torch.randn(1024, 32),)


def turned() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Turned(), (torch.randn(1024, 32),)


def overwritten(graph: PlannedGraph) -> list[str]:
    """Names of the forward values that the plan's slots overwrite."""
    ways = (slot[k] for slot, k in zip(graph.program.slots, graph.schedule.ways, strict=True))
    found = [graph.program.values[way.overwrites] for way in ways if way.overwrites is not None]
    return [value.name for value in found if value.kind == "forward"]


def test_the_gradient_of_the_logits_takes_the_memory_of_the_saved_logits() -> None:
    model, inputs = head()
    graph, gradients = planned(model, inputs)
    assert overwritten(graph) == ["addmm"]
    with config.patch(donated_buffer=False):
        other, _ = planned(model, inputs)
    assert overwritten(other) == []
    weights, given = 4 * (32 * 512 + 512), 4 * 256 * 32 + 8 * 256
    assert graph.peak_bytes == 2 * weights + given + LOGITS + 4  # when all gradients are there; 4: the loss
    assert other.peak_bytes >= weights + given + 2 * LOGITS
    model.zero_grad(set_to_none=True)
    train_step(model, (inputs, {}))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-4, atol=1e-7)  # type: ignore[arg-type]
    planned(model, inputs, graph.peak_bytes)
    with config.patch(donated_buffer=False), pytest.raises(Exception, match="smallest known budget is"):
        planned(model, inputs, graph.peak_bytes)


class Returned(Head):
    """The caller gets the logits, too."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> Any:
        made = self.last(x)
        return nn.functional.cross_entropy(made, ids), made.detach()


class Twice(Head):
    """What makes the first gradient of the product reads it, and then the gradient of the other factor does."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        made = self.last(x)
        return (made.sin() @ made.t()).mean()


@pytest.mark.parametrize("kind", [Returned, Twice])
def test_what_is_returned_or_read_later_is_not_overwritten(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    graph, _ = planned(kind(), head()[1])
    program = graph.program
    last = {v: slot for slot, ways in enumerate(program.slots) for way in ways for v in way.reads}
    for slot, ways in enumerate(program.slots):
        taken = [way.overwrites for way in ways if way.overwrites is not None]
        assert all(last[v] == slot and v not in (*program.outputs, *program.gradients) for v in taken)
    assert kind is Twice or "addmm" not in overwritten(graph)


def test_concatenations_are_not_overwritten() -> None:
    graph, _ = planned(*turned())
    taken = [graph.program.values[t.overwrites].name for t in graph.program.every_task() if t.overwrites is not None]
    assert taken and not any(name.startswith("cat") for name in taken)


def test_a_plan_has_forward_kernels_in_place_wherever_nothing_reads_their_input_later() -> None:
    graph, _ = planned(*normed(), "70%")
    program = graph.program
    twins = {task.writes: p for p, task in enumerate(program.tasks) if task.overwrites is not None}
    assert twins
    kinds = [(task.writes, task.cost) for task in program.tasks]
    plain = {place: kinds.index(kind) for place, kind in enumerate(kinds)}
    before = Schedule(
        tuple(plain[p] for p in graph.schedule.forward),
        tuple(tuple(plain[p] for p in runs) for runs in graph.schedule.again),
        graph.schedule.ways,
    )
    assert before != graph.schedule == settled(program, before) == settled(program, graph.schedule)
    one, other = (simulate(program, schedule, graph.costs) for schedule in (before, graph.schedule))
    assert [step.seconds for step in one.steps] == [step.seconds for step in other.steps]
    lower = [a.bytes - b.bytes for a, b in zip(one.steps, other.steps, strict=True)]
    assert min(lower) == 0 and set(lower) == {0, 4 * 1024 * 32}


def test_without_donated_buffers_saved_values_are_overwritten_in_the_forward_alone() -> None:
    with config.patch(donated_buffer=False):
        graph, _ = planned(*normed(), "70%")
    found = [task for task in graph.program.tasks if task.overwrites is not None]
    assert found and all(task.runs == "first" for task in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "budget", "donated"),
    [
        (head, "100%", True),
        (normed, "100%", True),
        (normed, "80%", True),
        (normed, "80%", False),
        (turned, "70%", True),
    ],
)
def test_a_step_needs_what_is_predicted_to_the_byte(make: Any, budget: str, donated: bool) -> None:
    with config.patch(donated_buffer=donated):
        found, graph = peaks(*make(), budget, False)
    assert abs(found - graph.peak_bytes) <= SCALARS
