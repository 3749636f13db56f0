"""Compiles a captured program and a schedule into a training step: one forward, and a backward in segments.

The segments are a chain of autograd nodes. Each returns the gradients of its parameters as soon as they are
ready, so they reach ``.grad`` (and a distributed wrapper's buckets) while the rest of the backward runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import starmap
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree

from ..capture.captured import Captured, Tensor, TensorMeta
from ..capture.constants import Constants
from ..capture.example_inputs import may_be_saved
from ..capture.guards.holders import Holder
from ..capture.guards.reads import Reads
from ..errors import UsageError
from ..inductor.compiled_call import CompiledCall
from ..ir.program import RESIDENT_KINDS, Call, Ref
from ..ir.schedule import Schedule
from ..ir.schedule_file import ScheduleRecord
from ..runtime import out_of_memory
from ..runtime.codegen import Block, compile_block, compile_chain
from ..runtime.offloaded_calls import Keeping
from ..runtime.questions import ASK, Asking, OtherAnswer
from ..runtime.streamed_block import Streamed
from .branches import undone_if_ended, written_residents
from .checks.backward_checks import Asked, Hook, check_backward, inner_results, watch_results
from .checks.one_pass import in_one_pass
from .checks.transforms import own_tensors_alone
from .graphs.model import ModelGraphs
from .graphs.step import GraphedCall
from .memory.arena import StepMemory
from .missing_gradients import without_missing
from .segments import Runs, Segment, Stretch, cut, cut_alike, live_between, tasks_of, with_run_bytes

#: From saved values and incoming gradients to the gradients of one segment after the other.
Backward = Callable[[list[Any]], Iterator[list[Any]]]


class CompiledStep:
    """A compiled training step. It holds no tensors: all state belongs to one call.

    Args:
        watch: called before every task.
        segments: of a step with the same gradients: its backward is cut so that they are returned in these segments.
        run_bytes: predicted memory while each task runs, in the order of the schedule; for people.

    Attributes:
        captured: without constants and the values that the model read, see `KeptStep`.
        residents: the parameters, the buffers and the inputs.
        blocks: its forward, and the segments of its backward.
        forward: from the residents to (outputs, what ``saved`` lists).
        may_end: whether a call of the forward may end without a result: it asks for values, or has side effects.
        written: positions of the residents that the forward changes.
        backward: from what ``saved`` and then ``tangents`` list to the gradients of one segment after the other.
        saved: values that the backward reads.
        overwritten: positions among ``saved`` of those whose memory the backward writes into.
        inner_results: positions of outputs from which others are made.
        tangents: (position among the outputs, value) of the incoming gradients that it reads.
        compiled: runs its calls instead, compiled by Inductor; None: they follow the schedule.
        for_row_major: the same step, whose backward takes incoming gradients in row-major order, where the model's
            results lie in another: plain PyTorch's kernels round differently for another layout. None: it takes copies.
        memory: where its tensors are placed; None: where PyTorch's allocator puts them.
        record: what it was planned by; None: nothing is promised.
    """

    compiled: CompiledCall | None = None
    for_row_major: CompiledStep | None = None
    memory: StepMemory | None = None
    record: ScheduleRecord | None = None

    def __init__(
        self,
        captured: Captured,
        schedule: Schedule,
        watch: Callable[[], None] | None = None,
        segments: Sequence[Segment] = (),
        run_bytes: Sequence[int] = (),
    ) -> None:
        self.captured = replace(captured, reads=None, constants=Constants(), without_variants=None)
        self.inner_results = inner_results(captured)
        program = captured.program
        self.residents = (*(v for _, v in captured.parameters), *(v for _, v in captured.buffers), *captured.inputs)
        stretches = cut_alike(captured, schedule, segments) if segments else cut(captured, schedule)
        runs: Runs = [tasks_of(captured, schedule, start, stop) for start, stop, _ in stretches]
        runs = with_run_bytes([tuple(program.tasks[i] for i in schedule.forward), *runs], run_bytes)
        blocks = self.blocks = _blocks(captured, self.residents, runs, stretches)
        self.saved = blocks[0].carries
        there = {*blocks[1].takes} if blocks[1:] else set()
        self.tangents = tuple((i, v) for i, v in enumerate(captured.tangents) if v in there)
        taken = {task.overwrites for tasks in runs[1:] for task in tasks}
        self.overwritten = tuple(place for place, value in enumerate(self.saved) if value in taken)
        self._partial: dict[frozenset[int], Backward] = {}
        asking = {ASK: Asking([answer.shown for answer in captured.answers])}
        self.forward = compile_block(blocks[0], "forward", asking, watch)
        self.may_end = bool(captured.answers) or captured.effects is not None
        self.written = written_residents(runs[0], self.residents)
        self.backward: Backward = compile_chain(blocks[1:], "backward", before=watch)
        place = {value: i for i, value in enumerate(self.saved) if program.values[value].kind in RESIDENT_KINDS}
        self.segments = tuple(
            Segment(
                tuple(index for kind, index, _ in gradients if kind == "parameter"),
                tuple(index for kind, index, _ in gradients if kind == "input"),
                (start, stop),
                tuple(sorted({place[v] for task in tasks for v in task.reads if v in place})),
            )
            for (start, stop, gradients), tasks in zip(stretches, runs[1:], strict=True)
        )

    def for_gradients(self, gradients: Sequence[torch.Tensor | None]) -> CompiledStep:
        """The step whose backward was captured for the layouts of these incoming gradients, if there is one."""
        other = self.for_row_major
        if other is None:
            return self
        there = [
            (g, v) for g, v in zip(gradients, self.captured.tangents, strict=True) if g is not None and v is not None
        ]
        as_results = all(self.captured.metas[v].lies_as(g) for g, v in there)
        return other if not as_results and all(other.captured.metas[v].lies_as(g) for g, v in there) else self

    def backward_without(self, missing: frozenset[int]) -> Backward:
        """The backward without the incoming gradients ``missing`` (values), which it does not take."""
        if not missing:
            return self.backward
        if missing not in self._partial:
            blocks = without_missing(self.captured, self.blocks[1:], missing)
            self._partial[missing] = compile_chain(blocks, "backward of some results")
        return self._partial[missing]


def _blocks(
    captured: Captured, residents: tuple[int, ...], runs: Runs, stretches: Sequence[Stretch]
) -> tuple[Block, ...]:
    """The code of the forward and of the segments, which carries what later ones need."""
    live = live_between(runs[1:], stretches)
    saved = tuple(v for v in live[0] if v not in captured.program.tangents)
    live[0] = (*saved, *(v for v in captured.tangents if v is not None and v in live[0]))
    results = [tuple((t.calls, t.ref) for t in _distinct(captured.outputs))]
    results += [tuple((t.calls, t.ref) for _, _, t in gradients) for _, _, gradients in stretches]
    ends = zip([residents, *live], runs, results, [saved, *live[1:]], strict=False)
    return tuple(starmap(Block, ends))


def _distinct(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Make every output a tensor object that autograd does not take for a view, so that callers may write into it."""
    return [
        Tensor(Ref(f"output{i}"), t.value, (*t.calls, Call("aten.detach.default", (t.ref,), (), (Ref(f"output{i}"),))))
        for i, t in enumerate(outputs)
    ]


class PlainBackward(Protocol):
    """The backward of a call by plain PyTorch, see `monet_like.replay.plain_call`."""

    def made(self, results: Sequence[torch.Tensor]) -> None:
        """Take note of the call's results."""

    def __call__(
        self, gradients: Sequence[torch.Tensor | None], segments: Sequence[Segment],
        hooks: Mapping[int, Sequence[Hook]], reason: UsageError,
    ) -> Iterator[list[Any]]:  # fmt: skip
        """The gradients of one segment after the other."""


@dataclass(slots=True)
class _Call:
    """The state of one call of the model.

    Attributes:
        segments: the backward that is under way.
        versions: by position, the saved parameters, buffers and inputs, and their versions when the backward began.
        other: by which the call has left its branch.
        weights: has the model's streamed weights on the device for a segment of the backward; None: all are there.
        keeping: keeps what the backward needs; None: it is kept as it is.
        reads: values that the model read when the step was captured; None: not recorded, or the model is gone.
        graphs: its replay as CUDA graphs; None: it runs without, or no backward will read what they hold.
        whose: the wrapper on a GPU, for an error of memory.
    """

    step: CompiledStep
    reads: Callable[[], Reads | None]
    segments: Iterator[list[Any]] | None = None
    versions: Mapping[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    other: OtherAnswer | None = None
    weights: Streamed | None = None
    plain: PlainBackward | None = None
    keeping: Keeping | None = None
    graphs: GraphedCall | None = None
    asked: Asked = field(default_factory=Asked)
    whose: weakref.ref[Any] | None = field(default_factory=out_of_memory.whose)

    def reason_for_plain(self, grads: Sequence[torch.Tensor | None]) -> UsageError | None:
        """Why the schedule cannot compute what is asked for and plain PyTorch has to; None: it can.

        Raises:
            UsageError: neither can.
        """
        reason = self.asked.error
        try:
            check_backward(self.step.captured, grads)
            if (reads := self.reads()) is not None and (change := reads.late_change()):
                raise UsageError(
                    f"{change}: this was set between a forward and its backward, which reads it, and the schedule is "
                    "of the value in the forward; set it before the forward"
                )
        except UsageError as error:
            reason = error
        if self.plain is None and reason is not None:
            raise reason
        return reason

    def check_versions(self, segment: Segment) -> None:
        """Check that parameters, buffers and inputs which a segment reads have not changed since the forward.

        Raises:
            RuntimeError: as autograd's for a saved tensor that was changed.
        """
        for place in segment.reads:
            tensor, version = self.versions[place]
            if tensor._version != version:
                name = self.step.captured.program.values[self.step.saved[place]].name
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{name} is at version {tensor._version}; expected version {version} instead. It was changed while "
                    "the backward ran, by a hook of another tensor, and the rest of the backward still reads it"
                )


class _Head(torch.autograd.Function):
    """Autograd node of the forward. Its backward only unpacks saved tensors and takes the incoming gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, token: Any, residents: list[torch.Tensor], *_: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = call
        memory = call.step.memory
        try:
            with memory.forward() if memory else nullcontext(), torch._C._DisableAutocast():
                run = call.step.forward if call.graphs is None else call.graphs.forward
                outputs, saved = run(list(residents))
        except OtherAnswer as other:  # raised later: PyTorch loses an error if an operator has given a warning before
            call.other = other
            return None
        ctx.save_for_backward(*(saved if call.keeping is None else call.keeping.left(call.step.saved, saved)))
        without = (o for o, t in zip(outputs, call.step.captured.tangents, strict=True) if t is None)
        ctx.mark_non_differentiable(*without)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        call: _Call = ctx.call
        out_of_memory.enters(out_of_memory.BACKWARD, call.whose)
        reason = call.reason_for_plain(grads)
        step = call.step.for_gradients(grads)
        given = [*ctx.saved_tensors] if call.graphs is None else call.graphs.filled(ctx.saved_tensors)
        again = torch._C._autograd._get_current_graph_task_keep_graph()  # another backward will read them
        if call.keeping is not None:
            given = call.keeping.back(given, again=again)
        if again:
            for place in step.overwritten:
                given[place] = step.captured.metas[step.saved[place]].empty().copy_(given[place])
        ctx.maybe_clear_saved_tensors()
        call.versions = {p: (given[p], given[p]._version) for segment in step.segments for p in segment.reads}
        graphs, call.graphs = call.graphs, call.graphs if again else None
        if call.plain is not None and reason is not None:
            call.segments = call.plain(grads, step.segments, call.asked.taken(), reason)
            return (None,) * len(ctx.needs_input_grad)
        missing = frozenset(value for position, value in step.tangents if grads[position] is None)
        there = ((grads[position], step.captured.metas[value]) for position, value in step.tangents)
        incoming = [as_captured(grad, meta) for grad, meta in there if grad is not None]
        if graphs is not None and not again and not missing and graphs.can(step, incoming):
            call.segments = graphs.backward(given, incoming)
            return (None,) * len(ctx.needs_input_grad)
        backward = step.backward_without(missing)([*given, *incoming])
        call.segments = backward if graphs is None else graphs.ordinary(backward)
        return (None,) * len(ctx.needs_input_grad)


@in_one_pass
class _SegmentNode(torch.autograd.Function):
    """Autograd node of one segment: nothing in the forward, its slots in the backward.

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
        assert call.segments is not None, "a segment of the backward was reached before the one above it"
        call.check_versions(segment)
        memory = call.step.memory
        weights = call.weights.there() if call.weights and segment.reads else nullcontext()
        modes = own_tensors_alone() if torch._C._len_torch_dispatch_stack() else nullcontext()
        with weights, memory.backward() if memory else nullcontext(), torch._C._DisableAutocast(), modes:
            handed = next(call.segments)
        if segment is call.step.segments[-1]:  # the caller may hold the graph, and with it this call, for longer
            call.segments, call.versions = None, {}
            out_of_memory.enters(out_of_memory.AFTER)
        gradients = (None, None, None, *handed)
        handed.clear()  # or else a gradient would be copied when it becomes a parameter's
        return gradients


def as_captured(grad: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Convert an incoming gradient to the layout that the program was captured with."""
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    grad = grad.resolve_conj().resolve_neg()
    if grad.dtype != meta.dtype or not meta.lies_as(grad):
        return meta.empty().copy_(grad)
    return grad if grad.stride() == meta.stride else grad.as_strided(meta.shape, meta.stride, grad.storage_offset())


def run_step(
    step: CompiledStep,
    parameters: list[torch.Tensor],
    buffers: list[torch.Tensor],
    inputs: list[torch.Tensor],
    reads: Reads | None = None,
    places: Mapping[str, Holder] | None = None,
    weights: Streamed | None = None,
    plain: PlainBackward | None = None,
    keeping: Keeping | None = None,
    graphs: ModelGraphs | None = None,
) -> Any:
    """Run the forward of a step; its autograd graph is the backward of the schedule.

    Args:
        reads: Python values that the model read when it was captured; None: not recorded.
        places: of what the forward sets, see `Effects.places`.
        weights: those of the parameters that are streamed; they are on the device now.
        plain: does a backward that the schedule cannot.
        keeping: keeps what the backward needs; None: it is kept as it is.
        graphs: of the model's steps; None: it runs without.

    Returns:
        The model's result, nested as the model nests it.

    Raises:
        OtherAnswer: the call takes another branch than the capture; nothing has changed.
        NotRepeated: its side effects cannot be set again; nothing has changed.
    """
    captured = step.captured
    for position in captured.made_to_require:
        inputs[position].requires_grad_()
    for index in captured.buffers_made_to_require:
        parameters[index].requires_grad_()
    call = _Call(step, weakref.ref(reads) if reads else lambda: None, weights=weights, plain=plain, keeping=keeping)
    token = None
    for segment in reversed(step.segments):
        leaves = [*(parameters[i] for i in segment.parameters), *(inputs[i] for i in segment.inputs)]
        token = _SegmentNode.apply(call, segment, token, *leaves)
    residents = [*map(may_be_saved, (*parameters, *buffers, *inputs))]
    if graphs is not None and weights is None and keeping is None and step.memory is None:
        call.graphs = graphs.call(step, residents)
    written = [residents[position] for position in step.written]
    with undone_if_ended(captured, written) if step.may_end else nullcontext():
        outputs = _Head.apply(call, token, residents)
        if call.other is not None:
            raise call.other
        if captured.effects is not None and reads is not None and places is not None:
            captured.effects.repeat(reads, places, outputs, inputs)
    watch_results(step.inner_results, outputs, call.asked if plain else None)
    if plain is not None:
        plain.made(outputs)
    leaves_out = list(captured.output_leaves)
    for positions, output in zip(captured.output_positions, outputs, strict=False):
        for position in positions:
            leaves_out[position] = output
    for position, output in zip(captured.written, outputs[len(captured.output_positions) :], strict=True):
        inputs[position].copy_(output)  # so that gradients of what the caller makes of it reach the model
    return pytree.tree_unflatten(leaves_out, captured.output_spec)
