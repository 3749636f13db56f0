"""Memory of a model's training step without what its blocks do, counted by rehearsals."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._subclasses.fake_tensor import FakeTensorMode

from ...capture.captured import allocated_bytes, fake_mode, let_go_of_tensors
from ...capture.checks import check_unflattened
from ...capture.example_inputs import Example, device_of
from ...capture.guards.side_effects import generators_restored
from ...capture.resident import parts_of, resident_parts
from ...capture.trace.joint import asks_for_values
from ...capture.trees import tensors_of
from ...compiler.request import OPTIMIZERS
from ...errors import UsageError
from ...ir.step import Point, Step, Streaming
from ...profile.measure import Stretch, allocated_stretches, have_workspaces
from ...replay.verify.steps import unsaved_loss
from ..agreement import Sharing, all_do, check_uncounted, gathered, processes
from ..block import BlockSchedule
from ..kept_state import State
from .counted import changed_values, counted, held_values, lone_inputs
from .fake import NotOnFakes, fake_stretches, none_left, outside
from .graphs import OwnGraph
from .stand_ins import Event, Rehearsal, without_saved_tensors_hooks


@dataclass(frozen=True)
class Blocks:
    """A model and its blocks."""

    model: nn.Module
    blocks: tuple[BlockSchedule, ...]

    @property
    def names(self) -> list[str]:
        """Of the blocks."""
        return [block._block_name for block in self.blocks]


@dataclass(frozen=True)
class WholeStep:
    """A training step as it is rehearsed.

    Attributes:
        run: forward and backward, without the optimizer; called with the example's arguments. Its result is alive until
            the step has ended.
        example: arguments.
        given: the step is the user's own (`plan_step`): what its first run leaves behind, such as a pipeline's receive
            buffers, exists in all later ones.
    """

    run: Callable[..., Any]
    example: Example
    given: bool = False


def step_of(
    model: nn.Module, example: Example, loss: Callable[[Any], torch.Tensor] | None, *, keeps_result: bool = True
) -> WholeStep:
    """One call of the model and the backward of its loss.

    Args:
        loss: from the model's result to a scalar; None: the result's own ``loss``, or one that takes no memory.
        keeps_result: the model's result is alive until the backward has ended, not the loss alone.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        own = OwnGraph(model, args, kwargs)
        args, kwargs = own.example
        kept = [model(*args, **kwargs)]
        total = (loss or loss_of)(kept[0])
        if not keeps_result:
            kept.clear()
        own.backward(total)
        return kept, total

    return WholeStep(run, example)


class NoBlockCalled(UsageError):
    """Nothing can be planned for a call in which no block runs, as a layer drop may have it."""


@dataclass(frozen=True)
class Rehearsed:
    """The result of a rehearsal.

    Attributes:
        step: its pieces are the blocks, without menus; ``base_bytes`` is the largest of all processes that share a
            plan.
        held, changed: by block, see `held_values` and `changed_values`; of a rehearsal in which blocks keep everything.
        lone: by block, see `lone_inputs`; of one in which they keep nothing.
    """

    step: Step
    held: Mapping[int, frozenset[int]]
    changed: Mapping[int, frozenset[int]]
    lone: Mapping[int, Mapping[int, frozenset[int]]]


class StepMemory:
    """Counts the memory of one training step by rehearsals of it.

    A rehearsal runs the step with stand-ins for the model's blocks (`monet_like.auto.rehearsal.stand_ins`): in one
    process on fake tensors, and on real ones where these do not tell. Gradients that exist when it begins are added to,
    as in a later micro-step. Afterwards everything that can be reached from the model and the
    step is what it was (`monet_like.auto.kept_state`).

    Args:
        optimizer: whose state to count, see `OPTIMIZERS`.
        sharing: with ``same``, count the largest of all processes.

    Attributes:
        streaming: of the blocks' frozen weights, once it is known.
        host_bytes: that offloaded values may take of the host; 0 until it is known.

    Raises:
        UsageError: the optimizer is unknown.
    """

    def __init__(self, of: Blocks, whole: WholeStep, optimizer: str, sharing: Sharing) -> None:
        check_uncounted(of.model)
        check_unflattened(of.model)
        self.of, self.whole, self.sharing = of, whole, sharing
        self.device = device_of(of.model)
        self._optimizer = optimizer
        self.streaming: Streaming | None = None
        self.host_bytes = 0
        self._fakes = None if needs_real(of.model) else fake_mode()
        self._begin()

    def _begin(self) -> None:
        """Keep what rehearsals may change, and run a step once that was given."""
        self._least: Rehearsed | None = None
        self.resident_bytes = _resident_bytes(self.of.model, self.whole.example, self._optimizer, self.device)
        self._before = self._state = self._now(self.whole.run)
        self._first_end_bytes: int | None = None
        if not self.whole.given:
            return
        try:
            self._run_first()
        except NotOnFakes:
            self._leave_fakes()
        except BaseException:
            self.close()
            raise

    def _now(self, *more: Any, like: State | None = None) -> State:
        """What a rehearsal may change; on fake tensors no memory."""
        return State([self.of.model, *more, self.whole.example], like, memory=self._fakes is None)

    def _run_first(self) -> None:
        """Run a step that was given once: all rehearsals begin with what it leaves behind outside of the model."""
        of_model = self._state = self._now(like=self._before)
        self._first_end_bytes = self._counted_on(self._fakes, None)[1][-1].end_bytes
        self._state = self._now(self.whole.run, like=of_model)
        for block in self.of.blocks:
            block._block_call = None

    def _leave_fakes(self) -> None:
        """Begin anew on real tensors."""
        self._before.put_back()
        self._fakes = None
        for block in self.of.blocks:
            block._block_call = None
            if asks_for_values(block._model):  # it may compute in another way where there are none
                block._block_shared.forget()
        self._begin()

    def close(self) -> None:
        """Put back also what the first run of a step has left behind."""
        if self._state is not self._before:
            self._before.put_back()
        if self._fakes is not None:
            let_go_of_tensors(self._fakes)

    def rehearsed(self, kept: Sequence[Collection[int]] | None) -> Rehearsed:
        """Rehearse the step.

        Args:
            kept: the inputs and results that each block keeps, as values of its program; None: all of them.

        Raises:
            NoBlockCalled: none is.
        """
        events, stretches = self._counted(kept)
        if self._first_end_bytes is not None:
            # The first run leaves buffers behind that are used again. The second one frees what it replaces, and ends
            # without the buffers. Gradients are in both.
            self.resident_bytes += self._first_end_bytes - stretches[-1].end_bytes
            self._first_end_bytes = None
        mine = counted(events, stretches, self.of.names, self.resident_bytes)
        _check_same_steps(mine, self.sharing)
        every = gathered([moment.base_bytes for moment in mine.moments], self.sharing)
        step = _with_bases(mine, map(max, zip(*every, strict=True)))
        step = replace(step, streaming=self.streaming, host_bytes=self.host_bytes)
        return Rehearsed(step, held_values(events, stretches), changed_values(events), lone_inputs(events))

    def least(self) -> Rehearsed:
        """A rehearsal in which blocks keep none of their inputs and results; made once."""
        if self._least is None:
            self._least = self.rehearsed([()] * len(self.of.blocks))
        return self._least

    def step_with(self, points: Iterable[Point]) -> Step:
        """The step, rehearsed with blocks that keep what these points keep."""
        return self.rehearsed([point.shared for point in points]).step

    def least_step(self, first: Step) -> Step:
        """The step of a rehearsal with bases that no schedules make smaller: blocks keep none of their inputs and
        results.
        """
        least = self.least().step
        if [moment.what for moment in first.moments] != [moment.what for moment in least.moments]:
            raise UsageError(
                f"the training step of {type(self.of.model).__name__} runs its blocks differently in each rehearsal, "
                "as with checkpointing around them; take that off: a schedule says itself what runs again"
            )
        both = zip(first.moments, least.moments, strict=True)
        return _with_bases(first, (min(m.base_bytes, low.base_bytes) for m, low in both))

    def _counted(self, kept: Sequence[Collection[int]] | None) -> tuple[list[Event], list[Stretch]]:
        """The events of a rehearsal and the memory between them."""
        try:
            return self._counted_on(self._fakes, kept)
        except NotOnFakes:
            self._leave_fakes()
        return self._counted_on(None, kept)

    @none_left()
    def _counted_on(
        self, fakes: FakeTensorMode | None, kept: Sequence[Collection[int]] | None
    ) -> tuple[list[Event], list[Stretch]]:
        """As `_counted`; on fake tensors if there is a mode.

        Raises:
            NotOnFakes: the step has to be run on real tensors.
        """
        rehearsals: list[Rehearsal] = []
        args, kwargs = self.whole.example

        def run(mark: Callable[[], None]) -> Any:
            rehearsal = Rehearsal(kept, mark, defers=self.sharing != "alone", aside=outside if fakes else None)
            rehearsals.append(rehearsal)
            for number, block in enumerate(self.of.blocks):
                block._block_number, block._rehearsal = number, rehearsal
            try:
                return self.whole.run(*args, **kwargs)
            finally:
                for block in self.of.blocks:
                    block._rehearsal = None

        have_workspaces(self.device)
        if fakes is None:
            gc.collect()  # or else memory of cycles that is freed meanwhile would seem to be the step's
        try:
            with generators_restored(self.device), without_saved_tensors_hooks():
                without_hooks(self.of.model)
                drop_sparse_gradients(self.of.model, self.whole.example)
                if fakes is None:
                    stretches = allocated_stretches(run, self.device)
                else:
                    inputs = tensors_of(self.whole.example)
                    stretches = fake_stretches(run, fakes, self.device, inputs=inputs)
                    if rehearsals[0].error or any(asks_for_values(block._model) for block in self.of.blocks):
                        raise NotOnFakes("a block asks for values, or cannot be captured")
        finally:
            advanced = self._state.put_back()
        all_do(partial(_check_not_advanced, advanced), self.sharing)
        (rehearsal,) = rehearsals
        all_do(lambda: _raise(rehearsal.error), self.sharing)
        all_do(lambda: self._check_called(rehearsal), self.sharing)
        return rehearsal.events, stretches

    def _check_called(self, rehearsal: Rehearsal) -> None:
        if not rehearsal.called:
            raise NoBlockCalled(
                f"the training step of {type(self.of.model).__name__} calls none of its blocks; give blocks that it "
                "calls, and an example in which it does (a layer drop may leave out all of them)"
            )


def _with_bases(step: Step, bases: Iterable[int]) -> Step:
    moments = (replace(moment, base_bytes=base) for moment, base in zip(step.moments, bases, strict=True))
    return replace(step, moments=tuple(moments))


def needs_real(model: nn.Module) -> bool:
    """Whether steps of a model have to be rehearsed on real tensors.

    Fake ones do not tell what processes exchange, and what `torch.compile` makes of a part.
    """
    compiled = any(m._compiled_call_impl is not None or isinstance(m, OptimizedModule) for m in model.modules())
    return processes() > 1 or compiled


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _check_same_steps(step: Step, sharing: Sharing) -> None:
    """Refuse one plan for processes whose steps run blocks in another order, as the stages of a pipeline do."""
    every = gathered([moment.what for moment in step.moments], sharing)
    for rank, theirs in enumerate(every):
        if theirs != every[0]:
            raise UsageError(
                f"the steps of rank 0 and rank {rank} run their blocks in another order, and one plan is made for all; "
                "give auto_schedule same_plan=False to let each process plan for itself"
            )


def ends_of(result: Any) -> list[torch.Tensor]:
    """The scalar that a result has as its loss, or else all its tensors that require a gradient."""
    own = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if isinstance(own, torch.Tensor) and own.requires_grad and own.numel() == 1:
        return [own]
    return [tensor.values() if tensor.is_nested else tensor for tensor in tensors_of(result) if tensor.requires_grad]


def loss_of(result: Any) -> torch.Tensor:
    """The scalar that a result has as its loss, or else one of all its tensors that saves nothing."""
    tensors = ends_of(result)
    if not tensors:
        raise UsageError(
            "the model's result has no tensor with a gradient; give auto_schedule a loss= that makes one of it"
        )
    return tensors[0] if len(tensors) == 1 and tensors[0].numel() == 1 else unsaved_loss(tensors)


def without_hooks(model: nn.Module) -> None:
    """Have hooks that run when a gradient is there not run in a rehearsal: those of an optimizer that steps in the
    backward would step.

    So the plan has room for all gradients. The state that is put back has the hooks.
    """
    for parameter in model.parameters():
        if hooks := getattr(parameter, "_post_accumulate_grad_hooks", None):
            hooks.clear()


def _check_not_advanced(what: str) -> None:
    """Refuse steps that use up an iterator: every rehearsal would take from it, and training would go on behind that.

    Args:
        what: class of the iterator; "": there is none.
    """
    if what:
        raise UsageError(
            f"the training step takes values from a {what}, and the rehearsals that plan its blocks have taken some, "
            "which cannot be put back; give the values as arguments, or draw from torch's, numpy's or random's "
            "generators"
        )


def drop_sparse_gradients(model: nn.Module, example: Example) -> None:
    """Have sparse gradients made anew in a rehearsal, because they are not added to in place."""
    for tensor in (*model.parameters(), *tensors_of(example)):
        if tensor.is_leaf and tensor.grad is not None and tensor.grad.layout is not torch.strided:
            tensor.grad = None


def _resident_bytes(model: nn.Module, example: Example, optimizer: str, device: torch.device) -> int:
    """Bytes in this process of all that exists when a step begins; each storage counts once.

    These are parameters, buffers, inputs, the optimizer's state, and gradients of an earlier micro-step.
    """
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"optimizer {optimizer!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
    trained = (part for p in model.parameters() if p.requires_grad for part in parts_of(p))
    state = sum(map(OPTIMIZERS[optimizer].state_bytes, trained))
    there = resident_parts(model, example)
    return sum(allocated_bytes(part.untyped_storage().nbytes(), device) for part in there) + state
