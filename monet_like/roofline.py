"""Costs without measuring: the larger of arithmetic and memory traffic at a device's datasheet rates.

For planning for a device that is not at hand, and to judge in advance how long measuring would take.

Where the rates are from (all are peaks, which no operator reaches; nothing here was measured, but for ``cpu``):

* a100: "NVIDIA A100 Tensor Core GPU" datasheet, column A100 40GB PCIe: FP32 19.5 TFLOPS, BFLOAT16 Tensor Core 312,
  40 GB HBM2, 1,555 GB/s.
* h100: "NVIDIA H100 Tensor Core GPU" datasheet, column H100 SXM: FP32 67 TFLOPS, BFLOAT16 Tensor Core 989 (without
  sparsity), 80 GB, 3.35 TB/s.
* h200: "NVIDIA H200 Tensor Core GPU" datasheet, column H200 SXM: FP32 67 TFLOPS, BFLOAT16 989 (without sparsity),
  141 GB, 4.8 TB/s.
* rtx4090: "NVIDIA Ada GPU Architecture" whitepaper, appendix A: FP32 82.6 TFLOPS, FP16 Tensor Core with FP32
  accumulate 165.2 (without sparsity), 24 GB GDDR6X, 1,008 GB/s.
* rtx2080ti: "NVIDIA Turing GPU Architecture" whitepaper, reference card: FP32 13.4 TFLOPS, 11 GB, 616 GB/s.
* p100: "NVIDIA Tesla P100" datasheet, PCIe 16 GB: FP32 9.3 TFLOPS, FP16 18.7, 732 GB/s.

FP32 is without TF32, as PyTorch multiplies float32 matrices by default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from .capture import Captured
from .codegen import Block, compile_block
from .kernels.reference import largest_kept
from .mode import ALGORITHMS
from .profiler import distinct_tasks
from .program import REFUSED, Call, Cost, Ref, Task
from .tracing import fake_mode
from .units import GIB


@dataclass(frozen=True)
class DeviceLimits:
    """A device's rates.

    Attributes:
        name: for people.
        flops_per_second: of matrix products, in the precision that training uses by default for float32 models.
        half_flops_per_second: the same for 16-bit floats.
        bytes_per_second: memory bandwidth.
        host_bytes_per_second: of copies to and from the host, in one direction.
        launch_seconds: the least any operator takes.
        source: where the figures come from.
        memory_bytes: in all, a GB of the datasheet taken as 2**30 bytes; 0: not told.
        device: ``cuda`` or ``cpu``, what programs for it are captured as.
        product: words that PyTorch's name of the device has, lower case; "": none are known.
    """

    name: str
    flops_per_second: float
    half_flops_per_second: float
    bytes_per_second: float
    host_bytes_per_second: float
    launch_seconds: float
    source: str
    memory_bytes: int = 0
    device: str = "cpu"
    product: str = ""


#: Bytes a second and direction of a link of 16 lanes: PCI Express 3.0, 4.0 and 5.0, by NVIDIA's datasheets 32, 64 and
#: 128 GB/s in both; and the share of it that large copies of pinned memory are taken to reach.
PCIE3, PCIE4, PCIE5 = (0.8 * rate for rate in (16e9, 32e9, 64e9))


def _gpu(
    name: str, flops: float, half: float, bandwidth: float, link: float, gigabytes: int, product: str, source: str
) -> DeviceLimits:
    return DeviceLimits(name, flops, half, bandwidth, link, 4e-6, source, gigabytes * GIB, "cuda", product)


#: Of the estimates below: raised whenever they change, because plans made from them then would not come out again.
ROOFLINE_VERSION = 2

DEVICES: Mapping[str, DeviceLimits] = {
    limits.name: limits
    for limits in (
        DeviceLimits(
            "cpu", 1.0e11, 1.0e11, 1.5e10, 1e9, 2e-6, "a server CPU on two cores, as measured; files: a guess"
        ),
        _gpu("p100", 9.3e12, 18.7e12, 732e9, PCIE3, 16, "p100", "NVIDIA Tesla P100 PCIe 16 GB datasheet"),
        _gpu("a100", 19.5e12, 312e12, 1555e9, PCIE4, 40, "a100", "NVIDIA A100 40 GB PCIe datasheet, FP32 without TF32"),
        _gpu("h100", 67e12, 989e12, 3350e9, PCIE5, 80, "h100", "NVIDIA H100 SXM datasheet, FP32 without TF32"),
        _gpu("h200", 67e12, 989e12, 4800e9, PCIE5, 141, "h200", "NVIDIA H200 SXM datasheet, FP32 without TF32"),
        _gpu(
            "rtx2080ti", 13.4e12, 53.8e12, 616e9, PCIE3, 11, "2080 ti", "NVIDIA Turing whitepaper, reference card, FP32"
        ),
        _gpu("rtx4090", 82.6e12, 165.2e12, 1008e9, PCIE4, 24, "4090", "NVIDIA Ada architecture whitepaper, FP32"),
    )
}


#: What reads dropped caches.
_UNPACKING = ("monet_like.unpack_largest.default", "monet_like.mm_largest.default")
#: As many elements as mm_largest makes dense at a time (csrc/cpu/mm_largest.cpp, csrc/cuda/caches.cu).
_DENSE = 1 << 22
_IM2COL = "aten._slow_conv2d_forward.default"


def roofline(captured: Captured, limits: DeviceLimits) -> dict[str, Cost]:
    """The cost of every distinct task of ``captured`` on a device with ``limits``.

    Workspace is taken to be 0, but for what a dropped cache is unpacked into: a tensor as large as the one dropped, or,
    for a product with it, a copy of what is kept or of some rows. Rates know no algorithms: what ``algorithms`` admits is refused, so that
    plans take PyTorch's own.
    """
    priced = {task.cost for task in captured.every_task() if task.word != ALGORITHMS}
    tasks, works = distinct_tasks(captured), _works(captured)
    return {
        key: Cost(_seconds(captured, task, works[key], limits), works[key].unpacked_bytes) if key in priced else REFUSED
        for key, task in tasks.items()
    }


@dataclass(frozen=True, slots=True)
class _Work:
    """What a task does, on any device."""

    flops: int = 0
    touched_bytes: int = 0
    unpacked_bytes: int = 0


#: The work of programs' tasks, as long as they exist: counting runs all of them, and one is priced for several devices.
_WORKS: WeakKeyDictionary[Captured, dict[str, _Work]] = WeakKeyDictionary()


def _works(captured: Captured) -> dict[str, _Work]:
    """The work of every distinct task."""
    if captured not in _WORKS:
        found = {}
        for key, task in distinct_tasks(captured).items():
            work = (0, 0) if task.copies else (flops(captured, task), touched_bytes(captured, task))
            found[key] = _Work(*work, _unpacked_bytes(captured, task))
        _WORKS[captured] = found
    return _WORKS[captured]


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
    half = any(metas[v].dtype.itemsize == 2 and metas[v].dtype.is_floating_point for v in task.reads)
    rate = limits.half_flops_per_second if half else limits.flops_per_second
    return max(limits.launch_seconds, work.flops / rate, work.touched_bytes / limits.bytes_per_second)


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
    heavy = ("conv", "mm", "attention", "linear")
    if not any(word in call.op for call in task.calls for word in heavy):
        return 0
    if _is_opaque(task):
        return sum(_im2col_flops(captured, call) for call in task.calls if call.op == _IM2COL)
    counter = FlopCounterMode(display=False, custom_mapping=_flop_formulas())
    _run_fake(captured, task, counter)
    return int(counter.get_total_flops())


def _flop_formulas() -> dict[Any, Callable[..., int]]:
    """Of operators that PyTorch's counter does not know, from the shapes of their arguments."""
    found: dict[Any, Callable[..., int]] = {}
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        found[torch.ops.mkldnn._linear_pointwise] = lambda x, weight, *_, **__: 2 * prod(x[:-1]) * prod(weight)
    if hasattr(torch.ops.monet_like, "mm_largest"):  # as if it were dense, which it is on a GPU
        found[torch.ops.monet_like.mm_largest] = lambda grad, _, __, columns, *___, **____: 2 * prod(grad) * columns
    return found


def _im2col_flops(captured: Captured, call: Call) -> int:
    """The same products as the convolution itself."""
    (out,), filters = call.outs, call.args[1]
    assert out is not None and isinstance(out.name, int)
    cells = prod(iter(captured.metas[out.name].shape))
    return 2 * cells * prod(iter(captured.metas[filters.name].shape[1:]))


def _read_for_its_shape(op: str, args: Sequence[Any]) -> Any:
    """The tensor argument that an operator takes for its shape alone, if there is one."""
    of_weight = op == "aten.convolution_backward.default" and args[-1][1]
    pools = ("aten.max_pool2d_with_indices_backward.default", "aten._adaptive_avg_pool2d_backward.default")
    return args[1] if op in pools or (op == "aten.convolution_backward.default" and not of_weight) else None


def _is_opaque(task: Task) -> bool:
    """Whether a task cannot run on fake tensors: no kernel for them, or a random generator's state."""
    return any(call.op == _IM2COL or call.op.endswith("_rng_state") for call in task.calls)


def _run_fake(captured: Captured, task: Task, observer: Any) -> None:
    """Run a task on tensors without storage, under a mode that observes its operators."""
    run = compile_block(Block(task.reads, (task,)), task.name)
    with fake_mode(), observer, torch.no_grad(), torch._C._DisableAutocast():
        inputs: list[Any] = []
        for value in task.reads:
            meta = captured.metas[value]
            inputs.append(torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device))
        run(inputs)


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
    """Sums what dropped caches are unpacked into."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if str(func) == "monet_like.unpack_largest.default":
            self.bytes += result.untyped_storage().nbytes()
        elif str(func) == "monet_like.mm_largest.default":
            grad, _, keep, columns = args[:4]
            elements, size = grad.shape[0] * columns, grad.element_size()
            # sorted: a value and an int32 for each; of 16-bit floats some may be made dense instead
            dense = min(elements, _DENSE) * size if size == 2 else 0
            self.bytes += max(largest_kept(elements, keep) * (max(4, size) + 4), dense)
        return result
