"""The result of a capture: a program with the shapes, memory layouts and calls of its values and tasks."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode

from ..ir.display import short_repr
from ..ir.program import Call, Program, Ref, Task, refs
from ..ops.memory_layout import is_dense
from ..ops.sync_batch_norm import COMMUNICATING
from .annotations import Mark
from .constants import Constants
from .guards.effects import Effects
from .guards.reads import Reads
from .trace.answers import Answer

#: The CUDA caching allocator hands out multiples of this.
CUDA_GRANULARITY_BYTES = 512

#: At most, of a tensor without dimensions: on a CPU it may be an operand of operators of any device.
NUMBER_BYTES = 16


def allocated_bytes(asked: int, device: torch.device) -> int:
    """The bytes that the device's allocator hands out when ``asked`` bytes are requested."""
    step = CUDA_GRANULARITY_BYTES if device.type == "cuda" else 1
    return -(-asked // step) * step


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Dtype, device, shape and memory layout of a tensor: enough to make one like it.

    Attributes:
        dtype, device: as torch's.
        shape, stride: in elements.
        offset: first element within its storage.
        storage_bytes: the size of the storage it lies in.
        lazily: ``conj`` or ``neg`` for elements that lie there conjugated or negated, as views by PyTorch's bits are.
    """

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    storage_bytes: int = 0
    lazily: str = ""

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorMeta:
        """The description of ``tensor``, real or fake."""
        return TensorMeta(
            tensor.dtype,
            tensor.device,
            tuple(map(int, tensor.shape)),
            tuple(map(int, tensor.stride())),
            int(tensor.storage_offset()),
            tensor.untyped_storage().nbytes(),
            " ".join(["conj"] * tensor.is_conj() + ["neg"] * tensor.is_neg()),
        )

    def empty(self) -> torch.Tensor:
        """A new tensor of this shape, stride, dtype and device, at the start of its own storage; not initialised."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def lies_as(self, tensor: torch.Tensor) -> bool:
        """Whether the elements of a tensor of this shape lie as these do: the stride of an extent of 1 says nothing."""
        pairs = zip(self.shape, self.stride, tensor.stride(), strict=True)
        return all(mine == its for extent, mine, its in pairs if extent != 1)

    def __str__(self) -> str:
        text = f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"
        text = f"{self.lazily} {text}" if self.lazily else text
        return text if self.contiguous else f"{text}/{','.join(map(str, self.stride))}"

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the storage, rounded up as the device's allocator does."""
        return allocated_bytes(self.storage_bytes, self.device)

    @property
    def covers_storage(self) -> bool:
        """Whether the elements lie in the storage from its start on, without gaps or overlap."""
        return self.offset == 0 and is_dense(self.shape, self.stride)

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        return self.stride == contiguous_strides(self.shape)


def look_of(tensor: torch.Tensor | TensorMeta) -> str:
    """Dtype and shape in words, such as ``float32[8, 16]``: what a tensor's capture and its graph in Inductor share."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a row-major tensor of this shape."""
    strides = [1]
    for extent in reversed(shape[1:]):
        strides.append(strides[-1] * max(extent, 1))
    return tuple(reversed(strides)) if shape else ()


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that leaves the program: a value, seen through the view calls that lead to it.

    Attributes:
        ref: a value, or the last temporary of ``calls``.
        value: the value whose storage it lies in.
        calls: view calls, usually none.
    """

    ref: Ref
    value: int
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class Captured:
    """A captured training step: the program, and how its values correspond to the module's tensors, inputs and results.

    Compared by identity, so it can be a key.

    Attributes:
        program: the values and tasks.
        metas: for every value, its own tensor.
        parameters, buffers: (qualified name, value) of the module's tensors that the program reads; the first name of
            tied ones.
        inputs: value of every tensor among the flattened arguments, by position.
        outputs: the tensors among the flattened results.
        output_spec, output_leaves: how the results were nested, and the flattened results with ``None`` in
            place of tensors.
        output_positions: for each of ``outputs``, its position in ``output_leaves``; several if it is returned more
            than once, none if it is only a part of the effects.
        tangents: for every output, the backward value its incoming gradient is, or None.
        parameter_gradients: (index into ``parameters``, tensor), in the order in which they become ready; several for
            one that has several names, each by the uses under one of them: autograd adds them up.
        input_gradients: (position among ``inputs``, tensor).
        device: where the program runs.
        marks: of forward values, given by hand.
        layers: of values that the graph makes, the module in whose call they are made, or whose backward makes them.
        no_dropit: values of the parameters in modules that have a true attribute ``no_dropit``.
        as_called: plain PyTorch's program, where that is not ``program``: before variants, in autograd's order, and in
            place where the model's own calls are. Its values come first in ``metas``.
        autograd_nodes: the node of autograd's graph that each slot of ``plain`` belongs to, by the slot's name.
        optimizer_in_backward: gradients of parameters are freed in the backward, where slots named ``release`` read
            them.
        made_last: names of the parameters whose gradients ``program`` makes after all others, see `made_last`.
        without_variants: what variants were added to (`monet_like.variants.admitted`); None before that.
        undelayed: the step as traced, without variants, whose gradients are all made in autograd's order; None where
            ``program`` delays none.
        reads: Python values that the model reads, such as a dropout's ``p``, as they were at the capture.
        constants: the tensors among ``parameters`` and ``buffers`` that the model has not registered.
        written: positions among ``inputs`` of those that the forward changes in place and that gradients flow through
            then: their new contents are the last of ``outputs``.
        changed: residents whose contents are others when the forward has ended.
        effects: what the forward sets beside its results.
        made_to_require: positions among ``inputs`` of those on which the forward calls ``requires_grad_``.
        buffers_made_to_require: indices into ``parameters`` of buffers on which it does so.
        answers: to the questions about values that the forward asks; with others it is another program.
        examples: by value, what tensors in its memory were at the capture that decide sizes: the program's costs are
            for these.
    """

    __repr__ = short_repr

    program: Program
    metas: tuple[TensorMeta, ...]
    parameters: tuple[tuple[str, int], ...]
    buffers: tuple[tuple[str, int], ...]
    inputs: tuple[int, ...]
    outputs: tuple[Tensor, ...]
    output_spec: pytree.TreeSpec
    output_leaves: tuple[Any, ...]
    output_positions: tuple[tuple[int, ...], ...]
    tangents: tuple[int | None, ...]
    parameter_gradients: tuple[tuple[int, Tensor], ...]
    input_gradients: tuple[tuple[int, Tensor], ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    no_dropit: frozenset[int] = frozenset()
    marks: Mapping[int, Mark] = field(default_factory=dict)
    layers: Mapping[int, str] = field(default_factory=dict)
    as_called: Program | None = None
    autograd_nodes: Mapping[str, int] = field(default_factory=dict)
    made_last: tuple[str, ...] = ()
    without_variants: Captured | None = None
    undelayed: Captured | None = None
    optimizer_in_backward: bool = False
    reads: Reads | None = None
    constants: Constants = field(default_factory=Constants)
    written: tuple[int, ...] = ()
    changed: frozenset[int] = frozenset()
    effects: Effects | None = None
    made_to_require: tuple[int, ...] = ()
    buffers_made_to_require: tuple[int, ...] = ()
    answers: tuple[Answer, ...] = ()
    examples: Mapping[int, Sequence[tuple[Tensor, torch.Tensor]]] = field(default_factory=dict)

    @property
    def plain(self) -> Program:
        """The program of PyTorch's own operators alone, called as the model calls them."""
        return self.as_called or self.program

    @property
    def on_several_devices(self) -> bool:
        """Whether what the model owns and a step makes is on several devices, but for numbers and random states."""
        large = (v for v, value in enumerate(self.plain.values) if value.bytes > NUMBER_BYTES)
        owned = (v for v in large if self.plain.values[v].kind != "input" and self.plain.values[v].spec != "state")
        return len({self.metas[v].device for v in owned}) > 1

    @property
    def gradients_in_rows(self) -> bool:
        """Whether all incoming gradients have row-major layout; by default they have the layout of the results."""
        return all(self.metas[value].contiguous for value in self.tangents if value is not None)

    def every_task(self) -> list[Task]:
        """All forward tasks and ways, also those of plain PyTorch that variants have replaced."""
        programs = (self.program,) if self.as_called is None else (self.program, self.as_called)
        return [task for program in programs for task in program.every_task()]


def make_task(
    name: str, calls: Sequence[Call], writes: Sequence[int], metas: Sequence[TensorMeta], **options: Any
) -> Task:
    """A task from its calls: reads and cost key follow from them.

    Args:
        metas: the own tensor of every value, to make the cost key.
        options: further fields of `Task` (variant, word, overwrites, runs, copies; another cost key).
    """
    written = set(writes)
    reads = tuple(
        dict.fromkeys(
            ref.name for call in calls for ref in refs(call) if isinstance(ref.name, int) and ref.name not in written
        )
    )
    cost = options.pop("cost") if "cost" in options else cost_key(calls, metas)
    if cost and options.get("overwrites") is not None:  # memory that it takes over is no workspace
        cost += f"; takes {reads.index(options['overwrites'])}"
    return Task(name, reads, tuple(writes), cost=cost, calls=tuple(calls), **options)


def cost_key(calls: Sequence[Call], metas: Sequence[TensorMeta]) -> str:
    """The text by which tasks of equal cost are found: operators, literals, and the tensors that they read."""
    names: dict[Ref, str] = {}

    def text(leaf: Any) -> str:
        if isinstance(leaf, Ref):
            if leaf not in names:
                names[leaf] = f"%{len(names)}"
                if isinstance(leaf.name, int):
                    return f"{names[leaf]}:{metas[leaf.name]}"
            return names[leaf]
        if isinstance(leaf, tuple | list):
            return f"({','.join(map(text, leaf))})"
        return str(leaf).removeprefix("torch.")

    parts = []
    for call in calls:
        given = call.args[:-1] if call.op in COMMUNICATING else call.args  # whichever group it is
        arguments = [text(a) for a in given] + [f"{k}={text(v)}" for k, v in call.kwargs]
        for out in call.outs:
            if out is not None:
                names.setdefault(out, f"%{len(names)}")
        parts.append(f"{call.op}({', '.join(arguments)})")
    return "; ".join(parts)


def distinct_tasks(captured: Captured) -> dict[str, Task]:
    """One task for every cost key."""
    found: dict[str, Task] = {}
    for task in captured.every_task():
        if task.cost:
            found.setdefault(task.cost, task)
    return found


def fake_mode() -> FakeTensorMode:
    """A mode under which tensors have shapes but no storage: make example inputs for `capture` in it."""
    return FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


def let_go_of_tensors(mode: FakeTensorMode) -> None:
    """Have a mode refer to no real tensor any more, not even weakly: `torch.utils.swap_tensors`, which ``.to()`` may
    call, refuses tensors that something refers to.
    """
    mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


_of_thread = threading.local()


def shape_mode() -> FakeTensorMode:
    """A `fake_mode` for all short computations of shapes of a thread: making one reads the whole stack's source."""
    if not hasattr(_of_thread, "mode"):
        _of_thread.mode = fake_mode()
    mode: FakeTensorMode = _of_thread.mode
    return mode
