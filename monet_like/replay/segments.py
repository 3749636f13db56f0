"""Cuts the backward of a schedule into segments, each of which returns gradients as soon as they are ready."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..capture.captured import Captured, Tensor
from ..ir.program import Task, refs
from ..ir.schedule import Schedule
from ..runtime.batch_norm import backward_of
from ..runtime.codegen import liveness

#: The backward is cut into at most about this many segments, balanced by the bytes of parameter gradients.
SEGMENTS = 24

#: First slot, one past the last, and the gradients that are returned then: kind, index and tensor of each.
Stretch = tuple[int, int, list[tuple[str, int, Tensor]]]
#: Tasks of the forward, and of the segments of the backward.
Runs = Sequence[tuple[Task, ...]]


@dataclass(frozen=True)
class Segment:
    """A range of backward slots that runs as one autograd node.

    Attributes:
        parameters, inputs: whose gradients it returns, in that order: indices into the captured parameters,
            positions among the captured inputs.
        slots: first slot and one past the last.
        reads: positions among the saved values, of the parameters, buffers and inputs that it reads.
    """

    parameters: tuple[int, ...]
    inputs: tuple[int, ...]
    slots: tuple[int, int]
    reads: tuple[int, ...]


def _ready(captured: Captured, schedule: Schedule) -> Iterator[tuple[int, tuple[str, int, Tensor]]]:
    """Each gradient that is returned, with the slot after which it is ready.

    A gradient is ready when nothing will read it, nor what it is the gradient of: whoever gets it, such as an
    optimizer that steps in a hook, may change both.
    """
    last: dict[int, int] = {}
    for slot in range(len(captured.program.slots)):
        for task in tasks_of(captured, schedule, slot, slot + 1):
            last.update(dict.fromkeys((*task.reads, *task.writes), slot))
    parameters = [value for _, value in captured.parameters]
    for kind, found, of in (
        ("parameter", captured.parameter_gradients, parameters),
        ("input", captured.input_gradients, captured.inputs),
    ):
        for index, tensor in found:
            yield max(last[tensor.value], last.get(of[index], 0)), (kind, index, tensor)


def cut_alike(captured: Captured, schedule: Schedule, segments: Sequence[Segment]) -> list[Stretch]:
    """Cut the backward so that each of ``segments`` returns the gradients that it returns in another step."""
    ready: dict[tuple[str, int], list[tuple[int, Tensor]]] = {}
    for slot, (kind, index, tensor) in _ready(captured, schedule):
        ready.setdefault((kind, index), []).append((slot, tensor))
    stretches: list[Stretch] = []
    start = 0
    for segment in segments:
        keys = [*(("parameter", i) for i in segment.parameters), *(("input", i) for i in segment.inputs)]
        found = [(key, *ready[key].pop(0)) for key in keys]
        stop = max(start, *(slot + 1 for _, slot, _ in found))
        stretches.append((start, stop, [(*key, tensor) for key, _, tensor in found]))
        start = stop
    first, _, gradients = stretches[-1]
    return [*stretches[:-1], (first, len(captured.program.slots), gradients)]


def cut(captured: Captured, schedule: Schedule) -> list[Stretch]:
    """Cut the backward into segments: first slot, one past the last, gradients that become ready, parameters' first."""
    program = captured.program
    ready: dict[int, list[tuple[str, int, Tensor]]] = {}
    for slot, gradient in _ready(captured, schedule):
        ready.setdefault(slot, []).append(gradient)
    sizes = {slot: sum(captured.metas[t.value].storage_bytes for _, _, t in g) for slot, g in ready.items()}
    enough = 0.0 if captured.optimizer_in_backward else sum(sizes.values()) / SEGMENTS
    stretches: list[Stretch] = []
    gathered: list[tuple[str, int, Tensor]] = []
    start, stop, size = 0, 0, 0
    for slot in sorted(ready):
        if gathered and size + sizes[slot] > enough:
            stretches.append((start, stop, gathered))
            start, gathered, size = stop, [], 0
        gathered = [*gathered, *ready[slot]]
        stop = slot + 1
        size += sizes[slot]
    if gathered:
        stretches.append((start, len(program.slots), gathered))
    return [(first, stop, sorted(found, key=lambda g: g[0] == "input")) for first, stop, found in stretches]


def handed_gradients(captured: Captured, schedule: Schedule) -> dict[int, int]:
    """For the values that are gradients of parameters alone, the slot after which autograd gets them."""
    kept = {tensor.value for _, tensor in captured.input_gradients}
    ends = ((tensor.value, stop - 1) for _, stop, made in cut(captured, schedule) for _, _, tensor in made)
    return {value: slot for value, slot in ends if value not in kept}


def tasks_of(captured: Captured, schedule: Schedule, start: int, stop: int) -> tuple[Task, ...]:
    program = captured.program
    tasks: list[Task] = []
    for slot in range(start, stop):
        tasks += [program.tasks[i] for i in schedule.again[slot]]
        tasks.append(_without_statistics(program.slots[slot][schedule.ways[slot]]))
    return tuple(tasks)


def with_run_bytes(runs: Sequence[tuple[Task, ...]], run_bytes: Sequence[int]) -> list[tuple[Task, ...]]:
    """Tasks with the memory that is predicted for them, if there are as many numbers as tasks."""
    if len(run_bytes) != sum(map(len, runs)):
        return list(runs)
    known = iter(run_bytes)
    return [tuple(replace(task, run_bytes=next(known)) for task in tasks) for tasks in runs]


def live_between(runs: Sequence[tuple[Task, ...]], stretches: Sequence[Stretch]) -> list[tuple[int, ...]]:
    """Values alive before every segment, and after the last: read or returned later, before they are written again."""
    live: list[tuple[int, ...]] = [()]
    for tasks, (_, _, gradients) in zip(reversed(runs), reversed(stretches), strict=True):
        needed = (*live[-1], *(tensor.value for _, _, tensor in gradients))
        live.append(liveness(tasks, needed)[1])
    live.reverse()
    return live


def _without_statistics(way: Task) -> Task:
    """Remove the running statistics from batch norm's gradient, which in training does not read them.

    They may have moved since, by another forward.
    """
    calls = tuple(
        replace(call, args=found.native)
        if (found := backward_of(call)) is not None and not found.cudnn  # cuDNN's is captured without
        else call
        for call in way.calls
    )
    if calls == way.calls:
        return way
    read = {ref.name for call in calls for ref in refs(call)}
    return replace(way, calls=calls, reads=tuple(v for v in way.reads if v in read))
