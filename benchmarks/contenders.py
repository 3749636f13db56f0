"""Ways to train in less memory, each through its public API on an unmodified model.

A contender is a function from a job and its model to a module that trains alike. `CONTENDERS` says which settings of
each are measured. What does not work raises, and the suite reports what it said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from benchmarks.work import Job
from monet_like.capture.example_inputs import Example
from monet_like.ir.defaults import MODE

MB = 10**6


class NotApplicableError(Exception):
    """This contender has no way to run this model; the message says why."""


@dataclass(frozen=True)
class Built:
    """A contender's module.

    Attributes:
        module: trains as the model does.
        planning_seconds: that it took to get it, profiles not counted.
        predicted_bytes, predicted_seconds, plain_seconds: what the planner promises, and for plain PyTorch; 0: nothing.
        gap: from the bound for all schedules; -1: none proven.
    """

    module: nn.Module
    planning_seconds: float = 0.0
    predicted_bytes: int = 0
    predicted_seconds: float = 0.0
    plain_seconds: float = 0.0
    gap: float = -1.0


Build = Callable[[Job, nn.Module, Example], Built]


def plain(job: Job, model: nn.Module, example: Example) -> Built:
    """PyTorch as it is."""
    return Built(model)


def _blocks(job: Job, model: nn.Module) -> list[nn.Module]:
    """The outermost modules of the classes named in the work."""
    found = [m for m in model.modules() if type(m).__name__ in job.work.blocks and m is not model]
    inner = {id(m) for block in found for m in block.modules() if m is not block}
    return [block for block in found if id(block) not in inner]


def per_block(job: Job, model: nn.Module, example: Example) -> Built:
    """``torch.utils.checkpoint`` around every block, or around every n-th, as ``every_n_layers`` of Transformers has
    it.
    """
    for block in _blocks(job, model)[:: int(job.setting or 1)]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    return Built(model)


def sequential(job: Job, model: nn.Module, example: Example) -> Built:
    """``checkpoint_sequential`` in as many segments as the setting says."""
    if job.work.sequence is None:
        raise NotApplicableError(f"{job.model} is no sequence of modules")
    owner, modules = job.work.sequence(model)

    def forward(x: torch.Tensor) -> Any:
        return checkpoint_sequential(list(modules), int(job.setting), x, use_reentrant=False)

    owner.forward = forward  # type: ignore[method-assign,assignment]
    return Built(model)


def selective(job: Job, model: nn.Module, example: Example) -> Built:
    """Selective checkpointing of every block: products, convolutions and attention are kept, all else is run again."""
    aten = torch.ops.aten
    kept = [
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default,
        aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_cudnn_attention.default,
    ]  # fmt: skip
    contexts = partial(create_selective_checkpoint_contexts, kept)
    for block in _blocks(job, model):
        around = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
        block.forward = around  # type: ignore[method-assign]
    return Built(model)


def selective_planned(job: Job, model: nn.Module, example: Example) -> Built:
    """Selective checkpointing of every block, by our plan of that mechanism for the job's budget."""
    from monet_like.compiler.pipeline import compile_prepared, prepare
    from monet_like.compiler.request import Request
    from monet_like.export.selective import SelectivePolicy, selective_plan
    from monet_like.ir.profile_file import Profile

    blocks, names = _blocks(job, model), {id(module): name for name, module in model.named_modules()}
    request = Request(model, example, "normal", strategy="store_all", profile_batch=job.batch, autocast=job.autocast)
    ready = prepare(request, job.device, profile=Profile.load(job.costs_file) if job.profiles else None)
    record = compile_prepared(request, ready, 2**50, job.device).record
    started = time.perf_counter()
    found = selective_plan(
        replace(record, budget_bytes=job.budget_bytes or 2**50), ready, request, job.device,
        [names[id(block)] for block in blocks], time_limit_seconds=job.solver_seconds,
    )  # fmt: skip
    policy = SelectivePolicy(found)
    for block in blocks:
        around = partial(checkpoint, block.forward, use_reentrant=False, context_fn=policy)
        block.forward = around  # type: ignore[method-assign]
    seconds = time.perf_counter() - started
    return Built(model, seconds, found.peak_bytes - record.cublas_bytes, found.seconds, found.plain_seconds)


def under_budget(setting: float, solver: str, eager: bool, graph: Any, inputs: Any) -> Any:
    """A backend of ``torch.compile`` with this ``activation_memory_budget``."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(activation_memory_budget=setting, activation_memory_budget_solver=solver):
        return aot_eager(graph, inputs) if eager else compile_fx(graph, inputs)


def compiled(job: Job, model: nn.Module, example: Example, *, eager: bool = False) -> Built:
    """``torch.compile``, with an activation memory budget if the setting is one, such as ``0.5 ilp``.

    With ``eager`` by the backend aot_eager: the same partition, PyTorch's own operators.
    """
    setting, _, solver = (job.setting or "1.0").partition(" ")
    backend = partial(under_budget, float(setting), solver or "dp", eager)
    module: Any = torch.compile(model, backend=backend)  # an object of its own, so that no graph is shared
    return Built(module)


def compiled_mode(job: Job, model: nn.Module, example: Example) -> Built:
    """``torch.compile`` in one of its modes."""
    module: Any = torch.compile(model, mode=job.setting)
    return Built(module)


def compiled_planned(job: Job, model: nn.Module, example: Example, *, graphs: bool = False) -> Built:
    """``torch.compile`` with our plan of Inductor's joint graph for the job's budget; planned in the first step.

    With ``graphs`` as CUDA graphs.
    """
    from monet_like.inductor.options import compile_options

    options = compile_options(job.budget_bytes or 2**50, time_limit_seconds=job.solver_seconds)
    options["triton.cudagraphs"] = graphs
    module: Any = torch.compile(model, options=options)
    return Built(module)


def rockmate(job: Job, model: nn.Module, example: Example) -> Built:
    """Rockmate or HiRemate for a budget, such as ``hilp 45%``.

    The packages 2.0.0 on PyPI lack their own subpackages: it takes the two folders of topal-team/rockmate on GitHub and
    pulp 2.7.0. Of its classes that its README names, those with a sequence partitioner stop at a NameError;
    `from_config` does not.
    """
    from rockmate import from_config  # type: ignore[import-not-found]

    kind, _, _ = job.setting.partition(" ")
    weights = 2 * sum(
        t.untyped_storage().nbytes() for t in model.parameters()
    )  # not in its budget: nor their gradients
    started = time.perf_counter()
    module = from_config(model, example[0], job.budget_bytes - weights, config_type=kind)
    return Built(module, time.perf_counter() - started)


def ours(
    job: Job, model: nn.Module, example: Example, *, strategy: str = "milp", mode: str = MODE, backend: str = "eager",
    graphs: bool = False,
) -> Built:  # fmt: skip
    """A schedule of this package; the budget is the job's, all the memory there is for strategies that take none.

    With ``graphs`` as CUDA graphs.
    """

    from monet_like.compiler.request import Request
    from monet_like.compiler.sources import Given
    from monet_like.ir.profile_file import Profile
    from monet_like.job.job import Job as Compiler
    from monet_like.replay.wrapper import ScheduleWrapper

    request = Request(
        model, example, mode, strategy=strategy, solver="HIGHS", time_limit_seconds=job.solver_seconds,
        profile_batch=job.batch, threads=torch.get_num_threads(), autocast=job.autocast,
    )  # fmt: skip
    profile = Profile.load(job.costs_file) if job.profiles else None
    compiler = Compiler(request, job.device, Given(profile))
    own = compiler.ready.cublas_bytes + compiler.ready.variants_cublas_bytes  # counted by plans, and in no peak here
    found = compiler.plan(job.budget_bytes + own if job.budget_bytes else 2**50)
    started = time.perf_counter()
    module = ScheduleWrapper(
        model, found.record, example=example, captured=found.ready.captured, backend=backend, cuda_graphs=graphs
    )
    wrapping = time.perf_counter() - started
    seconds = sum(s for stage, s in found.compiled.stage_seconds.items() if stage != "profile") + wrapping
    record = found.record
    gap = -1.0 if record.gap is None else record.gap
    return Built(module, seconds, record.peak_bytes - record.cublas_bytes, record.seconds, record.plain_seconds, gap)


@dataclass(frozen=True)
class Contender:
    """A way to train.

    Attributes:
        build: makes the module.
        settings: to measure; ``60%`` is a budget: parameters, their gradients, buffers, inputs, and 60 % of what plain
            PyTorch's peak has beyond these.
        quick: the settings of a quick run; None: all.
        front: eager or inductor: with which of ours it is compared.
        is_ours: planned by the integer program: the front that the others are compared with.
        plans: by what operators cost.
        compiles: in its first step, so that this is part of its planning.
        batches: the setting whose largest batch is sought; None: it is not. ``limit``: planned for the limit.
    """

    build: Build
    settings: tuple[str, ...] = ("",)
    quick: tuple[str, ...] | None = None
    front: str = "eager"
    is_ours: bool = False
    plans: bool = False
    compiles: bool = False
    batches: str | None = None


_SHARES = ("100%", "80%", "60%", "45%", "30%", "20%", "10%")
_BUDGETS = ("0.9", "0.7", "0.5", "0.3", "0.2", "0.1", "0.0")
_SOLVERS = ("0.5 ilp", "0.2 ilp", "0.5 greedy", "0.2 greedy")

CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        "plain PyTorch": Contender(plain, batches=""),
        "checkpoint per block": Contender(per_block, batches=""),
        "checkpoint every n-th block": Contender(per_block, ("2", "3"), ("2",), batches="2"),
        "checkpoint_sequential": Contender(sequential, ("2", "4", "8"), ("4",), batches="4"),
        "selective checkpoint": Contender(selective, batches=""),
        "selective checkpoint planned": Contender(
            selective_planned, ("80%", "60%", "45%", "30%"), ("45%",), plans=True, batches="limit"
        ),
        "aot_eager budget": Contender(
            partial(compiled, eager=True), (*_BUDGETS, *_SOLVERS), ("0.5", "0.2"), compiles=True, batches="0.2"
        ),
        "torch.compile": Contender(compiled, front="inductor", compiles=True, batches=""),
        "torch.compile budget": Contender(
            compiled,
            ("0.5", "0.2", "0.0", "0.2 ilp", "0.2 greedy"),
            ("0.2",),
            front="inductor",
            compiles=True,
            batches="0.2",
        ),
        "torch.compile mode": Contender(
            compiled_mode, ("max-autotune-no-cudagraphs", "reduce-overhead"), (), front="inductor", compiles=True
        ),
        "torch.compile planned": Contender(
            compiled_planned, ("80%", "60%", "45%", "30%"), ("45%",), front="inductor", compiles=True, batches="limit"
        ),
        "torch.compile planned graphs": Contender(
            partial(compiled_planned, graphs=True), ("300%", "45%"), (), front="inductor", compiles=True
        ),
        "Rockmate": Contender(rockmate, ("hilp 45%", "rockmate 45%"), ("hilp 45%",)),
        "strategy ogc": Contender(partial(ours, strategy="ogc", mode="normal"), plans=True, batches=""),
        "strategy chen_sqrt": Contender(partial(ours, strategy="chen_sqrt", mode="normal"), plans=True, batches=""),
        "strategy chen_greedy": Contender(
            partial(ours, strategy="chen_greedy", mode="normal"),
            ("60%", "45%", "30%"),
            ("30%",),
            plans=True,
            batches="limit",
        ),
        "strategy checkmate": Contender(
            partial(ours, strategy="checkmate", mode="normal"),
            ("60%", "45%", "30%"),
            ("30%",),
            plans=True,
            batches="limit",
        ),
        "monet_like without variants": Contender(
            partial(ours, mode="normal"),
            ("80%", "60%", "45%", "30%", "20%"),
            ("45%",),
            is_ours=True,
            plans=True,
            batches="limit",
        ),
        "monet_like": Contender(ours, _SHARES, ("100%", "45%", "20%"), is_ours=True, plans=True, batches="limit"),
        "monet_like graphs": Contender(
            partial(ours, graphs=True), ("300%", "45%"), ("300%",), is_ours=True, plans=True
        ),
        "monet_like inductor without variants": Contender(
            partial(ours, mode="normal", backend="inductor"), ("45%",), (), front="inductor", is_ours=True, plans=True
        ),
        "monet_like inductor": Contender(
            partial(ours, backend="inductor"),
            ("100%", "45%", "20%"),
            ("45%",),
            front="inductor",
            is_ours=True,
            plans=True,
            batches="limit",
        ),
    }
)
