"""A captured program and a schedule become functions: one forward, and a backward cut into segments.

The segments are a chain of autograd nodes. Each returns the gradients of its parameters as soon as they are
ready, so they reach ``.grad`` (and a distributed wrapper's buckets) while the rest of the backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from .capture import Captured, Tensor, TensorMeta
from .codegen import Block, compile_block, compile_chain
from .errors import UsageError
from .pieces import Fused, fuse
from .program import Call, Ref, Task
from .schedule import Schedule
from .simulate import Free, simulate

#: The backward is cut into at most about this many segments, balanced by the bytes of parameter gradients.
SEGMENTS = 24


@dataclass(frozen=True)
class Segment:
    """A stretch of the backward.

    Attributes:
        parameters, inputs: whose gradients it returns, in that order: indices into the captured parameters,
            positions among the captured inputs.
        tangents: for each of its gradients, the outputs whose incoming gradients it depends on.
        slots: first slot and one past the last.
    """

    parameters: tuple[int, ...]
    inputs: tuple[int, ...]
    tangents: tuple[frozenset[int], ...]
    slots: tuple[int, int]


class Step:
    """A compiled training step. Holds no tensors: all state belongs to one call.

    Args:
        fuse_within_bytes: have Inductor compile pieces with which the step stays within this or, if that is more,
            within what the schedule's values take. None: compile none.
        watch: called before every task; not for what Inductor compiles.

    Attributes:
        parameter_slots, buffer_slots: (dict, key) where the module keeps the captured tensors.
        forward: from the residents to (outputs, what ``saved`` lists).
        backward: from what ``saved`` and then ``tangents`` list to the gradients of one segment after the other.
        saved: values that the backward reads.
        tangents: (position among the outputs, value) of the incoming gradients that it reads.
        fused: what Inductor compiled.
        numbers: (attributes of a module, a function that reads some of them, what it read when the model was captured).
    """

    parameter_slots: Sequence[tuple[dict[str, Any], str]] = ()
    buffer_slots: Sequence[tuple[dict[str, Any], str]] = ()
    fused: Fused | None = None
    numbers: Sequence[tuple[dict[str, Any], Callable[[dict[str, Any]], Any], Any]] = ()

    def __init__(
        self,
        captured: Captured,
        schedule: Schedule,
        fuse_within_bytes: int | None = None,
        watch: Callable[[], None] | None = None,
    ) -> None:
        self.captured = captured
        program = captured.program
        self.residents = (
            *(v for _, v in captured.parameters),
            *(v for _, v in captured.buffers),
            *captured.inputs,
        )
        stretches = self._cut()
        runs = [_runs(captured, schedule, start, stop) for start, stop, _ in stretches]
        live = self._live(runs)
        forward = tuple(program.tasks[i] for i in schedule.forward)
        outputs = _distinct(captured.outputs)
        self.saved = tuple(v for v in live[0] if v not in program.tangents)
        self.tangents = tuple((i, v) for i, v in enumerate(captured.tangents) if v is not None and v in live[0])
        live[0] = (*self.saved, *(v for _, v in self.tangents))
        blocks = [Block(self.residents, forward, tuple((t.calls, t.ref) for t in outputs), self.saved)]
        for (_, _, gradients), tasks, takes, carries in zip(stretches, runs, live, live[1:], strict=False):
            blocks.append(Block(takes, tasks, tuple((t.calls, t.ref) for _, _, t in gradients), carries))
        functions: dict[str, Callable[..., Any]] = {}
        if fuse_within_bytes is not None:
            before, peak = _existing(captured, schedule)
            self.fused = fuse(captured, blocks, before, max(fuse_within_bytes, peak))
            blocks, functions = list(self.fused.blocks), self.fused.functions
        self.forward = compile_block(blocks[0], "forward", functions, watch)
        self.backward = compile_chain(blocks[1:], "backward", functions, watch)
        self.segments = tuple(
            Segment(
                tuple(index for kind, index, _ in gradients if kind == "parameter"),
                tuple(index for kind, index, _ in gradients if kind == "input"),
                tuple(t.tangents for _, _, t in gradients),
                (start, stop),
            )
            for start, stop, gradients in stretches
        )

    def holds(self) -> bool:
        """Whether the numbers that the model's forward reads are those with which it was captured."""
        try:
            return all(read(attributes) == then for attributes, read, then in self.numbers)
        except KeyError:  # one was deleted
            return False

    def _cut(self) -> list[tuple[int, int, list[tuple[str, int, Tensor]]]]:
        """(first slot, one past the last, gradients that become ready) of every segment."""
        captured = self.captured
        made = {value: i for i, slot in enumerate(captured.program.slots) for value in slot[0].writes}
        ready: dict[int, list[tuple[str, int, Tensor]]] = {}
        for kind, found in (("parameter", captured.parameter_gradients), ("input", captured.input_gradients)):
            for index, tensor in found:
                ready.setdefault(made[tensor.value], []).append((kind, index, tensor))
        sizes = {slot: sum(captured.metas[t.value].storage_bytes for _, _, t in g) for slot, g in ready.items()}
        enough = sum(sizes.values()) / SEGMENTS
        stretches: list[tuple[int, int, list[tuple[str, int, Tensor]]]] = []
        gathered: list[tuple[str, int, Tensor]] = []
        start, size = 0, 0
        for slot in sorted(ready):
            if gathered and size + sizes[slot] > enough:
                previous = max(made[t.value] for _, _, t in gathered) + 1
                stretches.append((start, previous, gathered))
                start, gathered, size = previous, [], 0
            gathered = [*gathered, *ready[slot]]
            size += sizes[slot]
        if gathered:
            stretches.append((start, len(captured.program.slots), gathered))
        for index, (first, last, gradients) in enumerate(stretches):  # parameters first, then inputs
            stretches[index] = (first, last, sorted(gradients, key=lambda g: g[0] == "input"))
        return stretches

    def _live(self, runs: Sequence[tuple[Task, ...]]) -> list[tuple[int, ...]]:
        """Values alive at every boundary between segments: those read later before they are written anew."""
        live: list[tuple[int, ...]] = [()]
        alive: dict[int, None] = {}
        for tasks in reversed(runs):
            for task in reversed(tasks):
                for value in task.writes:
                    alive.pop(value, None)
                alive.update(dict.fromkeys(task.reads))
            live.append(tuple(alive))
        live.reverse()
        return live


def _runs(captured: Captured, schedule: Schedule, start: int, stop: int) -> tuple[Task, ...]:
    program = captured.program
    tasks: list[Task] = []
    for slot in range(start, stop):
        tasks += [program.tasks[i] for i in schedule.again[slot]]
        tasks.append(program.slots[slot][schedule.ways[slot]])
    return tuple(tasks)


def _existing(captured: Captured, schedule: Schedule) -> tuple[list[int], int]:
    """Bytes of values that exist when each run of a schedule begins; and the most that exist at any time."""
    program = captured.program
    report = simulate(program, schedule, Free())
    tasks = (*(program.tasks[i] for i in schedule.forward), *_runs(captured, schedule, 0, len(program.slots)))
    before = []
    for step, task in zip(report.steps, tasks, strict=True):
        taken = 0 if task.overwrites is None else program.values[task.overwrites].bytes
        before.append(step.bytes + taken - sum(program.values[v].bytes for v in task.writes))
    return before, report.peak_bytes


def _distinct(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, each a tensor object of its own that autograd takes for no view, so that callers may write into it."""
    return [
        Tensor(Ref(f"output{i}"), t.value, (*t.calls, Call("aten.detach.default", (t.ref,), (), (Ref(f"output{i}"),))))
        for i, t in enumerate(outputs)
    ]


@dataclass(slots=True)
class _Call:
    """The state of one call of the model.

    Attributes:
        segments: the backward that is under way.
        given: the outputs whose gradients came in.
    """

    step: Step
    segments: Iterator[list[Any]] | None = None
    given: frozenset[int] = frozenset()


class _Head(torch.autograd.Function):
    """Runs the whole forward; its backward only unpacks what was saved and takes in the incoming gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, token: Any, residents: list[torch.Tensor], *_: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = call
        with torch._C._DisableAutocast():
            outputs, saved = call.step.forward(list(residents))
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(
            *(o for o, t in zip(outputs, call.step.captured.tangents, strict=True) if t is None)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(
                "a schedule's backward was called with create_graph=True, and second derivatives are not supported; compute "
                "them on the model that the schedule wraps"
            )
        call: _Call = ctx.call
        step = call.step
        given = [*ctx.saved_tensors]
        ctx.maybe_clear_saved_tensors()
        call.given = frozenset(i for i, g in enumerate(grads) if g is not None)
        given += [_tangent(grads[position], step.captured.metas[value]) for position, value in step.tangents]
        call.segments = step.backward(given)
        return (None,) * len(ctx.needs_input_grad)


class _SegmentNode(torch.autograd.Function):
    """One segment: in the forward nothing, in the backward its stretch of slots.

    The nodes are a chain of empty tensors, so that each waits for the one above it; no gradient passes along it.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, segment: Segment, token: Any, *leaves: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.segment = call, segment
        return torch.empty(0, device=call.step.captured.device)

    @staticmethod
    def backward(ctx: Any, _: None) -> Any:
        call: _Call = ctx.call
        segment: Segment = ctx.segment
        if call.segments is None:
            raise RuntimeError("a segment of the backward was reached before the one above it")
        with torch._C._DisableAutocast():
            handed = next(call.segments)
        given = call.given
        if len(given) == len(call.step.captured.tangents) or all(needs & given for needs in segment.tangents):
            gradients = (None, None, None, *handed)
        else:  # an output took no part in the loss
            gradients = (
                *(None, None, None),
                *(g if needs & given else None for g, needs in zip(handed, segment.tangents, strict=True)),
            )
        handed.clear()  # or else a gradient would be copied when it becomes a parameter's
        return gradients


def _tangent(grad: torch.Tensor | None, meta: TensorMeta) -> torch.Tensor:
    """The incoming gradient with the layout that the program was captured with; zeros where there is none."""
    grad = None if grad is None else grad.resolve_conj().resolve_neg()
    if grad is None:
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device).zero_()
    if grad.stride() == meta.stride and grad.dtype == meta.dtype:
        return grad
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device).copy_(grad)


def run_step(
    step: Step, parameters: list[torch.Tensor], buffers: list[torch.Tensor], inputs: list[torch.Tensor]
) -> Any:
    """One forward whose autograd graph is the schedule's backward.

    Returns:
        The model's result, nested as the model nests it.
    """
    captured = step.captured
    call = _Call(step)
    token = None
    for segment in reversed(step.segments):
        leaves = [*(parameters[i] for i in segment.parameters), *(inputs[i] for i in segment.inputs)]
        token = _SegmentNode.apply(call, segment, token, *leaves)
    outputs = _Head.apply(call, token, [*parameters, *buffers, *inputs])
    leaves_out = list(captured.output_leaves)
    for position, output in zip(captured.output_positions, outputs, strict=True):
        leaves_out[position] = output
    return pytree.tree_unflatten(leaves_out, captured.output_spec)
