"""Which steps have no CUDA graphs, and why."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree

from ...capture.captured import Captured
from ...ir.schedule_file import ScheduleRecord
from ...ops.memory_layout import is_dense
from ...runtime.codegen import Block
from ..branches import written_residents
from ..segments import Segment

#: Reads the generator's state before numbers are drawn that may be drawn again.
DRAWS = "monet_like.get_rng_state"
#: Operators that a graph cannot have, by the beginning of their names.
_REFUSED = {
    "monet_like.set_rng_state": "draws random numbers again, from an earlier state of the generator",
    "monet_like.send": "offloads to the host",
    "monet_like.fetch": "offloads to the host",
    "monet_like.sync": "exchanges statistics between processes",
}

_BACKENDS: Any = torch.backends


class Step(Protocol):
    """What graphs are made of: a `monet_like.replay.training_step.CompiledStep`, which says what each is."""

    captured: Captured
    residents: tuple[int, ...]
    blocks: tuple[Block, ...]
    segments: tuple[Segment, ...]
    saved: tuple[int, ...]
    tangents: tuple[tuple[int, int], ...]
    written: tuple[int, ...]
    may_end: bool
    compiled: Any
    record: ScheduleRecord | None


def kernel_settings() -> tuple[Any, ...]:
    """PyTorch's settings by which an operator chooses its kernel: a graph keeps the kernels of its capture."""
    return (
        _BACKENDS.cuda.matmul.fp32_precision,
        _BACKENDS.cudnn.conv.fp32_precision,
        _BACKENDS.cudnn.rnn.fp32_precision,
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_accumulation(),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_fill_uninitialized_memory(),
        torch._C._get_blas_preferred_backend(),
    )


def refusal(step: Step) -> str:
    """Why a step has no graphs; "" if it may have."""
    captured, program, device = step.captured, step.captured.program, step.captured.device
    calls = [call for block in step.blocks for task in block.tasks for call in task.calls]
    for name, reason in _REFUSED.items():
        if any(call.op.startswith(name) for call in calls):
            return f"its schedule {reason}"
    if step.may_end:
        return "its forward asks for values of tensors, or sets Python values"
    if step.compiled is not None:
        return "Inductor compiles it"
    if {output.value for output in captured.outputs} & set(step.residents):
        return "a result lies in the memory of a parameter, a buffer or an input, which a copy would not"
    backward = [task for block in step.blocks[1:] for task in block.tasks]
    written = {*step.written, *written_residents(backward, step.residents)}
    inputs = set(range(len(step.residents) - len(captured.inputs), len(step.residents)))
    if written & inputs or written != set(step.written):
        return "it changes an input, or its backward a parameter or a buffer"
    places = [leaf for call in calls for leaf in pytree.tree_leaves((call.args, dict(call.kwargs)))]
    devices = {leaf.type for leaf in places if isinstance(leaf, torch.device)}
    values = {value for block in step.blocks for task in block.tasks for value in (*task.reads, *task.writes)}
    devices |= {captured.metas[value].device.type for value in values if program.values[value].spec != "state"}
    if devices - {device.type}:
        return f"some of its tensors are not on the {device.type.upper()} device"
    given = [captured.metas[value] for value in (*captured.inputs, *(v for _, v in step.tangents))]
    if not all(is_dense(meta.shape, meta.stride) and not meta.lazily for meta in given):
        return "an input has elements that share their memory, or gaps between them"
    return "" if step.segments else "nothing in it has a gradient"
