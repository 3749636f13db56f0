"""`BlockSchedule`: a block of a model that trains by a schedule of its own."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..capture.captured import Captured
from ..capture.checks import is_sharded
from ..capture.example_inputs import Example, device_of, input_specs, is_for_shapes, outline_of_call, specs_in_words
from ..capture.precision import autocast_name, weights_layout
from ..capture.trace.alone import is_observed
from ..capture.trace.answers import Answer
from ..capture.trees import flattened, map_tensors, tensors_of
from ..compiler.request import Request, captured_for, in_autograd_order
from ..errors import ScheduleFileError, UsageError, warn_caller
from ..inductor.planned_graph import Settings as GraphSettings
from ..ir.schedule_file import InputSpec, ScheduleRecord
from ..replay.checks.compatibility import OTHER_STEP, call_difference
from ..replay.kept_steps import KeptStep, KeptSteps, tensor_slots
from ..replay.stand_in import SignedAsModel
from ..replay.stepping import NewInput
from ..replay.training_step import CompiledStep
from ..replay.wrapper import ScheduleWrapper
from ..runtime.offloaded_calls import Keeping
from .promise import BlockPlan
from .rehearsal.counted import Changed
from .rehearsal.stand_ins import Rehearsal
from .shared_captures import SharedCaptures

#: Forms of calls that a found part is captured for in any case; after them while nine calls in ten have an earlier one.
MOST_FORMS = 32


@dataclass(frozen=True)
class BlockCall:
    """How a block is called in a training step.

    Attributes:
        key: everything that a capture fixes.
        captured: the block's program for this call.
        undelayed: the same with all gradients in autograd's order, where ``captured`` delays some; else None. Which one
            is used depends on workspaces, which are measured later, when the inputs are gone. Both number inputs,
            results and their gradients alike.
        request: what it was captured for; without inputs.
        inputs: of the call.
        layout: of the block's weights.
        example: its arguments, of fake tensors; None: Inductor is not asked about it.
    """

    key: Any
    captured: Captured
    undelayed: Captured | None
    request: Request
    inputs: tuple[InputSpec, ...]
    layout: str
    example: Example | None = None

    def as_in(self, record: ScheduleRecord) -> Captured:
        """The program with those gradients delayed that a schedule delays, as far as there is one."""
        return self.captured if record.made_last or self.undelayed is None else self.undelayed


class BlockSchedule(ScheduleWrapper):
    """A block of a model whose training step follows a schedule of its own; made by `monet_like.auto_schedule`.

    It has the block's own parameters, buffers, submodules and ``state_dict``.

    Args:
        model: the block; it is shared, not copied.
        name: in the whole model.
        mode: which variants may be used.
        backend: see `ScheduleWrapper`.
        shared: programs of the model's other blocks.

    Attributes:
        record: the schedule; None before planning, and if nothing in the block has a gradient.
    """

    record: ScheduleRecord | None  # type: ignore[assignment]
    plans_its_memory = False

    def __init__(self, model: nn.Module, name: str, mode: str, backend: str, shared: SharedCaptures) -> None:
        nn.Module.__init__(self)
        self._share(model, backend)
        self.record = None
        self._block_name, self._block_mode, self._block_shared = name, mode, shared
        self._block_call: BlockCall | None = None
        self._block_share: Any = None  # of the plan's memory, see `monet_like.auto.block_shares`
        self._block_own: Any = None  # plans calls that the plan has not foreseen
        self._block_records: list[ScheduleRecord] = []  # of such calls
        self._block_number, self._block_planned, self._block_sharded = 0, False, False
        self._block_changed = Changed()
        self._rehearsal: Rehearsal | None = None
        self._block_plan: BlockPlan | None = None  # of the whole model, for people
        self._block_settings: Any = None  # with which the whole model is planned
        self._block_forms, self._block_calls = 0, 0  # of calls by schedules
        self._block_told = False  # whether a warning has told of too many forms

    @SignedAsModel
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's forward, whose backward follows the schedule; its streamed weights are on the device meanwhile.

        Raises:
            UsageError: the block was sharded after it was planned.
        """
        weights = self._streamed
        if weights is None or not weights.weights:
            return self._forward(*args, **kwargs)
        self.let_go_of_trained()
        trains = self.training and torch.is_grad_enabled()
        with weights.there("forward", trains=trains):
            result = self._forward(*args, **kwargs)
            if any(map(weights.holds, tensors_of(result))):
                result = map_tensors(lambda tensor: tensor.clone() if weights.holds(tensor) else tensor, result)
            return result

    def let_go_of_trained(self) -> None:
        """Stream weights no longer that are trained now."""
        if self._streamed is not None and (trained := self._streamed.trained()):
            self._streamed.stay_resident(trained, self._block_name)

    def _run_model(self, *args: Any, **kwargs: Any) -> Any:
        weights = self._streamed
        if weights is None or not torch.is_grad_enabled() or not weights.runs:
            return self._model(*args, **kwargs)
        if not all(weight.plain for weight in weights.weights):
            weights.stay_resident(None, self._block_name)
            return self._model(*args, **kwargs)
        with weights.plainly():
            return self._model(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._rehearsal is not None:
            self._rehearsal.called = True
        if not self.training or not torch.is_grad_enabled() or is_observed():
            return self._run_model(*args, **kwargs)
        if self._rehearsal is not None:
            return self._rehearsed(self._rehearsal, args, kwargs)
        if not self._block_planned:
            if not is_for_shapes(tensors_of((args, kwargs))):
                warn_caller(
                    f"{type(self._model).__name__} has no schedule yet and runs as plain PyTorch: the first call in "
                    "training mode of the model that was given to auto_schedule plans its blocks; call that model, or "
                    "give auto_schedule example inputs"
                )
            return self._run_model(*args, **kwargs)
        if not self._block_sharded and is_sharded(self):
            raise UsageError(
                f"{self._block_name} was sharded by fully_shard after its schedule was planned, so the plan does not "
                "count what fully_shard gathers; call auto_schedule without example inputs, then fully_shard, and the "
                "first training call plans"
            )
        if self.record is None or not self._has_gradient(args, kwargs):
            return self._run_model(*args, **kwargs)
        self._block_calls += 1
        return ScheduleWrapper.forward(self, *args, **kwargs)

    def _rehearsed(self, rehearsal: Rehearsal, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of the block's stand-in; the block itself where nothing has a gradient."""
        kwargs = self._without_cache(args, kwargs)
        leaves, spec = flattened((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not self._has_gradient(args, kwargs):
            return self._run_model(*args, **kwargs)
        try:
            with rehearsal.aside((args, kwargs)) as example:
                call = self._call(self._key(leaves, spec), example)
        except Exception as error:
            if not rehearsal.defers:
                raise
            rehearsal.error = rehearsal.error or error
            return self._run_model(*args, **kwargs)
        if call is None:
            return self._run_model(*args, **kwargs)
        parameters = [owner[name] for owner, name in tensor_slots(self._model, call.captured, "_parameters")]
        forward = lambda: self._model(*args, **kwargs)  # noqa: E731
        return rehearsal.run(self._block_number, call.captured, parameters, inputs, forward)

    def _has_gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether anything in the block, or an input of this call, has a gradient."""
        return any(tensor.requires_grad for tensor in chain(tensors_of((args, kwargs)), self.parameters()))

    def _call(self, key: Any, example: Example) -> BlockCall | None:
        """The block's call with its program, captured the first time; None for a second kind of call in a step, and for
        results without gradients.

        Those run as plain PyTorch and count as the rest of the model does.
        """
        if self._block_call is None:
            call = self._captured_call(key, example)
            if all(tangent is None for tangent in call.captured.tangents):  # no backward of it will run
                return None
            self._block_call = call
        elif self._block_call.key != key:
            if key not in self._kept.plain:
                ways = specs_in_words(self._block_call.inputs), specs_in_words(input_specs(*example))
                self._run_plain(key, UsageError(_TWO_WAYS.format(self._block_name, *ways)), input_specs(*example))
            return None
        return self._block_call

    def _captured_call(self, key: Any, example: Example, known: tuple[Answer, ...] = ()) -> BlockCall:
        """A call of the block with its program.

        ``known``: its first answers to questions about values.

        Raises:
            UsageError: the block changes its inputs.
        """
        precision = autocast_name(device_of(self, example))
        request = Request(self._model, example, self._block_mode, type(self._model).__qualname__, autocast=precision)
        captured = self._captured(request, key, known)
        if captured.written:
            raise UsageError(
                f"{self._block_name} changes its inputs in place, which a block of a schedule cannot; clone them "
                "first, or leave the block out"
            )
        undelayed = None
        if captured.made_last:
            undelayed = self._captured(replace(request, made_last=()), key, captured.answers, captured)
        request = replace(request, example=((), {}), made_last=captured.made_last)
        inputs, outline = input_specs(*example), outline_of_call(example) if self.backend == "inductor" else None
        return BlockCall(key, captured, undelayed, request, inputs, weights_layout(self._model), outline)

    def _captured(
        self, request: Request, key: Any, known: tuple[Answer, ...], delayed: Captured | None = None
    ) -> Captured:
        """The block's program, or that of an equal block.

        Args:
            known: its first answers to questions about values.
            delayed: the same with gradients delayed, if that is at hand and ``request`` is for autograd's order.
        """
        described = (*key[1:], self._block_mode, request.made_last)
        captured = self._block_shared.find(self._model, described, known)
        if captured is None:
            if delayed is not None:
                captured = in_autograd_order(request, delayed)
            else:
                captured = captured_for(request, request.example)
                if self._rehearsal is None or not self._rehearsal.fake:
                    gc.collect()  # the tracer's cycles hold the inputs, which would be counted as memory of the rest
            self._block_shared.keep(self._model, described, captured)
        return captured

    def _step(
        self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], captured: Captured | None = None,
        known: tuple[Answer, ...] = (),
    ) -> KeptStep | None:  # fmt: skip
        if not known and not self._kept.of(key):
            self._check_forms()
        call, record = self._block_call, self.record
        if captured is None and call and record and call.key == key and not self._kept.of(key):
            captured = call.as_in(record)
        described = (*key[1:], self._block_mode, record and (record.attention, record.made_last))
        if captured is None:
            captured = self._block_shared.find(self._model, described, known)
        earlier = self._kept.of(key)
        change = earlier[-1].change() if earlier else None
        try:
            kept = super()._step(key, args, kwargs, captured, known)
        except ScheduleFileError:
            if self._on_new_input != "plan" or self._block_share is None:
                differs = record and call_difference(record, self._model, args, kwargs)
                reason = f"it was planned {differs[0]}, and is called {differs[1]}" if differs else change or OTHER_STEP
                raise NewInput(f"no plan of the block {self._block_name} serves this call: {reason}") from None
            kept = self._own_step(key, args, kwargs, known)
        if kept is not None:
            self._block_shared.keep(self._model, described, kept.captured)
        return kept

    def _check_forms(self) -> None:
        """Check that another form of call is captured, of a part that nobody has named."""
        found = self._block_settings is not None and bool(self._block_settings.told)
        if found and self._block_forms >= max(MOST_FORMS, self._block_calls // 10):
            self._block_told = True
            raise UsageError(
                f"{self._block_name} was called in {self._block_forms} ways in {self._block_calls} calls, and each "
                "needs a capture, which takes seconds; pad what it is called with to a few sizes, or name other parts: "
                "auto_schedule(model, blocks=[...])"
            )
        self._block_forms += 1

    def _keeping(self, kept: KeptStep) -> Keeping | None:
        copied = self._block_changed.values(kept.captured)
        return Keeping(self._offloads, kept.offloaded, copied) if self._offloads or copied else None

    def _own_step(
        self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: tuple[Answer, ...]
    ) -> KeptStep | None:
        """The step of a call that the plan has not foreseen, by a schedule of its own within the block's share of
        memory.

        Raises:
            InfeasibleError: no schedule fits into it.
        """
        call, planned = self._captured_call(key, (args, kwargs), known), self.record
        try:
            for record in self._block_records:
                self.record = record
                with contextlib.suppress(ScheduleFileError):
                    return super()._step(key, args, kwargs, call.as_in(record), known)
            self.record = self._block_own.record(call, self._block_share)
            if self.record is None:
                self._kept.plain[key] = "plain PyTorch needs no more memory than the plan gives to the block"
                return None
            self._block_records.append(self.record)
            return super()._step(key, args, kwargs, call.as_in(self.record), known)
        finally:
            self.record = planned

    def _tells_of(self, inputs: tuple[InputSpec, ...]) -> bool:
        told, call = self._block_shared.told, (type(self._model), () if self._block_told else inputs)
        new = call not in told
        told.add(call)
        return new

    def plan_state(self) -> dict[str, Any]:
        """What the block has of the present plan, to be given to `take_plan` later."""
        return {name: getattr(self, name) for name in _OF_PLAN}

    def take_plan(self, state: dict[str, Any] | None) -> None:
        """Follow a plan; None: none yet."""
        fresh: dict[str, Any] = dict(zip(_OF_PLAN, (None, None, None, False, [], KeptSteps(), Changed()), strict=True))
        for name, value in (state or fresh).items():
            setattr(self, name, value)

    def why_not_compiled(self, captured: Captured) -> str:
        """As of a whole model; nor where a copy is kept of what the backward reads."""
        if self._block_changed.values(captured):
            return "the rest of the model changes in place what it reads in its backward"
        return super().why_not_compiled(captured)

    def _graph_settings(self, record: ScheduleRecord, captured: Captured) -> GraphSettings:
        settings, plan = super()._graph_settings(record, captured), self._block_plan
        if plan is None or self._block_share is None:
            return settings
        room = max(0, plan.budget_bytes - plan.peak_bytes)
        return replace(settings, limits=self._block_share.limits(room, captured))

    def _made(
        self, record: ScheduleRecord, captured: Captured, settings: GraphSettings | None, args: tuple[Any, ...],
        kwargs: dict[str, Any]
    ) -> CompiledStep:  # fmt: skip
        step = self._block_shared.step(captured, record.schedule, settings)
        if step is None:
            step = super()._made(record, captured, settings, args, kwargs)
            self._block_shared.keep_step(captured, record.schedule, step, settings)
        return step

    def _apply(self, fn: Any, *options: Any, **named: Any) -> Any:
        """As of any module: for ``to``, ``cuda``, ``half`` and others. Streamed weights stay where they are.

        Raises:
            UsageError: they were to have another dtype or device.
        """
        if self._streamed is not None and self._streamed.weights:
            self._streamed.check_change(fn, self._block_name)
            fn = self._streamed.but_streamed(fn)
        return super()._apply(fn, *options, **named)

    def __getstate__(self) -> dict[str, Any]:
        if self._streamed is not None and self._streamed.weights:
            raise UsageError(
                f"{self._block_name} has weights that are streamed from the host, which belong to one process and "
                "cannot be copied or pickled with the module; save state_dict(), or copy what monet_like.unwrap(model) "
                "returns"
            )
        # Captured anew where it is unpickled or copied.
        return {**super().__getstate__(), "_block_call": None, "_block_records": []}

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        kept = self._block_share.carried_bytes if self._block_share else 0
        plan = self._block_plan
        return plan.of_block(self.record, kept, self.backend) if plan else "schedule: made at the first training call"

    def _shown_class(self) -> type:
        return type(self._model) if "_model" in self.__dict__ else type(self)  # the code around it may look


#: What a plan gives to a block.
_OF_PLAN = ("record", "_block_call", "_block_share", "_block_planned", "_block_records", "_kept", "_block_changed")

_TWO_WAYS = (
    "{} is called twice in a step in different ways: with {}, and with {}; a block has one schedule, so give both "
    "calls the same shapes, or leave the block out"
)


def blocks_of(model: nn.Module) -> Sequence[BlockSchedule]:
    """The blocks of a model that have schedules of their own, in the order of their names."""
    return [module for module in model.modules() if isinstance(module, BlockSchedule)]
