"""SyncBatchNorm as operators that a schedule can place. It also runs on a CPU, where PyTorch has none.

Three steps forward (this process's statistics, gathered over the group, the normalisation) and three backward (sums,
reduced over the group, the gradient). The second of each communicates. It is done once in every step and in the order
of the program, whatever the schedule: so processes make their collectives in the same order even where their schedules
differ. All other operators are local and can be recomputed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .. import ops
from ..ir.program import Program
from ..ops.sync_batch_norm import COMMUNICATING

#: As among how many processes to trace, where the group itself is not there.
_imagined: int | None = None


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.SyncBatchNorm` that also runs on a CPU, where PyTorch's own and ``DistributedDataParallel`` refuse it.

    Parameters, buffers and ``state_dict`` are the same. Made by `convert_sync_batchnorm`.
    """

    process_group: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise by the statistics of the whole group in training, as batch norm else."""
        return forward(self, x)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        nn.SyncBatchNorm._check_input_dim(self, input)  # type: ignore[arg-type]


def convert_sync_batchnorm(model: nn.Module, process_group: Any = None) -> nn.Module:
    """``model`` with `SyncBatchNorm` for every batch norm; as ``torch.nn.SyncBatchNorm.convert_sync_batchnorm``.

    On CUDA, results are those of PyTorch's own to the bit.

    Args:
        process_group: whose statistics are shared; default: all processes.
    """
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, process_group)
    for module in converted.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = SyncBatchNorm  # type: ignore[assignment]  # neither is the other, so as DDP takes it
    return converted


def is_synchronised(model: nn.Module) -> bool:
    """Whether statistics of ``model`` are shared among processes."""
    return any(isinstance(module, nn.SyncBatchNorm | SyncBatchNorm) for module in model.modules())


def world() -> tuple[str, int]:
    """Name and size of the default process group, on which SyncBatchNorm's operators depend."""
    if not (dist.is_available() and dist.is_initialized()):
        return "", 1
    group: Any = dist.group.WORLD
    return group.group_name, dist.get_world_size()


def among(program: Program) -> int:
    """Number of processes that share statistics in ``program``; 1 without a SyncBatchNorm that communicates."""
    calls = (call for task in program.tasks for call in task.calls if call.op in COMMUNICATING)
    return max((int(call.args[-2]) for call in calls), default=1)


@contextlib.contextmanager
def traced(processes: int | None) -> Iterator[None]:
    """Have PyTorch's SyncBatchNorm run by the operators here.

    Args:
        processes: trace as among so many; None: as among those of its group, alone without one.
    """
    global _imagined
    own, before = nn.SyncBatchNorm.forward, _imagined
    nn.SyncBatchNorm.forward, _imagined = forward, processes  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward, _imagined = own, before  # type: ignore[method-assign]


def _group_of(module: Any) -> tuple[int, str]:
    """How many processes share the module's statistics, and the name of their group."""
    if _imagined is not None:
        return _imagined, ""
    if not (dist.is_available() and dist.is_initialized()):
        return 1, ""
    group: Any = module.process_group or dist.group.WORLD
    return dist.get_world_size(group), group.group_name


def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The result of a SyncBatchNorm ``module`` for x: [N, C, ...].

    Raises:
        ValueError: x has fewer than 2 dimensions, or no element.
    """
    processes, group = _group_of(module)
    if not module.training or processes < 2:
        return _BatchNorm.forward(module, x)
    ops.load()
    module._check_input_dim(x)
    if not x.numel():
        raise ValueError(f"SyncBatchNorm needs at least one element in every process, got an input of {list(x.shape)}")
    running_mean = running_var = batches = None
    if module.track_running_stats:
        running_mean, running_var = module.running_mean, module.running_var
        module.num_batches_tracked.add_(1)
        batches = module.num_batches_tracked if module.momentum is None else None
    x = _dense(x)
    registered = torch.ops.monet_like
    with torch.no_grad():
        stats = registered.sync_batch_norm_stats(x, module.eps)
        mean, invstd, counts, *moved = registered.sync_batch_norm_gather_functional(
            stats, running_mean, running_var, batches, module.momentum or 0.0, module.eps, processes, group
        )
        for running, new in zip((running_mean, running_var), moved, strict=True):
            if running is not None:
                running.copy_(new)
    result: torch.Tensor = _Normalise.apply(x, module.weight, module.bias, mean, invstd, counts, module.eps, group)
    return result


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Row-major, unless channels come last."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    return tensor if last and tensor.is_contiguous(memory_format=last) else tensor.contiguous()


class _Normalise(torch.autograd.Function):
    """(x - mean) * invstd * weight + bias, and its gradients where mean and invstd are those of the group's x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        invstd: torch.Tensor,
        counts: torch.Tensor,
        eps: float,
        group: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, invstd, counts)
        ctx.group = group
        result: torch.Tensor = torch.ops.monet_like.sync_batch_norm_elemt(x, weight, bias, mean, invstd, eps)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, mean, invstd, counts = ctx.saved_tensors
        registered, grad, wanted = torch.ops.monet_like, _dense(grad), list(ctx.needs_input_grad[:3])
        sums, of_weight, of_bias = registered.sync_batch_norm_backward_reduce(grad, x, weight, mean, invstd, wanted)
        of_x = None
        if wanted[0]:
            sums = registered.sync_batch_norm_all_reduce(sums, ctx.group)
            of_x = registered.sync_batch_norm_backward_elemt(grad, x, weight, mean, invstd, sums, counts)
        return of_x, of_weight, of_bias, None, None, None, None, None
