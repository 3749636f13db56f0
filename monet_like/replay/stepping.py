"""Runs each call of a model by a step of its own: one that is kept, or one that is captured and compiled now."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import _StopRecomputationError

from ..capture.absent_gpu.attention import KINDS, attention_as
from ..capture.captured import Captured
from ..capture.example_inputs import Example, device_of, input_specs, is_for_shapes, specs_in_words
from ..capture.guards.effects import NotRepeated
from ..capture.guards.holders import Holder
from ..capture.guards.reads import Change
from ..capture.guards.side_effects import generators_restored
from ..capture.guards.traversal import given_containers
from ..capture.lower.step import capture
from ..capture.precision import autocast_name
from ..capture.trace.alone import CAPTURING, CallLock, is_observed
from ..capture.trace.answers import Answer, raised_by_model
from ..capture.trace.taken import taken_leaves
from ..capture.trees import flattened, tensors_of
from ..errors import InfeasibleError, MonetError, ScheduleFileError, UsageError, warn_caller
from ..inductor.compiled_call import CompiledCall, NotCompiled
from ..inductor.planned_graph import Settings
from ..ir.mode import NHWC, parse_mode
from ..ir.schedule_file import InputSpec, ScheduleRecord
from ..ir.units import format_bytes
from ..nn.sync_batch_norm import world
from ..runtime import out_of_memory
from ..runtime.offloaded_calls import Keeping
from ..runtime.questions import OtherAnswer
from ..variants import admitted
from .branches import known_answers
from .checks.call_keys import arguments, structure
from .checks.changed_inputs import check_changeable
from .checks.compatibility import carried_over, check_program, has_liger, mismatch, replayed_in_words
from .checks.transforms import check_transforms
from .checks.twins import warn_of_liger, warn_of_twins
from .compiling import Compiling
from .graphs.model import ModelGraphs
from .kept_steps import KeptStep, KeptSteps
from .memory.arena import Arena
from .plain_call import PlainCall
from .stand_in import SignedAsModel, warn_of_checkpointing
from .training_step import CompiledStep, run_step

_log = logging.getLogger("monet_like")

#: Number of captures of one model after which a warning is given.
MANY_STEPS = 16


class NewInput(UsageError):
    """A call that no plan serves, where ``on_new_input`` does not let it be planned."""


class Stepping(Compiling):
    """A module whose calls in training follow schedules; what is shared with the model is in `ScheduleWrapper`."""

    record: ScheduleRecord
    _kept: KeptSteps
    _lock: CallLock
    _begun: bool
    _arena: Arena | None
    _graphs: ModelGraphs | None
    _synchronised: bool
    #: What a call does for which nothing was planned: "plan", "plain" or "error"; see `monet_like.auto_schedule`.
    _on_new_input = "plan"

    @SignedAsModel
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, whose backward follows the schedule."""
        if not self.training or not torch.is_grad_enabled():
            return self._run_model(*args, **kwargs)
        kwargs = self._without_cache(args, kwargs)
        leaves, spec = flattened((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if is_observed() or is_empty(leaves) or is_for_shapes(inputs):
            return self._run_model(*args, **kwargs)
        known: tuple[Answer, ...] = ()
        while True:
            with self._lock:
                kept, places = self._step_or_plain(args, kwargs, leaves, spec, inputs, known)
                parameters, buffers = ([], []) if kept is None else kept.residents()
            if kept is None:
                return self._run_model(*args, **kwargs)
            if self._arena is not None and kept.step.memory is None:
                self._place(kept.step, self._arena)
            out_of_memory.begins(self, kept.captured.device)
            plain = self._plain_call(kept, leaves, spec)
            try:
                if kept.step.compiled is not None and self._arena is None:
                    result = self._run_compiled(kept.step.compiled, args, kwargs)
                else:
                    whole = kept.reads, places, self._streamed, plain, self._keeping(kept), self._graphs
                    result = run_step(kept.step, parameters, buffers, inputs, *whole)
            except NotCompiled as error:
                self._leave_uncompiled(kept.step, error, (args, kwargs))
                continue
            except OtherAnswer as other:
                before, known = known, known_answers(kept.captured, other)
                if len(known) <= len(before):  # from equal states it does not answer alike
                    return self._run_model(*args, **kwargs)
                continue
            except NotRepeated as error:
                if self._on_new_input == "error":
                    raise
                self._leave(kept, error, (args, kwargs))
                return self._run_model(*args, **kwargs)
            except (torch.OutOfMemoryError, _StopRecomputationError):  # the latter ends a checkpoint around the call
                raise
            except Exception as error:  # of an operator, such as an index that is out of range
                if plain is None or not plain.undone():
                    raise
                result = self._run_model(*args, **kwargs)  # raises it when all before it is done
                self._leave(kept, error, (args, kwargs))
                return result
            self._begun = True
            out_of_memory.enters(out_of_memory.BETWEEN)
            return result

    def _run_model(self, *args: Any, **kwargs: Any) -> Any:
        """The model as it is."""
        return self._model(*args, **kwargs)

    def _keeping(self, kept: KeptStep) -> Keeping | None:
        """How a call keeps what its backward needs; None: as it is."""
        return None

    def _place(self, step: CompiledStep, arena: Arena) -> None:
        """Have a step's tensors placed; on a device on which they cannot be, warn, and place none from now on."""
        try:
            step.memory = arena.memory_of(step.captured.device)
        except UsageError as error:
            self._arena = None
            warn_caller(f"the memory of {type(self._model).__name__}'s steps is placed no longer: {error}")

    def _step_or_plain(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], spec: pytree.TreeSpec,
        inputs: list[torch.Tensor], known: tuple[Answer, ...] = (),
    ) -> tuple[KeptStep | None, Mapping[str, Holder] | None]:  # fmt: skip
        """The step for a call, and the places of what it sets; None: the call runs as the plain model.

        A call without a step ends no training that has begun: it is plain PyTorch's, for which nothing was changed yet.

        Args:
            known: the first answers to its questions about values, by a step whose branch was another one.

        Raises:
            Exception: there is no step, and none was run before, or ``on_new_input`` is "error".
        """
        key: Any = None
        try:
            check_transforms(self._model, inputs)
            key = self._kept.known(self._key(leaves, spec))
            with self._attention():
                kept = self._kept.find(key, inputs, known)
            if kept is None and key not in self._kept.plain and not known:
                key = self._shared_key(key, args, kwargs, leaves)
                kept = self._kept.find(key, inputs)
            if kept is None and key not in self._kept.plain:
                kept = self._new_branch(key, args, kwargs, known) if known else self._new_step(key, args, kwargs)
            if kept is None:
                return None, None
            if kept.captured.answers and not known:
                self._kept.branches_of(key).calls += 1
            if kept.captured.changed:
                parameters, buffers = kept.residents()
                check_changeable(kept.captured, [*parameters, *buffers, *inputs], inputs)
            effects = kept.captured.effects
            return kept, effects.places(kept.reads, (args, kwargs)) if effects and kept.reads else None
        except Exception as error:
            if raised_by_model(error):
                return None, None
            if self._on_new_input == "error" or not (self._begun or isinstance(error, NewInput)):
                raise
            self._run_plain(str(error) if key is None else key, error, input_specs(args, kwargs))
            if known and not isinstance(error, InfeasibleError):  # or each call would begin by one of them
                self._kept.drop(key)
            return None, None

    def _shared_key(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        """The key of a form that differs from a call in nothing but values which the forward does not take; the call's
        own if there is none.
        """
        values = [place for place, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)]
        if not given_containers(args, kwargs) or not (alike := self._kept.alike(key, values)):
            return key
        if (self._synchronised and world()[1] > 1) or any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return key
        with CAPTURING, generators_restored(device_of(self, (args, kwargs)), if_alone=True), self._attention():
            taken = taken_leaves(self._model, args, kwargs)
        return key if taken is None else self._kept.share(key, alike, frozenset(values) - taken)

    def _new_step(
        self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], captured: Captured | None = None,
        known: tuple[Answer, ...] = (),
    ) -> KeptStep | None:  # fmt: skip
        """`_step`, after which nothing but what this wrapper keeps is changed; or a step that is right meanwhile."""
        inputs = tensors_of((args, kwargs))
        with CAPTURING:  # a capture in another thread changes settings that steps read
            if captured is None and not known and (kept := self._kept.find(key, inputs)) is not None:
                return kept
        with CAPTURING, generators_restored(device_of(self, (args, kwargs)), if_alone=True), self._attention():
            return self._step(key, args, kwargs, captured, known)

    def _new_branch(
        self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: tuple[Answer, ...]
    ) -> KeptStep | None:
        """The step for a branch that was not captured yet.

        Raises:
            UsageError: too many branches were captured.
        """
        branches = self._kept.branches_of(key)
        branches.check(known)
        kept = self._new_step(key, args, kwargs, None, known)
        branches.captures += 1
        if kept is not None and kept.captured.answers[: len(known)] != known:
            raise UsageError(
                "its Python code asks for values of tensors that are not the same in two runs from equal states"
            )
        return kept

    def _run_plain(self, key: Any, reason: Exception, inputs: tuple[InputSpec, ...]) -> None:
        """Have calls of a key run as the plain model from now on, with one warning.

        Args:
            reason: why there is no step for them.
        """
        if key in self._kept.plain:
            return
        said = str(reason) if isinstance(reason, MonetError) else f"{type(reason).__name__}: {reason}"
        self._kept.plain[key] = said
        peak = reason.plain_peak_bytes if isinstance(reason, MonetError) else None
        needs = "in plain PyTorch's memory" if peak is None else f"whose predicted peak is {format_bytes(peak)}"
        if self._tells_of(inputs):
            warn_caller(
                f"{type(self._model).__name__} runs as plain PyTorch when it is called with {specs_in_words(inputs)}, "
                f"{needs}: {said}"
            )

    def _plain_call(self, kept: KeptStep, leaves: list[Any], spec: pytree.TreeSpec) -> PlainCall | None:
        """What repeats a call for a backward that its schedule cannot do; None: such a backward is an error."""
        if self._on_new_input == "error" or self._streamed is not None:
            return None
        here: Any = weakref.ref(self)
        there = weakref.ref(kept)
        instead: Callable[..., None] = lambda reason, given: here()._leave(there(), reason, given)  # noqa: E731
        return PlainCall(self._model, kept, leaves, spec, instead)

    def _leave(self, kept: KeptStep | None, reason: Exception, given: Example) -> None:
        """Have calls of the form of a step run as the plain model from now on, with one warning."""
        with self._lock:
            if (key := self._kept.key_of(kept)) is not None:
                self._kept.drop(key)  # or each call would begin by it
                self._run_plain(key, reason, input_specs(*given))

    def _attention(self) -> AbstractContextManager[None]:
        """The kind of attention that the schedule was planned with, pinned while the model is captured."""
        name = self.record.attention if self.record else ""
        if name and name not in KINDS:
            raise ScheduleFileError(f"the schedule's attention is {name!r}, which this version does not know")
        return attention_as(name)

    def _key(self, leaves: list[Any], spec: pytree.TreeSpec) -> Any:
        """The key of a captured step: everything that a capture fixes.

        Calls with different keys have steps of their own.
        """
        device = device_of(self, (tuple(leaves), {}))
        autocast = autocast_name(device), torch.is_autocast_cache_enabled()
        group = world() if self._synchronised else None
        return structure(self._model), arguments(leaves), str(spec), device, autocast, group

    def _step(
        self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], captured: Captured | None = None,
        known: tuple[Answer, ...] = (),
    ) -> KeptStep | None:  # fmt: skip
        """Capture the model for these arguments and compile the schedule's decisions for it.

        ``known``: the first answers to its questions about values, where earlier captures have others.

        Returns:
            The step, which is kept; None: such calls run as the plain model, for the reason in ``KeptSteps.plain``.
        """
        if captured is not None and captured.reads is not None:
            reads = captured.reads.of(self._model)
            if reads.change() or reads.holds_others(tensors_of((args, kwargs))):
                captured = None  # the model has been changed since, or holds an input
        earlier = self._kept.of(key)
        change = earlier[-1].change() if earlier else None
        self._kept.check_own(key)
        if change is None and known:
            change = Change(f"{known[-1]} in the forward", "another", known[-1].shown)
        started, inputs = time.monotonic(), input_specs(args, kwargs)
        record, captured = self._planned(args, kwargs, captured, change)
        if record.is_plain:
            size = format_bytes(record.budget_bytes)
            self._kept.plain[key] = f"plain PyTorch's step fits into {size}, and no schedule"
            return None
        if inputs != record.inputs:
            _log.info(replayed_in_words(record, captured, inputs, time.monotonic() - started))
        warn_of_twins(captured, captured.device, stacklevel=3)
        warn_of_liger(captured.program, record.schedule, captured.device, stacklevel=3)
        warn_of_checkpointing(self._model)
        made = self._made(record, captured, self._compiles(record, captured, inputs), args, kwargs)
        kept = KeptStep.of(made, captured, self._model, record.offloaded)
        self._kept.add(key, kept)
        if len(self._kept) == MANY_STEPS:
            last = f" (the last time, {change})" if change else ""
            warn_caller(
                f"{type(self._model).__name__} was captured for {MANY_STEPS} different calls{last}, which takes time "
                "and memory; pad inputs to few shapes, and pass numbers that change, attributes of modules among them, "
                "as tensors"
            )
        return kept

    def _made(
        self, record: ScheduleRecord, captured: Captured, settings: Settings | None, args: tuple[Any, ...],
        kwargs: dict[str, Any]
    ) -> CompiledStep:  # fmt: skip
        """Compile a schedule's decisions; ``settings``: Inductor compiles the model, whose graphs are planned so."""
        step = CompiledStep(captured, record.schedule, run_bytes=record.run_bytes)
        step.record = record
        step.compiled = None if settings is None else CompiledCall(settings)
        if not captured.gradients_in_rows:
            step.for_row_major = self._for_row_major(record, step, args, kwargs)
        return step

    def _for_row_major(
        self, record: ScheduleRecord, step: CompiledStep, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CompiledStep | None:
        """The same decisions for incoming gradients in row-major order; None if the program differs."""
        captured = self._captured_as(record, args, kwargs, in_rows=True)
        schedule = carried_over(record.schedule, step.captured.program, captured.program)
        if schedule is None:
            return None
        other = CompiledStep(captured, schedule, segments=step.segments, run_bytes=record.run_bytes)
        return other if other.saved == step.saved else None

    def _captured_as(
        self, record: ScheduleRecord, args: tuple[Any, ...], kwargs: dict[str, Any], *, in_rows: bool = False
    ) -> Captured:
        """The model's program for these arguments, with the variants that a schedule was planned with; ``in_rows``:
        incoming gradients are in row-major order.
        """
        captured = capture(
            self._model, args, kwargs, made_last=record.made_last, row_major_gradients=in_rows,
            optimizer_in_backward=record.optimizer_in_backward, channels_last=NHWC in parse_mode(record.mode),
        )  # fmt: skip
        return admitted(captured, record.mode, ablation=record.ablation, liger=has_liger(record))

    def _planned(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], captured: Captured | None, change: Change | None
    ) -> tuple[ScheduleRecord, Captured]:
        """The schedule for these arguments and its captured program.

        ``change``: the difference from an earlier capture.
        """
        record = self.record
        if reason := mismatch(record, self._model, args, kwargs):
            raise ScheduleFileError(reason)
        if captured is None:
            captured = self._captured_as(record, args, kwargs)
        try:
            check_program(record, captured, type(self._model).__name__, captured.device)
        except ScheduleFileError as error:
            if change is None:
                raise
            raise ScheduleFileError(f"{error}; since the last step, {change}") from None
        return record, captured


def is_empty(leaves: Sequence[Any]) -> bool:
    """Whether a call's tensors have no elements: such a batch has nothing to save, and runs as the plain model."""
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return bool(inputs) and not any(tensor.numel() for tensor in inputs)
