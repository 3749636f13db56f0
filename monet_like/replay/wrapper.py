"""`ScheduleWrapper`: a model that trains by a schedule. During training nothing is measured or planned."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..capture.absent_gpu.attention import KINDS, attention_as
from ..capture.captured import Captured
from ..capture.checks import check_initialized
from ..capture.example_inputs import device_of, example_of, input_specs, specs_in_words
from ..capture.guards.effects import NotRepeated, given_containers
from ..capture.guards.holders import Holder
from ..capture.guards.reads import Change
from ..capture.guards.side_effects import generators_restored
from ..capture.lower.step import capture
from ..capture.precision import AUTOCASTS, autocast_as, autocast_name
from ..capture.quantised import settle
from ..capture.trace.alone import CAPTURING, CallLock
from ..capture.trace.answers import Answer, raised_by_model
from ..capture.trace.joint import asks_for_values
from ..capture.trace.taken import taken_leaves
from ..capture.trees import flattened
from ..errors import CaptureError, MonetError, ScheduleFileError, UsageError, warn_caller
from ..ir.schedule_file import InputSpec, ScheduleRecord
from ..ir.units import format_bytes
from ..nn.sync_batch_norm import is_synchronised, world
from ..profile.devices import known_limits, machine_at
from ..runtime.questions import OtherAnswer
from ..variants import admitted
from .branches import known_answers
from .checks.call_keys import arguments, structure
from .checks.changed_inputs import check_changeable
from .checks.compatibility import (
    carried_over,
    check_program,
    check_shapes,
    has_liger,
    mismatch,
    replayed_in_words,
    told_of_order,
    warn_elsewhere,
)
from .checks.transforms import check_transforms
from .checks.twins import warn_of_liger, warn_of_twins
from .inductor import check_inductor
from .kept_steps import KeptStep, KeptSteps
from .memory.arena import Arena
from .stand_in import SignedAsModel, StandIn, warn_of_checkpointing
from .training_step import CompiledStep, run_step

_log = logging.getLogger("monet_like")

#: How the operators of a schedule run: one by one as PyTorch calls them, or in pieces that TorchInductor compiles.
BACKENDS = ("eager", "inductor")


#: Number of captures of one model after which a warning is given.
MANY_STEPS = 16


class NewInput(UsageError):
    """A call that no plan serves, where ``on_new_input`` does not let it be planned."""


class ScheduleWrapper(StandIn):
    """A model whose training step follows a schedule.

    It has the model's own parameters, buffers, submodules and ``state_dict``. In training mode with gradients
    enabled a call runs the schedule; ``eval()`` and ``no_grad`` run the model as it is. Gradients, buffers and
    random masks are those of the plain model. Hooks on submodules do not fire while a schedule runs. A call that the
    schedule is not for is an error before the first step; later it runs as the plain model, with one warning.

    Args:
        model: the model the schedule was solved for; it is shared, not copied.
        solution_file: a schedule file, a loaded `ScheduleRecord`, or a schedule of the zoo: ``zoo:resnet50_184_10.00``
            is the one for the device that the model is on, ``zoo:resnet50_184_10.00@h100`` that for a H100.
        input_shape: shape of the input, with or without the batch; a list of shapes for several inputs. It must be the
            shape that the schedule was solved for. None takes the file's word. Calls may have smaller inputs: a last
            batch, shorter sequences. They are captured once for each shape and follow the same decisions.
        example: arguments to capture the model with, as (args, kwargs); default: fake ones of the file's shapes.
        captured: the model as captured with ``example`` and the schedule's mode, if that is at hand: it takes seconds.
        backend: ``eager``, or ``inductor``: runs of elementwise operators, normalisations and reductions are compiled,
            in the schedule's order and within its peak (minutes, once); results agree to rounding, random masks are
            the same. Smaller inputs are replayed by ``eager``.

    Raises:
        UsageError: an unknown backend, or one that lacks its compiler.
        ScheduleFileError: the file is unreadable or was made for another model, shape or version.
        CaptureError: the model cannot be captured.
    """

    #: Attributes of the wrapper itself; all others are the model's.
    _OWN = frozenset({"backend", "record", "training"})
    #: Whether one step is all that its tensors' places depend on; not so for one of many blocks.
    plans_its_memory = True
    #: What a call does for which nothing was planned: "plan", "plain" or "error"; see `monet_like.auto_schedule`.
    _on_new_input = "plan"

    def __init__(
        self,
        model: nn.Module,
        solution_file: str | Path | ScheduleRecord,
        input_shape: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *,
        example: tuple[tuple[Any, ...], dict[str, Any]] | None = None,
        captured: Captured | None = None,
        backend: str = "eager",
    ) -> None:
        super().__init__()
        self._share(model, backend)
        self.record = record = _loaded(solution_file, device_of(model))
        if input_shape is not None:
            check_shapes(record, input_shape)
        inputs = len(record.inputs) if example is None else 0
        if example is None:
            example = example_of(record.inputs, device_of(model))
        device = device_of(model, example)
        warn_elsewhere(record, device, stacklevel=2)
        if model.training:
            args, kwargs = example
            kwargs = self._without_cache(args, kwargs)
            leaves, spec = flattened((args, kwargs))
            if record.autocast not in AUTOCASTS:
                raise ScheduleFileError(
                    f"the schedule's autocast is {record.autocast!r}, which this version does not know"
                )
            with autocast_as(record.autocast, device), told_of_order(inputs):
                try:
                    self._new_step(self._key(leaves, spec), args, kwargs, captured)
                except (CaptureError, ScheduleFileError):
                    if not inputs or not asks_for_values(model):
                        raise  # else the first call, which has values, is captured

    def _share(self, model: nn.Module, backend: str) -> None:
        """Share the parameters, buffers and submodules of ``model``."""
        if isinstance(model, ScheduleWrapper):
            raise UsageError("the model is already wrapped in a ScheduleWrapper")
        check_initialized(model)
        settle(model)
        check_backend(backend, device_of(model))
        self.__dict__["_model"] = model
        self._parameters, self._buffers, self._modules = model._parameters, model._buffers, model._modules
        self._non_persistent_buffers_set = model._non_persistent_buffers_set
        self.training, self.backend = model.training, backend
        self._kept = KeptSteps()
        self._lock = CallLock()  # of captures in several threads, each of which changes the model while it lasts
        self._begun = False  # whether a step was run, or planned ahead
        self._arena: Arena | None = None  # see `monet_like.place_memory`
        self._synchronised = is_synchronised(model)

    @SignedAsModel
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, whose backward follows the schedule."""
        if not self.training or not torch.is_grad_enabled():
            return self._model(*args, **kwargs)
        kwargs = self._without_cache(args, kwargs)
        leaves, spec = flattened((args, kwargs))
        if is_empty(leaves):
            return self._model(*args, **kwargs)
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        known: tuple[Answer, ...] = ()
        while True:
            with self._lock:
                kept, places = self._step_or_plain(args, kwargs, leaves, spec, inputs, known)
                parameters, buffers = ([], []) if kept is None else kept.residents()
            if kept is None:
                return self._model(*args, **kwargs)
            if self._arena is not None and kept.step.memory is None:
                self._place(kept.step, self._arena)
            try:
                result = run_step(kept.step, parameters, buffers, inputs, kept.reads, places)
            except OtherAnswer as other:
                before, known = known, known_answers(kept.captured, other)
                if len(known) <= len(before):  # from equal states it does not answer alike
                    return self._model(*args, **kwargs)
                continue
            except NotRepeated as error:
                if self._on_new_input == "error":
                    raise
                with self._lock:
                    key = self._kept.key_of(kept) or str(error)
                    self._kept.drop(key)  # or each call would begin by it
                    self._run_plain(key, error, input_specs(args, kwargs))
                return self._model(*args, **kwargs)
            self._begun = True
            return result

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
                kept = self._kept.find(key, known)
            if kept is None and key not in self._kept.plain and not known:
                key = self._shared_key(key, args, kwargs, leaves)
                kept = self._kept.find(key)
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
            if known:  # or each call would begin by one of them
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
        with CAPTURING, generators_restored(device_of(self, (args, kwargs))), self._attention():
            taken = taken_leaves(self._model, args, kwargs)
        return key if taken is None else self._kept.share(key, alike, frozenset(values) - taken)

    def _new_step(
        self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], captured: Captured | None = None,
        known: tuple[Answer, ...] = (),
    ) -> KeptStep | None:  # fmt: skip
        """`_step`, after which nothing is changed but what this wrapper keeps; or a step that has become right
        meanwhile.
        """
        with CAPTURING:  # a capture in another thread changes settings that steps read
            if captured is None and not known and (kept := self._kept.find(key)) is not None:
                return kept
        with CAPTURING, generators_restored(device_of(self, (args, kwargs))), self._attention():
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

    def _tells_of(self, inputs: tuple[InputSpec, ...]) -> bool:
        """Whether to warn of calls with such inputs; not so of each of many equal blocks."""
        return True

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
        group = world() if self._synchronised else None
        autocast = autocast_name(device), torch.is_autocast_cache_enabled()
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
        if captured is not None and captured.reads is not None and captured.reads.of(self._model).change():
            captured = None  # the model has been changed since
        earlier = self._kept.of(key)
        change = earlier[-1].change() if earlier else None
        self._kept.check_own(key)
        if change is None and known:
            change = Change(f"{known[-1]} in the forward", "another", known[-1].shown)
        started, inputs = time.monotonic(), input_specs(args, kwargs)
        record, captured = self._planned(args, kwargs, captured, change)
        if record.is_plain:
            self._kept.plain[key] = (
                f"plain PyTorch's step fits into {format_bytes(record.budget_bytes)}, and no schedule"
            )
            return None
        if inputs != record.inputs:
            _log.info(replayed_in_words(record, captured, inputs, time.monotonic() - started))
        warn_of_twins(captured, captured.device, stacklevel=3)
        warn_of_liger(captured.program, record.schedule, captured.device, stacklevel=3)
        warn_of_checkpointing(self._model)
        within = None
        if self.backend == "inductor" and inputs == record.inputs:
            within = record.peak_bytes - record.extra_bytes
        kept = KeptStep.of(self._made(record, captured, within, args, kwargs), captured, self._model)
        self._kept.add(key, kept)
        if len(self._kept) == MANY_STEPS:
            last = f" (the last time, {change})" if change else ""
            warn_caller(
                f"{type(self._model).__name__} was captured for {MANY_STEPS} different calls{last}, which takes time "
                "and memory; pad inputs to few shapes, and pass numbers that change, attributes of modules among them, "
                "as tensors",
            )
        return kept

    def _made(
        self, record: ScheduleRecord, captured: Captured, within: int | None, args: tuple[Any, ...],
        kwargs: dict[str, Any]
    ) -> CompiledStep:  # fmt: skip
        """Compile a schedule's decisions for a captured program; ``within``: as `CompiledStep`'s
        ``fuse_within_bytes``.
        """
        step = CompiledStep(captured, record.schedule, within)
        if within is None and not captured.gradients_in_rows:
            step.for_row_major = self._for_row_major(record, step, args, kwargs)
        return step

    def _for_row_major(
        self, record: ScheduleRecord, step: CompiledStep, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CompiledStep | None:
        """The step with the same decisions for incoming gradients in row-major order; None if its program differs."""
        captured = capture(
            self._model,
            args,
            kwargs,
            made_last=record.made_last,
            row_major_gradients=True,
            optimizer_in_backward=record.optimizer_in_backward,
        )
        captured = admitted(captured, record.mode, ablation=record.ablation, liger=has_liger(record))
        schedule = carried_over(record.schedule, step.captured.program, captured.program)
        other = None if schedule is None else CompiledStep(captured, schedule, segments=step.segments)
        return other if other is not None and other.saved == step.saved else None

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
            captured = capture(
                self._model, args, kwargs, made_last=record.made_last,
                optimizer_in_backward=record.optimizer_in_backward,
            )  # fmt: skip
            captured = admitted(captured, record.mode, ablation=record.ablation, liger=has_liger(record))
        try:
            check_program(record, captured, type(self._model).__name__, captured.device)
        except ScheduleFileError as error:
            if change is None:
                raise
            raise ScheduleFileError(f"{error}; since the last step, {change}") from None
        return record, captured

    def train(self, mode: bool = True) -> ScheduleWrapper:
        """Switch the model and this wrapper together."""
        self._model.train(mode)
        self.training = mode
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_own(name):
            super().__setattr__(name, value)
        if not self._is_own(name) or (name == "training" and "_model" in self.__dict__):
            setattr(self._model, name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_own(name):
            super().__delattr__(name)
        else:
            delattr(self._model, name)

    def _is_own(self, name: str) -> bool:
        """Whether an attribute belongs to the wrapper and not to the model.

        Private names that the model does not have are the wrapper's too: libraries keep notes there, such as the
        forward that they have replaced.
        """
        model = self.__dict__.get("_model")
        if model is None or name in self.__dict__ or hasattr(type(self), name) or name in type(self)._OWN:
            return True
        return name.startswith("_") and not hasattr(model, name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_model" not in self.__dict__:
                raise
            return getattr(self.__dict__["_model"], name)

    def __getstate__(self) -> dict[str, Any]:
        # Steps are compiled anew where it is unpickled or copied, and no memory is shared.
        return {**super().__getstate__(), "_arena": None}

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        return f"schedule: {self.record.mode}, peak {format_bytes(self.record.peak_bytes)}, backend: {self.backend}"


def _loaded(solution: str | Path | ScheduleRecord, device: torch.device) -> ScheduleRecord:
    """Load a schedule record from a file or from the zoo."""
    if isinstance(solution, ScheduleRecord):
        return solution
    if str(solution).startswith("zoo:"):
        from ..zoo.download import find_record

        limits = known_limits(machine_at(device).name)
        return find_record(str(solution), device=device.type, near=limits.name if limits else "")
    return ScheduleRecord.load(Path(solution))


def check_backend(backend: str, device: torch.device) -> None:
    """Check that ``backend`` can replay schedules on ``device``.

    Raises:
        UsageError: it is unknown, or lacks its compiler.
    """
    if backend not in BACKENDS:
        raise UsageError(f"backend {backend!r} is unknown; give {' or '.join(BACKENDS)}")
    if backend == "inductor":
        check_inductor(device)


def is_empty(leaves: Sequence[Any]) -> bool:
    """Whether a call's tensors have no elements: such a batch has nothing to save, and runs as the plain model."""
    inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return bool(inputs) and not any(tensor.numel() for tensor in inputs)
