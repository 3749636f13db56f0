"""`compile_options`: plans within ``torch.compile``, against plain PyTorch, Inductor alone and measured memory."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from compiled import CPU, uncompiled
from later import Later
from torch import nn

import monet_like
from benchmarks.unrun_kernels import unrun_kernels
from monet_like.cli.group import main
from monet_like.errors import InfeasibleError, ScheduleFileError, UsageError
from monet_like.export.graph_plans import _run_as_it_is
from monet_like.inductor.emission import GROUP
from monet_like.inductor.partitioner import PlannedPartitioner
from monet_like.inductor.plan_file import read_plan
from monet_like.inductor.planned_graph import PlannedGraph
from monet_like.profile.measure import allocated_peak

utils = Later("torch._inductor.utils")


class DecoderLayer(nn.Module):
    """A layer as Llama's: without biases, with a gated product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(*shape, bias=False) for shape in 2 * [(width, 3 * width)] + [(3 * width, width)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Loss(nn.Module):
    """A model with its loss, so that a step is one graph."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def chain(layers: int = 8) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    made = (nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(layers))
    return Loss(*made), torch.randn(256, 32)


def net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (3, 16, 16):
        layers += [nn.Conv2d(width, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    layers += [nn.MaxPool2d(2), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(8 * 15 * 15, 4)]
    return Loss(*layers), torch.randn(8, 3, 34, 34)


def partitioned(
    model: nn.Module, budget: str | int, seen: Callable[..., Any] = _run_as_it_is, **settings: Any
) -> tuple[Any, PlannedPartitioner]:
    """The model with Inductor's graphs partitioned by a plan, and run without generating code."""
    options = monet_like.compile_options(budget, quick=True, measured=False, **settings)
    torch._dynamo.reset()
    return torch.compile(model, backend=uncompiled(options, seen)), options["custom_partitioner_fn"]


def gradients(model: nn.Module, function: Any, x: torch.Tensor) -> list[torch.Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
    torch.manual_seed(1)
    function(x).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def error(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """Relative, of all gradients together."""
    apart = [(a - b).flatten() for a, b in zip(found, wanted, strict=True)]
    return float(torch.cat(apart).norm() / torch.cat([t.flatten() for t in wanted]).norm())


def compiled(model: nn.Module, budget: str | int, **settings: Any) -> tuple[Any, PlannedPartitioner]:
    options = monet_like.compile_options(budget, quick=True, **settings)
    torch._dynamo.reset()
    return torch.compile(model, options=options), options["custom_partitioner_fn"]


def measured_peak(model: nn.Module, function: Any, x: torch.Tensor) -> int:
    """Bytes of a step with the model and its input."""
    function(x).backward()
    for parameter in model.parameters():
        parameter.grad = None
    resident = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), x))
    return allocated_peak(lambda: function(x).backward(), CPU) + resident


def recomputed(graph: PlannedGraph) -> Counter[int]:
    """How often each value is recomputed."""
    tasks = graph.program.tasks
    return Counter(tasks[p].writes[0] for again in graph.schedule.again for p in again)


def test_a_plan_has_as_many_copies_of_a_kernel_as_it_recomputes_it() -> None:
    model, x = chain()
    wanted = gradients(model, model, x)
    graphs: list[torch.fx.GraphModule] = []

    def seen(graph: torch.fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        graphs.append(graph)
        return _run_as_it_is(graph, inputs)

    function, partitioner = partitioned(model, "54%", seen)
    assert error(gradients(model, function, x), wanted) < 1e-6
    (graph,) = partitioner.graphs
    again = recomputed(graph)
    assert max(again.values()) > 1
    products = sum(graph.program.tasks[p].name.startswith("addmm") for runs in graph.schedule.again for p in runs)
    backward = Counter(str(node.target) for node in graphs[1].graph.nodes)
    assert backward["aten.addmm.default"] == products
    groups = [node.meta[GROUP] for node in graphs[1].graph.nodes if GROUP in node.meta]
    assert groups == sorted(groups)


def test_what_cannot_be_planned_is_refused_in_words() -> None:
    model, x = chain()
    with pytest.raises(UsageError, match="extra_bytes"):
        monet_like.compile_options("8 GB", extra_bytes=-1)
    with pytest.raises(UsageError, match="memory budget"):
        monet_like.compile_options("much")
    function, _ = partitioned(model, "10%")
    with pytest.raises(Exception, match="smallest known budget is") as raised:
        function(x)
    assert InfeasibleError.__name__ in str(raised.value)
    torch._dynamo.reset()
    options = monet_like.compile_options("70%", quick=True)
    with pytest.raises(Exception, match="size that changes from call to call"):
        torch.compile(model, backend=uncompiled(options), dynamic=True)(x)


class Scaled(nn.Module):
    """Rows times their product: the backward keeps few bytes of what is large and read by nobody else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        return x * (1 + x.prod(-1, keepdim=True))


def test_the_forward_can_make_what_only_the_backward_is_made_from() -> None:
    torch.manual_seed(0)
    function, partitioner = partitioned(Loss(Scaled()), "100%")
    x = torch.randn(64, 32)
    function(x).backward()
    (graph,) = partitioner.graphs
    again = {v for task in graph.program.tasks if task.runs == "again" for v in task.writes}
    first = [task for task in graph.program.tasks if task.variant == "aten" and task.runs != "again"]
    assert first and all(again.isdisjoint(task.reads) for task in first)


@pytest.mark.slow
def test_gradients_are_those_of_torch_compile_and_the_peak_is_the_predicted_one() -> None:
    model, x = net()
    torch._dynamo.reset()
    wanted = gradients(model, torch.compile(model), x)
    buffers = [b.clone() for b in model.buffers()]
    model, x = net()
    function, partitioner = compiled(model, "60%")
    assert error(gradients(model, function, x), wanted) < 1e-5
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(model.buffers(), buffers, strict=True))
    (graph,) = partitioner.graphs
    assert graph.schedule.rerun_count
    assert measured_peak(model, function, x) == pytest.approx(graph.peak_bytes, rel=0.03)


@pytest.mark.slow
def test_the_generated_code_runs_kernels_in_the_order_of_the_plan() -> None:
    model, x = chain()
    function, partitioner = compiled(model, "54%")
    _, codes = utils.run_fw_bw_and_get_code(lambda: function(x))
    (graph,) = partitioner.graphs
    wanted, program = [], graph.program
    for slot, runs in enumerate(graph.schedule.again):
        wanted += [program.tasks[p].name for p in runs]
        wanted.append(program.slots[slot][graph.schedule.ways[slot]].name)
    products = [re.sub(r"[_0-9.]*$", "", name) for name in wanted if name.startswith(("addmm", "mm"))]
    assert re.findall(r"extern_kernels\.(\w+)\(", codes[1]) == products
    assert products.count("addmm") > 8


@pytest.mark.slow
def test_an_amount_is_for_all_graphs_of_a_model_and_a_percentage_for_each() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = chain(4)[0].layers, chain(6)[0].layers  # type: ignore[union-attr]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            torch._dynamo.graph_break()
            return self.second(y).square().mean()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, x = Broken(), torch.randn(256, 32)
    wanted = gradients(model, model, x)
    function, partitioner = partitioned(model, "80%")
    assert error(gradients(model, function, x), wanted) < 1e-6
    first, second = partitioner.graphs
    assert first.budget_bytes == int(0.8 * first.plain.peak_bytes)
    assert second.budget_bytes == int(0.8 * second.plain.peak_bytes)
    amount = first.plain.peak_bytes + second.plain.peak_bytes + 5000
    function, partitioner = partitioned(model, amount, extra_bytes=5000)
    assert error(gradients(model, function, x), wanted) < 1e-6
    first, second = partitioner.graphs
    assert first.budget_bytes == amount - 5000 and second.budget_bytes == amount - 5000 - first.held_bytes
    assert first.held_bytes + second.peak_bytes <= amount - 5000
    with pytest.raises(Exception, match=r"what 1 graph\(s\) of this model hold that were compiled before"):
        partitioned(model, first.held_bytes + 100_000)[0](x)


@pytest.mark.slow
def test_plans_need_no_more_than_the_activation_memory_budget_of_torch_compile() -> None:
    """The case of pytorch/pytorch#197838, in small: a layer of a decoder, at small budgets.

    Kernels do not change what is needed.
    """
    torch.manual_seed(0)
    model, x = Loss(DecoderLayer(32)), torch.randn(4, 64, 32)
    others = []
    for budget in (0.3, 0.05):
        torch._dynamo.reset()
        with torch._functorch.config.patch(activation_memory_budget=budget), unrun_kernels():
            others.append(measured_peak(model, torch.compile(model), x))
    peaks = []
    for amount in (max(others), int(0.9 * min(others))):
        function, partitioner = compiled(model, amount)
        with unrun_kernels():
            peaks.append(measured_peak(model, function, x))
        (graph,) = partitioner.graphs
        assert peaks[-1] == pytest.approx(graph.peak_bytes, rel=0.03)
        assert graph.peak_bytes <= amount
    assert peaks[1] < peaks[0] <= 1.01 * max(others) and peaks[1] < min(others)


NET = """from torch import nn


def make_model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
"""


@pytest.mark.slow
def test_the_command_plans_in_advance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    runner = CliRunner()
    solve = "solve net.py:make_model 256 90% normal heuristic --input-shape 64 --out n.json --quiet"
    done = runner.invoke(main, solve)
    assert done.exit_code == 0, done.output
    done = runner.invoke(main, ("export", "n.json", "--to", "inductor", "--model", "net.py:make_model", "--json"))
    assert done.exit_code == 0, done.output
    (planned,) = read_plan(Path("n.inductor.json")).graphs
    assert json.loads(done.stdout)["graphs"][0]["key"] == planned.key
    assert planned.peak_bytes <= planned.budget_bytes

    names: dict[str, Any] = {}
    exec(NET, names)
    options = monet_like.compile_options("n.inductor.json", measured=False)
    torch._dynamo.reset()
    torch.compile(names["make_model"](), backend=uncompiled(options))(torch.randn(256, 64)).square().mean().backward()
    (graph,) = options["custom_partitioner_fn"].graphs
    assert (graph.schedule, graph.plan.found_by) == (planned.schedule, "file")
    torch._dynamo.reset()
    options = monet_like.compile_options("n.inductor.json")
    with pytest.raises(Exception, match=r"the plan is of 1 other graph\(s\)"):
        torch.compile(names["make_model"](), backend=uncompiled(options))(torch.randn(128, 64))
    Path("n.inductor.json").write_text("{}")
    with pytest.raises(ScheduleFileError, match="export it again"):
        monet_like.compile_options("n.inductor.json")
