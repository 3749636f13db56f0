"""Memory beside what tasks read and write, on any device, counted on tensors without storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..capture.captured import Captured
from ..ir.program import Task
from ..ops import liger
from ..ops.caches import largest_kept
from ..runtime.batch_norm import CUDNN_BACKWARD
from .gpu_paces import is_channels_last
from .observing import LiveBytes, Observer, made_by

IM2COL = "aten._slow_conv2d_forward.default"
CONVOLUTIONS = ("aten.convolution.default", "aten.convolution_backward.default")
_GEMM_4BIT = "bitsandbytes.gemm_4bit.default"
_MM_LARGEST = "monet_like.mm_largest.default"
#: As many elements as mm_largest makes dense at a time (csrc/cpu/mm_largest.cpp, csrc/cuda/caches.cu).
_DENSE = 1 << 22
#: Gradients of fused attention; cuDNN's is taken to need what the flash kind does.
_ATTENTION = tuple(
    f"aten._scaled_dot_product_{kind}_attention_backward.default" for kind in ("flash", "cudnn", "efficient")
)
#: Operators that make tensors like their first argument on a GPU, and how many of them.
_LIKE_FIRST = {
    "aten._softmax_backward_data.default": 1,
    "aten.logsumexp.default": 1,
    "aten.binary_cross_entropy_with_logits.default": 2,
}
#: Operators with a workspace of their own.
_HEAVY = (*CONVOLUTIONS, *_ATTENTION, *_LIKE_FIRST, _MM_LARGEST, _GEMM_4BIT, *liger.PARTIAL_SUMS)
#: Channels of a tensor core's tile in a convolution: a group with fewer leaves the rest of it idle. An estimate.
TILE = 32


@dataclass(frozen=True, slots=True)
class Need:
    """Memory beside what a task reads and writes, while one of its operators runs.

    Attributes:
        between_bytes: of tensors that the task has made and not yet released, less all that it writes: negative while
            these do not exist yet.
        unpacked_bytes: that the operator unpacks dropped caches, or 4-bit weights, into.
        convolution_bytes: that a convolution is estimated to need on a GPU.
        gpu_bytes: that the gradient of fused attention and some other operators need on a GPU.
        partial_sums_bytes: of sums that each multiprocessor of a GPU makes of its share, for one multiprocessor.
    """

    between_bytes: int = 0
    unpacked_bytes: int = 0
    convolution_bytes: int = 0
    gpu_bytes: int = 0
    partial_sums_bytes: int = 0


class Workspaces(Observer):
    """Notes what a task's operators need beside its results, by the rules that `monet_like.profile.roofline` states.

    Attributes:
        are_asked: whether it must see the task's operators.
    """

    def __init__(self, captured: Captured, task: Task) -> None:
        super().__init__()
        runs = all(call.op != IM2COL for call in task.calls)
        self.are_asked = runs and (len(task.calls) > 1 or task.calls[0].op in _HEAVY)
        #: Of operators with equal needs of their own, that with the most between them.
        self._noted: dict[Need, int] = {}
        self._other = Need(_unwanted_bytes(captured, task)), Need(convolution_bytes=_im2col_bytes(captured, task))
        self._written = sum(captured.metas[v].storage_bytes for v in made_by(task))
        self._begun = False
        self._taken = task.reads.index(task.overwrites) if task.overwrites is not None else None
        self._live = LiveBytes()

    def begin(self, given: Sequence[torch.Tensor]) -> None:
        """Count what the task takes over, in whose place it writes, until it is released."""
        self._begun = True
        if self._taken is not None:
            self._live.add(given[self._taken])

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Note an operator."""
        # An operator that is noted alone makes what is written.
        between = self._live.after(args, kwargs, result) - self._written if self._begun else 0
        own = own_need(str(func), args, result)
        self._noted[own] = max(between, self._noted.get(own, between))

    @property
    def needs(self) -> tuple[Need, ...]:
        """Some memory at some moments of the task, the most among them."""
        noted = (replace(own, between_bytes=between) for own, between in self._noted.items())
        return tuple(need for need in (*noted, *self._other) if need != Need())


def own_need(op: str, args: Any, result: Any) -> Need:
    """What an operator itself needs."""
    if op in CONVOLUTIONS and group_channels(op, args) > 1:  # depthwise ones need none
        return Need(convolution_bytes=_transposed_bytes(op, args, result))
    if op in _ATTENTION:
        return Need(gpu_bytes=_attention_bytes(*args[1:4], blocks=op == _ATTENTION[-1]))
    if op in _LIKE_FIRST:
        return Need(gpu_bytes=_LIKE_FIRST[op] * args[0].numel() * args[0].element_size())
    if op in liger.PARTIAL_SUMS and args[2] is not None:
        return Need(partial_sums_bytes=4 * args[2].numel())
    if op == _GEMM_4BIT:
        return Need(unpacked_bytes=prod(args[2]) * result.element_size())
    if op == _MM_LARGEST:
        grad, _, keep, columns = args[:4]
        elements, size = grad.shape[0] * columns, grad.element_size()
        # sorted: a value and an int32 for each; of 16-bit floats some may be made dense instead
        dense = min(elements, _DENSE) * size if size == 2 else 0
        return Need(unpacked_bytes=max(largest_kept(elements, keep) * (max(4, size) + 4), dense))
    return Need()


def _attention_bytes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, blocks: bool) -> int:
    """Of the gradient of queries [N, heads, length, width], in float32, and of a number for each query; of keys and
    values one for each head of the queries, if several share them.

    Args:
        blocks: the efficient kind, whose blocks of 64 queries have a column of 64 or 128 elements each.
    """
    (samples, heads, length, width), size = query.shape, query.element_size()
    keys, of_values = key.shape[-2], value.shape[-1]
    shared = size * samples * heads * keys * (width + of_values) if key.shape[1] != heads else 0
    if not blocks:
        rows = samples * heads * _up(length, 128)
        return 4 * rows * (_up(width, 32) + 1) + shared
    column = 64 if max(width, of_values) <= 64 else 128
    found = samples * heads * (_up(length, 64) // 64 * (4 * 64 * _up(width, column) + 256) + 4 * _up(length, 64))
    if size == 2 and max(width, of_values) > 128:  # sums of these do not stay in registers
        found += 4 * samples * heads * _up(keys, 128) * (_up(width, 128) + _up(of_values, 128))
    return found + shared


def _up(extent: int, step: int) -> int:
    return -(-extent // step) * step


def _transposed_bytes(op: str, args: Any, result: Any) -> int:
    filters, _ = filters_and_groups(op, args)
    of_weight = op == CONVOLUTIONS[1] and args[-1][1]
    unread = [read_for_its_shape(op, args), filters if of_weight and not args[-1][0] else None]
    leaves = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
    data = [leaf for leaf in leaves if leaf.dim() == filters.dim() and all(leaf is not other for other in unread)]
    if any(map(is_channels_last, data)):
        return filters.numel() * max(4, filters.element_size()) if of_weight else 0
    return sum(leaf.numel() * leaf.element_size() for leaf in data)


def _im2col_bytes(captured: Captured, task: Task) -> int:
    """On a GPU, columns are made of one sample after another."""
    found = [0]
    for call in task.calls:
        if call.op == IM2COL:
            (out,), filters = call.outs, captured.metas[call.args[1].name]
            assert out is not None and isinstance(out.name, int)
            found.append(prod(filters.shape[1:]) * prod(captured.metas[out.name].shape[2:]) * filters.dtype.itemsize)
    return max(found)


def _unwanted_bytes(captured: Captured, task: Task) -> int:
    found = [0]
    for call in task.calls:
        if call.op == CUDNN_BACKWARD and call.outs[0] is None and isinstance(call.args[0].name, int):
            found.append(captured.metas[call.args[0].name].storage_bytes)
    return max(found)


def read_for_its_shape(op: str, args: Sequence[Any]) -> Any:
    """The tensor argument that an operator takes for its shape alone, if there is one."""
    of_weight = op == "aten.convolution_backward.default" and args[-1][1]
    pools = ("aten.max_pool2d_with_indices_backward.default", "aten._adaptive_avg_pool2d_backward.default")
    return args[1] if op in pools or (op == "aten.convolution_backward.default" and not of_weight) else None


def filters_and_groups(op: str, args: Sequence[Any]) -> tuple[torch.Tensor, int]:
    """The filters of a convolution, and into how many groups its channels fall."""
    return (args[1], args[8]) if op == CONVOLUTIONS[0] else (args[2], args[9])


def group_channels(op: str, args: Sequence[Any]) -> int:
    """The fewer of input and output channels of a group; `TILE` if there is one group."""
    filters, groups = filters_and_groups(op, args)
    return min(filters.shape[0] // groups, filters.shape[1]) if groups > 1 else TILE
