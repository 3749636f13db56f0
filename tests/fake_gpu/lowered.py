"""What Inductor launches on a GPU, counted on the fake one.

`compiled` answers ``NAME:SHARE`` about a layer of `layers.LAYERS` or of `SMALL` under ``torch.compile`` with this
``activation_memory_budget``. ``NAME:peak of SHARE`` is the layer under `compile_options` within the peak of the
allocator that an answer before had for this share, and ``NAME:0.8 of SHARE`` within 80 % of it.
``NAME:file of SHARE`` is what a file has of a plan within that peak.
``NAME:alone of SHARE`` has plans alone, nothing of PyTorch's own beside them.
``NAME:unfused of SHARE``, ``failing`` and ``swollen`` break fusion in plans, and Inductor's code for them.
``NAME:timed of SHARE`` times ways, by a clock on which each takes half as long as the one before; the others time none.
``NAME:graphs of SHARE`` is captured by Inductor as CUDA graphs.

Inductor lowers, fuses, schedules and writes its code as always; Triton's kernels alone are left out. So the code that
Inductor writes runs, with its buffers and with PyTorch's own operators, and the allocator sees what it would on a GPU.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
import torch.nn.functional as F
from brief import FEW, FEWER
from layers import LAYERS, Made
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering
from torch.distributed._functional_collectives import all_reduce
from torch.testing._internal.distributed.fake_pg import FakeStore

from monet_like.capture.captured import allocated_bytes
from monet_like.export.graph_plans import plan_model
from monet_like.inductor import choice, handed, prices, rehearsal, trial
from monet_like.inductor.emission import Run
from monet_like.inductor.groups import arranged_runs
from monet_like.inductor.joint import Kernel
from monet_like.inductor.options import compile_options
from monet_like.inductor.plan_file import GraphDecisions
from monet_like.inductor.planned_graph import PlannedGraph
from monet_like.inductor.portfolio import Way, judged
from monet_like.ir.program import Cost
from monet_like.ir.simulate import simulate
from monet_like.plan.local_search import searcher
from monet_like.profile.rates import limits_like


@dataclass
class Launched:
    """Kernels of the graphs that were compiled.

    Attributes:
        calls: of PyTorch's operators: products, convolutions, attention.
        kernels: that Inductor generates.
        moved_bytes: of the latter: every buffer that a kernel reads or writes, once.
        names: operators of each generated kernel, for messages.
    """

    calls: int = 0
    kernels: int = 0
    moved_bytes: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, graph: GraphLowering) -> None:
        """Count the kernels of a graph that has been compiled."""
        for node in graph.scheduler.nodes:
            kind = type(node).__name__
            if "Nop" in kind:
                continue
            if "Extern" in kind:
                self.calls += 1
                continue
            self.kernels += 1
            moved = int(node.get_read_write_buffers_sizes())
            self.moved_bytes += moved
            parts = getattr(node, "snodes", None) or [node]
            origins = {str(origin.name) for part in parts for origin in (getattr(part.node, "origins", ()) or ())}
            self.names.append(f"{moved / 1e6:.1f} MB: {' '.join(sorted(origins))}")


class _NoKernel:
    """In the place of a Triton kernel."""

    def run(self, *_: Any, **__: Any) -> None:
        """Launch nothing."""


@contextlib.contextmanager
def lowered() -> Iterator[Launched]:
    """What Inductor compiles within has no Triton kernels, and is counted."""
    found, compiled = Launched(), GraphLowering.compile_to_module

    def counted(graph: GraphLowering) -> Any:
        module = compiled(graph)
        found.add(graph)
        return module

    def no_kernel(*_: Any, **__: Any) -> _NoKernel:
        return _NoKernel()

    uncached = config.patch({"fx_graph_cache": False, "fx_graph_remote_cache": False})
    with (
        mock.patch.object(GraphLowering, "compile_to_module", counted),
        mock.patch.object(AsyncCompile, "triton", no_kernel),
        mock.patch.object(trial, "MOST_TIMED", _most_timed),
        uncached,
        functorch_config.patch({"enable_autograd_cache": False}),
    ):
        yield found


@dataclass(frozen=True)
class Counts:
    """A step of a compiled model.

    Attributes:
        calls, kernels, moved_bytes, names: see `Launched`.
        saved_bytes: between forward and backward, without what was there before and the result.
        peak_bytes: the allocator's, with parameters and inputs, without what libraries keep.
    """

    calls: int
    kernels: int
    moved_bytes: int
    saved_bytes: int
    peak_bytes: int
    names: tuple[str, ...]


class _Loss(torch.autograd.Function):
    """A number whose gradient is made when it is asked for, and is nobody else's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.like = x.detach()
        return x.new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(ctx.like)


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def count(model: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any] | None = None, **settings: Any) -> Counts:
    """Compile a model on the GPU, and count a step of it.

    Args:
        options: of Inductor.
        settings: of ``torch._functorch.config``.
    """
    torch._dynamo.reset()
    with lowered() as found, functorch_config.patch(settings):
        compiled = torch.compile(model, dynamic=False, options=dict(options) if options else None)
        peak, saved = step_bytes(compiled, args)
    return Counts(found.calls, found.kernels, found.moved_bytes, saved, peak, tuple(found.names))


def step_bytes(model: Any, args: tuple[Any, ...]) -> tuple[int, int]:
    """Bytes of a model's second step: its peak, with parameters and inputs, and what is kept between forward and
    backward, without what was there before and the result.
    """
    leaves = [*model.parameters(), *(a for a in args if isinstance(a, torch.Tensor) and a.requires_grad)]

    def forget() -> None:
        for leaf in leaves:
            leaf.grad = None

    forget()
    given = [*model.parameters(), *model.buffers(), *(a for a in args if isinstance(a, torch.Tensor))]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in given}
    resident = sum(allocated_bytes(count, torch.device("cuda")) for count in storages.values())
    _Loss.apply(_first(model(*args))).backward()
    forget()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = _first(model(*args))
    loss = _Loss.apply(result)
    saved = torch.cuda.memory_allocated() - before - result.nbytes - 512
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before + resident - 1024  # the loss and its gradient
    forget()
    return peak, saved


class Gated(nn.Module):
    """Two products, and a third one of SiLU of the first times the second."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(256, 256, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


def _convolved() -> nn.Module:
    return nn.Sequential(nn.Conv2d(96, 96, 3), nn.BatchNorm2d(96), nn.ReLU(), nn.Conv2d(96, 96, 3))


class _Summed(torch.autograd.Function):
    """The sum over all processes, of the gradient too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x, "sum", dist.group.WORLD)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return all_reduce(grads[0].contiguous(), "sum", dist.group.WORLD)


class Halved(nn.Module):
    """Two gated layers, of each of which this process has a part; the other process does not exist."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gated() for _ in range(2))
        if not dist.is_initialized():
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + _Summed.apply(layer(F.layer_norm(x, (256,))))
        return x


#: Layers whose kernels can be counted by hand, or that are quickly compiled.
SMALL = {
    "halved": lambda _: (Halved(), (torch.randn(1024, 256),)),
    "gated": lambda _: (Gated(), (torch.randn(1024, 256),)),
    "convolved": lambda _: (_convolved(), (torch.randn(8, 96, 16, 16).requires_grad_(),)),
}


def on_gpu(name: str) -> Made:
    """A layer and its arguments."""
    with torch.device("cuda"):
        return {**LAYERS, **SMALL}[name](False)


def timed_by_rates() -> contextlib.AbstractContextManager[Any]:
    """Within it times of graphs are by the rates of the device; workspaces are measured."""
    measure = prices.measured_cost

    def by_rates(root: Any, writes: Any, device: prices.Device) -> Cost | None:
        cost, kernel = measure(root, writes, device), Kernel(root, tuple(root.all_input_nodes), (), tuple(writes))
        return replace(cost, seconds=prices._estimated(kernel, device.limits).seconds) if cost else None

    return mock.patch.multiple(prices, measured_cost=by_rates, measured_limits=limits_like)


def planned(model: nn.Module, args: tuple[Any, ...], budget_bytes: int) -> dict[str, Any]:
    """Plan for a budget, and count a step."""
    ways: dict[str, list[list[int]]] = {}
    priced: dict[str, float] = {}

    def judge(share: float | None, *args: Any, **kwargs: Any) -> Way:
        way = judged(share, *args, **kwargs)
        ways.setdefault(str(share), []).append([len(way.rehearsed.moved), sum(way.rehearsed.moved)])
        priced[str(share)] = way.seconds
        return way

    options = compile_options(budget_bytes, quick=True)
    with (
        timed_by_rates(),
        mock.patch.object(handed, "judged", judge),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        found = asdict(count(model, args, options))
    (graph,) = options["custom_partitioner_fn"].graphs
    said = [str(one.message) for one in caught if "the plan is not compared" in str(one.message)]
    told = {"predicted_bytes": graph.peak_bytes, "seconds": graph.seconds, "share": graph.share, "judged": ways}
    told["prices"] = priced
    told["copied_for_graphs"] = counters["inductor"]["cudagraph_recorded_non_static_inputs"]
    told |= {"found_by": graph.plan.found_by, "timed": _clock[1:]}
    return {**found, **told, "budget_bytes": budget_bytes, "said": said}


def filed(model: nn.Module, args: tuple[Any, ...], budget_bytes: int) -> dict[str, Any]:
    """What a file has of a plan for a budget, and what the schedule in it needs; Inductor writes larger code for it."""
    with swollen(), mock.patch.object(handed, "own_partitions", return_value=[]):
        (graph,) = plan_model(model, (args, {}), compile_options(budget_bytes, quick=True, measured=False))
    report = simulate(graph.program, graph.schedule, graph.costs)
    return {**vars(GraphDecisions.of(graph)), "needed_bytes": report.peak_bytes}


def unfused() -> contextlib.AbstractContextManager[Any]:
    """Within it plans have no fusion, and nothing stands beside them."""

    def alone(*args: Any) -> tuple[list[Run], ...]:
        return tuple([replace(run, group=k) for k, run in enumerate(runs)] for runs in arranged_runs(*args))

    return mock.patch.multiple(handed, arranged_runs=alone, own_partitions=lambda *_: [])


def alone() -> contextlib.AbstractContextManager[Any]:
    """Within it nothing stands beside plans."""
    return mock.patch.object(handed, "own_partitions", return_value=[])


def failing() -> contextlib.AbstractContextManager[Any]:
    """Within it Inductor cannot write the code of any backward that is not compiled."""
    write = rehearsal.write

    def fails(*args: Any) -> Any:
        if len(args) > 2:
            raise AssertionError
        return write(*args)

    return mock.patch.object(rehearsal, "write", fails)


def swollen() -> contextlib.AbstractContextManager[Any]:
    """Within it Inductor's code for a plan needs more memory than there is, and no time."""
    with_way = handed.with_way

    def larger(graph: PlannedGraph, way: Way) -> PlannedGraph:
        if way.share is None:
            way = replace(way, seconds=0.0, rehearsed=replace(way.rehearsed, forward_bytes=2**40))
        return with_way(graph, way)

    return mock.patch.object(handed, "with_way", larger)


def graphs() -> contextlib.AbstractContextManager[Any]:
    """Within it Inductor makes CUDA graphs."""
    made: contextlib.AbstractContextManager[Any] = config.patch({"triton.cudagraphs": True})
    return made


@contextlib.contextmanager
def timed() -> Iterator[None]:
    """Within it up to five ways are timed, however they are priced: see above."""
    global _most_timed

    def halved(function: Any, *_: Any, **__: Any) -> float:
        function()
        _clock.append(_clock[-1] / 2)
        return _clock[-1]

    _clock[:], _most_timed = [1.0], 5
    with mock.patch.multiple(trial, NEAR=100.0, seconds_of=halved), mock.patch.object(choice, "NEAR", 100.0):
        yield
    _most_timed = 1


#: How many ways are timed at most, and what the clock of `timed` has shown.
_most_timed, _clock = 1, [1.0]
#: What is otherwise, left out or broken, by the word that asks for it.
BROKEN = {"timed": timed, "alone": alone, "unfused": unfused, "failing": failing, "swollen": swollen, "graphs": graphs}

#: The allocator's peaks so far, by what was asked.
_peaks: dict[str, int] = {}


def compiled(asked: str) -> dict[str, Any]:
    """A step of a layer, counted: see above."""
    name, what = asked.split(":")
    within, _, share = what.rpartition(" of ")
    if not within:
        found = asdict(count(*on_gpu(name), activation_memory_budget=float(share)))
        _peaks[asked] = found["peak_bytes"]
        return found
    budget = _peaks[f"{name}:{share}"]
    with mock.patch.object(searcher, "EVALUATIONS", FEWER * FEW):  # as many as for a user
        if within == "file":
            return filed(*on_gpu(name), budget)
        share_of_it = 1.0 if within in ("peak", *BROKEN) else float(within)
        with BROKEN.get(within, contextlib.nullcontext)():
            return planned(*on_gpu(name), int(share_of_it * budget))
