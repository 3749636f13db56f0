"""The schedule command: run a schedule beside the plain model and say what differs, how long and how much."""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from rich.console import Console
from torch import nn

from ..capture.lowering import TensorMeta
from ..capture.precision import autocast_as, autocast_name, in_layout, layout_of
from ..cli.solve import SOLUTIONS
from ..cli.terminal import Terminal, aligned_table
from ..compiler.pipeline import Example, default_names
from ..compiler.problem import Problem, read_problem
from ..errors import UsageError
from ..ir.mode import is_lossy, parse_mode
from ..ir.schedule_file import ScheduleRecord
from ..profile.measure import allocated_peak, have_workspaces
from ..units import format_bytes, format_seconds
from .comparison import Differences, Tensors, Verdict, compare, differences
from .tf32 import EPS as tf32_eps
from .tf32 import runs_in_tf32
from .wrapper import ScheduleWrapper, device_of

#: At most so many times are the weights of plain PyTorch changed in the last places, to see what rounding does to it. It
#: is judged after each, so that most checks need one.
SHAKEN = 8
#: By how much, in units in the last place: more where that is still far below what is tolerated anyway, because one ReLU
#: whose input is near zero moves a gradient by more than any fixed tolerance would allow, and some step must show it.
SHAKEN_UNITS = {8: 16.0, 4: 16.0, 2: 1.0}


def check(
    *,
    solution_file: Path | None,
    check_runtime: bool,
    check_diff: bool,
    run_bs: bool,
    steps: int,
    terminal: Terminal | None = None,
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
    path = solution_file or default_names(problem.spec.name, problem.request, problem.budget_bytes, SOLUTIONS)
    record = ScheduleRecord.load(path)
    if parse_mode(record.mode) != parse_mode(problem.request.mode):
        raise UsageError(
            f"{path} is of mode {record.mode}, and MODE is {problem.request.mode}; give the file's, or another file"
        )
    model = problem.spec.module
    example = real_example(problem)
    terminal = terminal or Terminal()
    console, found = terminal.console, dict[str, Any]()
    good = True
    with autocast_as(problem.request.autocast, problem.device):
        if check_diff:
            good = found["check_diff"] = same_step(console, model, record, example)
        if run_bs:
            peak, fitted = _measured_peak(console, problem, record, example)
            good &= fitted
            found["run_bs"] = {"fitted": fitted, "peak_bytes": peak, "predicted_bytes": record.peak_bytes}
        if check_runtime:
            found["check_runtime"] = _runtime(console, model, record, example, problem.device, steps)
    terminal.result(found)
    if not good:
        sys.exit(1)


def real_example(problem: Problem) -> Example:
    """Random inputs of the problem's shapes (small integers where they are integers)."""
    generator = torch.Generator().manual_seed(0)

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.is_floating_point():
            made = in_layout(torch.randn(leaf.shape, generator=generator).to(leaf.dtype), layout_of(leaf))
        else:
            made = torch.randint(0, 2, leaf.shape, generator=generator).to(leaf.dtype)
        return made.to(problem.device).requires_grad_(leaf.requires_grad)

    args, kwargs = pytree.tree_map(real, problem.request.example)
    return args, kwargs


def train_step(model: Callable[..., Any], example: Example) -> list[torch.Tensor]:
    """One forward and backward; the loss is the mean of the squares of all floating outputs."""
    outputs = [t for t in pytree.tree_leaves(model(*example[0], **example[1])) if isinstance(t, torch.Tensor)]
    trained = [t for t in outputs if t.requires_grad]
    loss = torch.stack([t.float().square().mean() for t in trained]).sum()
    loss.backward()
    return [t.detach() for t in outputs]


def same_step(console: Console, model: nn.Module, record: ScheduleRecord, example: Example) -> bool:
    """Whether a step of the schedule leaves what plain PyTorch's does: outputs, every gradient, buffers. Prints it."""
    plain, wrapped = copy.deepcopy(model), ScheduleWrapper(copy.deepcopy(model), record)
    mine, theirs = everything_after_a_step(plain, example), everything_after_a_step(wrapped, example)
    verdicts = judged(model, example, mine, theirs)
    lossy = is_lossy(record.mode)
    inexact = [v for v in verdicts if lossy and v.name.startswith("gradient") and 0 < v.error < math.inf]
    bad = [v for v in verdicts if not v.right and v not in inexact]
    worst = max(verdicts, key=lambda v: v.error)
    equal = sum(v.error == 0.0 for v in verdicts)
    console.print(
        f"{equal} of {len(verdicts)} tensors equal bit by bit; largest relative difference {worst.error:.2e} ({worst.name})"
    )
    if measured := [v for v in verdicts if v.rounding]:
        largest = max(measured, key=lambda v: v.rounding)
        console.print(
            "rounding of plain PyTorch itself, with weights changed in the last places and against float64: up to "
            f"{largest.rounding:.2e} ({largest.name}); every tensor is judged by its own"
        )
    if inexact:
        console.print(f"{len(inexact)} gradients are inexact, as {record.mode} admits; they are not judged")
    for verdict in sorted(bad, key=lambda v: v.error, reverse=True)[:10]:
        console.print(f"differs: {verdict.name} {verdict.reason}")
    console.print("check_diff: " + (f"failed, {len(bad)} tensors differ" if bad else "passed"))
    return not bad


def judged(model: nn.Module, example: Example, mine: Tensors, theirs: Tensors) -> tuple[Verdict, ...]:
    """Compare a step with plain PyTorch's; what rounding does is measured only where the difference is no less.

    Args:
        model, example: that plain PyTorch made ``mine`` of; the model is copied.
        mine, theirs: what `everything_after_a_step` found for plain PyTorch and for the step in question.
    """
    device = device_of(model)
    autocast = autocast_name(device)
    eps = torch.finfo(getattr(torch, autocast)).eps if autocast else 0.0
    verdicts = compare(mine, theirs, eps=eps)
    tf32, coarse = False, eps
    if not _settled(verdicts) and runs_in_tf32(model, example, device):
        tf32, coarse = True, max(eps, tf32_eps)
        verdicts = compare(mine, theirs, eps=coarse, tf32=tf32)
    rounding: Differences = {}
    for seed in range(SHAKEN):
        if _settled(verdicts):
            break
        rounding = differences(mine, everything_after_a_step(shaken(model, seed, eps), example), rounding)
        if not seed and not draws(model, example, mine):  # in float64, noise is other noise
            # Float64 takes twice the memory, and models that name a dtype do not run in it: the other steps must do then.
            with autocast_as("", device), contextlib.suppress(RuntimeError):
                exact = everything_after_a_step(copy.deepcopy(model).double(), _as_double(example))
                rounding = differences(mine, exact, rounding)
        verdicts = compare(mine, theirs, rounding, eps=coarse, tf32=tf32)
    return verdicts


def _settled(verdicts: Sequence[Verdict]) -> bool:
    """Whether no measurement of rounding would change a verdict."""
    return all(verdict.right or verdict.error == math.inf for verdict in verdicts)


def draws(model: nn.Module, example: Example, mine: Tensors) -> bool:
    """Whether the model draws random numbers: a step from another seed leaves something else."""
    other = everything_after_a_step(copy.deepcopy(model), example, seed=2)
    return any(not v.right for v in compare(mine, {name: other.get(name) for name in mine}))


def everything_after_a_step(model: nn.Module, example: Example, *, seed: int = 1) -> dict[str, torch.Tensor | None]:
    """Outputs, gradients (those of inputs, too) and buffers after one step from a fixed seed, by name."""
    inputs = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor)]
    for tensor in inputs:
        tensor.grad = None
    torch.manual_seed(seed)
    found: dict[str, torch.Tensor | None] = {f"output {i}": t for i, t in enumerate(train_step(model, example))}
    found.update((f"gradient of {name}", p.grad) for name, p in model.named_parameters())
    found.update((f"gradient of input {i}", t.grad) for i, t in enumerate(inputs) if t.requires_grad)
    found.update((f"buffer {name}", buffer) for name, buffer in model.named_buffers())
    return found


def shaken(model: nn.Module, seed: int, eps: float = 0.0) -> nn.Module:
    """A copy whose weights differ by a few units in the last place: their own, or where it is coarser, ``eps``."""
    moved = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                size = SHAKEN_UNITS[parameter.dtype.to_real().itemsize] * torch.finfo(parameter.dtype).eps
                parameter.mul_(1 + max(size, eps) * torch.randn_like(parameter))
    return moved


def _as_double(example: Example) -> Example:
    def wide(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    args, kwargs = pytree.tree_map(wide, example)
    return args, kwargs


def step_peak(model: nn.Module, example: Example, device: torch.device) -> int:
    """Peak of a whole step: what exists before it, and the rise above that, without the loss and its gradient.

    What cuBLAS keeps from one step to the next is not in it; schedules count it beside (`ScheduleRecord.cublas_bytes`).
    """
    model.zero_grad(set_to_none=True)
    have_workspaces(device)

    def step() -> None:
        results = pytree.tree_leaves(model(*example[0], **example[1]))
        _Loss.apply(*(t for t in results if isinstance(t, torch.Tensor) and t.requires_grad)).backward()

    scalar = TensorMeta.of(torch.zeros((), device=device)).storage_bytes
    return resident_bytes(model, example) + allocated_peak(step, device) - 2 * scalar


class _Loss(torch.autograd.Function):
    """A number whose gradient is the same everywhere: the forward keeps nothing for it, the backward makes it alone."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.like = [(t.shape, torch.empty_like(t, device="meta").stride(), t.dtype, t.device) for t in outputs]
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        made = (
            torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype, device in ctx.like
        )
        return tuple(gradient.fill_(1e-3) for gradient in made)


def resident_bytes(model: nn.Module, example: Example) -> int:
    """Bytes that exist before a step: parameters, buffers and inputs, each as the device's allocator counts it."""
    inputs = (t for t in pytree.tree_leaves(example) if isinstance(t, torch.Tensor))
    return sum(TensorMeta.of(t).allocated_bytes for t in (*model.parameters(), *model.buffers(), *inputs))


def _measured_peak(console: Console, problem: Problem, record: ScheduleRecord, example: Example) -> tuple[int, bool]:
    """Bytes, and whether that is within the budget that is asked for and the file's own."""
    limit = min(problem.budget_bytes, record.budget_bytes)
    wrapped = ScheduleWrapper(copy.deepcopy(problem.spec.module), record)
    started = time.perf_counter()
    peak = step_peak(wrapped, example, problem.device) + record.extra_bytes
    seconds = time.perf_counter() - started
    console.print(
        f"one step: peak {format_bytes(peak)} ({peak} bytes), predicted {format_bytes(record.peak_bytes)}, "
        f"budget {format_bytes(limit)}, {format_seconds(seconds)} with memory measured"
    )
    fitted = peak <= limit
    console.print(f"run_bs: {'fitted' if fitted else 'did not fit'}")
    return peak, fitted


def _runtime(
    console: Console, model: nn.Module, record: ScheduleRecord, example: Example, device: torch.device, steps: int
) -> dict[str, dict[str, float]]:
    """Prints and returns measured step times and peaks."""
    plain, wrapped = copy.deepcopy(model), ScheduleWrapper(copy.deepcopy(model), record)
    peaks = [step_peak(candidate, example, device) for candidate in (plain, wrapped)]
    medians = step_seconds([(plain, example), (wrapped, example)], device, steps)
    table = aligned_table("", "measured step", "predicted", "measured peak", "predicted")
    rows = (
        ("plain PyTorch", record.plain_seconds, record.plain_peak_bytes),
        ("schedule", record.seconds, record.peak_bytes),
    )
    for (name, seconds, peak), median, measured in zip(rows, medians, peaks, strict=True):
        table.add_row(name, format_seconds(median), format_seconds(seconds), format_bytes(measured), format_bytes(peak))
    console.print(table)
    console.print(
        f"check_runtime: {100 * (medians[1] / medians[0] - 1):+.1f} % time, {100 * (peaks[1] / peaks[0] - 1):+.1f} % memory, "
        f"medians of {steps} alternating steps"
    )
    return {
        name: {"seconds": median, "predicted_seconds": seconds, "peak_bytes": measured, "predicted_bytes": peak}
        for (name, seconds, peak), median, measured in zip(rows, medians, peaks, strict=True)
    }


def step_seconds(runs: Sequence[tuple[nn.Module, Example]], device: torch.device, steps: int) -> list[float]:
    """Median wall seconds of a training step of every (model, inputs); they take turns, the first turn warms up."""
    found: list[list[float]] = [[] for _ in runs]
    for turn in range(steps + 1):
        for (model, example), times in zip(runs, found, strict=True):
            model.zero_grad(set_to_none=True)
            _synchronize(device)
            started = time.perf_counter()
            train_step(model, example)
            _synchronize(device)
            if turn:
                times.append(time.perf_counter() - started)
    return [statistics.median(times) for times in found]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
