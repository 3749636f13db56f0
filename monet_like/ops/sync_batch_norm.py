"""Batch norm over all processes of a group, split into operators, two of which communicate (`COMMUNICATING`).

| operator | arguments | results |
|---|---|---|
| sync_batch_norm_stats | x: F[N,C,...] | A[2 C + 1]: mean, 1 / std and count of this process |
| sync_batch_norm_gather | stats; running_*: P[C]; batches: I[] | mean, invstd: A[C]; counts: int32[processes] |
| sync_batch_norm_gather_functional | the same | the same, then the new running_*: P[C] ([0] for None) |
| sync_batch_norm_elemt | x; weight, bias: P[C]; mean, invstd | like x |
| sync_batch_norm_backward_reduce | grad, x: F[N,C,...]; weight, mean, invstd | A[2 C]: sums of grad, grad * (x - mean); P[C]; P[C] |
| sync_batch_norm_all_reduce | sums: A[2 C] | A[2 C]: over the group |
| sync_batch_norm_backward_elemt | grad, x; weight, mean, invstd; sums, counts | like x |

F is a floating-point dtype, P that of the parameters. A is float32 for 16-bit floats, else F. ``batches`` is the number
of batches so far if the running statistics are their plain average (``momentum`` None), else None. ``group`` is the
name of a process group, as in PyTorch's functional collectives. On CUDA these are the operators of PyTorch's own
SyncBatchNorm, called in its order: the same bits.

Every operator has a fake, so tracing communicates nothing. There are no compiled kernels.
"""  # noqa: E501  (a table)

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .registry import fake, on_cuda, operator

_GATHER = "Tensor? batches, float momentum, float eps, int processes, str group) -> (Tensor, Tensor, Tensor"

Three = tuple[Tensor, Tensor, Tensor]


# ---- statistics ----


@operator("(Tensor x, float eps) -> Tensor", compiled=False)
def sync_batch_norm_stats(x: Tensor, eps: float) -> Tensor:
    """Mean, 1 / std and count of this process's batch, one after the other."""
    wide = x.to(_accumulated(x.dtype))
    mean, variance = torch.batch_norm_update_stats(wide, None, None, 0.0)
    return _with_count(mean, (variance + eps).rsqrt_(), x)


@on_cuda(sync_batch_norm_stats)
def _(x: Tensor, eps: float) -> Tensor:
    mean, invstd = torch.batch_norm_stats(x, eps)
    return _with_count(mean, invstd, x)


@fake(sync_batch_norm_stats)
def _(x: Tensor) -> Tensor:
    return torch.empty((2 * x.shape[1] + 1,), dtype=_accumulated(x.dtype), device=x.device)


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    """The dtype A of the table above."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def _with_count(mean: Tensor, invstd: Tensor, x: Tensor) -> Tensor:
    return torch.cat((mean, invstd, mean.new_full((1,), x.numel() // x.size(1))))


def _gathered(stats: Tensor, processes: int, group: str) -> Tensor:
    """Collect the statistics of every process, by rank: A[processes, 2 C + 1]."""
    found = _resolve(group)
    everyone = stats.new_empty((processes, stats.numel()))
    if dist.get_backend(found) == "gloo":  # has no gathering into one tensor
        dist.all_gather(list(everyone.unbind()), stats, found)
    else:
        dist.all_gather_into_tensor(everyone.view(-1), stats, found)
    return everyone


def _resolve(group: str) -> Any:
    if not group:
        raise RuntimeError(
            "this program was captured for a plan, as among processes that are not there; capture it in their group to "
            "run it"
        )
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(group)  # type: ignore[arg-type]  # a NewType of str


def _as_if_alike(stats: Tensor, processes: int, group: str) -> Tensor:
    """Stand in for `_gathered` in one process: every other process is taken to have the same statistics."""
    return stats.repeat(processes, 1)


@operator(f"(Tensor stats, Tensor(a!)? running_mean, Tensor(b!)? running_var, {_GATHER})", compiled=False)
def sync_batch_norm_gather(
    stats: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batches: Tensor | None,
    momentum: float,
    eps: float,
    processes: int,
    group: str,
    *,
    collect: Callable[[Tensor, int, str], Tensor] = _gathered,
) -> Three:
    """Combine the statistics of the group's processes and update the running statistics.

    The running variance is unbiased, by the count of elements in the whole group.
    """
    everyone = collect(stats, processes, group)
    channels = everyone.shape[1] // 2
    means, invstds, counts = everyone.split((channels, channels, 1), 1)
    share = momentum if batches is None else 1.0 / float(batches.item())
    if everyone.is_cuda:
        means, invstds, counts = means.contiguous(), invstds.contiguous(), counts.contiguous().view(-1)
        typed = counts if running_mean is None else counts.to(running_mean.dtype)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            everyone, means, invstds, running_mean, running_var, share, eps, typed
        )
        return mean, invstd, counts.to(torch.int32)
    # As two passes over all would find them: the variance within the processes' batches and that between their means.
    means, invstds, counts = means.double(), invstds.double(), counts.double()
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    variance = (counts * (invstds.pow(-2) - eps + (means - mean).square())).sum(0) / total
    for running, new in ((running_mean, mean), (running_var, variance * (total / (total - 1)))):
        if running is not None:
            running.mul_(1 - share).add_(new.to(running.dtype), alpha=share)
    kind = everyone.dtype
    return mean.to(kind), (variance + eps).rsqrt().to(kind), counts.reshape(-1).to(torch.int32)


@fake(sync_batch_norm_gather)
def _gathered_shapes(stats: Tensor, processes: int) -> Three:
    mean, invstd = (stats.new_empty((stats.shape[0] // 2,)) for _ in range(2))
    return mean, invstd, stats.new_empty((processes,), dtype=torch.int32)


def _functional(gather: Callable[..., Three]) -> Callable[..., tuple[Tensor, ...]]:
    """Turn ``gather`` into a function that returns the new running statistics instead of updating them in place."""

    def gather_functional(
        stats: Tensor, running_mean: Tensor | None, running_var: Tensor | None, *rest: Any
    ) -> tuple[Tensor, ...]:
        moved = [None if running is None else running.clone() for running in (running_mean, running_var)]
        found = gather(stats, *moved, *rest)
        return (*found, *(stats.new_empty(0) if new is None else new for new in moved))

    return gather_functional


@operator(f"(Tensor stats, Tensor? running_mean, Tensor? running_var, {_GATHER}, Tensor, Tensor)", compiled=False)
def sync_batch_norm_gather_functional(*args: Any) -> tuple[Tensor, ...]:
    """`sync_batch_norm_gather` that returns the new running statistics instead of updating them."""
    return _functional(sync_batch_norm_gather)(*args)


@fake(sync_batch_norm_gather_functional)
def _(stats: Tensor, running_mean: Tensor | None, running_var: Tensor | None, processes: int) -> tuple[Tensor, ...]:
    moved = (
        stats.new_empty(0) if running is None else torch.empty_like(running) for running in (running_mean, running_var)
    )
    return (*_gathered_shapes(stats, processes), *moved)


# ---- elementwise ----


@operator("(Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, float eps) -> Tensor", compiled=False)
def sync_batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """Normalise x by the statistics of the group, which are given, then scale and shift it."""
    result: Tensor = torch.ops.monet_like.batch_norm_apply(
        x, weight, bias, mean, invstd, None, "clamp", -math.inf, math.inf
    )
    return result


@on_cuda(sync_batch_norm_elemt)
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    return torch.batch_norm_elemt(x, weight, bias, mean, invstd, eps)


# ---- backward ----


@operator(
    "(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor invstd, bool[3] mask) -> (Tensor, Tensor, Tensor)",
    compiled=False,
)
def sync_batch_norm_backward_reduce(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, mask: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Sums over this process's batch that the gradient of x needs, and the gradients for weight and bias.

    None, or an empty tensor for the sums, where ``mask`` is false.
    """
    # ATen sums in one pass by whatever mean it is given; its gradient of the weight has the factor 1 / std.
    sums = torch.ops.aten.native_batch_norm_backward(
        grad, x, None, None, None, mean, invstd, True, 0.0, [False, True, True]
    )
    scaled, total = sums[1].to(mean.dtype), sums[2].to(mean.dtype)
    kind = mean.dtype if weight is None else weight.dtype
    both = torch.cat((total, scaled / invstd)) if mask[0] else mean.new_empty(0)
    return both, scaled.to(kind) if mask[1] else None, total.to(kind) if mask[2] else None


@on_cuda(sync_batch_norm_backward_reduce)
def _(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, mask: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    of_grad, of_product, of_weight, of_bias = torch.batch_norm_backward_reduce(grad, x, mean, invstd, weight, *mask)
    both = torch.cat((of_grad, of_product)) if mask[0] else mean.new_empty(0)
    return both, of_weight if mask[1] else None, of_bias if mask[2] else None


@fake(sync_batch_norm_backward_reduce)
def _(weight: Tensor | None, mean: Tensor, mask: Sequence[bool]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    like = mean if weight is None else weight
    of_weight, of_bias = (torch.empty_like(like) if wanted else None for wanted in mask[1:])
    return mean.new_empty((2 * mean.shape[0] if mask[0] else 0,)), of_weight, of_bias


@operator("(Tensor sums, str group) -> Tensor", compiled=False)
def sync_batch_norm_all_reduce(sums: Tensor, group: str) -> Tensor:
    """Add the sums of all processes of the group."""
    total = sums.clone()
    dist.all_reduce(total, dist.ReduceOp.SUM, _resolve(group))
    return total


@fake(sync_batch_norm_all_reduce)
def _(sums: Tensor) -> Tensor:
    return torch.empty_like(sums)


def _all_reduce_alone(sums: Tensor, group: str) -> Tensor:
    return sums.clone()


@operator(
    "(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor invstd, Tensor sums, Tensor counts) -> Tensor",
    compiled=False,
)
def sync_batch_norm_backward_elemt(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, sums: Tensor, counts: Tensor
) -> Tensor:
    """The gradient for x from the sums over the group."""
    of_grad, of_product = (part / counts.sum() for part in sums.chunk(2))
    scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
    shape = (1, -1, *(1,) * (x.dim() - 2))
    slope, offset = (-scale * invstd.square() * of_product).view(shape), (-scale * of_grad).view(shape)
    wide = torch.sub(x.to(mean.dtype), mean.view(shape))
    torch.addcmul(offset, wide, slope, out=wide)
    return wide.addcmul_(grad.to(mean.dtype), scale.view(shape)).to(x.dtype)


@on_cuda(sync_batch_norm_backward_elemt)
def _(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, sums: Tensor, counts: Tensor
) -> Tensor:
    of_grad, of_product = sums.chunk(2)
    typed = None if weight is None else weight.to(mean.dtype)
    return torch.batch_norm_backward_elemt(grad, x, mean, invstd, typed, of_grad, of_product, counts)


@fake(sync_batch_norm_elemt, sync_batch_norm_backward_elemt)
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


# ---- in one process alone ----

_gather_alone = functools.partial(sync_batch_norm_gather, collect=_as_if_alike)
#: Operators that wait for the other processes of a group, whose name is their last argument. Each has a stand-in that
#: works in one process alone, for measuring: a process that is profiled does not know when the others reach the call.
COMMUNICATING: dict[str, Callable[..., Any]] = {
    "monet_like.sync_batch_norm_gather.default": _gather_alone,
    "monet_like.sync_batch_norm_gather_functional.default": _functional(_gather_alone),
    "monet_like.sync_batch_norm_all_reduce.default": _all_reduce_alone,
}
