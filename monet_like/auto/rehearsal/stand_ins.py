"""A rehearsal: one training step in which blocks are replaced by stand-ins, to count the memory of everything else.

A stand-in has the block's results, by plain PyTorch without autograd, and makes gradients of zeros. Between its forward
and its backward it holds those inputs and results that it is told to keep, and nothing else. So what the allocator
counts is what the rest of the model needs: embeddings, head and loss, gradients so far, buffers of a sharded model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch.multiprocessing.reductions import StorageWeakRef

from ...capture.captured import Captured, Tensor, TensorMeta
from ...capture.example_inputs import may_be_saved, version_of
from ...capture.trees import taken_apart
from ...replay.checks.one_pass import apart, refuse
from ...replay.training_step import as_captured
from .operators import made_as

Kind = Literal["forward", "forward done", "backward", "dropped", "backward done"]


@dataclass(eq=False)
class RehearsedCall:
    """A call of a block during a rehearsal.

    Attributes:
        block: its number.
        captured: its program.
        inputs: by value, the storage of each input that was computed and has a gradient.
        made: the storages of its results.
        held: inputs that exist when a backward begins.
        changed: inputs and results that something has changed in place when the backward begins.
        saved: inputs that the stand-in holds.
        results: results that it holds, by value.
        gradients: incoming gradients, by value; empty before the backward.
        adds: its parameters had gradients already when its backward began.
        copied: an incoming gradient had another layout than a schedule takes.
    """

    block: int
    captured: Captured
    inputs: Mapping[int, StorageWeakRef] = field(default_factory=dict)
    made: frozenset[StorageWeakRef] = frozenset()
    held: set[int] = field(default_factory=set)
    changed: frozenset[int] = frozenset()
    saved: list[torch.Tensor] = field(default_factory=list)
    results: dict[int, torch.Tensor] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    adds: bool = False
    copied: bool = False


@dataclass(frozen=True)
class Event:
    """The end of a stretch of the step: ``kind`` begins or ends for a call.

    Attributes:
        kind: ``forward`` and ``backward`` begin the call's; ``dropped``: its stand-in has let go of ``value`` in the
            backward.
        call: which.
        value: of the block's program; -1 for other kinds.
    """

    kind: Kind
    call: RehearsedCall
    value: int = -1


class Rehearsal:
    """The events of one step and what stand-ins keep.

    Args:
        kept: for every block the inputs and results that its stand-in holds from its forward to its backward, as values
            of its program; None: all of them.
        mark: ends a stretch, see `monet_like.profile.measure.allocated_stretches`.
        defers: ``error`` is raised when the step has ended, because other processes wait for this one's part of the
            step. Until then a block that cannot be captured runs as it is.
        aside: the step runs on fake tensors, and captures in this context.
    """

    def __init__(
        self, kept: Sequence[Collection[int]] | None, mark: Callable[[], None], *, defers: bool = False,
        aside: Callable[[Any], AbstractContextManager[Any]] | None = None,
    ) -> None:  # fmt: skip
        self.kept, self.mark, self.defers = kept, mark, defers
        self.aside, self.fake = aside or nullcontext, aside is not None
        self.events: list[Event] = []
        self._calls: list[RehearsedCall] = []
        self.error: Exception | None = None
        self.called = False  # whether any block was, also in eval mode or without a gradient

    def reach(self, kind: Kind, call: RehearsedCall, value: int = -1) -> None:
        """Note an event, which ends a stretch."""
        self.mark()
        self.events.append(Event(kind, call, value))
        for one in self._calls if kind == "backward" else ():
            one.held |= {v for v, storage in one.inputs.items() if not storage.expired()}

    def keeps(self, block: int, value: int) -> bool:
        """Whether the block's stand-in holds this input or result."""
        return self.kept is None or value in self.kept[block]

    def run(
        self,
        block: int,
        captured: Captured,
        parameters: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        forward: Callable[[], Any],
    ) -> Any:
        """Call a block's stand-in.

        Args:
            block: its number.
            captured: of this call.
            parameters, inputs: as `captured` lists them.
            forward: the plain block with its arguments.

        Returns:
            What the block returns; its backward is the stand-in's.
        """
        computed = {
            captured.inputs[place]: StorageWeakRef(inputs[place].untyped_storage())
            for place in _positions(captured.input_gradients)
            if inputs[place].grad_fn is not None
        }
        call = RehearsedCall(block, captured, computed)
        self._calls.append(call)
        self.reach("forward", call)
        with torch.no_grad(), _without_cached_casts():
            if self.fake and captured.effects is None:  # there is nothing to be computed
                results = [made_as(captured.metas[tensor.value]) for tensor in captured.outputs]
            else:
                results = list(_results(captured, forward()))
        call.made = frozenset(StorageWeakRef(result.untyped_storage()) for result in results)
        self.reach("forward done", call)
        trained = [parameters[index] for index in _positions(captured.parameter_gradients)]
        leaves = [inputs[index] for index in _positions(captured.input_gradients)]
        token = _Body.apply(self, call, trained, *trained, *leaves)
        outputs = _Head.apply(self, call, token, list(inputs), results)
        leaves_out = list(captured.output_leaves)
        for positions, output in zip(captured.output_positions, outputs, strict=True):
            for position in positions:
                leaves_out[position] = output
        return pytree.tree_unflatten(leaves_out, captured.output_spec)


def _positions(gradients: Sequence[tuple[int, Tensor]]) -> list[int]:
    """Of what there are gradients, each once: a parameter with several names has several."""
    return list(dict.fromkeys(index for index, _ in gradients))


@contextmanager
def _without_cached_casts() -> Iterator[None]:
    """Autocast keeps no casts of weights, as in a schedule."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """Leave out the caller's hooks on saved tensors: a checkpoint around the whole model counts what is saved."""
    hooks, autograd = [], torch._C._autograd
    while (innermost := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(innermost)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def _results(captured: Captured, result: Any) -> Iterator[torch.Tensor]:
    """The tensors of a block's result, in storages of the size that a schedule's have."""
    leaves = pytree.tree_leaves(taken_apart(result, results=True))
    for tensor, positions in zip(captured.outputs, captured.output_positions, strict=False):
        meta = captured.metas[tensor.value]
        found = leaves[positions[0]] if positions else meta.empty()  # the plain forward has set what is no result
        if found.untyped_storage().nbytes() != meta.storage_bytes:
            yield found.clone()
            continue
        yield made_as(TensorMeta.of(found)).copy_(found).detach()


class _Head(torch.autograd.Function):
    """Autograd node of the stand-in's results: as a schedule's, its backward takes the incoming gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        rehearsal: Rehearsal,
        call: RehearsedCall,
        token: Any,
        inputs: list[torch.Tensor],
        results: list[torch.Tensor],
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, captured = call, call.captured
        kept = [t for v, t in zip(captured.inputs, inputs, strict=True) if rehearsal.keeps(call.block, v)]
        ctx.of = [t.value for t in captured.outputs if rehearsal.keeps(call.block, t.value)]
        outputs = tuple(results)
        ctx.watched = {}
        if rehearsal.kept is None:  # or else to watch them would be to keep them
            given, made = zip(captured.inputs, inputs, strict=True), zip(captured.outputs, outputs, strict=True)
            ends = [*given, *((tensor.value, result) for tensor, result in made)]
            ctx.watched = {v: (own.detach(), version_of(own)) for v, own in ends}
        kept += [r for t, r in zip(captured.outputs, outputs, strict=True) if rehearsal.keeps(call.block, t.value)]
        results.clear()
        ctx.save_for_backward(*(may_be_saved(tensor.data) for tensor in kept))  # the model may change them in place
        ctx.mark_non_differentiable(*(o for o, t in zip(outputs, captured.tangents, strict=True) if t is None))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        call: RehearsedCall = ctx.call
        call.changed |= {value for value, (tensor, version) in ctx.watched.items() if version_of(tensor) != version}
        ctx.watched = {}
        given = [*ctx.saved_tensors]
        ctx.maybe_clear_saved_tensors()
        count = len(given) - len(ctx.of)
        call.saved, call.results = given[:count], dict(zip(ctx.of, given[count:], strict=True))
        for grad, value in zip(grads, call.captured.tangents, strict=True):
            if grad is not None and value is not None:
                taken = call.gradients[value] = _taken(grad, call.captured.metas[value])
                # An object of Python's for its storage would keep autograd from adding to the gradient where it lies.
                call.copied = call.copied or not torch._C._is_alias_of(taken, grad)  # type: ignore[attr-defined]
        return (None,) * len(ctx.needs_input_grad)


def _taken(grad: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """An incoming gradient as a schedule takes it: in the layout of its capture, or in rows as it comes."""
    in_rows = grad.is_contiguous() and grad.dtype == meta.dtype
    return grad if in_rows and not grad.is_conj() and not grad.is_neg() else as_captured(grad, meta)


class _Body(torch.autograd.Function):
    """Autograd node that hands over the gradients of a block's parameters and inputs."""

    @staticmethod
    def forward(
        ctx: Any, rehearsal: Rehearsal, call: RehearsedCall, trained: list[torch.Tensor], *leaves: torch.Tensor
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.rehearsal, ctx.call, ctx.trained = rehearsal, call, trained
        ctx.like = [TensorMeta.of(leaf) for leaf in leaves]
        return torch.empty(0, device=call.captured.device)

    @staticmethod
    def backward(ctx: Any, _: None) -> Any:
        rehearsal: Rehearsal = ctx.rehearsal
        call: RehearsedCall = ctx.call
        there = [tensor.is_leaf and tensor.grad is not None for tensor in ctx.trained]
        call.adds = bool(there) and all(there)
        rehearsal.reach("backward", call)
        for tensors in (call.gradients, call.results):
            for value in list(tensors):
                del tensors[value]
                rehearsal.reach("dropped", call, value)
        call.saved.clear()
        # A schedule's gradient is added to one that exists and freed before the next one is made; so zeros take no
        # memory.
        there += [False] * (len(ctx.like) - len(there))
        gradients: list[torch.Tensor | None] = [
            _nothing(meta) if exists else meta.empty().zero_() for exists, meta in zip(there, ctx.like, strict=True)
        ]
        rehearsal.reach("backward done", call)
        gradients[:0] = [None, None, None]
        handed = tuple(gradients)
        gradients.clear()  # or else a gradient would be copied when it becomes a parameter's
        return handed


def _noted(node: Any, hook: Callable[..., Any]) -> Any:
    """Refuse gradients of inputs and of parameters apart, as `in_one_pass` does: where other processes wait, after the
    step.
    """
    rehearsal: Rehearsal = node.rehearsal
    if not rehearsal.defers:
        refuse()
    rehearsal.error = rehearsal.error or apart("the training step")
    return torch.autograd.function.BackwardCFunction.register_prehook(node, hook)


_Body._backward_cls.register_prehook = _noted


def _nothing(meta: TensorMeta) -> torch.Tensor:
    """Zeros that all lie in one element."""
    return torch.zeros((), dtype=meta.dtype, device=meta.device).expand(meta.shape)
