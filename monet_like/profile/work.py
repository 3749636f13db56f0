"""What tasks do on any device: arithmetic and memory traffic, counted on tensors without storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ..capture.captured import Captured, distinct_tasks
from ..ir.program import Call, Ref, Task
from ..ops import liger
from .gpu_paces import channels_of, is_known, kind_of
from .observing import RANDOM_STATE, Observer, observe
from .workspaces import (
    CONVOLUTIONS,
    IM2COL,
    TILE,
    Need,
    Workspaces,
    filters_and_groups,
    group_channels,
    read_for_its_shape,
)

_SCALED_INT8 = "bitsandbytes.int8_scaled_mm.default"
#: They make tensors without values.
_EMPTY = (torch.ops.aten.empty_strided, torch.ops.aten.new_empty_strided)


@dataclass(frozen=True, slots=True)
class Operation:
    """What one operator of a task does, on any device.

    Attributes:
        kind: of it, a key of `monet_like.profile.gpu_paces.PACES`.
        flops: floating-point operations of matrix products.
        convolution_flops: of convolutions.
        touched_bytes: that it reads and writes.
        half: whether it computes at least at the rate of 16-bit floats.
        group_channels: of one group of a convolution, the fewer of input and output; 1 if it is depthwise, `TILE` or
            more if it fills tensor cores.
        channels: that have a block of threads each on a GPU; 0: it has no such blocks.
        launches: of kernels, where one does not do.
    """

    kind: str = "elementwise"
    flops: int = 0
    convolution_flops: int = 0
    touched_bytes: int = 0
    half: bool = False
    group_channels: int = TILE
    channels: int = 0
    launches: int = 1


@dataclass(frozen=True, slots=True)
class Work:
    """What a task does, on any device.

    Attributes:
        operations: one after another.
        needs: what operators need beside what it reads and writes, the most among them.
    """

    operations: tuple[Operation, ...] = ()
    needs: tuple[Need, ...] = ()


#: The work of programs' tasks, as long as they exist: counting runs all of them, and one is priced for several devices.
_WORKS: WeakKeyDictionary[Captured, dict[str, Work]] = WeakKeyDictionary()


def works_of(captured: Captured) -> dict[str, Work]:
    """The work of every distinct task; equal tasks of several programs, as blocks have them, are counted once."""
    if captured not in _WORKS:
        known = {look: work for other, works in _WORKS.items() for look, work in _looked(other, works)}
        found = _WORKS[captured] = {}
        for key, task in distinct_tasks(captured).items():
            look = _look(captured, task)
            found[key] = known[look] if look in known else Work() if task.copies else _work(captured, task)
    return _WORKS[captured]


def _looked(captured: Captured, works: Mapping[str, Work]) -> Iterator[tuple[Any, Work]]:
    tasks = distinct_tasks(captured)
    return ((_look(captured, tasks[key]), work) for key, work in works.items())


def _look(captured: Captured, task: Task) -> Any:
    """All that the work of a task depends on: its key, and the storages, of which it may see parts."""
    sizes = tuple(captured.metas[value].storage_bytes for value in (*task.reads, *task.writes))
    return task.cost, captured.device, task.copies, sizes


def touched_bytes(captured: Captured, task: Task) -> int:
    """Bytes that a task's operators read and write, results that one hands to the next included."""
    if len(task.calls) == 1 or _is_opaque(task):
        return _touched_by(captured, task)
    known = _WORKS.get(captured, {}).get(task.cost)
    operations = _operations(captured, task) if known is None or task.copies else known.operations
    return sum(operation.touched_bytes for operation in operations)


def flops(captured: Captured, task: Task) -> int:
    """Floating-point operations of the matrix products and convolutions in a task."""
    return sum(operation.flops + operation.convolution_flops for operation in _operations(captured, task))


def _work(captured: Captured, task: Task) -> Work:
    workspaces = Workspaces(captured, task)
    operations = _operations(captured, task, *[workspaces] * workspaces.are_asked)
    return Work(operations, workspaces.needs)


def _operations(captured: Captured, task: Task, *others: Observer) -> tuple[Operation, ...]:
    """What each operator does; ``others`` see them, too."""
    counter, alone = Operations(), len(task.calls) == 1
    metas = [captured.metas[value] for value in (*task.reads, *task.writes)]
    one_width = len({meta.dtype.itemsize for meta in metas if meta.dtype.is_floating_point}) < 2
    is_plain = alone and one_width and not is_known(task.calls[0].op)
    told = others if is_plain or _is_opaque(task) else (counter, *others)
    if told:
        observe(captured, task, told)
    if _is_opaque(task):
        return (_opaque(captured, task),)
    if not alone:
        return tuple(counter.found)
    found = [Operation()] if is_plain else counter.found[:1]
    return tuple(replace(operation, touched_bytes=_touched_by(captured, task)) for operation in found)


def _touched_by(captured: Captured, task: Task) -> int:
    """Of whole storages, of which the task's last call, which is its only one that moves data, may see parts."""
    call = task.calls[-1]
    unread = read_for_its_shape(call.op, call.args)
    values = [v for v in (*task.reads, *task.writes) if unread is None or unread != Ref(v)]
    return sum(captured.metas[v].storage_bytes for v in values)


def _opaque(captured: Captured, task: Task) -> Operation:
    """Of a task that cannot run on fake tensors: by its values alone."""
    touched = _touched_by(captured, task)
    columns = [call for call in task.calls if call.op == IM2COL]
    if not columns:
        return Operation(touched_bytes=touched)
    samples = captured.metas[columns[0].args[0].name].shape[0]
    products = sum(_im2col_flops(captured, call) for call in columns)
    return Operation("convolution, sample by sample", products, touched_bytes=touched, launches=samples)


def _flop_formulas() -> dict[Any, Callable[..., int]]:
    """By operator, from the shapes of arguments; with some that PyTorch's counter does not know."""
    found: dict[Any, Callable[..., int]] = {}
    for kind in ("flash", "efficient", "cudnn"):  # before 2.12 the counter refused grouped heads
        name = f"_scaled_dot_product_{kind}_attention"
        found[getattr(torch.ops.aten, name)] = _attention_flops
        found[getattr(torch.ops.aten, f"{name}_backward")] = _attention_backward_flops
    if hasattr(torch.ops.aten, "_grouped_mm"):
        found[torch.ops.aten._grouped_mm] = _grouped_flops
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        found[torch.ops.mkldnn._linear_pointwise] = lambda x, weight, *_, **__: 2 * prod(x[:-1]) * prod(weight)
    if hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        found[torch.ops.bitsandbytes.gemm_4bit] = lambda x, _, weight, *__, **___: 2 * prod(x[:-1]) * prod(weight)
        found[torch.ops.bitsandbytes.int8_scaled_mm] = lambda x, weight, *_, **__: 2 * prod(x[:-1]) * prod(weight)
    if hasattr(torch.ops.monet_like, "mm_largest"):  # as if it were dense, which it is on a GPU
        found[torch.ops.monet_like.mm_largest] = lambda grad, _, __, columns, *___, **____: 2 * prod(grad) * columns
    return dict(FlopCounterMode(display=False, custom_mapping=found).flop_registry)


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Of scores and of their products with values, for each head of ``query`` [N, heads, length, width]; a mask saves
    nothing.
    """
    return 2 * prod(query[:3]) * key[2] * (query[3] + value[3])


def _attention_backward_flops(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> int:
    """Scores again and two products with their gradients; two with the values' or the result's."""
    return 2 * prod(query[:3]) * key[2] * (3 * query[3] + 2 * value[3])


def _grouped_flops(one: Any, other: Any, offs: Any = None, *_: Any, **__: Any) -> int:
    """Of products of groups, which are ranges of rows of one matrix: each row or column belongs to one group."""
    del offs
    rows = one[-2] * (one[0] if len(one) == len(other) == 3 else 1)
    return 2 * int(rows) * int(one[-1]) * int(other[-1])


def _im2col_flops(captured: Captured, call: Call) -> int:
    """The same products as the convolution itself."""
    (out,), filters = call.outs, call.args[1]
    assert out is not None and isinstance(out.name, int)
    cells = prod(iter(captured.metas[out.name].shape))
    return 2 * cells * prod(iter(captured.metas[filters.name].shape[1:]))


def _is_opaque(task: Task) -> bool:
    """Whether a task cannot run as it is on fake tensors: no kernel for them, or a random generator's state."""
    return any(call.op == IM2COL or call.op.endswith(RANDOM_STATE) for call in task.calls)


class Operations(Observer):
    """Notes every operator's `Operation`, in `found`; memory traffic of a storage is no more than there is of it.

    Views do nothing, nor do new tensors without values and questions such as ``prim.device``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Operation] = []

    @cached_property
    def formulas(self) -> dict[Any, Callable[..., int]]:
        """See `_flop_formulas`."""
        return _flop_formulas()

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Note an operator."""
        asked = not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result))
        if not asked and not func.is_view and func.overloadpacket not in _EMPTY:
            self.found.append(self._operation(func, args, kwargs, result))

    def _operation(self, func: Any, given: Any, kwargs: dict[str, Any], result: Any) -> Operation:
        op, args = str(func), _by_place(func, given, kwargs)
        unread = read_for_its_shape(op, args)
        tensors = [leaf for leaf in tree_leaves((given, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        kind, formula = kind_of(op, args, result), self.formulas.get(func.overloadpacket)
        is_convolution = op in CONVOLUTIONS
        return Operation(
            kind,
            int(formula(*given, **kwargs, out_val=result)) if formula and not is_convolution else 0,
            _convolution_flops(op, args, result) if is_convolution else 0,
            _traffic([tensor for tensor in tensors if tensor is not unread]) + _extra_traffic(op, args, result),
            op == _SCALED_INT8 or any(t.is_floating_point() and t.element_size() == 2 for t in tensors),
            group_channels(op, args) if is_convolution else TILE,
            channels_of(kind, args),
        )


def _by_place(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments that have a place, defaults too, which a trace leaves out at the end."""
    missing = (argument for argument in func._schema.arguments[len(args) :] if not argument.kwarg_only)
    return (*args, *(kwargs.get(argument.name, argument.default_value) for argument in missing))


def _extra_traffic(op: str, args: Sequence[Any], result: Any) -> int:
    return liger.extra_traffic_bytes(op, args, tree_leaves(result)) if liger.is_ours(op) else 0


def _traffic(tensors: Sequence[torch.Tensor]) -> int:
    parts = {(t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()): t.nbytes for t in tensors}
    touched = Counter[int]()
    for (storage, *_), size in parts.items():
        touched[storage] += size
    whole = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(min(touched[storage], size) for storage, size in whole.items())


def _convolution_flops(op: str, args: Sequence[Any], result: Any) -> int:
    """Of all that is computed. PyTorch's counter takes gradients of grouped weights for those of whole ones."""
    filters, _ = filters_and_groups(op, args)
    forward = op == CONVOLUTIONS[0]
    transposed = args[6 if forward else 7]
    results = result if forward else args[0]
    small = args[0 if forward else 1] if transposed else results  # each element of it meets a filter
    once = 2 * small.numel() * prod(filters.shape[1:])
    return once if forward else once * sum(args[10][:2])
