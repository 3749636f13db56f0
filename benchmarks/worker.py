"""One contender in a process of its own: python -m benchmarks.worker JOB, a `benchmarks.work.Job` as JSON.

Builds, takes a first step beside plain PyTorch's, and measures its peak; answers with one line of JSON, a `Ready`. Then it does
what it is told, a line each, and answers each with a line: ``step`` (seconds of one), ``high`` (the process's
high-water mark during a step), ``limit BYTES`` (a step that may hold no more; where it needs more, the process dies).
"""

from __future__ import annotations

import copy
import ctypes
import gc
import json
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from benchmarks.contenders import CONTENDERS, Built
from benchmarks.work import Job
from monet_like.check import ROUNDING_FACTOR, SHAKEN, everything_after_a_step, shaken, step_peak, train_step
from monet_like.compiler import Example
from monet_like.measure import resident_peak, status_bytes

#: Outputs further apart than this are not rounding: random masks are other ones.
OTHER_MASKS = 1e-2
#: Share of the loss by which weights are moved to see how it changes, and how far off the change may be.
MOVED, MOST_OFF = {torch.float32: 3e-3, torch.float64: 1e-6}, {torch.float32: 5e-2, torch.float64: 1e-4}
#: Relative difference that is rounding, whatever the model.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Ready:
    """What is known before the steps that are timed.

    Attributes:
        peak_bytes: of a step, parameters, buffers and inputs included; reserved_bytes: from the device, on CUDA.
        gradient_error: of all gradients together, relative, in the 2-norm; or that of the change of the loss.
        checked: against what: plain, or finite differences where random masks are not plain PyTorch's.
        correct: it is no more than rounding does to plain PyTorch itself.
        first_seconds: of the first step, which compiles.
    """

    peak_bytes: int
    reserved_bytes: int
    gradient_error: float
    checked: str
    correct: bool
    first_seconds: float
    planning_seconds: float
    predicted_bytes: int
    predicted_seconds: float
    predicted_plain_seconds: float
    gap: float


def resident_bytes(model: nn.Module, example: Example) -> int:
    """Parameters, buffers and inputs."""
    held = [*model.parameters(), *model.buffers(), *pytree.tree_leaves(example)]
    return sum(t.untyped_storage().nbytes() for t in held if isinstance(t, torch.Tensor))


def apart(mine: dict[str, Any], theirs: dict[str, Any], kind: str) -> float:
    """Relative difference in the 2-norm of all tensors whose names start with ``kind``, taken as one vector."""
    squares = [0.0, 0.0]
    theirs = {name.replace("_orig_mod.", ""): tensor for name, tensor in theirs.items()}  # torch.compile's prefix
    for name, tensor in mine.items():
        if not name.startswith(kind):
            continue
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
    return float(sum(t.double().square().mean() for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad))


def slope_error(model: nn.Module, example: Example) -> float:
    """How far the gradients of a step are from what the loss itself does when weights move along them, relative."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    train_step(model, example)
    moves = [(p, p.grad.detach().clone()) for p in model.parameters() if p.grad is not None]
    steepness = float(sum(grad.double().square().sum() for _, grad in moves))
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


def judged(plain: nn.Module, built: Built, example: Example) -> tuple[float, str, bool, float]:
    """Error of the gradients, against what, whether that is rounding, and seconds of the first step."""
    mine = everything_after_a_step(plain, example)
    started = time.perf_counter()
    theirs = everything_after_a_step(built.module, example)
    first = time.perf_counter() - started
    if apart(mine, theirs, "output") > OTHER_MASKS:
        error = slope_error(built.module, example)
        return error, "finite differences", error <= MOST_OFF[next(plain.parameters()).dtype], first
    error = apart(mine, theirs, "gradient")
    if error <= ROUNDING:
        return error, "plain PyTorch", True, first
    plain.zero_grad(set_to_none=True)
    others = (everything_after_a_step(shaken(plain, seed), example) for seed in range(SHAKEN))
    rounding = max(apart(mine, other, "gradient") for other in others)
    return error, "plain PyTorch", error <= ROUNDING_FACTOR * rounding, first


class Worker:
    """A contender, ready to take steps."""

    def __init__(self, job: Job) -> None:
        self.job, self.device = job, job.device
        model, self.example = job.model_and_inputs()
        reference = copy.deepcopy(model)
        if CONTENDERS[job.contender].front == "inductor":  # what the first kernel of all takes is nobody's
            torch.compile(torch.neg)(torch.ones(9, device=self.device))
        built = CONTENDERS[job.contender].build(job, model, self.example)
        error, checked, correct, first = judged(reference, built, self.example)
        del reference, model
        self.module = built.module
        self._forget()
        peak = step_peak(self.module, self.example, self.device)
        reserved = torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else 0
        self.ready = Ready(
            peak, reserved, error, checked, correct, first, built.planning_seconds, built.predicted_bytes,
            built.predicted_seconds, built.plain_seconds, built.gap,
        )  # fmt: skip

    def _forget(self) -> None:
        """Nothing is held but the module and its inputs, nor kept by an allocator."""
        self.module.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def _give_back(self) -> None:
        """From here on large blocks go back to the system as soon as they are freed, which makes steps slower."""
        self._forget()
        libc = ctypes.CDLL(None)
        threshold, trim = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
        libc.mallopt(threshold, 65536)
        libc.mallopt(trim, 65536)
        train_step(self.module, self.example)  # what was allocated before and is kept would not be given back
        self.module.zero_grad(set_to_none=True)
        gc.collect()
        libc.malloc_trim(0)

    def step(self) -> float:
        """Seconds of one step."""
        self.module.zero_grad(set_to_none=True)
        self._synchronize()
        started = time.perf_counter()
        train_step(self.module, self.example)
        self._synchronize()
        return time.perf_counter() - started

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def high(self) -> int:
        """Resident memory of the process at most during a step, above what it is without model and inputs."""
        if self.device.type == "cuda":
            return 0
        self._give_back()
        rise = resident_peak(lambda: train_step(self.module, self.example))
        return resident_bytes(self.module, self.example) + rise

    def limit(self, most_bytes: int) -> bool:
        """Take a step that may hold so much: parameters, buffers, inputs and all that it allocates."""
        if self.device.type == "cuda":
            self._forget()
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(most_bytes / total, self.device)
        else:
            self._give_back()
            more = most_bytes - resident_bytes(self.module, self.example)
            limit = status_bytes("VmData") + max(0, more)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        train_step(self.module, self.example)
        self._synchronize()
        return True


def main() -> None:
    """Answer on what was standard output; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = Job(**json.loads(sys.argv[1]))
    worker = Worker(job)
    print(json.dumps(asdict(worker.ready)), file=answers)
    for line in sys.stdin:
        what, *numbers = line.split()
        done: Any = {"step": worker.step, "high": worker.high, "limit": worker.limit}[what](*map(int, numbers))
        print(json.dumps(done), file=answers)


if __name__ == "__main__":
    main()
