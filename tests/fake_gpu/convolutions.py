"""What convolutions by named algorithms call of cuDNN, on the fake GPU: see ``cudnn.c``.

As a program it makes one convolution, prints its counts and ends as a user's process does.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from replays import record_for
from torch import nn

import monet_like.ops
from monet_like.capture.lower.step import capture
from monet_like.plan.random_schedules import random_schedule
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.variants import admitted

FAKE = ctypes.CDLL(None)
COUNTED = ("created", "set", "asked", "runs", "destroyed")
OPERATORS = ("cudnn_convolution", "cudnn_convolution_backward_input", "cudnn_convolution_backward_weight")
#: cuDNN's numbers of dtypes.
TYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 9}
#: Problems of `many`: more than are kept.
MANY = 4500
Counts = list[int]


def so_far() -> Counts:
    """`COUNTED` of this process."""
    return [ctypes.c_long.in_dll(FAKE, f"fake_cudnn_{name}").value for name in COUNTED]


def counted(run: Callable[[], object]) -> Counts:
    """`COUNTED` of a run."""
    before = so_far()
    run()
    return [after - first for after, first in zip(so_far(), before, strict=True)]


def latest() -> Counts:
    """The arguments of this thread's latest convolution: see ``cudnn.c``."""
    return list((ctypes.c_long * 26).in_dll(FAKE, "fake_cudnn_latest"))


@dataclass(frozen=True)
class Problem:
    """A convolution, or a gradient of it; the sizes of the default fit all three operators."""

    which: int = 0
    algorithm: str = "1"
    dtype: torch.dtype = torch.float32
    tf32: bool = True
    device: int = 0
    x: tuple[int, ...] = (2, 8, 9, 9)
    weight: tuple[int, ...] = (8, 8, 3, 3)
    y: tuple[int, ...] = (2, 8, 9, 9)
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (1, 1)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    channels_last: bool = False

    def call(self) -> Callable[[], torch.Tensor]:
        """The operator's call; its inputs are made here."""
        torch.backends.cudnn.allow_tf32 = self.tf32
        x, weight, y = (
            torch.zeros(size, dtype=self.dtype, device=torch.device("cuda", self.device))
            for size in (self.x, self.weight, self.y)
        )
        tensors: Sequence[Any] = ((x, weight, None), (y, weight, self.x), (y, x, self.weight))[self.which]
        names = {"1": "implicit_precomp_gemm", "2": "gemm"} if self.which == 0 else {}
        settings = (*map(list, (self.stride, self.padding, self.dilation)), self.groups, self.channels_last)
        operator = getattr(torch.ops.monet_like, OPERATORS[self.which])
        return lambda: operator(*tensors, *settings, names.get(self.algorithm, self.algorithm))

    def run(self) -> None:
        self.call()()

    def arguments(self) -> Counts:
        """What `latest` is after this problem."""
        math = 1 if self.dtype == torch.float16 else 3 if self.dtype == torch.float32 and not self.tf32 else 0
        first = (self.which, int(self.algorithm), TYPES[self.dtype], int(self.channels_last), math, self.groups)
        workspace = int(self.algorithm) * torch.Size(self.x).numel() + self.which
        rest = (*self.x, *self.weight, *self.y, self.device, workspace)
        return [*first, *self.stride, *self.padding, *self.dilation, *rest]


SQUARE = Problem()
LARGE_STEPS = replace(SQUARE, stride=(3, 1), y=(2, 8, 3, 9))
ONE_ROW = replace(SQUARE, weight=(8, 8, 9, 3), padding=(0, 1), y=(2, 8, 1, 9))
#: Problems that differ in one thing, where sizes allow it: from `SQUARE` or from one before them.
OTHERS = {
    "input gradient": replace(SQUARE, which=1),
    "weight gradient": replace(SQUARE, which=2),
    "algorithm": replace(SQUARE, algorithm="2"),
    "float64": replace(SQUARE, dtype=torch.float64),
    "float16": replace(SQUARE, dtype=torch.float16),
    "bfloat16": replace(SQUARE, dtype=torch.bfloat16),
    "TF32": replace(SQUARE, tf32=False),
    "device": replace(SQUARE, device=1),
    "batch": replace(SQUARE, x=(3, 8, 9, 9), y=(3, 8, 9, 9)),
    "width": replace(SQUARE, x=(2, 8, 9, 4), y=(2, 8, 9, 4)),
    "window": replace(SQUARE, weight=(8, 8, 5, 5), padding=(2, 2)),
    "filters": replace(SQUARE, weight=(4, 8, 3, 3), y=(2, 4, 9, 9)),
    "stride": replace(SQUARE, stride=(2, 1), y=(2, 8, 5, 9)),
    "the other stride": replace(SQUARE, stride=(1, 2), y=(2, 8, 9, 5)),
    "padding": replace(SQUARE, padding=(2, 1), y=(2, 8, 11, 9)),
    "dilation": replace(SQUARE, dilation=(2, 1), y=(2, 8, 7, 9)),
    "dilation and padding": replace(SQUARE, dilation=(2, 2), padding=(2, 2)),
    "groups": replace(SQUARE, weight=(8, 4, 3, 3), groups=2),
    "depthwise": replace(SQUARE, weight=(8, 1, 3, 3), groups=8),
    "layout": replace(SQUARE, channels_last=True),
    "large steps": LARGE_STEPS,
    "input of large steps": replace(LARGE_STEPS, x=(2, 8, 8, 9)),
    "window of large steps": replace(LARGE_STEPS, weight=(8, 8, 4, 3)),
    "padding of large steps": replace(LARGE_STEPS, padding=(0, 1)),
    "small window of large steps": replace(LARGE_STEPS, weight=(8, 8, 2, 3), padding=(0, 1)),
    "dilation of large steps": replace(LARGE_STEPS, weight=(8, 8, 2, 3), padding=(0, 1), dilation=(2, 1)),
    "one row": ONE_ROW,
    "stride of one row": replace(ONE_ROW, stride=(2, 1)),
}


def again() -> dict[str, Any]:
    """Three calls of each operator: counts, and bytes that the allocator gives it beside its result, and after it."""
    found: dict[str, Any] = {}
    for which, operator in enumerate(OPERATORS):
        problem = replace(SQUARE, which=which, x=(2, 8, 12, 9), y=(2, 8, 12, 9))
        call, found[operator] = problem.call(), []
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            sizes: list[int] = []
            counts = counted(lambda call=call, sizes=sizes: sizes.append(call().nbytes))
            after = torch.cuda.memory_stats()
            beside = after["requested_bytes.all.peak"] - before - sizes[0]
            left = after["requested_bytes.all.current"] - before
            found[operator].append(
                {"counts": counts, "beside": beside, "left": left, "workspace": problem.arguments()[-1]}
            )
    return found


def others() -> dict[str, Any]:
    """Of each of `OTHERS`: counts of its call, of `SQUARE`'s and of its own again; and the arguments of the last."""
    SQUARE.run()
    found: dict[str, Any] = {}
    for name, problem in OTHERS.items():
        counts = [counted(problem.run), counted(SQUARE.run), counted(problem.run)]
        found[name] = {"counts": counts, "given": latest(), "wanted": problem.arguments()}
    found["one number for both"] = counted(replace(SQUARE, stride=(1,), padding=(1,), dilation=(1,)).run)
    return found


def threads() -> dict[str, Any]:
    """Counts of two threads at once that run the same 20 problems 20 times, of a third one later, and of backwards."""
    problems = [replace(SQUARE, x=(2, 8, side, 9), y=(2, 8, side, 9)) for side in range(5, 25)]
    failed: list[BaseException] = []

    def run(start: threading.Barrier) -> None:
        try:
            start.wait()
            for _ in range(20):
                for problem in problems:
                    problem.run()
        except BaseException as error:
            failed.append(error)

    def at_once(count: int) -> None:
        start = threading.Barrier(count)
        started = [threading.Thread(target=run, args=(start,)) for _ in range(count)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()

    class Convolved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            SQUARE.run()
            return grads[0]

    def backward() -> None:
        result: torch.Tensor = Convolved.apply(torch.zeros(2, device="cuda", requires_grad=True))  # type: ignore[no-untyped-call]
        result.sum().backward()

    two, later = counted(lambda: at_once(2)), counted(lambda: at_once(1))
    backwards = [counted(backward) for _ in range(2)]
    return {"two": two, "later": later, "backwards": backwards, "failed": list(map(repr, failed))}


def refused() -> dict[str, Any]:
    """Of calls after calls that do: the error's class, its first line, and counts."""

    def error_of(problem: Problem) -> list[Any]:
        said: list[str] = []

        def run() -> None:
            try:
                problem.run()
            except (RuntimeError, ValueError, TypeError) as error:
                said.extend((type(error).__name__, str(error).splitlines()[0]))

        counts = counted(run)
        return [*said, counts]

    strided = replace(SQUARE, algorithm="fft", stride=(2, 2), y=(2, 8, 5, 5))
    late = replace(SQUARE, algorithm="2", dtype=torch.float64)
    groups = replace(SQUARE, weight=(8, 4, 3, 3), groups=2, padding=(0, 0), y=(2, 8, 7, 7))
    of_input = replace(groups, which=1)
    for problem in (SQUARE, groups, of_input):
        problem.run()
    return {
        "when asked": [error_of(strided) for _ in range(2)],
        "when run": [error_of(late) for _ in range(2)],
        "groups": [error_of(replace(problem, groups=1)) for problem in (groups, of_input)],
        "padding": [error_of(replace(of_input, padding=(1, 1)))],
        "result": [error_of(replace(of_input, y=(2, 8, 6, 7)))],
        "no stride": [error_of(replace(SQUARE, which=which, stride=(0, 0))) for which in range(3)],
        "three strides": [error_of(replace(SQUARE, stride=(1, 1, 1)))],
        "dtype": [error_of(replace(SQUARE, dtype=torch.int32))],
        "algorithm": [error_of(replace(SQUARE, algorithm="fast"))],
    }


def many() -> dict[str, Any]:
    """Descriptors that there are at most while `MANY` problems run; and counts of the last problem again."""
    most = 0
    for batch in range(1, MANY + 1):
        size = (batch, 1, 1, 1)
        last = replace(SQUARE, x=size, y=size, weight=(1, 1, 1, 1), padding=(0, 0))
        last.run()
        created, *_, destroyed = so_far()
        most = max(most, created - destroyed)
    return {"most": most, "again": counted(last.run)}


def step() -> dict[str, Any]:
    """Counts of three steps of a net whose schedule takes cuDNN's algorithms."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, groups=2), nn.ReLU(),
        nn.Conv2d(16, 4, 1),
    ).cuda()  # fmt: skip
    x = torch.randn(4, 3, 20, 20, device="cuda")
    captured = admitted(capture(model, (x,)), "algorithms")
    schedule = random_schedule(captured.program, 0, drop=0.6, others=1.0)
    record = replace(record_for(captured, schedule, "algorithms", (model, (x,), {})), device="cuda")
    wrapped = ScheduleWrapper(model, record, example=((x,), {}), captured=captured)

    def once() -> None:
        wrapped.zero_grad(set_to_none=True)
        wrapped(x).square().mean().backward()

    return {"steps": [counted(once) for _ in range(3)]}


CASES = {case.__name__: case for case in (again, others, threads, refused, many, step)}


def cudnn_calls(case: str) -> dict[str, Any]:
    """What one of `CASES` tells."""
    monet_like.ops.load()
    return CASES[case]()


if __name__ == "__main__":
    monet_like.ops.load()
    print(json.dumps(counted(SQUARE.run)), flush=True)
