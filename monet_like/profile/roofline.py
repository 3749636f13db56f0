"""Costs without measuring: from a device's datasheet rates, arithmetic and memory traffic of each operator.

For planning for a device that is not at hand, and to judge in advance how long measuring would take.

Where the rates are from: `monet_like.profile.devices`. How much of them GPUs reach: `monet_like.profile.gpu_paces`. On
a CPU a task takes the longer of arithmetic and memory traffic.

Two rules are estimates of ours, on GPUs alone:

* Grouped convolutions fill a part of the tensor cores' tiles: the rate is the share of `TILE` that a group's channels
  are, and at least FP32's. Depthwise ones, which PyTorch and cuDNN run without tensor cores, have FP32's rate.
* Convolutions in the default layout are taken to need a workspace of the size of all that they read and write, but at
  most `WORKSPACE_LIMIT_BYTES`. Tensor cores want the channels last, so cuDNN transposes inputs, filters and results
  ("NVIDIA Deep Learning Performance: Convolutional Layers User's Guide", section Tensor Layout); some of its kernels do
  without some of the copies. No default of PyTorch bounds them: the limit holds where the environment has
  ``CUDNN_CONV_WSCAP_DBG=512``. In channels-last layout implicit GEMM needs no copies, and the weights' gradient is
  taken to need one of the weights, for partial sums. Depthwise convolutions need none.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..capture.captured import Captured, distinct_tasks
from ..ir.mode import ALGORITHMS
from ..ir.program import REFUSED, Cost, Task
from .cublas import multiplies
from .devices import DeviceLimits
from .gpu_paces import PACES, Pace
from .work import Operation, Work, works_of
from .workspaces import TILE, Need

#: Of the estimates: raised whenever they change, because plans made from them then would not come out again.
ROOFLINE_VERSION = 5

#: The most that convolutions' workspaces are taken to be; what is larger is taken to have a kernel with less.
WORKSPACE_LIMIT_BYTES = 512 * 2**20


def roofline(captured: Captured, limits: DeviceLimits) -> dict[str, Cost]:
    """The cost of every distinct task of ``captured`` on a device with ``limits``.

    Workspace is what a task of several operators makes and releases on its way, as its code does on tensors without
    storage. An operator itself is taken to need none, but for these:

    * a convolution on a GPU: what is estimated above;
    * the gradient of fused attention on a GPU: that of the queries in float32, and of keys and values one for each head
      of the queries (as PyTorch's flash and efficient kinds allocate them; cuDNN's is taken to be like flash);
    * the gradient of softmax, logsumexp, and binary cross-entropy with logits on a GPU: tensors of their input's size;
    * a product with a dropped cache: a copy of what is kept or of some rows; one with a 4-bit weight dequantises it;
    * cuDNN's batch norm: the gradient of its input, even where nobody wants it;
    * Liger's gradient of RMS norm: a row of float32 for each multiprocessor, and the sum of these;
    * from PyTorch 2.15 on a product on a GPU: cuBLAS's workspace (cuBLASLt's is smaller, and counted as large).

    Rates know no algorithms: what ``algorithms`` admits is refused, so that plans take PyTorch's own.
    """
    priced = {task.cost for task in captured.every_task() if task.word != ALGORITHMS}
    tasks, works = distinct_tasks(captured), works_of(captured)
    return {
        key: Cost(_seconds(captured, task, works[key], limits), _workspace(task, works[key], limits))
        if key in priced
        else REFUSED
        for key, task in tasks.items()
    }


def _workspace(task: Task, work: Work, limits: DeviceLimits) -> int:
    product = limits.product_bytes if limits.product_bytes and multiplies([task]) else 0

    def bytes_of(need: Need) -> int:
        of_gpu = min(need.convolution_bytes, WORKSPACE_LIMIT_BYTES) + need.gpu_bytes
        sums = need.partial_sums_bytes * (max(1, limits.multiprocessors) + 1)
        own = need.unpacked_bytes + sums + (of_gpu if limits.device == "cuda" else 0)
        return need.between_bytes + own + product

    return max(0, *map(bytes_of, (Need(), *work.needs)))


def _seconds(captured: Captured, task: Task, work: Work, limits: DeviceLimits) -> float:
    if task.copies:
        return copy_seconds(captured, task, limits.host_bytes_per_second, limits.launch_seconds)
    return seconds_of(work.operations, limits)


def copy_seconds(captured: Captured, task: Task, bytes_per_second: float, launch_seconds: float) -> float:
    """How long a task takes that copies a value to or from the host."""
    copied = max(captured.metas[v].storage_bytes for v in (*task.reads, *task.writes))
    return launch_seconds + copied / bytes_per_second


def seconds_of(operations: Sequence[Operation], limits: DeviceLimits) -> float:
    """How long operators take, one after another: on a GPU by the paces of their kinds, on a CPU by its rates."""
    if limits.device == "cuda":
        return max(limits.launch_seconds, sum(operation_seconds(operation, limits) for operation in operations))
    computing = sum(_computing(operation, limits) for operation in operations)
    touched = sum(operation.touched_bytes for operation in operations)
    return max(limits.launch_seconds, computing, touched / limits.bytes_per_second)


def operation_seconds(operation: Operation, limits: DeviceLimits, pace: Pace | None = None) -> float:
    """How long an operator takes on a GPU, by the pace of its kind or another one (`monet_like.profile.gpu_paces`)."""
    pace = pace or PACES[operation.kind]
    idle = max(1.0, pace.blocks * limits.multiprocessors / operation.channels) if operation.channels else 1.0
    moving = pace.traffic * idle * operation.touched_bytes / limits.bytes_per_second
    return operation.launches * pace.launch_seconds + pace.arithmetic * _computing(operation, limits) + moving


def _computing(operation: Operation, limits: DeviceLimits) -> float:
    """Seconds of arithmetic at the datasheet's rates."""
    products, convolutions = limits.flop_rates(operation.half)
    if operation.group_channels < TILE:
        share = operation.group_channels / TILE if operation.group_channels > 1 else 0.0
        convolutions = max(limits.flops_per_second, share * convolutions)
    return operation.flops / products + operation.convolution_flops / convolutions
