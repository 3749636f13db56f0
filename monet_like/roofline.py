"""Costs without measuring: the larger of arithmetic and memory traffic at a device's datasheet rates.

For planning for a device that is not at hand, and to judge in advance how long measuring would take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from .capture import Captured
from .codegen import Block, compile_block
from .profiler import distinct_tasks
from .program import Cost, Program, Task
from .tracing import fake_mode


@dataclass(frozen=True)
class DeviceLimits:
    """A device's rates.

    Attributes:
        name: for people.
        flops_per_second: of matrix products, in the precision that training uses by default for float32 models.
        half_flops_per_second: the same for 16-bit floats.
        bytes_per_second: memory bandwidth.
        launch_seconds: the least any operator takes.
        source: where the figures come from.
    """

    name: str
    flops_per_second: float
    half_flops_per_second: float
    bytes_per_second: float
    launch_seconds: float
    source: str


DEVICES: Mapping[str, DeviceLimits] = {
    limits.name: limits
    for limits in (
        DeviceLimits("cpu", 1.0e11, 1.0e11, 1.5e10, 2e-6, "a server CPU on two cores, as measured while designing"),
        DeviceLimits("p100", 9.3e12, 18.7e12, 732e9, 4e-6, "NVIDIA Tesla P100 PCIe 16 GB datasheet"),
        DeviceLimits("a100", 19.5e12, 312e12, 1555e9, 4e-6, "NVIDIA A100 40 GB PCIe datasheet, FP32 without TF32"),
        DeviceLimits("h100", 67e12, 989e12, 3350e9, 4e-6, "NVIDIA H100 SXM datasheet, FP32 without TF32"),
        DeviceLimits("h200", 67e12, 989e12, 4800e9, 4e-6, "NVIDIA H200 SXM datasheet, FP32 without TF32"),
        DeviceLimits("rtx4090", 82.6e12, 165.2e12, 1008e9, 4e-6, "NVIDIA Ada architecture whitepaper, FP32"),
    )
}


def roofline(captured: Captured, program: Program, limits: DeviceLimits) -> dict[str, Cost]:
    """The cost of every distinct task of ``program`` on a device with ``limits``. Workspace is taken to be 0."""
    return {key: Cost(_seconds(captured, task, limits)) for key, task in distinct_tasks(program).items()}


def _seconds(captured: Captured, task: Task, limits: DeviceLimits) -> float:
    metas = captured.metas
    touched = sum(metas[v].storage_bytes for v in (*task.reads, *task.writes))
    half = any(metas[v].dtype.itemsize == 2 and metas[v].dtype.is_floating_point for v in task.reads)
    rate = limits.half_flops_per_second if half else limits.flops_per_second
    return max(limits.launch_seconds, flops(captured, task) / rate, touched / limits.bytes_per_second)


def flops(captured: Captured, task: Task) -> int:
    """Floating-point operations of the matrix products and convolutions in a task."""
    ours = ("monet_like.get_rng_state", "monet_like.set_rng_state")
    if not any(call.op.startswith("aten.") for call in task.calls) or any(call.op in ours for call in task.calls):
        return 0
    heavy = ("conv", "mm", "attention", "linear")
    if not any(word in call.op for call in task.calls for word in heavy):
        return 0
    if task.variant == "conv.im2col":  # no fake kernel; the same products as the convolution itself
        _, weight = task.calls[0].args[:2]
        filters = captured.metas[weight.name].shape
        return 2 * math.prod(captured.metas[task.writes[0]].shape) * math.prod(filters[1:])
    run = compile_block(Block(task.reads, (task,)), task.name)
    counter = FlopCounterMode(display=False)
    with fake_mode(), counter, torch.no_grad():
        inputs: list[Any] = []
        for value in task.reads:
            meta = captured.metas[value]
            inputs.append(torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device))
        run(inputs)
    return int(counter.get_total_flops())
