"""cuBLAS's workspaces, in which its products put partial sums; PyTorch takes them from its allocator.

Up to PyTorch 2.14 each thread keeps one from its first matrix product on. A training step has two such threads, the one
that calls the model and autograd's. The workspaces outlive every operator, so they are resident: a constant of the
device that counts for every schedule with a product. From 2.15 on each product has one while it runs: a workspace like
any other, which the profiler measures and `monet_like.profile.roofline` estimates. ``TORCH_CUBLAS_WORKSPACE_CACHE=1``
has 2.15 keep them as before.

PyTorch chooses their size (``getChosenWorkspaceSize`` in aten/src/ATen/cuda/CublasHandlePool.cpp): what
``CUBLAS_WORKSPACE_CONFIG`` says where that is set; else 32 MiB on GPUs of capability 9.x to 12.x (Hopper, Blackwell),
and 8.1 MiB on others. Products of cuBLASLt, such as sums of a product and a bias, use the same ones, or where products
have their own, one of 1 MiB. In version 2.11 they have one of 1 MiB beside it, in the thread that calls the model, and
capabilities 10.x to 12.x have the small ones. On the device all of it is measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from ..ir.program import Program, Task
from ..ir.schedule import Schedule
from ..torch_versions import release
from .measure import have_workspaces

#: Threads of a step that multiply.
THREADS = 2
#: Bytes of a workspace on GPUs of these major capabilities.
LARGE_BYTES, LARGE_CAPABILITIES = 32 * 2**20, (9, 10, 11, 12) if release() > (2, 11) else (9,)
#: Bytes of a workspace on others: 2 parts of 4 MiB and 8 of 16 KiB, as ``:4096:2:16:8`` says.
SMALL_BYTES = 2 * 4096 * 2**10 + 8 * 16 * 2**10

#: Operators that call cuBLAS on a GPU, without the overload and without the ``_`` of those in place.
_PRODUCTS = frozenset(
    (
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul", "linear", "mv", "addmv", "dot", "vdot", "mm_largest"),
        *("_addmm_activation", "_scaled_mm", "_int_mm", "_native_multi_head_attention", "linalg_matrix_exp"),
        *("linalg_inv_ex", "_linalg_solve_ex", "linalg_solve_triangular", "triangular_solve", "linalg_lstsq"),
        *("linalg_lu_factor_ex", "linalg_lu_solve", "_slow_conv2d_forward", "_slow_conv2d_backward"),
    )
)
_CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})


def are_kept() -> bool:
    """Whether threads keep their workspaces; else each product has one of its own while it runs."""
    return release() < (2, 15) or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"


def workspace_bytes(major: int) -> int:
    """Bytes of one workspace by default, on a GPU of this major compute capability."""
    return LARGE_BYTES if major in LARGE_CAPABILITIES else SMALL_BYTES


def default_bytes(major: int) -> int:
    """Bytes that a step's threads keep by default, on a GPU of this major compute capability."""
    return THREADS * workspace_bytes(major) if are_kept() else 0


def measured_bytes(device: torch.device) -> int:
    """Measured bytes that a step's threads keep on a device; 0 on a CPU. They are freed and allocated anew."""
    if device.type != "cuda":
        return 0
    torch.zeros(1, device=device)  # makes the allocator's statistics
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated(device)
    have_workspaces(device)
    return int(torch.cuda.memory_allocated(device)) - before


def multiplies(tasks: Iterable[Task]) -> bool:
    """Whether one of the tasks has an operator that calls cuBLAS on a GPU.

    Convolutions are cuDNN's; where that is off, PyTorch's own are products of columns.
    """
    products = _PRODUCTS if torch.backends.cudnn.enabled else _PRODUCTS | _CONVOLUTIONS
    return any(_name(call.op) in products for task in tasks for call in task.calls)


def schedule_multiplies(program: Program, schedule: Schedule) -> bool:
    """Whether a schedule runs a task that multiplies: by a variant it can where plain PyTorch does not."""
    again = {index for tasks in schedule.again for index in tasks}
    ways = (program.slots[slot][way] for slot, way in enumerate(schedule.ways))
    return multiplies((*(program.tasks[index] for index in {*schedule.forward, *again}), *ways))


def _name(operator: str) -> str:
    """``aten.addmm_.default``: addmm."""
    return operator.split(".")[1].rstrip("_")
