"""Input tensors on which tasks run while they are profiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from ..capture.captured import Captured, TensorMeta
from ..ir.program import Call, Task
from ..ops.sync_batch_norm import COMMUNICATING
from ..runtime.codegen import Block, compile_block
from ..runtime.operators import get_rng_state
from .cache_state import CacheState, reuse_bytes

#: What these operators read are probabilities or rates. A GPU that is given other numbers fails for the whole process.
_OF_PROBABILITIES = (
    "aten.bernoulli", "aten.binary_cross_entropy.", "aten.binomial.", "aten.multinomial.", "aten.poisson.",
    "aten._sample_dirichlet.",
    "aten._standard_gamma.",
)  # fmt: skip

#: Of operators of other libraries nobody knows what they read: as `roi_align`'s numbers of images, floating ones may be
#: indices that are not checked. All are 0 where they are uniform in 0 to 1.
_KNOWN = ("aten.", "prims.", "monet_like.")

#: Of integers that these operators read none may be zero: rows that change places.
_OF_PIVOTS = ("aten.lu_unpack.", "aten.linalg_lu_solve.")
#: Lengths that these operators read add up to the length of what they divide.
_OF_LENGTHS = ("aten.segment_reduce.", "aten._segment_reduce_backward.")
#: How often each row is repeated adds up to the rows of the result.
_OF_REPEATS = "aten.repeat_interleave.Tensor"
#: Integers that these operators read are no less than zero: an index less the first one of a part.
_OF_INDICES = ("aten.gather.", "aten.scatter", "aten.index_select.")
#: A mask of this operator has as many places as there are rows to write.
_OF_ROWS = "aten.index_put."


class Inputs:
    """Input tensors for the tasks of a program, made once and shared by tasks whose inputs are alike."""

    def __init__(
        self, captured: Captured, device: torch.device, batches: float = 1.0, *, uniform: bool = False
    ) -> None:
        """Args: batches: the wanted batch in units of the one that is measured. uniform: in 0 to 1, not normal."""
        self.captured, self.device, self.batches, self.uniform = captured, device, batches, uniform
        self.cache: dict[tuple[TensorMeta, int, int | None], torch.Tensor] = {}  # by meta, alike and value
        random = torch.rand if uniform else torch.randn
        self.block = random(2**18, generator=torch.Generator().manual_seed(0)).to(device)

    @cached_property
    def as_uniform(self) -> Inputs:
        """The same, uniform."""
        return Inputs(self.captured, self.device, self.batches, uniform=True)

    @cached_property
    def _reuse(self) -> Mapping[tuple[str, int], tuple[int, ...]]:
        return reuse_bytes(self.captured)

    @cached_property
    def _caches(self) -> CacheState:
        return CacheState(self.device)

    def of(self, task: Task, *, twin: bool = False) -> dict[int, Any]:
        """The inputs of a task, by value: a tensor for each; with ``twin`` a second set.

        Floating ones are normal; for `_OF_PROBABILITIES` and what is not `_KNOWN` uniform in 0 to 1.
        """
        if (maker := self._for(task)) is not self:
            return maker.of(task, twin=twin)
        found, alike = dict[int, Any](), Counter[TensorMeta]()
        for value in task.reads:
            found[value] = self.make(value, alike[self.captured.metas[value]] + twin * len(task.reads))
            alike[self.captured.metas[value]] += 1
        return {value: _admissible(task, tensor, self.captured.metas) for value, tensor in found.items()}

    def _for(self, task: Task) -> Inputs:
        """These, or the uniform ones where the task is to read such."""
        if self.uniform or not any(_wants_uniform(call.op) for call in task.calls):
            return self
        self.as_uniform.captured = self.captured
        return self.as_uniform

    def caches_before(self, task: Task, inputs: Mapping[int, Any], warm: Callable[[], object]) -> Callable[[], None]:
        """To be called before a task with a cost is timed: as much of its inputs is in the cache as in a step.

        ``warm`` is as of `CacheState`.
        """
        since = self._reuse[task.cost, len(task.reads)]
        pairs = zip(map(inputs.__getitem__, task.reads), since, strict=True)
        recent = [(tensor, int(count * self.batches)) for tensor, count in pairs if isinstance(tensor, torch.Tensor)]
        return lambda: self._caches(recent, warm)

    def make(self, value: int, alike: int = 0) -> Any:
        """The tensor of a value: random if it is floating, else made by the operator that makes it in the model.

        Random ones are shared by all values of the same shape. ``alike`` tells those apart that must not be one tensor.
        """
        meta = self.captured.metas[value]
        program = self.captured.program
        made = program.producers[value]
        if program.values[value].spec == "state":
            return get_rng_state(str(self.device))
        if value in self.captured.examples:
            return self._example(value)
        if meta.dtype.is_floating_point or meta.dtype.is_complex or not made:
            return self._random(meta, alike)
        key = (meta, alike, value)
        if key not in self.cache:
            task = program.tasks[made[0]]
            # Of random numbers an index could lie outside.
            if meta.dtype != torch.bool and _converts_floats(task, self.captured.metas):
                return self._random(meta, alike)
            run = compile_block(Block(task.reads, (task,), (), (value,)), task.name, COMMUNICATING)
            maker = self._for(task)
            self.cache[key] = run([_admissible(task, maker.make(v), self.captured.metas) for v in task.reads])[1][0]
        return self.cache[key]

    def _example(self, value: int) -> torch.Tensor:
        """A value that decides sizes: as it was at the capture, in the parts that do."""
        meta = self.captured.metas[value]
        key = (meta, 0, value)
        if key not in self.cache:
            flat = torch.zeros(meta.storage_bytes // meta.dtype.itemsize, dtype=meta.dtype, device=self.device)
            self.cache[key] = made = flat.as_strided(meta.shape, meta.stride, meta.offset)
            for part, recorded in self.captured.examples[value]:
                run = compile_block(Block((value,), (), ((part.calls, part.ref),)), "example")
                ((seen,), _) = run([made])
                for dim, stride in enumerate(seen.stride()):
                    if not stride and seen.shape[dim]:  # expanded
                        seen, recorded = seen.narrow(dim, 0, 1), recorded.narrow(dim, 0, 1)
                seen.copy_(recorded)
        return self.cache[key]

    def _random(self, meta: TensorMeta, alike: int) -> torch.Tensor:
        key = (meta, alike, None)
        if key not in self.cache:
            if sum(t.untyped_storage().nbytes() for t in self.cache.values()) > 2**31:
                self.cache.clear()  # only what is alive at once counts against the device
            elements = meta.storage_bytes // meta.dtype.itemsize
            flat = torch.zeros(elements, dtype=meta.dtype, device=self.device)
            if meta.dtype.is_floating_point or meta.dtype.is_complex:
                numbers = torch.view_as_real(flat).flatten() if meta.dtype.is_complex else flat
                whole = len(numbers) // len(self.block) * len(self.block)
                numbers[:whole].view(-1, len(self.block)).copy_(self.block)
                numbers[whole:].copy_(self.block[: len(numbers) - whole])
            self.cache[key] = flat.as_strided(meta.shape, meta.stride, meta.offset)
        return self.cache[key]


def _wants_uniform(op: str) -> bool:
    """Whether an operator is to read numbers in 0 to 1, as probabilities are and unchecked indices have to be."""
    return op.startswith(_OF_PROBABILITIES) or not op.startswith(_KNOWN)


def _admissible(task: Task, tensor: Any, metas: Sequence[TensorMeta]) -> Any:
    """An input of a task; integers of which it would raise an error are others."""
    call = task.calls[-1]
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if tensor.dtype == torch.bool and call.op.startswith(_OF_ROWS):
        return _with_places(call, tensor, metas)
    if tensor.dtype not in (torch.int32, torch.int64):
        return tensor
    if call.op.startswith(_OF_INDICES):
        return tensor.clamp_min(0)
    if call.op.startswith(_OF_PIVOTS):
        return tensor.clamp_min(1)
    if call.op.startswith(_OF_LENGTHS) and tensor.dim():
        data = call.args[2 if "backward" in call.op else 0]
        return _adding_up_to(metas[data.name].shape[tensor.dim() - 1] if isinstance(data.name, int) else 0, tensor)
    if call.op.startswith(_OF_REPEATS) and (total := dict(call.kwargs).get("output_size")) is not None:
        return _adding_up_to(int(total), tensor)
    return tensor


def _with_places(call: Call, mask: torch.Tensor, metas: Sequence[TensorMeta]) -> torch.Tensor:
    """A mask of the first dimensions that has a place for each row that is written."""
    into, indices, rows = call.args[:3]
    if len(indices) != 1 or not (isinstance(into.name, int) and isinstance(getattr(rows, "name", None), int)):
        return mask
    shape = metas[rows.name].shape
    if len(shape) != len(metas[into.name].shape) - mask.dim() + 1 or shape[0] == 1:
        return mask
    return (torch.arange(mask.numel(), device=mask.device) < shape[0]).view(mask.shape)


def _adding_up_to(total: int, like: torch.Tensor) -> torch.Tensor:
    """Zeros in the place of integers, and at the end of each row their sum."""
    lengths = torch.zeros_like(like)
    lengths[..., -1:] = total
    return lengths


def _converts_floats(task: Task, metas: Sequence[TensorMeta]) -> bool:
    return any(call.op == "aten._to_copy.default" for call in task.calls) and any(
        metas[value].dtype.is_floating_point for value in task.reads
    )
