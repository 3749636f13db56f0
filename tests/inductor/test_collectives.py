"""Collectives in graphs of plans: each runs once, in the order of the graph, whatever the plan is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from compiled import peaks, uncompiled
from later import Later
from processes import together
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import monet_like
from monet_like.capture.lower.step import capture
from monet_like.errors import CaptureError, InfeasibleError, UsageError
from monet_like.export.graph_plans import _run_as_it_is
from monet_like.inductor.planned_graph import PlannedGraph
from monet_like.inductor.portfolio import own_partitions
from monet_like.inductor.rehearsal import RELEASES_GRADIENTS
from monet_like.inductor.rewrites import convert_gradients, is_conversion
from monet_like.runtime.operators import communicates
from monet_like.torch_versions import release

WIDTH, HEADS = 64, 4
handed = Later("monet_like.inductor.handed")


class Layer(nn.Module):
    """Attention and two linear layers, each after a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        heads = (part(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.last(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer())


def parallel(model: nn.Module) -> nn.Module:
    """The model in halves: every process has half of the heads and of the features in between."""
    mesh = init_device_mesh("cpu", (2,))
    split: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    for layer in model.children():
        parallelize_module(layer, mesh, split | {"last": RowwiseParallel(), "down": RowwiseParallel()})
    return model


def batch() -> torch.Tensor:
    return torch.randn(8, 32, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def alone() -> Iterator[None]:
    """One process of two, the other of which does not exist: results of collectives are any numbers."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def collectives(graph: fx.Graph) -> list[str]:
    """The names of a graph's collectives, without their groups of kernels."""
    return [node.name.partition("_of_group")[0] for node in graph.nodes if communicates(node.target)]


class Noted:
    """Graphs of a model that is compiled within a plan, and runs operator by operator.

    Attributes:
        joint, parts: the collectives of the joint graph, and of the forward and the backward.
    """

    def __init__(
        self, model: nn.Module, budget: str | int, monkeypatch: pytest.MonkeyPatch, *, measured: bool = False
    ) -> None:
        torch._dynamo.reset()
        self.options = monet_like.compile_options(budget, quick=True, measured=measured)
        self.joint: list[str] = []
        self.parts: list[list[str]] = []
        read = handed.read_joint

        def noted(module: fx.GraphModule, *given: Any) -> Any:
            self.joint = collectives(module.graph)
            assert not self.joint or not list(own_partitions(module, (), {"num_fwd_outputs": 1}))
            return read(module, *given)

        def run(module: fx.GraphModule, inputs: Any, **options: Any) -> Any:
            self.parts.append(collectives(module.graph))
            return _run_as_it_is(module, inputs, **options)

        monkeypatch.setattr("monet_like.inductor.handed.read_joint", noted)
        self.model: Any = torch.compile(model, backend=uncompiled(self.options, run), dynamic=False)

    @property
    def graph(self) -> PlannedGraph:
        (found,) = self.options["custom_partitioner_fn"].graphs
        return found


def step(model: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model(batch()).square().mean().backward()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("budget", ["100%", "60%"])
def test_collectives_of_a_plan_run_once_in_the_order_of_the_graph(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(parallel(layers()), budget, monkeypatch)
    step(noted.model)
    assert (noted.graph.schedule.rerun_count > 5) == (budget == "60%")
    assert list(map(len, noted.parts)) == [4, 8]
    assert noted.parts[0] + noted.parts[1] == noted.joint


@pytest.mark.usefixtures("alone")
def test_no_collective_runs_for_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[fx.Node] = []
    monkeypatch.setattr("monet_like.inductor.prices.MEASURED", {})
    monkeypatch.setattr("monet_like.inductor.prices._measured", lambda node, *_: run.append(node))
    step(Noted(parallel(layers()), "100%", monkeypatch, measured=True).model)
    assert run and not any(communicates(node.target) for node in run)


class Communicated(torch.autograd.Function):
    """The result of a collective, and a collective of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.kind = kind
        return OPERATIONS[kind](x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        back = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}.get(ctx.kind, ctx.kind)
        return OPERATIONS[back](*grads), None


def _several(operation: Callable[..., list[torch.Tensor]], x: torch.Tensor, *args: Any) -> torch.Tensor:
    one, other = operation([x, x.sin()], *args)
    return one - other


OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_reduce": lambda x: functional.all_reduce(x, "sum", dist.group.WORLD),
    "broadcast": lambda x: functional.broadcast(x, 0, dist.group.WORLD),
    "all_gather": lambda x: functional.all_gather_tensor(x, 0, dist.group.WORLD),
    "reduce_scatter": lambda x: functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD),
    "all_to_all": lambda x: functional.all_to_all_single(x, None, None, dist.group.WORLD),
    "several": lambda x: _several(functional.all_reduce_coalesced, x, "sum", dist.group.WORLD),
}


class Between(nn.Module):
    """A collective between a product and a sum: with its input it is the largest part of the step."""

    def __init__(self, kind: str, *, strided: bool = False) -> None:
        super().__init__()
        self.first, self.kind, self.strided = nn.Linear(16, 512, bias=False), kind, strided

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = Communicated.apply(self.first(x), self.kind)
        return (y if self.strided else y.square()).sum(1)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", OPERATIONS)
def test_a_collective_takes_the_bytes_that_its_plan_counts(kind: str) -> None:
    """Inductor makes a sum in the memory of what is summed. The plan says so too, but not of several sums at once."""
    if kind == "several" and hasattr(torch.ops._c10d_functional, "wait_tensors"):
        pytest.skip("this PyTorch waits for all results at once, which is refused")
    found, graph = peaks(Between(kind), (torch.randn(128, 16),), "100%", False)
    product = 4 * 128 * 512
    # An old PyTorch keeps the incoming gradient, as large as the result, until the backward ends.
    kept = 0 if release() >= RELEASES_GRADIENTS else graph.program.values[graph.program.tangents[0]].bytes
    assert graph.peak_bytes + kept - found == (product if kind == "several" else 0)


@pytest.mark.usefixtures("alone")
def test_a_gradient_that_is_expanded_for_a_collective_is_counted() -> None:
    found, graph = peaks(Between("all_to_all", strided=True), (torch.randn(128, 16),), "100%", False)
    assert 0 <= graph.peak_bytes - found <= 4 * 128  # the gradient of the sums, which ends when it is expanded


class Unread(nn.Module):
    """Nobody reads what a collective returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        functional.all_reduce(y.detach().sum(), "sum", dist.group.WORLD)
        return y.tanh()


class Weighed(torch.autograd.Function):
    """A product with a weight that is gathered for it, and once more in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, shard)
        return x @ OPERATIONS["all_gather"](shard)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, shard = ctx.saved_tensors
        weight = OPERATIONS["all_gather"](shard)
        return grads[0] @ weight.t(), OPERATIONS["reduce_scatter"](x.flatten(0, 1).t() @ grads[0].flatten(0, 1))


class Sharded(nn.Module):
    """A layer of which every process has half, behind another one or first."""

    def __init__(self, *, first: bool = False) -> None:
        super().__init__()
        self.before = nn.Identity() if first else nn.Linear(WIDTH, WIDTH)
        self.shard = nn.Parameter(torch.randn(WIDTH // 2, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Weighed.apply(self.before(x).sin(), self.shard).sin()


class Scaled(nn.Module):
    """The gradient of a scale is larger than what it is gathered from, and nothing else reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed = Communicated.apply(self.layer(x), "all_reduce")
        return summed * Communicated.apply(self.scale, "reduce_scatter")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [(Unread, 1, 0), (Sharded, 1, 2), (partial(Sharded, first=True), 1, 2), (Scaled, 2, 2)],
)
def test_no_collective_is_left_out_or_changes_sides(
    kind: Callable[[], nn.Module], forward: int, backward: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Noted(kind(), "100%", monkeypatch)
    step(noted.model)
    assert list(map(len, noted.parts)) == [forward, backward]
    assert noted.parts[0] + noted.parts[1] == noted.joint


class Words(nn.Module):
    """An embedding, of whose features every process has half, before layers in halves."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(16, WIDTH), parallel(layers())
        parallelize_module(self.words, init_device_mesh("cpu", (2,)), ColwiseParallel(output_layouts=Replicate()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.words(x[..., 0].abs().long()))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("frozen", ["nothing", "layers.0", "words"])
def test_parameters_of_dtensor_are_told_apart_from_inputs(frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a tensor and a mesh."""
    model = Words()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    noted = Noted(model, "100%", monkeypatch)
    step(noted.model)
    values = noted.graph.program.values
    assert [value.bytes for value in values if value.kind == "input" and value.bytes] == [batch().nbytes]
    sizes = sorted(value.bytes for value in values if value.kind == "parameter" and value.bytes)
    assert sizes == sorted(tensor.nbytes for tensor in map(_local, model.parameters()))
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.startswith(frozen), name


@pytest.mark.parametrize("gradient", ["sharded otherwise", "a mesh"])
def test_a_gradient_that_does_not_lie_as_its_parameter_stays_as_it_is(gradient: str) -> None:
    """DTensor's mesh is not described if it is that of a model which was compiled before."""
    graph = fx.Graph()
    graph.placeholder("weight").meta["val"] = torch.empty(8, 4)
    made = graph.placeholder("tangents_1")
    if gradient != "a mesh":
        made.meta["val"] = torch.empty(8, 8)
    graph.output((made,))
    convert_gradients(graph, 0, [0])
    assert not any(map(is_conversion, graph.nodes))


def _received(x: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.irecv(x.clone(), 1, 0, "0"))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        pytest.param(
            _received,
            "with one other process",
            marks=pytest.mark.skipif(not hasattr(torch.ops._c10d_functional, "irecv"), reason="an old PyTorch"),
        ),
        (lambda x: torch.ops._c10d_functional.wait_tensor(x.detach()), "began outside of this graph"),
        (lambda x: torch.ops._c10d_functional.all_reduce(x.detach(), "sum", "0"), "a wait for this result alone"),
    ],
)
def test_communication_that_no_plan_can_express_is_refused(
    operation: Callable[[torch.Tensor], torch.Tensor], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    noted = Noted(nn.Sequential(layer, Applied(operation)), "100%", monkeypatch)
    with pytest.raises(Exception, match=reason) as raised:
        step(noted.model)
    assert UsageError.__name__ in str(raised.value)


class Applied(nn.Module):
    """A function, added to what it is given."""

    def __init__(self, operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.operation(x)


@pytest.mark.parametrize(
    ("operator", "wanted"),
    [
        (torch.ops._c10d_functional.all_reduce.default, True),
        (torch.ops.c10d.allreduce_.default, True),
        (torch.ops._c10d_functional.wait_tensor.default, False),
        (torch.ops.aten.native_group_norm.default, False),
        (torch.add, False),
    ],
)
def test_who_is_given_a_group_of_processes_communicates(operator: Any, wanted: bool) -> None:
    assert communicates(operator) is wanted


def _turned(x: torch.Tensor) -> torch.Tensor:
    """As DTensor moves its shards from one dimension to another: no operator of functional collectives."""
    return torch.ops._dtensor.shard_dim_alltoall(x.detach(), 0, 1, "0").reshape(x.shape)


@pytest.mark.usefixtures("alone")
def test_a_plan_has_what_dtensors_call_once(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(nn.Sequential(nn.Linear(WIDTH, WIDTH), Applied(_turned)), "100%", monkeypatch)
    step(noted.model)
    assert noted.parts == [noted.joint, []] == [["shard_dim_alltoall"], []]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("operator", "operation"),
    [
        ("all_reduce", lambda x: functional.all_reduce(x.detach(), "sum", dist.group.WORLD) * 1),
        ("shard_dim_alltoall", _turned),
        ("wait_tensor", lambda x: torch.ops._c10d_functional.wait_tensor(x.detach().clone())),
    ],
)
def test_a_schedule_of_operators_is_refused(operator: str, operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Applied(operation))
    with pytest.raises(CaptureError, match=rf"{operator}.* communicates with other processes.*compile_options"):
        capture(model, (batch(),))


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [_local(p.grad) for p in model.parameters() if p.grad is not None]


def _local(tensor: Any) -> torch.Tensor:
    """What this process has of a tensor."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def _steps_alike(rank: int, budgets: list[tuple[str, str]], written: bool) -> None:
    """Steps of processes with budgets of their own are those of the eager model.

    Args:
        written: by Inductor's code, else operator by operator.
    """
    plain = Words()
    plain.layers[0].q.requires_grad_(False)
    step(plain)
    for own in budgets:
        model = copy.deepcopy(plain)
        model.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            noted = Noted(model, own[rank], patch)
            if written:
                noted.model = torch.compile(model, options=noted.options, dynamic=False)
            step(noted.model)
            assert written or noted.parts[0] + noted.parts[1] == noted.joint
        assert (noted.graph.schedule.rerun_count > 5) == (own[rank] != "100%")
        for one, other in zip(*map(_gradients, (plain, model)), strict=True):
            torch.testing.assert_close(one, other)
    lean = Noted(copy.deepcopy(plain), "10%", pytest.MonkeyPatch())
    with pytest.raises(Exception, match="smallest known budget is") as raised:
        step(lean.model)
    assert InfeasibleError.__name__ in str(raised.value)


@pytest.mark.slow
def test_processes_with_different_plans_agree(tmp_path: Path) -> None:
    """The last pair: one process finds its plan in the cache, the other makes one."""
    together(tmp_path, _steps_alike, [("65%", "65%"), ("100%", "65%"), ("100%", "70%")], False)


@pytest.mark.slow
def test_inductors_code_with_collectives_has_eager_gradients(tmp_path: Path) -> None:
    together(tmp_path, _steps_alike, [("100%", "65%")], True)
