"""Graphs that change or check tensors beside what they compute: their gradients are those without a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled import SCALARS, peaks, planned, uncompiled
from torch import nn
from torch.utils.checkpoint import checkpoint

import monet_like
from monet_like.inductor.partitioner import PlannedPartitioner
from monet_like.inductor.planned_graph import PlannedGraph
from monet_like.inductor.portfolio import own_partitions
from monet_like.replay.verify.steps import train_step
from monet_like.torch_versions import release

#: Whether PyTorch itself copies what a forward overwrites and the backward reads.
COPIES = release() >= (2, 15)


class Queue(nn.Module):
    """Contrasts features with those of earlier batches, which it then replaces, as MoCo does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.register_buffer("queue", torch.randn(96, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.layer(x).tanh()
        likenesses = features @ self.queue.clone().T
        with torch.no_grad():
            self.queue[: len(x)] = features
        return likenesses


class Inverse(nn.Module):
    """The inverse of a matrix: PyTorch checks that there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(self.layer(x).view(-1, 8, 8))


def queue() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Queue(), (torch.randn(64, 32),)


def inverse() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Inverse(), (torch.randn(4, 8),)


def without_a_compiler(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    train_step(model, (inputs, {}))
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("make", [queue, inverse])
def test_gradients_are_those_without_a_compiler(make: Callable[[], Any]) -> None:
    wanted = without_a_compiler(*make())
    _, found = planned(*make())
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_generated_code_reads_the_copy() -> None:
    wanted = without_a_compiler(*queue())
    model, inputs = queue()
    torch._dynamo.reset()
    train_step(torch.compile(model, options=monet_like.compile_options("100%", quick=True)), (inputs, {}))
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted, rtol=1e-4, atol=1e-6)


def test_the_peak_with_a_copy_is_the_predicted_one() -> None:
    measured, graph = peaks(*queue(), "100%", measured=False)
    assert graph.peak_bytes - SCALARS <= measured <= graph.peak_bytes
    if COPIES:
        return
    (copy,) = (value for value in graph.program.values if value.name.startswith("copied"))
    assert copy.bytes == 4 * 96 * 32 and copy.name in graph.saved


@pytest.mark.parametrize(("make", "count"), [(queue, int(COPIES)), (inverse, 1)])
def test_pytorchs_own_partition_is_left_out_where_it_saves_what_the_forward_overwrites(
    make: Callable[[], Any], count: int
) -> None:
    """Its backward would read what was written."""
    found: list[int] = []

    class Counting(PlannedPartitioner):
        def __call__(self, gm: Any, joint_inputs: Any, **options: Any) -> Any:
            found.append(len(list(own_partitions(gm, joint_inputs, options))))
            return super().__call__(gm, joint_inputs, **options)

    model, inputs = make()
    torch._dynamo.reset()
    options = monet_like.compile_options("100%", quick=True, measured=False)
    options["custom_partitioner_fn"] = Counting(options["custom_partitioner_fn"].settings)
    torch.compile(model, backend=uncompiled(options), dynamic=False)(*inputs)
    assert [min(number, 1) for number in found] == [count]


@pytest.mark.skipif(COPIES, reason="this PyTorch's own partitions have plain PyTorch's gradients")
def test_no_partition_with_other_gradients_is_run_where_sizes_change() -> None:
    """It would be, if its gradients were plain PyTorch's: see `test_forms`."""
    model, _ = queue()
    torch._dynamo.reset()
    function = torch.compile(model, backend=uncompiled(monet_like.compile_options("100%", quick=True, measured=False)))
    function(torch.randn(64, 32))
    with pytest.raises(Exception, match="compile with dynamic=False"):
        function(torch.randn(48, 32))


def parameters(graph: PlannedGraph) -> list[int]:
    return [value.bytes for value in graph.program.values if value.kind == "parameter"]


def test_a_check_in_the_forward_is_made_and_its_token_is_no_argument() -> None:
    model, inputs = inverse()
    graph, _ = planned(model, inputs)
    assert parameters(graph) == [p.nbytes for p in model.parameters()]
    if release() < (2, 14):
        pytest.skip("with this PyTorch every compiler leaves out the check")
    options = monet_like.compile_options("100%", quick=True, measured=False)
    torch._dynamo.reset()
    function = torch.compile(model, backend=uncompiled(options), dynamic=False)
    function(*inputs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(RuntimeError, match="singular"):
        function(*inputs)


class Branching(nn.Module):
    """Takes one of two functions, by a value."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def test_an_operator_that_is_given_functions_is_refused_in_words() -> None:
    with pytest.raises(Exception, match=r"this model calls cond, .*compile its parts before and after this call"):
        planned(Branching(), (torch.randn(4, 8, requires_grad=True),))


class Checkpointed(nn.Module):
    """Layers that PyTorch would compute anew in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def checkpointed() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    return Checkpointed(), (torch.randn(256, 32),)


def test_what_a_checkpoint_computes_anew_is_the_plans_to_decide() -> None:
    wanted = without_a_compiler(*checkpointed())
    for budget, again in ("100%", False), ("60%", True):
        graph, found = planned(*checkpointed(), budget)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
        assert (graph.schedule.rerun_count > 0) is again
