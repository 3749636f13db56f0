"""The schedule command: run a schedule and plain PyTorch, and compare results, peak memory and time."""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from ..capture.absent_gpu.attention import attention_as
from ..capture.example_inputs import Example
from ..capture.precision import autocast_as
from ..errors import UsageError
from ..ir.mode import parse_mode
from ..ir.schedule_file import ScheduleRecord
from ..ir.units import format_bytes, format_seconds
from ..replay.verify.steps import real_example, same_step, step_peak, step_seconds
from ..replay.wrapper import ScheduleWrapper
from .prepare import SOLUTIONS, schedule_path
from .problem import Problem, read_problem
from .terminal import Terminal, aligned_table


def check(
    *,
    solution_file: Path | None,
    check_runtime: bool,
    check_diff: bool,
    run_bs: bool,
    steps: int,
    terminal: Terminal,
    **options: Any,
) -> None:
    """Run the checks that were asked for; exit code 1 if one of them fails.

    Raises:
        UsageError: none was asked for.
    """
    if not (check_runtime or check_diff or run_bs):
        raise UsageError("say what to check: --check_runtime, --check_diff or --run_bs")
    if steps < 1:
        raise UsageError(f"--steps {steps} must be at least 1")
    problem = read_problem(**options)
    path = solution_file or _solved(problem)
    record = ScheduleRecord.load(path)
    if parse_mode(record.mode) != parse_mode(problem.request.mode):
        raise UsageError(
            f"{path} is of mode {record.mode}, and MODE is {problem.request.mode}; give the file's, or another file"
        )
    model = problem.spec.module
    example = real_example(problem.request.example, problem.device)
    console, found = terminal.console, dict[str, Any]()
    good = True
    with autocast_as(problem.request.autocast, problem.device), attention_as(record.attention):
        if check_diff:
            good = found["check_diff"] = same_step(console.print, model, record, example)
        if run_bs:
            peak, fitted = _measured_peak(console, problem, record, example)
            good &= fitted
            found["run_bs"] = {"fitted": fitted, "peak_bytes": peak, "predicted_bytes": record.peak_bytes}
        if check_runtime:
            found["check_runtime"] = _runtime(console, model, record, example, problem.device, steps)
    terminal.result(found)
    if not good:
        sys.exit(1)


def _solved(problem: Problem) -> Path:
    """The file that solve.py writes by default; if it is only there, that of the same name in ``solutions/``."""
    path = schedule_path(problem)
    return SOLUTIONS / path if not path.exists() and (SOLUTIONS / path).exists() else path


def _measured_peak(console: Console, problem: Problem, record: ScheduleRecord, example: Example) -> tuple[int, bool]:
    """Measure the peak of a step in bytes; also whether it is within the given budget and the file's."""
    limit = min(problem.budget.of(record.plain_peak_bytes), record.budget_bytes)
    wrapped = ScheduleWrapper(copy.deepcopy(problem.spec.module), record)
    started = time.perf_counter()
    peak = step_peak(wrapped, example, problem.device) + record.extra_bytes
    seconds = time.perf_counter() - started
    console.print(
        f"one step: measured peak {format_bytes(peak)} ({peak} bytes), predicted {format_bytes(record.peak_bytes)}, "
        f"budget {format_bytes(limit)}, {format_seconds(seconds)} with memory measured"
    )
    fitted = peak <= limit
    console.print(f"run_bs: {'fitted' if fitted else 'did not fit'}")
    return peak, fitted


def _runtime(
    console: Console, model: nn.Module, record: ScheduleRecord, example: Example, device: torch.device, steps: int
) -> dict[str, dict[str, float]]:
    """Measure, print and return step times and peaks."""
    plain, wrapped = copy.deepcopy(model), ScheduleWrapper(copy.deepcopy(model), record, cuda_graphs=False)
    peaks = [step_peak(candidate, example, device) for candidate in (plain, wrapped)]
    medians = step_seconds([(plain, example), (wrapped, example)], device, steps)
    predicted = (
        ("plain PyTorch", record.plain_seconds, record.plain_peak_bytes),
        ("schedule", record.seconds, record.peak_bytes),
    )
    found = {
        name: {"seconds": median, "predicted_seconds": seconds, "peak_bytes": measured, "predicted_bytes": peak}
        for (name, seconds, peak), median, measured in zip(predicted, medians, peaks, strict=True)
    }
    table = aligned_table("", "measured step", "predicted", "measured peak", "predicted")
    for name, row in found.items():
        seconds, sizes = (row["seconds"], row["predicted_seconds"]), (row["peak_bytes"], row["predicted_bytes"])
        table.add_row(name, *map(format_seconds, seconds), *map(format_bytes, sizes))
    console.print(table)
    console.print(
        f"check_runtime: {100 * (medians[1] / medians[0] - 1):+.1f} % time, {100 * (peaks[1] / peaks[0] - 1):+.1f} % "
        f"memory, medians of {steps} alternating steps"
    )
    return found
