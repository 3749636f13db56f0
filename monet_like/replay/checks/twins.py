"""Tells which tasks run plain-torch twins instead of compiled kernels, and how much memory the twins take.

A twin gives its kernel's results from several of PyTorch's operators, whose own results it needs memory for. A schedule
that was planned with kernels then needs more than it promises. How much is counted here by running the twins on tensors
without storage, so that a schedule can be refused before a step instead of running out of memory in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ... import ops
from ...capture.captured import Captured, shape_mode
from ...ir.program import Cost, Program, Task
from ...ir.schedule import Schedule
from ...ir.simulate import Free
from ...ops.liger import is_ours
from ...ops.registry import NAMESPACE
from ...profile.observing import LiveBytes, Observer
from ...runtime.codegen import Block, compile_block

#: Where twins need so much that nobody can tell how much, as much as this many times what they read and write.
_UNKNOWN = 2

_warned = False
_warned_of_liger = False


def twins_of(task: Task, device: str) -> frozenset[str]:
    """The operators of a task that run as plain-torch twins on this kind of device."""
    return frozenset(call.op for call in task.calls if not ops.runs_here(call.op, device))


def twins_taken(program: Program, schedule: Schedule, device: str) -> frozenset[str]:
    """The operators that a schedule runs as plain-torch twins on this kind of device."""
    tasks = [program.tasks[place] for places in (schedule.forward, *schedule.again) for place in places]
    tasks += [ways[way] for ways, way in zip(program.slots, schedule.ways, strict=True)]
    return frozenset(op for task in tasks for op in twins_of(task, device))


def workspaces_of_twins(captured: Captured, device: str) -> Mapping[str, Cost]:
    """Costs with the workspace of plain-torch twins and 0 seconds; other tasks cost nothing."""
    return _Workspaces(captured, device)


class _Workspaces(Free):
    """Costs that are computed when they are looked up."""

    def __init__(self, captured: Captured, device: str) -> None:
        super().__init__()
        self._tasks = {task.cost: task for task in captured.every_task() if task.cost and twins_of(task, device)}
        self._captured = captured

    def __missing__(self, key: str) -> Cost:
        if key not in self._tasks:
            return super().__missing__(key)
        self[key] = Cost(0.0, workspace_of_twin(self._captured, self._tasks[key]))
        return self[key]


def workspace_of_twin(captured: Captured, task: Task) -> int:
    """Peak bytes that a task allocates with plain-torch twins, beyond the values that it reads and writes."""
    metas = captured.metas
    run = compile_block(Block(task.reads, (task,)), task.name)
    counter = _Twins()
    try:
        with shape_mode(), torch.no_grad(), torch._C._DisableAutocast():
            inputs: list[Any] = [metas[value].empty() for value in task.reads]
            with counter:
                run(inputs)
    except (RuntimeError, NotImplementedError):  # its result's shape depends on values, and fake tensors have none
        return _UNKNOWN * sum(metas[value].storage_bytes for value in (*task.reads, *task.writes))
    made = task.writes if task.overwrites is None else task.writes[1:]  # the first lies in what is overwritten
    return max(0, counter.peak_bytes - sum(metas[value].storage_bytes for value in made))


class _Twins(Observer):
    """Runs twins, and counts the most bytes that they hold at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes, self._live = 0, LiveBytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NAMESPACE and (twin := ops.twin(func._schema.name.partition("::")[2])):
            with self:
                return twin(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        self.peak_bytes = max(self.peak_bytes, self._live.after(args, kwargs, result))


def warn_of_liger(program: Program, schedule: Schedule, device: torch.device, stacklevel: int) -> None:
    """Warn, once in a process, that a schedule runs twins of Liger's kernels on a GPU, and say what to install."""
    global _warned_of_liger
    if _warned_of_liger or device.type != "cuda" or not any(map(is_ours, twins_taken(program, schedule, "cuda"))):
        return
    _warned_of_liger = True
    warnings.warn(
        "the schedule takes Liger's kernels, which are not installed here, so plain-torch twins run: results are the "
        "same to rounding, steps take longer and more memory than the schedule promises. Install Liger with pip "
        "install 'monet_like[liger]' (and do not set MONET_LIKE_LIGER=0), or plan here",
        stacklevel=stacklevel + 1,
    )


def warn_of_twins(captured: Captured, device: torch.device, stacklevel: int) -> None:
    """Warn, once in a process, that twins run on a GPU, and say what to install."""
    global _warned
    if _warned or device.type != "cuda" or ops.available("cuda"):
        return
    ours = (op for task in captured.every_task() for op in twins_of(task, "cuda") if not is_ours(op))
    if not any(ours):
        return
    _warned = True
    warnings.warn(
        "the compiled CUDA kernels of monet_like are not there, so plain-torch twins run on the GPU: results are the "
        f"same, steps take longer and more memory than schedules promise that were planned with kernels "
        f"({ops.status()}). Install nvcc (for CUDA 13 pip install 'monet_like[kernels]', else NVIDIA's CUDA toolkit "
        f"{torch.version.cuda}) and a C++ compiler, then run python -m monet_like.build; or plan here, where twins are "
        "measured",
        stacklevel=stacklevel + 1,
    )
