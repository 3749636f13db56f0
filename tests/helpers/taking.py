"""Schedules that take chosen variants, their errors, and single tasks on random inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from replays import FULL, replayed, worst
from training import run, twin
from zoo import Built

from monet_like.capture.captured import Captured
from monet_like.ir.program import Task
from monet_like.ir.schedule import Schedule, prune
from monet_like.plan.baseline import store_all
from monet_like.runtime.codegen import Block, compile_block


def taking(captured: Captured, *names: str, ways: Sequence[str] | None = None, again: str = "") -> Schedule:
    """Plain PyTorch's schedule with variants of these names in place of what makes the same, where there are some.

    Args:
        names: of forward tasks.
        ways: names of the slots' ways, the first of several counts; default: ``names``.
        again: tasks of this name run again before each slot that reads what they make.
    """
    program, kept = captured.program, store_all(captured.program)
    first = [place for place, task in enumerate(program.tasks) if task.variant in names and task.runs != "again"]
    made = {value for place in first for value in program.tasks[place].writes}
    others = (place for place in kept.forward if made.isdisjoint(program.tasks[place].writes))
    variants = [[way.variant for way in slot] for slot in program.slots]
    wanted = names if ways is None else ways
    chosen = tuple(next((slot.index(name) for name in wanted if name in slot), 0) for slot in variants)
    reads = [set(slot[way].reads) for slot, way in zip(program.slots, chosen, strict=True)]
    makers = [place for place, task in enumerate(program.tasks) if task.variant == again]
    more = [[p for p in makers if not read.isdisjoint(program.tasks[p].writes)] for read in reads]
    assert not again or any(more)
    rerun = tuple(tuple(sorted({*one, *other})) for one, other in zip(kept.again, more, strict=True))
    return prune(program, replace(kept, forward=tuple(sorted((*others, *first))), again=rerun, ways=chosen))


def error_of(example: Built, captured: Captured, schedule: Schedule, mode: str = FULL) -> float:
    """The largest difference between a schedule's step and plain PyTorch's."""
    model, args, kwargs = example
    return worst(run(twin(model), args, kwargs), replayed(example, captured, schedule, mode, measured=False))


def random_inputs(captured: Captured, *tasks: Task) -> dict[int, torch.Tensor]:
    """Random tensors for what some tasks read, laid out as the values are."""
    found = {}
    for value in sorted({value for task in tasks for value in task.reads}):
        meta = captured.metas[value]
        storage = torch.randn(meta.storage_bytes // meta.dtype.itemsize) / 4
        storage = storage if meta.dtype.is_floating_point else torch.randint(0, 9, storage.shape)
        found[value] = storage.to(meta.dtype).as_strided(meta.shape, meta.stride, meta.offset)
    return found


def outcome(task: Task, inputs: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """What a task, which may have been captured as on a GPU, makes on the CPU."""
    calls = tuple(
        replace(call, kwargs=tuple((key, "cpu" if key == "device" else value) for key, value in call.kwargs))
        for call in task.calls
    )
    block = compile_block(Block(task.reads, (replace(task, calls=calls),), (), task.writes), "task")
    with torch.no_grad():
        return list(block([inputs[value].clone() for value in task.reads])[1])
