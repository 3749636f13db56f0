"""Runs training steps by a schedule and by plain PyTorch, and compares results, peak memory and time."""

from __future__ import annotations

import contextlib
import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ...capture.captured import TensorMeta
from ...capture.example_inputs import Example, device_of, each_once
from ...capture.precision import autocast_as, autocast_name, in_layout, layout_of
from ...capture.trees import tensors_of
from ...ir.mode import is_lossy
from ...ir.schedule_file import ScheduleRecord
from ...profile.measure import allocated_peak, have_workspaces
from ..wrapper import ScheduleWrapper
from .comparison import Differences, Tensors, Verdict, compare, differences
from .tf32 import EPS as tf32_eps
from .tf32 import runs_in_tf32

#: At most so many times are the weights of plain PyTorch changed in the last places, to see what rounding does to it.
#: It is judged after each, so that most checks need one.
SHAKEN = 8
#: By how much, in units in the last place: more where that is still far below what is tolerated anyway, because one
#: ReLU whose input is near zero moves a gradient by more than a fixed tolerance allows, and some step must show it.
SHAKEN_UNITS = {8: 16.0, 4: 16.0, 2: 1.0}


def real_example(example: Example, device: torch.device) -> Example:
    """Random inputs on ``device`` of the shapes of ``example``, which may be fake; 0 or 1 where they are integers."""
    generator = torch.Generator().manual_seed(0)

    def real(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.is_floating_point():
            made = in_layout(torch.randn(leaf.shape, generator=generator).to(leaf.dtype), layout_of(leaf))
        else:
            made = torch.randint(0, 2, leaf.shape, generator=generator).to(leaf.dtype)
        return made.to(device).requires_grad_(leaf.requires_grad)

    return each_once(real, example)


def train_step(model: Callable[..., Any], example: Example) -> list[torch.Tensor]:
    """One forward and backward; the loss is the mean of the squares of all floating outputs."""
    outputs = tensors_of(model(*example[0], **example[1]))
    trained = [t for t in outputs if t.requires_grad]
    loss = torch.stack([t.float().square().mean() for t in trained]).sum()
    loss.backward()
    return [t.detach() for t in outputs]


def same_step(say: Callable[[str], None], model: nn.Module, record: ScheduleRecord, example: Example) -> bool:
    """Compare outputs, gradients and buffers after a step with plain PyTorch's; ``say`` gets the findings by lines."""
    plain, wrapped = copy.deepcopy(model), ScheduleWrapper(copy.deepcopy(model), record)
    mine, theirs = everything_after_a_step(plain, example), everything_after_a_step(wrapped, example)
    verdicts = judged(model, example, mine, theirs, transforms=takes_transforms(record))
    lossy = is_lossy(record.mode)
    inexact = [v for v in verdicts if lossy and v.name.startswith("gradient") and 0 < v.error < math.inf]
    bad = [v for v in verdicts if not v.right and v not in inexact]
    worst = max(verdicts, key=lambda v: v.error)
    equal = sum(v.error == 0.0 for v in verdicts)
    say(
        f"{equal} of {len(verdicts)} tensors equal bit by bit; largest relative difference {worst.error:.2e} "
        f"({worst.name})"
    )
    if measured := [v for v in verdicts if v.rounding]:
        largest = max(measured, key=lambda v: v.rounding)
        say(
            "rounding of plain PyTorch itself, with weights changed in the last places and against float64: up to "
            f"{largest.rounding:.2e} ({largest.name}); every tensor is judged by its own"
        )
    if inexact:
        say(f"{len(inexact)} gradients are inexact, as {record.mode} admits; they are not judged")
    for verdict in sorted(bad, key=lambda v: v.error, reverse=True)[:10]:
        say(f"differs: {verdict.name} {verdict.reason}")
    say("check_diff: " + (f"failed, {len(bad)} tensors differ" if bad else "passed"))
    return not bad


def takes_transforms(record: ScheduleRecord) -> bool:
    """Whether a schedule has convolutions by FFT or Winograd, which lose more digits than sums of products."""
    return any("fft" in key or "winograd" in key for key in record.counts if key.startswith("variant conv.cudnn_"))


def judged(
    model: nn.Module, example: Example, mine: Tensors, theirs: Tensors, *, transforms: bool = False
) -> tuple[Verdict, ...]:
    """Compare the results of two steps; plain PyTorch's own rounding is measured only where it can change a verdict.

    Args:
        model, example: that plain PyTorch made ``mine`` of; the model is copied.
        mine, theirs: results of `everything_after_a_step` for plain PyTorch and for the step in question.
        transforms: see `takes_transforms`.
    """
    device = device_of(model, example)
    compared = partial(compare, mine, theirs, transforms=transforms)
    autocast = autocast_name(device)
    eps = torch.finfo(getattr(torch, autocast)).eps if autocast else 0.0
    verdicts = compared(eps=eps)
    tf32, coarse = False, eps
    if not _settled(verdicts) and runs_in_tf32(model, example, device):
        tf32, coarse = True, max(eps, tf32_eps)
        verdicts = compared(eps=coarse, tf32=tf32)
    rounding: Differences = {}
    for seed in range(SHAKEN):
        if _settled(verdicts):
            break
        rounding = differences(mine, everything_after_a_step(shaken(model, seed, eps), example), rounding)
        if not seed and not draws(model, example, mine):  # in float64, noise is other noise
            # Float64 takes twice the memory, and models that name a dtype do not run in it: then others must do.
            with autocast_as("", device), contextlib.suppress(RuntimeError):
                exact = everything_after_a_step(copy.deepcopy(model).double(), _as_double(example))
                rounding = differences(mine, exact, rounding)
        verdicts = compared(rounding, eps=coarse, tf32=tf32)
    return verdicts


def _settled(verdicts: Sequence[Verdict]) -> bool:
    """Whether all verdicts are final: no measurement of rounding would change one."""
    return all(verdict.right or verdict.error == math.inf for verdict in verdicts)


def draws(model: nn.Module, example: Example, mine: Tensors) -> bool:
    """Whether the model draws random numbers: another seed changes the results of a step."""
    other = everything_after_a_step(copy.deepcopy(model), example, seed=2)
    return any(not v.right for v in compare(mine, {name: other.get(name) for name in mine}))


def everything_after_a_step(model: nn.Module, example: Example, *, seed: int = 1) -> dict[str, torch.Tensor | None]:
    """Outputs, gradients (also of inputs) and buffers after one step with a fixed seed, by name."""
    inputs = tensors_of(example)
    for tensor in inputs:
        tensor.grad = None
    torch.manual_seed(seed)
    found: dict[str, torch.Tensor | None] = {f"output {i}": t for i, t in enumerate(train_step(model, example))}
    found.update((f"gradient of {name}", p.grad) for name, p in model.named_parameters())
    found.update((f"gradient of input {i}", t.grad) for i, t in enumerate(inputs) if t.requires_grad)
    found.update((f"buffer {name}", buffer) for name, buffer in model.named_buffers())
    return found


def shaken(model: nn.Module, seed: int, eps: float = 0.0) -> nn.Module:
    """A copy of the model with weights changed by a few units in the last place, or by ``eps`` where that is more."""
    moved = copy.deepcopy(model)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                size = SHAKEN_UNITS[parameter.dtype.to_real().itemsize] * torch.finfo(parameter.dtype).eps
                parameter.mul_(1 + max(size, eps) * torch.randn_like(parameter))
    return moved


def _as_double(example: Example) -> Example:
    return each_once(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, example)


def step_peak(model: nn.Module, example: Example, device: torch.device) -> int:
    """Measured peak memory of a whole step in bytes: resident tensors and what the step allocates, without the loss.

    Workspaces that cuBLAS keeps between steps are not in it; schedules count them in `ScheduleRecord.cublas_bytes`.
    """
    model.zero_grad(set_to_none=True)
    have_workspaces(device)

    def step() -> None:
        results = tensors_of(model(*example[0], **example[1]))
        unsaved_loss([t for t in results if t.requires_grad]).backward()

    scalar = TensorMeta.of(torch.zeros((), device=device)).storage_bytes
    return resident_bytes(model, example) + allocated_peak(step, device) - 2 * scalar


def unsaved_loss(
    outputs: Sequence[torch.Tensor], fill: Callable[[torch.Tensor], object] = lambda gradient: gradient.fill_(1e-3)
) -> torch.Tensor:
    """A loss that saves nothing in the forward and whose gradients belong to autograd alone; its value is 0.

    Args:
        fill: writes the gradient of one output, given an uninitialised tensor of its shape and layout.
    """
    return cast(torch.Tensor, _Loss.apply(fill, *outputs))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fill: Callable[[torch.Tensor], object], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.fill = fill
        ctx.like = [(t.shape, torch.empty_like(t, device="meta").stride(), t.dtype, t.device) for t in outputs]
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        made: list[torch.Tensor | None] = [None]
        for size, stride, dtype, device in ctx.like:
            gradient = torch.empty_strided(size, stride, dtype=dtype, device=device)
            ctx.fill(gradient)
            made.append(gradient)
        return tuple(made)


def resident_bytes(model: nn.Module, example: Example) -> int:
    """Bytes of parameters, buffers and inputs, each as the device's allocator counts it."""
    inputs = tensors_of(example)
    return sum(TensorMeta.of(t).allocated_bytes for t in (*model.parameters(), *model.buffers(), *inputs))


def step_seconds(runs: Sequence[tuple[nn.Module, Example]], device: torch.device, steps: int) -> list[float]:
    """Median wall seconds of a training step for every (model, inputs). They run in turns; the first turn warms up."""
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
