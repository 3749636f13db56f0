"""The benchmark command: OGC's benchmark (Feng and Huang, CVPR 2021) on the 18 nets of its table.

Memory is told in two ways: all that a step holds, and what is left of it without stationary memory. That is measured
as OGC does it: weights, buffers and the gradients of weights, which exist before the step, are not counted; the input
is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from rich.table import Table
from torch import nn

from ..capture.captured import Captured
from ..capture.example_inputs import Example
from ..capture.trees import tensors_of
from ..compiler.pipeline import make_record, plan_for
from ..compiler.prepared import Prepared
from ..errors import UsageError
from ..ir.frames import frame_of
from ..ir.program import Program
from ..ir.schedule_file import ScheduleRecord
from ..ir.simulate import simulate
from ..ir.units import format_bytes, format_seconds, parse_budget
from ..plan.baseline import plain_report
from ..plan.strategies.checkpointing import NO_LIMIT
from ..profile.measure import allocated_peak
from ..replay.verify.steps import real_example, same_step, step_peak, step_seconds, train_step
from ..replay.wrapper import ScheduleWrapper
from .output import check_results, write_table
from .prepare import job_of, source_of
from .problem import Problem, read_problem
from .terminal import Terminal, aligned_table


@dataclass(frozen=True)
class Arch:
    """A net of OGC's table: MODEL, and the batch and side of the images that it was measured with."""

    model: str
    batch: int
    size: int


ARCHS: Mapping[str, Arch] = MappingProxyType(
    {
        **{
            name: Arch(f"torchvision.models.{name}()", batch, 224)
            for name, batch in (
                *(("alexnet", 1024), ("vgg11", 64), ("vgg13", 64), ("vgg16", 64), ("vgg19", 64)),
                *(("resnet18", 256), ("resnet34", 128), ("resnet50", 64), ("resnet101", 32), ("resnet152", 16)),
                *(("densenet121", 32), ("densenet161", 16), ("densenet169", 32), ("densenet201", 16)),
            )
        },
        "inception_v3": Arch("torchvision.models.inception_v3(aux_logits=False, init_weights=False)", 32, 300),
        **{name: Arch(name, 64, 32) for name in ("nasnet", "amoebanet", "darts")},
    }
)


def find_arch(name: str) -> Arch:
    """A net by its name, or by OGC's for the three of cells (``darts_cifar10``).

    Raises:
        UsageError: unknown; lists the names.
    """
    try:
        return ARCHS[name.removesuffix("_cifar10")]
    except KeyError:
        raise UsageError(f"there is no arch {name!r}; choose one of {', '.join(ARCHS)}") from None


def benchmark(
    *,
    arch: str,
    batch: str | None,
    input_size: int | None,
    budget: str | None,
    profile_file: Path | None,
    steps: int,
    csv_file: Path | None,
    terminal: Terminal,
    **options: Any,
) -> None:
    """Plan a net, compare a step with plain PyTorch's and measure both; exit code 1 if they differ.

    Args:
        batch, input_size: instead of OGC's.
        budget: for strategies that plan for one; None: what the ``ogc`` strategy needs.
        options: of `read_problem`.
    """
    net = find_arch(arch)
    _check_options(input_size, steps, budget)
    check_results(csv_file)
    side = input_size or net.size
    problem = read_problem(
        model=net.model, batch=batch or str(net.batch), budget="1", input_shape=f"3,{side},{side}", **options
    )
    source = source_of(problem, profile_file)
    console = terminal.console
    ready = job_of(terminal, problem, source).ready
    with terminal.progress() as progress:
        limit = _limit(ready, problem, budget)
        progress.at("plan", most=problem.request.time_limit_seconds)
        started = time.perf_counter()
        found = plan_for(ready, problem.request, limit, progress=progress.planning)
        seconds = time.perf_counter() - started
    console.print(
        f"{arch}, batch {problem.request.batch}, {side} x {side}, {problem.request.strategy}, {problem.request.mode}, "
        f"{problem.device}; planned in {format_seconds(seconds)}",
        soft_wrap=True,
    )
    record, example = (
        make_record(problem.request, ready, found, limit),
        real_example(problem.request.example, problem.device),
    )
    same = same_step(console.print, problem.request.model, record, example)
    measured = _measured(ready, problem, record, example, steps)
    console.print(_told(measured))
    write_table(console, csv_file, frame_of(Measured, measured))
    terminal.result(
        {
            "arch": arch,
            "batch": problem.request.batch,
            "strategy": problem.request.strategy,
            "same": same,
            "planning_seconds": seconds,
            "measured": [asdict(line) for line in measured],
        }
    )
    if not same:
        sys.exit(1)


def _check_options(input_size: int | None, steps: int, budget: str | None) -> None:
    if input_size is not None and input_size < 1:
        raise UsageError(f"--input-size {input_size} must be at least 1")
    if steps < 1:
        raise UsageError(f"--steps {steps} must be at least 1")
    if budget is not None and "," in budget:
        raise UsageError(f"--budget {budget!r} must be one amount, such as 8, 565MB or 50%")


@dataclass(frozen=True)
class Measured:
    """A measure of plain PyTorch's step and of the schedule's, in bytes or seconds; and the ratio that
    was predicted.
    """

    what: str
    plain: float
    schedule: float
    predicted_ratio: float


def _measured(
    ready: Prepared, problem: Problem, record: ScheduleRecord, example: Example, steps: int
) -> list[Measured]:
    """Measure peak activation memory, total peak memory and the median seconds of a step."""
    device, model = problem.device, problem.request.model
    wrapped = ScheduleWrapper(model, record, captured=ready.captured, cuda_graphs=False)
    pairs = [(net, example) for net in (model, wrapped)]
    bare, weights = accumulating(ready), weight_bytes(ready)
    apart = simulate(bare.captured.program, record.schedule, ready.costs).peak_bytes - weights
    found = []
    for name, peak, predicted in (
        ("memory without stationary", activation_peak, apart / (bare.plain.peak_bytes - weights)),
        ("memory in all", step_peak, record.peak_bytes / record.plain_peak_bytes),
    ):
        plain, mine = (float(peak(net, inputs, device)) for net, inputs in pairs)
        found.append(Measured(name, plain, mine, predicted))
    plain, mine = step_seconds(pairs, device, steps)
    found.append(Measured("step, median", plain, mine, record.seconds / record.plain_seconds))
    return found


def _told(measured: list[Measured]) -> Table:
    """Print the measurements as a table."""
    table = aligned_table("measured", "plain PyTorch", "this schedule", "change", "predicted change")
    for line in measured:
        amount = format_bytes if line.what.startswith("memory") else format_seconds
        change = _change(line.schedule / line.plain), _change(line.predicted_ratio)
        table.add_row(line.what, amount(line.plain), amount(line.schedule), *change)
    return table


def _limit(ready: Prepared, problem: Problem, budget: str | None) -> int:
    if budget is None:
        if problem.request.strategy == "ogc":
            return NO_LIMIT
        return plan_for(ready, problem.request, NO_LIMIT, strategy="ogc").report.peak_bytes
    return parse_budget(budget).of(ready.plain.peak_bytes)


def _change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def activation_peak(model: nn.Module, example: Example, device: torch.device) -> int:
    """Peak memory of a step without parameters and gradients: what it allocates once all gradients exist, and the
    input.
    """
    train_step(model, example)
    inputs = tensors_of(example)
    return sum(t.untyped_storage().nbytes() for t in inputs) + allocated_peak(
        lambda: train_step(model, example), device
    )


def accumulating(ready: Prepared) -> Prepared:
    """The program where all weight gradients exist before the step: a new gradient is added and released.

    What exists before the step is not counted: peaks less `weight_bytes` are without stationary memory.
    """

    captured: Captured = replace(
        ready.captured,
        program=replace(_until_delivered(ready.captured), gradients=()),
        as_called=replace(ready.captured.plain, gradients=()),
    )
    return replace(
        ready,
        captured=captured,
        plain=plain_report(captured.plain, ready.costs, 0, autograd_nodes=captured.autograd_nodes),
        extra_bytes=0,
        cublas_bytes=0,
        variants_cublas_bytes=0,
    )


def _until_delivered(captured: Captured) -> Program:
    """The program where a parameter's gradient lives until the backward has read the parameter for the last time."""
    program = captured.program
    slots = [list(ways) for ways in program.slots]
    made = {value: slot for slot, ways in enumerate(slots) for value in ways[0].writes}
    last = {value: slot for slot, ways in enumerate(slots) for way in ways for value in way.reads}
    for index, gradient in captured.parameter_gradients:
        _, parameter = captured.parameters[index]
        if (slot := last.get(parameter, -1)) > made[gradient.value]:
            slots[slot] = [replace(way, reads=(*way.reads, gradient.value)) for way in slots[slot]]
    return replace(program, slots=tuple(map(tuple, slots)))


def weight_bytes(ready: Prepared) -> int:
    """Bytes of parameters and buffers."""
    return sum(value.bytes for value in ready.captured.program.values if value.kind in ("parameter", "buffer"))
