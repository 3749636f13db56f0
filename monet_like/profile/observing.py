"""Has observers see the operators of a task, with tensors that have shapes and no storage."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ..capture.captured import Captured, TensorMeta, shape_mode
from ..ir.program import Call, Ref, Task, refs
from ..runtime.codegen import Block, compile_block
from ..runtime.operators import overload, schema_of

RANDOM_STATE = "_rng_state"
#: Its mask says which of its results there are.
_MASKED = "aten.convolution_backward.default"


class Observer(TorchDispatchMode):
    """Sees operators with their arguments and results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(func, args, kwargs or {}, result)
        return result

    def begin(self, given: Sequence[torch.Tensor]) -> None:
        """Called before a task runs, with what it reads; not where its only operator is noted without running."""

    def note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Called with every operator, after it."""
        raise NotImplementedError


class LiveBytes:
    """The bytes of the storages that operators have made and that are alive."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, once, until its last tensor is gone."""
        storage = tensor.untyped_storage()
        self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def after(self, args: Any, kwargs: Any, result: Any) -> int:
        """The bytes after an operator, whose results count unless they lie in an argument's storage."""
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        leaves = tree_leaves((args, kwargs))
        given = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in given:
                self.add(leaf)
        return sum(size for _, size in self._alive.values())


def observe(captured: Captured, task: Task, observers: Sequence[Observer]) -> None:
    """Have observers see a task's operators."""
    if len(task.calls) > 1 or not _is_operator(task.calls[0]):
        return _run_fake(captured, task, observers)
    known: dict[Ref, torch.Tensor] = {}

    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        if leaf not in known:
            assert isinstance(leaf.name, int)
            known[leaf] = _laid_out(captured.metas[leaf.name])
        return known[leaf]

    (call,) = task.calls
    args, kwargs, results = (tree_map(tensor, part) for part in (call.args, dict(call.kwargs), call.outs))
    for observer in observers:
        observer.note(overload(call.op), args, kwargs, results if call.unpack else results[0])


def made_by(task: Task) -> tuple[int, ...]:
    """What a task writes and one of its calls makes: tensors; the rest are side effects."""
    made = {out.name for call in task.calls for out in call.outs if out is not None}
    return tuple(value for value in task.writes if value in made)


def _is_operator(call: Call) -> bool:
    """Whether a call is one operator whose arguments and results are all values: then nothing need run to know them."""
    if schema_of(call.op) is None or not all(
        isinstance(ref.name, int) for ref in (*refs(call), *filter(None, call.outs))
    ):
        return False
    op = overload(call.op)
    in_parts = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    complete = None not in call.outs or call.op == _MASKED
    return complete and any(call.outs) and not in_parts and not op.is_view


def _run_fake(captured: Captured, task: Task, observers: Sequence[Observer]) -> None:
    """Run a task on tensors without storage, under modes that observe its operators.

    Random generators are left alone: their state is real, and these tensors are not.
    """
    calls = tuple(call for call in task.calls if not call.op.endswith(RANDOM_STATE))
    task = replace(task, calls=calls)
    run = compile_block(Block(task.reads, (task,), (), made_by(task)), task.name)
    mode = shape_mode()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(_Repeated(mode))
        given = [_fake(captured.metas[value], mode) for value in task.reads]
        for observer in observers:
            observer.begin(given)
            stack.enter_context(observer)
        with torch.no_grad(), torch._C._DisableAutocast():
            run(given)


class _Repeated(TorchDispatchMode):
    """Knows the results of an operator from an equal call before: a task in tiles has the same calls for each tile."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode
        self.known: dict[Any, list[TensorMeta]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        into = kwargs.get("out")
        if not isinstance(into, torch.Tensor) and not _makes_new_tensors(func):
            return func(*args, **kwargs)
        key = func, _looks((args, tuple(kwargs.items())))
        if key in self.known and into is not None:
            return into
        if key in self.known:
            made = [_fake(meta, self.mode) for meta in self.known[key]]
            return made[0] if len(func._schema.returns) == 1 else tuple(made)
        result = func(*args, **kwargs)
        results = [result] if isinstance(result, torch.Tensor) else result
        if into is result or all(isinstance(each, torch.Tensor) and _is_whole(each) for each in results):
            self.known[key] = [*map(TensorMeta.of, results)]
        return result


@cache
def _makes_new_tensors(func: Any) -> bool:
    """Whether all that an operator does is to return tensors in memory of their own."""
    returned = func._schema.returns
    kinds = all(str(each.type) == "Tensor" and each.alias_info is None for each in returned)
    return bool(returned) and kinds and not func._schema.is_mutable


def _looks(leaf: Any) -> Any:
    """All that tells the look of an operator's results of an argument."""
    if isinstance(leaf, torch.Tensor):
        device = leaf.fake_device if isinstance(leaf, FakeTensor) else leaf.device
        return leaf.dtype, device, leaf.shape, leaf.stride(), leaf.is_conj(), leaf.is_neg()
    return tuple(map(_looks, leaf)) if isinstance(leaf, tuple | list) else (type(leaf), leaf)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Whether a storage begins and ends with a tensor's first and last element."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = tensor.element_size() * (last + 1) if tensor.numel() else 0
    return bool(tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == size)


def _fake(meta: TensorMeta, mode: FakeTensorMode) -> FakeTensor:
    """As `TensorMeta.empty` makes it under ``mode``, which takes as long as an operator of the task."""
    return FakeTensor(mode, _laid_out(meta), meta.device)


def _laid_out(meta: TensorMeta) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
