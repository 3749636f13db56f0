"""One contender in a process of its own: python -m benchmarks.worker JOB, a `benchmarks.work.Job` as JSON.

Builds, takes a first step beside plain PyTorch's, and measures its peak; answers with one line of JSON, a `Ready`. Then
it does what it is told, a line each, and answers each with a line: ``limit BYTES`` (a step that may hold no more; where
it needs more, the process dies), ``step`` (seconds of one).

Memory first, then time: the process starts with `EXACT`, under which what is freed goes back to the system at once, and
the first ``step`` ends that.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from benchmarks.contenders import CONTENDERS
from benchmarks.malloc import keep_freed
from benchmarks.processes import job_and_answers
from benchmarks.resident_memory import resident_peak, status_bytes
from benchmarks.work import Job
from monet_like.capture.example_inputs import Example, device_of
from monet_like.capture.precision import autocast_as
from monet_like.replay.graphs.model import WARM_UP
from monet_like.replay.verify.comparison import Tensors
from monet_like.replay.verify.steps import (
    draws,
    everything_after_a_step,
    judged,
    resident_bytes,
    shaken,
    step_peak,
    train_step,
)

#: Share of the loss by which weights are moved to see how it changes, and how far off the change may be: plain
#: PyTorch's own gradients are up to 0.7 % off in float32 (MobileNetV2; moved by 0.3 % 1.6, by 0.003 % 2.1), those of
#: other masks more than 10.
MOVED, MOST_OFF = {torch.float32: 1e-3, torch.float64: 1e-6}, {torch.float32: 2e-2, torch.float64: 1e-4}


@dataclass(frozen=True)
class Verdict:
    """Whether a contender is right.

    Attributes:
        gradient_error: of all gradients together, relative, in the 2-norm; or that of the change of the loss.
        rounding: the same for plain PyTorch, with weights changed in the last places: see `Job`.
        checked: against what: plain, or finite differences where random masks are not plain PyTorch's.
        correct: every gradient is plain PyTorch's but for rounding: see `monet_like.replay.verify.comparison`.
        first_seconds: of the first step, which compiles.
    """

    gradient_error: float
    rounding: float
    checked: str
    correct: bool
    first_seconds: float


@dataclass(frozen=True)
class Ready(Verdict):
    """What is known before the steps that are timed.

    Attributes:
        peak_bytes: of a step, parameters, buffers and inputs included, and pools of CUDA graphs not: ``process_bytes``
            has them.
        process_bytes: the same by the process's high-water mark; on CUDA what is reserved of the device.
        static_bytes: parameters, their gradients, buffers and inputs.
    """

    peak_bytes: int
    process_bytes: int
    static_bytes: int
    planning_seconds: float
    predicted_bytes: int
    predicted_seconds: float
    predicted_plain_seconds: float
    gap: float


def emptied(device: torch.device) -> None:
    """Give everything back that nobody holds."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Wall time of a call, to the end of what it queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


class Casting(nn.Module):
    """A model whose forward, and nothing else, runs under autocast; ``autocast`` may be none, ""."""

    def __init__(self, model: nn.Module, autocast: str, device: torch.device) -> None:
        super().__init__()
        self.model, self.autocast, self.device = model, autocast, device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with autocast_as(self.autocast, self.device):
            return self.model(*args, **kwargs)


def gradients_of(model: nn.Module, example: Example) -> Tensors:
    """All gradients after a step, by name, without torch.compile's prefix."""
    found = everything_after_a_step(model, example)
    return {name.replace("_orig_mod.", ""): t for name, t in found.items() if name.startswith("gradient")}


def apart(mine: Tensors, theirs: Tensors) -> float:
    """Relative difference in the 2-norm of all gradients, taken as one vector: a figure for tables, no judgement."""
    squares = [0.0, 0.0]
    for name, tensor in mine.items():
        other = theirs.get(name)
        if tensor is None or other is None:
            if tensor is not other:
                return float("inf")
            continue
        squares[0] += float((tensor.double() - other.double()).square().sum())
        squares[1] += float(tensor.double().square().sum())
    return (squares[0] / max(squares[1], 1e-300)) ** 0.5


def loss_of(model: nn.Module, example: Example) -> float:
    """The loss of `train_step` for the masks of a fixed seed."""
    torch.manual_seed(1)
    outputs = pytree.tree_leaves(model(*example[0], **example[1]))
    trained = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
    return sum(float(t.detach().double().square().mean()) for t in trained)


def slope_error(model: nn.Module, example: Example) -> float:
    """How far the gradients of a step are from what the loss itself does when weights move along them, relative."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    train_step(model, example)
    moves = [(p, p.grad.detach().clone()) for p in model.parameters() if p.grad is not None]
    steepness = float(sum(grad.double().square().sum() for _, grad in moves))
    if not steepness:
        return float("inf")
    kind = moves[0][0].dtype
    length = MOVED[kind] * loss_of(model, example) / steepness
    found = []
    for sign in (1, -2):
        with torch.no_grad():
            for parameter, grad in moves:
                parameter.add_(grad, alpha=sign * length)
        found.append(loss_of(model, example))
    with torch.no_grad():
        for parameter, grad in moves:
            parameter.add_(grad, alpha=length)
    return abs((found[0] - found[1]) / (2 * length * steepness) - 1)


def rounding_of(model: nn.Module, example: Example, gradients: Tensors) -> float:
    """How far ``gradients`` are from those of weights that are changed in the last places, relative."""
    return apart(gradients, gradients_of(shaken(model, 0), example))


def judge(plain: nn.Module, module: nn.Module, example: Example, rounding: float, autocast: str = "") -> Verdict:
    """Whether a first step leaves plain PyTorch's gradients, or, where it draws masks of its own, those of its loss."""
    mine = gradients_of(plain, example)
    plain.zero_grad(set_to_none=True)
    rounding = rounding or rounding_of(plain, example, mine)
    started = time.perf_counter()
    theirs = gradients_of(module, example)
    first = time.perf_counter() - started
    error = apart(mine, theirs)
    with autocast_as(autocast, device_of(plain)):  # by the tolerance of the dtype that was computed in
        good = all(verdict.right for verdict in judged(plain, example, mine, theirs))
    if good or not draws(plain, example, mine):
        return Verdict(error, rounding, "plain PyTorch", good, first)
    error = slope_error(module, example)
    return Verdict(error, rounding, "finite differences", error <= MOST_OFF[next(plain.parameters()).dtype], first)


class Worker:
    """A contender, ready to take steps."""

    def __init__(self, job: Job) -> None:
        self.job, self.device = job, job.device
        model, self.example = job.model_and_inputs()
        reference = Casting(copy.deepcopy(model), job.autocast, job.device)
        if CONTENDERS[job.contender].front == "inductor":  # what the first kernel of all takes is nobody's
            torch.compile(torch.neg)(torch.ones(9, device=self.device))
        built = CONTENDERS[job.contender].build(job, model, self.example)
        self.module, self._fast = Casting(built.module, job.autocast, job.device), False
        if job.judged:
            verdict = judge(reference, self.module, self.example, job.rounding, job.autocast)
        else:  # a first step, which compiles
            train_step(self.module, self.example)
            verdict = Verdict(0.0, job.rounding, "", False, 0.0)
        del reference, model
        for _ in range(WARM_UP if self.device.type == "cuda" else 0):  # after which graphs are captured
            train_step(self.module, self.example)
        self._forget()
        peak = step_peak(self.module, self.example, self.device)
        process = self._process_bytes()
        gradients = sum(t.untyped_storage().nbytes() for t in self.module.parameters() if t.requires_grad)
        self.ready = Ready(
            peak_bytes=peak,
            process_bytes=process,
            static_bytes=resident_bytes(self.module, self.example) + gradients,
            **asdict(verdict),
            planning_seconds=built.planning_seconds,
            predicted_bytes=built.predicted_bytes,
            predicted_seconds=built.predicted_seconds,
            predicted_plain_seconds=built.plain_seconds,
            gap=built.gap,
        )

    def _forget(self) -> None:
        """Nothing is held but the module and its inputs, nor kept by an allocator."""
        self.module.zero_grad(set_to_none=True)
        emptied(self.device)
        if self.device.type == "cpu":
            ctypes.CDLL(None).malloc_trim(0)

    def step(self) -> float:
        """Seconds of one step."""
        if not self._fast:
            keep_freed()
            self._fast = True
        self.module.zero_grad(set_to_none=True)
        return seconds_of(lambda: train_step(self.module, self.example), self.device)

    def _process_bytes(self) -> int:
        """Resident memory of the process at most during a step, above what it is without model and inputs."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_reserved(self.device))
        self._forget()
        rise = resident_peak(lambda: train_step(self.module, self.example))
        return resident_bytes(self.module, self.example) + rise

    def limit(self, most_bytes: int) -> bool:
        """Take a step that may hold so much: parameters, buffers, inputs and all that it allocates."""
        self._forget()
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(most_bytes / total, self.device)
            train_step(self.module, self.example)
            torch.cuda.synchronize(self.device)
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
            return True
        more = most_bytes - resident_bytes(self.module, self.example)
        before = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + max(0, more), before[1]))
        train_step(self.module, self.example)
        resource.setrlimit(resource.RLIMIT_DATA, before)
        return True


def main() -> None:
    """Answer each line of standard input by one."""
    job, answers = job_and_answers()
    worker = Worker(job)
    print(json.dumps(asdict(worker.ready)), file=answers)
    for line in sys.stdin:
        what, *numbers = line.split()
        done: Any = {"step": worker.step, "limit": worker.limit}[what](*map(int, numbers))
        print(json.dumps(done), file=answers)


if __name__ == "__main__":
    main()
