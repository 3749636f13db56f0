"""Real memory layouts of values, found by running every operator once on this machine's device.

A trace asks fake tensors how results lie, and for some operators PyTorch answers otherwise than its kernels on CUDA do:
the gradient of a layer norm of a permuted tensor is in rows, whatever the trace says. So operators would be timed on
inputs that no step gives them. Here every operator runs once, on inputs that lie as their operators have made them.

The program stays as it is: its memory is the same, and so are fingerprints and the names of costs, which are the
trace's. Plans and profiles therefore hold for a GPU whether it was there when they were made or not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..capture.captured import Captured, TensorMeta
from ..ir.program import RESIDENT_KINDS, Task
from ..ops.sync_batch_norm import COMMUNICATING
from ..runtime.codegen import Block, compile_block
from ..runtime.operators import without_fallback
from .observing import made_by
from .task_inputs import Inputs


def as_made(captured: Captured, device: torch.device) -> Captured:
    """``captured`` with the layouts that its operators really give to values on ``device``.

    Where several tasks make a value, the first counts, which is PyTorch's own. A task that fails leaves the trace's
    layout: it is profiled next, and says why.
    """
    metas, maker, values = list(captured.metas), Inputs(captured, device), captured.program.values
    known = {v for v, value in enumerate(values) if value.kind in RESIDENT_KINDS or value.spec == "state"}
    known.update(captured.program.tangents)
    made: dict[Any, tuple[TensorMeta, ...]] = {}  # by operators, and what they read looks like
    for task in captured.every_task():
        writes = tuple(v for v in made_by(task) if values[v].spec != "state")
        fresh = [v for v in writes if v not in known]
        if not fresh or task.copies:
            continue
        key = (task.cost, tuple(metas[v] for v in (*task.reads, *writes)))
        if key not in made or not task.cost:
            try:
                made[key] = _made(task, writes, maker)
            except (RuntimeError, MemoryError, NotImplementedError):
                continue
        found = zip(writes, made[key], strict=True)
        otherwise = {v: meta.stride for v, meta in found if v in fresh and _lies_otherwise(meta, metas[v])}
        if otherwise:
            for value, stride in otherwise.items():
                metas[value] = replace(metas[value], stride=stride)
            maker.captured = replace(captured, metas=tuple(metas))
        known.update(fresh)
    return maker.captured


def _made(task: Task, writes: tuple[int, ...], maker: Inputs) -> tuple[TensorMeta, ...]:
    """What a task writes looks like."""
    run = compile_block(Block(task.reads, (task,), (), writes), task.name, COMMUNICATING | without_fallback())
    devices = [maker.device] if maker.device.type == "cuda" else []
    with torch.no_grad(), torch._C._DisableAutocast(), torch.random.fork_rng(devices=devices):
        inputs = maker.of(task)
        results = run([inputs[v].clone() if v == task.overwrites else inputs[v] for v in task.reads])[1]
        return tuple(map(TensorMeta.of, results))


def _lies_otherwise(found: TensorMeta, told: TensorMeta) -> bool:
    """Whether the same memory holds the elements in another order."""
    return found.stride != told.stride and replace(found, stride=told.stride) == told
