"""Costs without measuring: the larger of arithmetic and memory traffic at a device's datasheet rates.

For planning for a device that is not at hand, and to judge in advance how long measuring would take.

Where the rates are from: `monet_like.profile.devices`.

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

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ..capture.captured import Captured, distinct_tasks, fake_mode
from ..ir.mode import ALGORITHMS
from ..ir.program import REFUSED, Call, Cost, Ref, Task
from ..ops.caches import largest_kept
from ..runtime.batch_norm import CUDNN_BACKWARD
from ..runtime.codegen import Block, compile_block
from .devices import DeviceLimits

#: Of the estimates below: raised whenever they change, because plans made from them then would not come out again.
ROOFLINE_VERSION = 3


_SCALED_INT8 = "bitsandbytes.int8_scaled_mm.default"
_GEMM_4BIT = "bitsandbytes.gemm_4bit.default"
#: Operators that read dropped caches, or a quantised weight.
_UNPACKING = ("monet_like.unpack_largest.default", "monet_like.mm_largest.default", _GEMM_4BIT)
#: As many elements as mm_largest makes dense at a time (csrc/cpu/mm_largest.cpp, csrc/cuda/caches.cu).
_DENSE = 1 << 22
_IM2COL = "aten._slow_conv2d_forward.default"
_RANDOM_STATE = "_rng_state"
_CONVOLUTIONS = ("aten.convolution.default", "aten.convolution_backward.default")
#: Channels of a tensor core's tile in a convolution: a group with fewer leaves the rest of it idle. An estimate.
TILE = 32
#: The most that convolutions' workspaces are taken to be; what is larger is taken to have a kernel with less.
WORKSPACE_LIMIT_BYTES = 512 * 2**20


def roofline(captured: Captured, limits: DeviceLimits) -> dict[str, Cost]:
    """The cost of every distinct task of ``captured`` on a device with ``limits``.

    Workspace is taken to be 0, with four exceptions. Convolutions on a GPU have the one that is estimated above. What a
    dropped cache is unpacked into is a tensor as large as the one dropped, or, for a product with it, a copy of what is
    kept or of some rows. A product with a 4-bit weight dequantises it. cuDNN makes the gradient of batch norm's input even
    where nobody wants it. Rates know no algorithms: what ``algorithms`` admits is refused, so that plans take PyTorch's own.
    """
    priced = {task.cost for task in captured.every_task() if task.word != ALGORITHMS}
    tasks, works = distinct_tasks(captured), _works(captured)
    return {
        key: Cost(_seconds(captured, task, works[key], limits), _workspace(works[key], limits))
        if key in priced
        else REFUSED
        for key, task in tasks.items()
    }


@dataclass(frozen=True, slots=True)
class _Work:
    """Arithmetic and memory traffic of a task, on any device.

    Attributes:
        flops: of matrix products.
        convolution_flops: of convolutions.
        channels: of one group of these convolutions, the fewer of input and output; 1 if they are depthwise, `TILE` or
            more if they fill tensor cores.
        touched_bytes: that operators read and write.
        unpacked_bytes: that dropped caches, or 4-bit weights, are unpacked into.
        unwanted_bytes: of gradients that are made and not wanted.
        convolution_workspace_bytes: that convolutions are estimated to need on a GPU.
    """

    flops: int = 0
    convolution_flops: int = 0
    channels: int = TILE
    touched_bytes: int = 0
    unpacked_bytes: int = 0
    unwanted_bytes: int = 0
    convolution_workspace_bytes: int = 0


#: The work of programs' tasks, as long as they exist: counting runs all of them, and one is priced for several devices.
_WORKS: WeakKeyDictionary[Captured, dict[str, _Work]] = WeakKeyDictionary()


def _works(captured: Captured) -> dict[str, _Work]:
    """The work of every distinct task."""
    if captured not in _WORKS:
        found = {}
        for key, task in distinct_tasks(captured).items():
            found[key] = _Work() if task.copies else _work(captured, task)
        _WORKS[captured] = found
    return _WORKS[captured]


def _work(captured: Captured, task: Task) -> _Work:
    products, convolutions = _flops(captured, task)
    seen = _Convolutions()
    if any(call.op in _CONVOLUTIONS for call in task.calls):
        _run_fake(captured, task, seen)
    return _Work(
        products,
        convolutions,
        seen.channels,
        touched_bytes(captured, task),
        _unpacked_bytes(captured, task),
        _unwanted_bytes(captured, task),
        max(seen.workspace_bytes, _im2col_bytes(captured, task)),
    )


def _workspace(work: _Work, limits: DeviceLimits) -> int:
    estimated = min(work.convolution_workspace_bytes, WORKSPACE_LIMIT_BYTES) if limits.device == "cuda" else 0
    return max(estimated, work.unpacked_bytes, work.unwanted_bytes)


def _unwanted_bytes(captured: Captured, task: Task) -> int:
    found = [0]
    for call in task.calls:
        if call.op == CUDNN_BACKWARD and call.outs[0] is None and isinstance(call.args[0].name, int):
            found.append(captured.metas[call.args[0].name].storage_bytes)
    return max(found)


def _unpacked_bytes(captured: Captured, task: Task) -> int:
    if not any(call.op in _UNPACKING for call in task.calls):
        return 0
    counter = _UnpackedBytes()
    _run_fake(captured, task, counter)
    return counter.bytes


def _seconds(captured: Captured, task: Task, work: _Work, limits: DeviceLimits) -> float:
    metas = captured.metas
    if task.copies:
        copied = max(metas[v].storage_bytes for v in (*task.reads, *task.writes))
        return limits.launch_seconds + copied / limits.host_bytes_per_second
    half = any(call.op == _SCALED_INT8 for call in task.calls)  # at least that rate
    half |= any(metas[v].dtype.itemsize == 2 and metas[v].dtype.is_floating_point for v in task.reads)
    products, convolutions = limits.flop_rates(half)
    if work.channels < TILE:
        share = work.channels / TILE if work.channels > 1 else 0.0
        convolutions = max(limits.flops_per_second, share * convolutions)
    computing = work.flops / products + work.convolution_flops / convolutions
    return max(limits.launch_seconds, computing, work.touched_bytes / limits.bytes_per_second)


def touched_bytes(captured: Captured, task: Task) -> int:
    """Bytes that a task's operators read and write, results that one hands to the next included."""
    if len(task.calls) == 1 or _is_opaque(task):
        call = task.calls[-1]
        unread = _read_for_its_shape(call.op, call.args)
        values = [v for v in (*task.reads, *task.writes) if unread is None or unread != Ref(v)]
        return sum(captured.metas[v].storage_bytes for v in values)
    counter = _TouchedBytes()
    _run_fake(captured, task, counter)
    return counter.bytes


def flops(captured: Captured, task: Task) -> int:
    """Floating-point operations of the matrix products and convolutions in a task."""
    return sum(_flops(captured, task))


def _flops(captured: Captured, task: Task) -> tuple[int, int]:
    """Floating-point operations of a task's matrix products, and of its convolutions."""
    heavy = ("conv", "mm", "attention", "linear")
    if not any(word in call.op for call in task.calls for word in heavy):
        return 0, 0
    if any(call.op == _IM2COL for call in task.calls):
        return sum(_im2col_flops(captured, call) for call in task.calls if call.op == _IM2COL), 0
    counter = FlopCounterMode(display=False, custom_mapping=_flop_formulas())
    _run_fake(captured, task, counter)
    return counted(counter)


def counted(counter: FlopCounterMode) -> tuple[int, int]:
    """What PyTorch's counter has seen: floating-point operations of matrix products, and of convolutions."""
    counts = counter.get_flop_counts().get("Global", {})
    convolutions = sum(int(count) for operator, count in counts.items() if "convolution" in str(operator))
    return int(counter.get_total_flops()) - convolutions, convolutions


def _flop_formulas() -> dict[Any, Callable[..., int]]:
    """Of operators that PyTorch's counter does not know, from the shapes of their arguments."""
    found: dict[Any, Callable[..., int]] = {}
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        found[torch.ops.mkldnn._linear_pointwise] = lambda x, weight, *_, **__: 2 * prod(x[:-1]) * prod(weight)
    if hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        found[torch.ops.bitsandbytes.gemm_4bit] = lambda x, _, weight, *__, **___: 2 * prod(x[:-1]) * prod(weight)
        found[torch.ops.bitsandbytes.int8_scaled_mm] = lambda x, weight, *_, **__: 2 * prod(x[:-1]) * prod(weight)
    if hasattr(torch.ops.monet_like, "mm_largest"):  # as if it were dense, which it is on a GPU
        found[torch.ops.monet_like.mm_largest] = lambda grad, _, __, columns, *___, **____: 2 * prod(grad) * columns
    return found


def _im2col_flops(captured: Captured, call: Call) -> int:
    """The same products as the convolution itself."""
    (out,), filters = call.outs, call.args[1]
    assert out is not None and isinstance(out.name, int)
    cells = prod(iter(captured.metas[out.name].shape))
    return 2 * cells * prod(iter(captured.metas[filters.name].shape[1:]))


def _im2col_bytes(captured: Captured, task: Task) -> int:
    """On a GPU, columns are made of one sample after another."""
    found = [0]
    for call in task.calls:
        if call.op == _IM2COL:
            (out,), filters = call.outs, captured.metas[call.args[1].name]
            assert out is not None and isinstance(out.name, int)
            found.append(prod(filters.shape[1:]) * prod(captured.metas[out.name].shape[2:]) * filters.dtype.itemsize)
    return max(found)


def _read_for_its_shape(op: str, args: Sequence[Any]) -> Any:
    """The tensor argument that an operator takes for its shape alone, if there is one."""
    of_weight = op == "aten.convolution_backward.default" and args[-1][1]
    pools = ("aten.max_pool2d_with_indices_backward.default", "aten._adaptive_avg_pool2d_backward.default")
    return args[1] if op in pools or (op == "aten.convolution_backward.default" and not of_weight) else None


def _is_opaque(task: Task) -> bool:
    """Whether a task cannot run as it is on fake tensors: no kernel for them, or a random generator's state."""
    return any(call.op == _IM2COL or call.op.endswith(_RANDOM_STATE) for call in task.calls)


def _run_fake(captured: Captured, task: Task, observer: Any) -> None:
    """Run a task on tensors without storage, under a mode that observes its operators.

    Random generators are left alone: their state is real, and these tensors are not.
    """
    calls = tuple(call for call in task.calls if not call.op.endswith(_RANDOM_STATE))
    task = replace(task, calls=calls)
    run = compile_block(Block(task.reads, (task,)), task.name)
    with fake_mode(), observer, torch.no_grad(), torch._C._DisableAutocast():
        run([captured.metas[value].empty() for value in task.reads])


class _TouchedBytes(TorchDispatchMode):
    """Sums what operators read and write, of a storage no more than there is.

    Views touch nothing, nor do questions such as ``prim.device``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        asked = not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result))
        if not asked and not func.is_view and func is not torch.ops.aten.empty_strided.default:
            unread = _read_for_its_shape(str(func), args)
            leaves = tree_leaves((args, kwargs, result))
            tensors = [t for t in leaves if isinstance(t, torch.Tensor) and t is not unread]
            parts = {(t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()): t.nbytes for t in tensors}
            touched = Counter[int]()
            for (storage, *_), size in parts.items():
                touched[storage] += size
            whole = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
            self.bytes += sum(min(touched[storage], size) for storage, size in whole.items())
        return result


class _UnpackedBytes(TorchDispatchMode):
    """Sums what dropped caches and 4-bit weights are unpacked into."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func) == "monet_like.unpack_largest.default":
            self.bytes += result.untyped_storage().nbytes()
        elif str(func) == _GEMM_4BIT:
            self.bytes += prod(args[2]) * result.element_size()
        elif str(func) == "monet_like.mm_largest.default":
            grad, _, keep, columns = args[:4]
            elements, size = grad.shape[0] * columns, grad.element_size()
            # sorted: a value and an int32 for each; of 16-bit floats some may be made dense instead
            dense = min(elements, _DENSE) * size if size == 2 else 0
            self.bytes += max(largest_kept(elements, keep) * (max(4, size) + 4), dense)
        return result


class _Convolutions(TorchDispatchMode):
    """Notes what convolutions' rates and workspaces depend on.

    Attributes:
        channels: as of `_Work`, the least of all.
        workspace_bytes: by the rules at the top of this file, the most of all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.channels, self.workspace_bytes = TILE, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func) in _CONVOLUTIONS:
            backward = func is torch.ops.aten.convolution_backward.default
            filters, groups = args[2 if backward else 1], args[9 if backward else 8]
            channels = min(filters.shape[0] // groups, filters.shape[1])
            if groups > 1:
                self.channels = min(self.channels, channels)
            if groups == 1 or channels > 1:
                self.workspace_bytes = max(self.workspace_bytes, self._copied(func, args, result, filters))
        return result

    @staticmethod
    def _copied(func: Any, args: Any, result: Any, filters: torch.Tensor) -> int:
        of_weight = func is torch.ops.aten.convolution_backward.default and args[-1][1]
        unread = [_read_for_its_shape(str(func), args), filters if of_weight and not args[-1][0] else None]
        leaves = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
        data = [leaf for leaf in leaves if leaf.dim() == filters.dim() and all(leaf is not other for other in unread)]
        if any(map(_is_channels_last, data)):
            return filters.numel() * max(4, filters.element_size()) if of_weight else 0
        return sum(leaf.numel() * leaf.element_size() for leaf in data)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether channels are the innermost dimension; not, where any layout is that one and the default, too."""
    if tensor.is_contiguous() or tensor.dim() not in (4, 5):
        return False
    layout = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return tensor.is_contiguous(memory_format=layout)
