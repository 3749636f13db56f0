"""Says what holds the memory when a GPU runs out of it in or after a scheduled step.

PyTorch calls an observer before it raises `torch.OutOfMemoryError`. The error stays what it is; one log message
(logger ``monet_like``, level WARNING) says which part of the memory the plan knows and which it does not.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from ..ir.program import Task
from ..ir.units import MIB, format_bytes

_log = logging.getLogger("monet_like")

#: In the globals of generated code: the line at which each task begins, and the task.
TASKS = "monet_like_tasks"

FORWARD, BETWEEN, BACKWARD, AFTER = "in the forward", "after the forward", "in the backward", "after the backward"
#: Below this much, a part is not worth a line.
_WORTH_A_LINE = 64 * MIB
#: Of a budget that is named: what CUDA's context and pieces between tensors may take beside it.
_ROOM = 0.95


@dataclass
class _Now:
    """Where the latest scheduled step of this process is.

    Attributes:
        wrapper: whose; None: of none yet.
        stage: one of the stages above; "": nothing is to be said, see `silent`.
        watched: whether PyTorch calls `_observe`; it does so for the rest of the process.
    """

    wrapper: weakref.ref[Any] | None = None
    stage: str = ""
    watched: bool = False


_now = _Now()


def as_pytorchs(run: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function raise `torch.OutOfMemoryError` where a kernel of ours finds no memory on a GPU.

    Of an error in such a kernel PyTorch's stable ABI passes on the text alone, as a RuntimeError.
    """

    @functools.wraps(run)
    def call(*args: Any) -> Any:
        try:
            return run(*args)
        except RuntimeError as error:
            if type(error) is RuntimeError and str(error).startswith("CUDA out of memory"):
                raise torch.OutOfMemoryError(str(error)) from error
            raise

    return call


def begins(wrapper: Any, device: torch.device) -> None:
    """A scheduled forward begins; the first on a GPU has PyTorch call us when there is no memory left."""
    if device.type != "cuda":
        return
    _now.wrapper, _now.stage = weakref.ref(wrapper), FORWARD
    if not _now.watched:
        _now.watched = True
        torch._C._cuda_attach_out_of_memory_observer(_observe)  # type: ignore[attr-defined]


def whose() -> weakref.ref[Any] | None:
    """The wrapper whose forward has begun latest."""
    return _now.wrapper


def enters(stage: str, wrapper: weakref.ref[Any] | None = None) -> None:
    """The scheduled step comes to another stage; ``wrapper``: of another block."""
    if _now.stage:
        _now.stage, _now.wrapper = stage, wrapper or _now.wrapper


@contextmanager
def silent() -> Iterator[None]:
    """While operators are measured: what does not fit is measured otherwise."""
    before, _now.stage = _now.stage, ""
    try:
        yield
    finally:
        _now.stage = before


@dataclass(frozen=True)
class Held:
    """Memory of a GPU at the moment when it was not enough; all in bytes.

    Attributes:
        asked: that PyTorch was asked for.
        tensors: allocated by this process's tensors.
        reserved: that PyTorch's allocator has of the device, ``tensors`` among it.
        free: of the device.
        limit: that PyTorch may take: the device's memory, or the process's fraction of it.
        total: of the device.
    """

    asked: int
    tensors: int
    reserved: int
    free: int
    limit: int
    total: int

    @property
    def elsewhere(self) -> int:
        """Taken by other processes, and by CUDA's own context."""
        return max(0, self.total - self.free - self.reserved)

    @property
    def unused(self) -> int:
        """Reserved by PyTorch, in pieces that no tensor is in."""
        return self.reserved - self.tensors


def running_task(frame: FrameType | None) -> Task | None:
    """The task of a scheduled step that the code around a frame runs; None: no such step is running."""
    while frame is not None and TASKS not in frame.f_globals:
        frame = frame.f_back
    if frame is None:
        return None
    tasks: Sequence[tuple[int, Task]] = frame.f_globals[TASKS]
    place = bisect_right(tasks, frame.f_lineno, key=lambda entry: entry[0])
    return tasks[place - 1][1] if place else None


def predicted_there(wrapper: Any, stage: str, task: Task | None) -> int | None:
    """The memory that is predicted while a task of a step runs; of a block, the whole step's in this stage of it.

    None: not known, or nothing is predicted of that stage.
    """
    if (plan := getattr(wrapper, "_block_plan", None)) is None:
        return None if task is None else task.run_bytes
    name = re.escape(wrapper._block_name)
    named = {
        FORWARD: f"the forward of {name}",
        BETWEEN: f"between the forward of {name} and .*",
        BACKWARD: f"the backward of {name}",
        AFTER: f"(between|after) the backward of {name}( and .*)?",
    }[stage]
    there = (count for moment, count in plan.moments if re.fullmatch(named, moment))
    return max(there, default=None)


def in_words(
    model: str, stage: str, predicted: int, budget: int, optimizer: str, held: Held, at: str = "",
    there: int | None = None,
) -> str:  # fmt: skip
    """What holds the memory, and what to do next.

    Args:
        model: its class.
        predicted: peak of the whole step, in bytes.
        optimizer: whose state the plan counts.
        at: the task that runs, by name.
        there: predicted for that part of the step, in bytes; None: not known.
    """
    where = f"{stage} of {model}'s scheduled step{f', at {at}' if at else ''}"
    lines = [
        f"out of memory {where}: PyTorch was asked for {format_bytes(held.asked)}",
        f"  predicted peak of the step   {format_bytes(predicted)}, budget {format_bytes(budget)}",
        f"  tensors of this process      {format_bytes(held.tensors)}",
    ]
    if there is not None:
        lines.insert(1, f"  predicted there              {format_bytes(there)}")
    beyond = max(0, held.tensors + held.asked - (predicted if there is None else there))
    if beyond >= _WORTH_A_LINE:
        lines.append(
            f"  of it not in the plan        {format_bytes(beyond)} with what was asked for: "
            "tensors that your loop holds, other models, evaluation"
            + (", the state that the optimizer makes in its first step" if optimizer == "none" else "")
        )
    if held.unused >= _WORTH_A_LINE:
        lines.append(
            f"  reserved, but in no tensor   {format_bytes(held.unused)}: pieces that are too small; "
            "PYTORCH_ALLOC_CONF=expandable_segments:True or monet_like.place_memory(model) keep them together"
        )
    if held.elsewhere >= _WORTH_A_LINE:
        lines.append(f"  outside of PyTorch           {format_bytes(held.elsewhere)}: CUDA's context, other processes")
    if held.limit < held.total:
        lines.append(f"  limit of this process        {format_bytes(held.limit)} of {format_bytes(held.total)}")
    lines.append(f"next: {_next(stage, predicted, budget, optimizer, beyond, held)}")
    return "\n".join(lines)


def _next(stage: str, predicted: int, budget: int, optimizer: str, beyond: int, held: Held) -> str:
    """What to do, with the budget for which there is room."""
    room = min(held.limit, held.total - held.elsewhere) - beyond
    least = min(budget, int(_ROOM * room))
    shown = "print(monet_like.memory_report(model)) lists what the forward keeps"
    if optimizer == "none" and stage == AFTER:
        return f'give auto_schedule the optimizer, such as optimizer="adamw", so that its state is planned for; {shown}'
    if least >= budget:
        return f"free what is not in the plan, or see the lines above; {shown}"
    if least < predicted // 4:
        return (
            f"there is room for {format_bytes(max(0, room))} beside what is not in the plan: free some of it; {shown}"
        )
    return f'plan for what is free: memory_budget="{format_bytes(least)}"; {shown}'


def _observe(device: int, asked: int, device_allocated: int, device_free: int) -> None:
    """Called by PyTorch's allocator when it gives up; whatever goes wrong here must not hide its error."""
    wrapper = _now.wrapper() if _now.wrapper is not None else None
    if wrapper is None or not _now.stage:
        return
    try:
        plan = getattr(wrapper, "_block_plan", None) or wrapper.record  # of the whole step
        settings = getattr(wrapper, "_block_settings", None) or wrapper.record
        total = torch.cuda.get_device_properties(device).total_memory
        held = Held(
            asked, torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), device_free,
            int(total * torch.cuda.get_per_process_memory_fraction(device)), total,
        )  # fmt: skip
        name = f"block {wrapper._block_name}" if plan is not wrapper.record else type(wrapper._model).__name__
        task = running_task(sys._getframe())
        there = predicted_there(wrapper, _now.stage, task)
        _log.warning(
            in_words(
                name, _now.stage, plan.peak_bytes, plan.budget_bytes, settings.optimizer, held,
                task.name if task else "", there,
            )
        )  # fmt: skip
    except Exception as error:
        _log.debug("no words for an error of memory: %r", error)
