"""The profiler: seconds and workspace of every distinct operator call, alternatives included.

Every task is run by itself on inputs of its own shapes and strides, through the very code that the replay generates for
it, and with caches that hold of its inputs, and of short ones the code, what they would in a step; all are timed in
turn, in passes. What waits for other processes is measured without waiting: every schedule does it as often, and one
process may be measuring alone. Where measuring at the wanted batch would take too long or too much memory, it is done
at a smaller one and scaled: seconds in proportion, workspace along a line through two batches, because weights' layout
changes do not grow with the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch

from ..capture.captured import allocated_bytes
from ..errors import OutOfMemory, ProfileError, warn_caller
from ..ir.mode import ALGORITHMS
from ..ir.program import REFUSED, Cost, Task
from ..ops import liger, runs_here
from ..ops.sync_batch_norm import COMMUNICATING
from ..runtime.codegen import Block, compile_block
from ..runtime.operators import without_fallback
from ..runtime.out_of_memory import silent
from .measure import allocated_peak, seconds_of
from .observing import made_by
from .task_inputs import Inputs

#: Called with (what, done, total) as profiling goes on.
Progress = Callable[[str, int, int], None]

_Found = TypeVar("_Found")

#: How often all operators are timed.
PASSES = 3

#: Tasks of fewer seconds are timed with their code in the caches, where a step finds it; what got the data out got the
#: code out, too. DenseNet-121's backward has 1,000 additions of 10 to 40 us, of which code from memory was half: its
#: schedules were predicted to take 5.7 % less of plain PyTorch's step than they do, and with this 1.7 and 2.4 %. (Two
#: CPU cores, each in one run; with limits of 1 and 3 ms 5 %.)
_SHORT = 3e-4


def measure(
    tasks: Mapping[str, Task], maker: Inputs, *, timed: bool = True, progress: Progress | None = None
) -> dict[str, Cost]:
    """Seconds and workspace of tasks of the program that ``maker`` makes inputs for.

    All tasks are timed once before any is timed again, and the least of `PASSES` counts: a machine that is slow for
    some seconds then makes few of them look slow, and those in one pass only. (What a schedule of MobileNetV2 takes in
    units of plain PyTorch's step moved by 4 % from profile to profile where a task's runs followed each other, two CPU
    cores; with passes that took as long in all, by 0.4 %.)

    Args:
        tasks: by what their costs are returned under.
        timed: measure seconds as well as workspace; else they are 0.

    Raises:
        ProfileError: one of PyTorch's own operators failed; out of memory is said to be that. An operator variant that
            fails is `REFUSED` instead, with a warning unless it is an algorithm of a library's or a kernel of Liger's:
            libraries do not say before which they have.
    """
    passes = PASSES if timed else 0
    seconds, report = dict[str, float](), _reporter(progress, (1 + passes) * len(tasks))
    trials = _tried(tasks, maker, report)
    for number in range(1, 1 + passes):
        for done, (key, trial) in enumerate(list(trials.items()), number * len(tasks)):
            report(done, trial.task)
            took = _unless_refused(trial.task, trial.seconds)
            if took is None:
                del trials[key]
            else:
                seconds[key] = min(took, seconds.get(key, math.inf))
    report((1 + passes) * len(tasks))
    return {
        key: Cost(seconds.get(key, 0.0), trials[key].workspace_bytes) if key in trials else REFUSED for key in tasks
    }


def measure_partly(
    tasks: Mapping[str, Task], maker: Inputs, enough: Callable[[], bool], *, progress: Progress | None = None
) -> tuple[dict[str, Cost], set[str]]:
    """Workspace of all tasks, then seconds of as many as there is time for, in the given order and each in one run.

    Args:
        enough: whether time is up; asked before every task that is to be timed.

    Returns:
        Costs, with 0 seconds for tasks that were not timed, and the keys of those that were.

    Raises:
        ProfileError: as of `measure`.
    """
    report = _reporter(progress, 2 * len(tasks))
    trials, seconds = _tried(tasks, maker, report), dict[str, float]()
    for done, (key, trial) in enumerate(list(trials.items()), len(tasks)):
        if enough():
            break
        report(done, trial.task)
        took = _unless_refused(trial.task, partial(trial.seconds, 1))
        if took is None:
            del trials[key]
        else:
            seconds[key] = took
    report(2 * len(tasks))
    costs = {
        key: Cost(seconds.get(key, 0.0), trials[key].workspace_bytes) if key in trials else REFUSED for key in tasks
    }
    return costs, set(seconds)


def _reporter(progress: Progress | None, total: int) -> Callable[..., None]:
    def report(done: int, task: Task | None = None) -> None:
        if progress:
            progress(task.calls[-1].op.split(".")[1] if task else "done", done, total)

    return report


def _tried(tasks: Mapping[str, Task], maker: Inputs, report: Callable[..., None]) -> dict[str, _Trial]:
    """Run every task once for its workspace; those that do not run here are left out."""
    trials = dict[str, _Trial]()
    for done, (key, task) in enumerate(tasks.items()):
        report(done, task)
        trial = _unless_refused(task, partial(_Trial, task, maker))
        if trial is not None:
            trials[key] = trial
    return trials


def _unless_refused(task: Task, what: Callable[[], _Found]) -> _Found | None:
    """The result of ``what``; None if it fails and the task is none of PyTorch's own."""
    try:
        return what()
    except ProfileError as error:
        expected = task.word == ALGORITHMS or any(liger.is_ours(call.op) for call in task.calls)
        if task.variant == "aten" and not expected:
            raise
        if not expected:
            warn_caller(
                f"operator variant {task.variant} is left out where it does not run ({error}). The step is exact "
                "without it, but may take more time or memory"
            )
        return None


class _Trial:
    """A task, compiled and run once for its workspace, to be timed.

    Random inputs are as of `Inputs.of`; where an operator refuses these, uniform in 0 to 1.

    Attributes:
        task: what it is of.
        workspace_bytes: as of `Cost`.

    Raises:
        ProfileError: as of `measure`.
    """

    def __init__(self, task: Task, maker: Inputs) -> None:
        self.task, self._maker, self._is_short = task, maker, False
        if task.word == ALGORITHMS and not all(runs_here(call.op, maker.device.type) for call in task.calls):
            raise ProfileError(f"{task.name} does not run here")  # what would be measured is PyTorch's own
        writes = made_by(task)
        self._run = compile_block(Block(task.reads, (task,), (), writes), task.name, COMMUNICATING | without_fallback())
        try:
            allocated = self._by_itself(self._peak)
        except ProfileError as error:
            if maker.uniform or task.word == ALGORITHMS or _is_out_of_memory(error.__cause__):
                raise
            self._maker = maker.as_uniform
            allocated = self._by_itself(self._peak)
        # The copy counts once among what is allocated, and takes the place of the first thing that is written.
        beside = allocated - sum(maker.captured.metas[v].storage_bytes for v in writes)
        self.workspace_bytes = allocated_bytes(max(0, beside), maker.device)

    def seconds(self, repeats: int = 2) -> float:
        """Least wall seconds of a few runs."""
        found = self._by_itself(partial(self._seconds, repeats=repeats))
        self._is_short = found < _SHORT
        return found

    def _peak(self, inputs: Mapping[int, Any]) -> int:
        task = self.task

        def call() -> None:
            # What the task takes over is made for it and given away: some tasks release it on the way.
            self._run([inputs[v].clone() if v == task.overwrites else inputs[v] for v in task.reads])

        if self._maker.device.type == "cuda":
            call()  # libraries keep what their first call allocates: cuBLAS a workspace, cuDNN's trials memory
        return allocated_peak(call, self._maker.device)

    def _seconds(self, inputs: Mapping[int, Any], repeats: int) -> float:
        def run(inputs: Mapping[int, Any]) -> None:
            self._run([inputs[v] for v in self.task.reads])

        def run_twins() -> None:
            if self._is_short:
                run(self._maker.of(self.task, twin=True))

        before = self._maker.caches_before(self.task, inputs, run_twins)
        # cuDNN plans a convolution by a named algorithm anew in every call. With descriptors and the workspace's size,
        # which are kept now, that took the CPU up to half a millisecond.
        by_name = any(call.op.startswith("monet_like.cudnn_convolution") for call in self.task.calls)
        return seconds_of(partial(run, inputs), self._maker.device, before=before, repeats=repeats, of_launches=by_name)

    def _by_itself(self, what: Callable[[Mapping[int, Any]], _Found]) -> _Found:
        """``what`` of the task's inputs; where that fails, a `ProfileError` instead."""
        device, task = self._maker.device, self.task
        try:
            with (
                torch.no_grad(),
                silent(),
                torch._C._DisableAutocast(),
                torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            ):
                return what(self._maker.of(task))
        except (RuntimeError, MemoryError, NotImplementedError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            if _is_out_of_memory(error):
                told = f"profiling {task.name} ran out of memory: {task.cost}: {first}"
                raise OutOfMemory(
                    f"{told}; measure at a smaller batch with --profile-batch", task.name, first
                ) from error
            raise ProfileError(f"profiling {task.name} failed: {task.cost}: {first}") from error


def _is_out_of_memory(error: BaseException | None) -> bool:
    first = (str(error).strip().splitlines() or [""])[0]
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in first
