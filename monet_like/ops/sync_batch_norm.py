"""Batch norm whose statistics are those of a process group, as operators. Two of them communicate, see `COMMUNICATING`.

| operator | arguments | results |
|---|---|---|
| sync_batch_norm_stats | x: F[N,C,...] | A[2 C + 1]: mean, 1 / std and count of this process |
| sync_batch_norm_gather | stats; running_*: P[C]; batches: I[] | mean, invstd: A[C]; counts: int32[processes] |
| sync_batch_norm_gather_functional | the same | the same, then the new running_*: P[C] ([0] for None) |
| sync_batch_norm_elemt | x; weight, bias: P[C]; mean, invstd | like x |
| sync_batch_norm_backward_reduce | grad, x: F[N,C,...]; weight, mean, invstd | A[2 C]: sums of grad, grad * (x - mean); P[C]; P[C] |
| sync_batch_norm_all_reduce | sums: A[2 C] | A[2 C]: over the group |
| sync_batch_norm_backward_elemt | grad, x; weight, mean, invstd; sums, counts | like x |

A is float32 for 16-bit floats, else F. ``batches`` is the number of batches so far where the running statistics are
their plain average (``momentum`` None), else None. ``group`` is a process group's name, as in PyTorch's functional
collectives. On CUDA these are the operators of PyTorch's own SyncBatchNorm, in its order: the same bits.

Everything has a form without storage, so tracing communicates nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .registry import NAMESPACE

_GATHER = "Tensor? batches, float momentum, float eps, int processes, str group) -> (Tensor, Tensor, Tensor"
SCHEMAS: dict[str, str] = {
    "sync_batch_norm_stats": "(Tensor x, float eps) -> Tensor",
    "sync_batch_norm_gather": f"(Tensor stats, Tensor(a!)? running_mean, Tensor(b!)? running_var, {_GATHER})",
    "sync_batch_norm_gather_functional": (
        f"(Tensor stats, Tensor? running_mean, Tensor? running_var, {_GATHER}, Tensor, Tensor)"
    ),
    "sync_batch_norm_elemt": (
        "(Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor invstd, float eps) -> Tensor"
    ),
    "sync_batch_norm_backward_reduce": (
        "(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor invstd, bool[3] mask) -> (Tensor, Tensor, Tensor)"
    ),
    "sync_batch_norm_all_reduce": "(Tensor sums, str group) -> Tensor",
    "sync_batch_norm_backward_elemt": (
        "(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor invstd, Tensor sums, Tensor counts) -> Tensor"
    ),
}

Three = tuple[Tensor, Tensor, Tensor]


# ---- statistics ----


def _stats_cpu(x: Tensor, eps: float) -> Tensor:
    wide = x.to(_accumulated(x.dtype))
    mean, variance = torch.batch_norm_update_stats(wide, None, None, 0.0)
    return _with_count(mean, (variance + eps).rsqrt_(), x)


def _stats_cuda(x: Tensor, eps: float) -> Tensor:
    mean, invstd = torch.batch_norm_stats(x, eps)
    return _with_count(mean, invstd, x)


def _with_count(mean: Tensor, invstd: Tensor, x: Tensor) -> Tensor:
    return torch.cat((mean, invstd, mean.new_full((1,), x.numel() // x.size(1))))


def _gathered(stats: Tensor, processes: int, group: str) -> Tensor:
    """The statistics of every process, by rank: [processes, 2 C + 1]."""
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
            "this program was captured for a plan, as among processes that are not there; capture it in their group to run it"
        )
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(group)  # type: ignore[arg-type]  # a NewType of str


def _as_if_alike(stats: Tensor, processes: int, group: str) -> Tensor:
    """`_gathered` where there is no other process: as if every one had the same statistics."""
    return stats.repeat(processes, 1)


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
    """Statistics over the group; moves the running ones by it, the variance unbiased by the group's count."""
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


def _functional(gather: Callable[..., Three]) -> Callable[..., tuple[Tensor, ...]]:
    """``gather`` that returns the new running statistics instead of moving them."""

    def gather_functional(
        stats: Tensor, running_mean: Tensor | None, running_var: Tensor | None, *rest: Any
    ) -> tuple[Tensor, ...]:
        moved = [None if running is None else running.clone() for running in (running_mean, running_var)]
        found = gather(stats, *moved, *rest)
        return (*found, *(stats.new_empty(0) if new is None else new for new in moved))

    return gather_functional


# ---- elementwise ----


def _elemt_cpu(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    result: Tensor = torch.ops.monet_like.batch_norm_apply(
        x, weight, bias, mean, invstd, None, "clamp", -math.inf, math.inf
    )
    return result


def _elemt_cuda(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    return torch.batch_norm_elemt(x, weight, bias, mean, invstd, eps)


# ---- backward ----


def _backward_reduce_cpu(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, mask: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    # ATen sums in one pass by whatever mean it is given; its gradient of the weight has the factor 1 / std.
    sums = torch.ops.aten.native_batch_norm_backward(
        grad, x, None, None, None, mean, invstd, True, 0.0, [False, True, True]
    )
    scaled, total = sums[1].to(mean.dtype), sums[2].to(mean.dtype)
    kind = mean.dtype if weight is None else weight.dtype
    both = torch.cat((total, scaled / invstd)) if mask[0] else mean.new_empty(0)
    return both, scaled.to(kind) if mask[1] else None, total.to(kind) if mask[2] else None


def _backward_reduce_cuda(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, mask: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    of_grad, of_product, of_weight, of_bias = torch.batch_norm_backward_reduce(grad, x, mean, invstd, weight, *mask)
    both = torch.cat((of_grad, of_product)) if mask[0] else mean.new_empty(0)
    return both, of_weight if mask[1] else None, of_bias if mask[2] else None


def sync_batch_norm_all_reduce(sums: Tensor, group: str) -> Tensor:
    """The sums over the group."""
    total = sums.clone()
    dist.all_reduce(total, dist.ReduceOp.SUM, _resolve(group))
    return total


def _all_reduce_alone(sums: Tensor, group: str) -> Tensor:
    return sums.clone()


def _backward_elemt_cpu(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, sums: Tensor, counts: Tensor
) -> Tensor:
    of_grad, of_product = (part / counts.sum() for part in sums.chunk(2))
    scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
    shape = (1, -1, *(1,) * (x.dim() - 2))
    slope, offset = (-scale * invstd.square() * of_product).view(shape), (-scale * of_grad).view(shape)
    wide = torch.sub(x.to(mean.dtype), mean.view(shape))
    torch.addcmul(offset, wide, slope, out=wide)
    return wide.addcmul_(grad.to(mean.dtype), scale.view(shape)).to(x.dtype)


def _backward_elemt_cuda(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, sums: Tensor, counts: Tensor
) -> Tensor:
    of_grad, of_product = sums.chunk(2)
    typed = None if weight is None else weight.to(mean.dtype)
    return torch.batch_norm_backward_elemt(grad, x, mean, invstd, typed, of_grad, of_product, counts)


# ---- without storage ----


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize == 2 else dtype


def _fake_stats(x: Tensor, eps: float) -> Tensor:
    return torch.empty((2 * x.shape[1] + 1,), dtype=_accumulated(x.dtype), device=x.device)


def _fake_gather(stats: Tensor, *settings: Any) -> Three:
    processes = settings[-2]
    mean, invstd = (stats.new_empty((stats.shape[0] // 2,)) for _ in range(2))
    return mean, invstd, stats.new_empty((processes,), dtype=torch.int32)


def _fake_elemt(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _fake_backward_reduce(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, mask: Sequence[bool]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    like = mean if weight is None else weight
    of_weight, of_bias = (torch.empty_like(like) if wanted else None for wanted in mask[1:])
    return mean.new_empty((2 * mean.shape[0] if mask[0] else 0,)), of_weight, of_bias


def _fake_all_reduce(sums: Tensor, group: str) -> Tensor:
    return torch.empty_like(sums)


def _fake_backward_elemt(grad: Tensor, x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


# ---- registration ----

#: Per operator what runs on a CPU, on CUDA, and on tensors without storage.
_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "sync_batch_norm_stats": (_stats_cpu, _stats_cuda, _fake_stats),
    "sync_batch_norm_gather": (sync_batch_norm_gather, sync_batch_norm_gather, _fake_gather),
    "sync_batch_norm_gather_functional": (
        _functional(sync_batch_norm_gather),
        _functional(sync_batch_norm_gather),
        _functional(_fake_gather),
    ),
    "sync_batch_norm_elemt": (_elemt_cpu, _elemt_cuda, _fake_elemt),
    "sync_batch_norm_backward_reduce": (_backward_reduce_cpu, _backward_reduce_cuda, _fake_backward_reduce),
    "sync_batch_norm_all_reduce": (sync_batch_norm_all_reduce, sync_batch_norm_all_reduce, _fake_all_reduce),
    "sync_batch_norm_backward_elemt": (_backward_elemt_cpu, _backward_elemt_cuda, _fake_backward_elemt),
}

_gather_alone = functools.partial(sync_batch_norm_gather, collect=_as_if_alike)
#: Operators that wait for the other processes of a group, whose name is their last argument; and what does the same in
#: one process alone, for measuring: a process that is profiled does not know when the others are.
COMMUNICATING: dict[str, Callable[..., Any]] = {
    "monet_like.sync_batch_norm_gather.default": _gather_alone,
    "monet_like.sync_batch_norm_gather_functional.default": _functional(_gather_alone),
    "monet_like.sync_batch_norm_all_reduce.default": _all_reduce_alone,
}


def register() -> list[torch.library.Library]:
    """Make the operators exist, as long as what is returned does; once per process."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        cpu, cuda, fake = _KERNELS[name]
        library.impl(name, cpu, "CPU")
        library.impl(name, cuda, "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return [library]
