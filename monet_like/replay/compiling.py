"""What ``backend="inductor"`` does: which calls Inductor compiles, within which bytes, and what is said of others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from ..capture.captured import Captured
from ..capture.example_inputs import Example, input_specs, specs_in_words
from ..errors import warn_caller
from ..inductor.compiled_call import CompiledCall, NotCompiled
from ..inductor.planned_graph import Settings
from ..ir.schedule_file import InputSpec, ScheduleRecord
from ..ir.units import Budget
from ..runtime.offloaded_calls import OffloadedCalls
from ..runtime.streamed_block import Streamed
from .checks.draws import draws_of, why_other_draws
from .stand_in import StandIn
from .training_step import CompiledStep


class Compiling(StandIn):
    """A module some of whose calls Inductor compiles."""

    backend: str
    _model: nn.Module
    _streamed: Streamed | None
    #: Whether progress is shown; None: if somebody sees stderr.
    _shows_progress: bool | None = None
    #: Of a whole model's blocks, some of which have on the host what they keep.
    _offloads: OffloadedCalls | None = None

    def _tells_of(self, inputs: tuple[InputSpec, ...]) -> bool:
        """Whether to warn of calls with such inputs; not so of each of many equal blocks."""
        return True

    def _run_compiled(self, compiled: CompiledCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model as Inductor compiles it.

        Raises:
            NotCompiled: nothing of it has run.
        """
        if compiled.graphs:
            return compiled(self._model, args, kwargs, self._offloads)
        from ..compiler.progress import Progress  # with rich, which a replay can do without

        with Progress(quiet=self._shows_progress is False, first="compile") as progress:
            progress.at("compile", type(self._model).__name__)
            return compiled(self._model, args, kwargs, self._offloads)

    def _leave_uncompiled(self, step: CompiledStep, error: NotCompiled, given: Example) -> None:
        """Have calls follow the schedule of a step that was to be compiled."""
        step.compiled = None
        self._tell_uncompiled(str(error), input_specs(*given))

    def _tell_uncompiled(self, reason: str, inputs: tuple[InputSpec, ...]) -> None:
        """Warn that calls with such inputs follow their schedule, operator by operator."""
        if self._tells_of(inputs):
            warn_caller(
                f"Inductor compiles nothing of {type(self._model).__name__} when it is called with "
                f"{specs_in_words(inputs)}, whose calls follow their schedule one operator after the other: {reason}"
            )

    def why_not_compiled(self, captured: Captured) -> str:
        """Why Inductor compiles no such call, so that it follows its schedule; "" if it does."""
        results = sum(tangent is not None for tangent in captured.tangents)
        reasons = {
            "its weights come from the host": self._streamed is not None,
            "the optimizer runs in the backward": captured.optimizer_in_backward,
            "its Python code asks for values of tensors": bool(captured.answers),
            "a loss may use some of its results alone, and Inductor's backward takes zeros for the others": results > 1,
        }
        return next((reason for reason, holds in reasons.items() if holds), "") or why_other_draws(captured)

    def _compiles(self, record: ScheduleRecord, captured: Captured, inputs: tuple[InputSpec, ...]) -> Settings | None:
        """How Inductor's graphs of calls with such inputs are planned; None: they follow their schedule."""
        if self.backend != "inductor" or inputs != record.inputs:
            return None
        if reason := self.why_not_compiled(captured):
            self._tell_uncompiled(reason, inputs)
            return None
        return replace(self._graph_settings(record, captured), draws=draws_of(captured))

    def _graph_settings(self, record: ScheduleRecord, captured: Captured) -> Settings:
        """How Inductor's graphs of such calls are planned."""
        return Settings(Budget(record.budget_bytes), extra_bytes=record.extra_bytes, quick=True)
