"""Which calls of a model are replayed as CUDA graphs: those of one form at a time, one after the other.

One graph is of the forward, and one of each segment of the backward. They keep a pool of memory as large as the step
needs, between the steps, too. Inputs and incoming gradients are copied in; results and gradients are copied out, and
lie beside the pool. Not yet run on a real GPU.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from ...capture.checks import acts_as_plain
from ...errors import MonetError, warn_caller
from ...runtime.out_of_memory import silent
from .recorder import CudaRecorder, Recorder
from .refusals import Step, refusal
from .step import GraphedCall, StepGraphs, may_serve
from .trial import Trial, Unused, unneeded

_log = logging.getLogger("monet_like")

#: What records steps, by the type of their device.
RECORDERS: Mapping[str, Callable[[torch.device], Recorder]] = MappingProxyType({"cuda": CudaRecorder})
#: So many calls of one form in a row run without graphs before they are captured.
WARM_UP = 2
#: After so many calls in a row, another form has the graphs: a phase of the training, and no smaller last batch.
TAKES_OVER = 64
#: Graphs are captured at most so often: a model whose parameters move in every step runs without.
MOST_CAPTURES = 4


class ModelGraphs:
    """The graphs of one model's training steps. A copy begins with none.

    Args:
        always: whether all calls that graphs can serve are replayed; else those of forms that win a `Trial`.
        recorders: see `RECORDERS`.

    Attributes:
        always: as given.
        captures: how often graphs were captured.
        replayed: how many calls were replayed.
        why_not: why the latest call was not; "": it was.
    """

    def __init__(self, always: bool, recorders: Mapping[str, Callable[[torch.device], Recorder]] = RECORDERS) -> None:
        self.always, self._recorders = always, recorders
        self._lock = threading.Lock()
        self._graphs: StepGraphs | None = None
        self._call: weakref.ref[GraphedCall] | None = None
        self._latest: weakref.ref[Step] | None = None
        self._refusals: weakref.WeakKeyDictionary[Step, str] = weakref.WeakKeyDictionary()
        self._won: weakref.WeakSet[Step] = weakref.WeakSet()
        self._in_row = 0
        self.captures = self.replayed = 0
        self.why_not = "no call was made yet"

    def __reduce__(self) -> Any:
        return ModelGraphs, (self.always,)

    def call(self, step: Step, residents: Sequence[torch.Tensor]) -> GraphedCall | None:
        """The call of a step that begins, as one by graphs; None: it runs without.

        Args:
            residents: its parameters, buffers and inputs.
        """
        if not self.always and step.captured.device.type not in self._recorders:
            return None
        if not self._lock.acquire(blocking=False):
            self.why_not = "another thread's call begins"
            return None
        try:
            found = self._graphs_for(step, residents)
            call = None if isinstance(found, str) else GraphedCall(found)
            self.why_not = found if isinstance(found, str) else ""
            if call is not None:
                self._call = weakref.ref(call)
                self.replayed += 1
            return call
        finally:
            self._lock.release()

    def _graphs_for(self, step: Step, residents: Sequence[torch.Tensor]) -> StepGraphs | str:
        """The graphs for a call, captured now if need be; or why it has none."""
        before, graphs = self._latest() if self._latest is not None else None, self._graphs
        self._in_row = self._in_row + 1 if before is step else 1
        self._latest = weakref.ref(step)
        if self._call is not None and self._call() is not None:
            return "an earlier call's backward has not ended"
        if graphs is not None and graphs.step is step and (reason := graphs.outdated(residents)):
            self._graphs, self._in_row = None, 1
            self._told(reason)
            return reason
        if graphs is not None and graphs.step is step:
            return graphs if graphs.serve(residents[graphs.first_input :]) else "stream, modes or inputs are others"
        if graphs is not None and graphs.step.captured.device != step.captured.device:
            self._graphs = graphs = None  # the model has moved, and shall leave no memory behind
        if self.captures >= MOST_CAPTURES:
            return f"graphs were captured {MOST_CAPTURES} times"
        if self._in_row <= (WARM_UP if graphs is None else TAKES_OVER):
            return "calls of this form run without graphs at first"
        return self._captured(step, residents)

    def _captured(self, step: Step, residents: Sequence[torch.Tensor]) -> StepGraphs | str:
        """Capture the graphs of a step."""
        device = step.captured.device
        make = self._recorders.get(device.type)
        if step not in self._refusals:
            reason = f"there are none on {device}" if make is None else refusal(step)
            self._refuse(step, reason or ("" if self.always else unneeded(step)))
        if make is None or self._refusals[step]:
            return self._refusals[step]
        if any(tensor.device != device or not acts_as_plain(tensor) for tensor in residents):
            return f"some parameters, buffers or inputs are not on {device}, or of a class of their own"
        self._graphs = None  # its memory is free for those that follow
        try:
            recorder = make(device)
            if not may_serve(recorder, residents[len(residents) - len(step.captured.inputs) :]):
                return "the call is captured by somebody else, or modes or inputs are others"
            if not (self.always or recorder.fails_safely):
                raise Unused("with this PyTorch a capture that fails would end the process")
            with silent():
                trial = None if self.always or step in self._won else Trial(step, recorder)
                self.captures += 1
                self._graphs = StepGraphs(step, recorder, residents, trial)
            self._won.add(step)
            if trial is not None:
                _log.info("training steps of a form are replayed as CUDA graphs: %s", trial.won)
        except Unused as lost:
            self._refuse(step, str(lost))
            return self._refusals[step]
        except Exception as error:
            self.captures = MOST_CAPTURES
            first = (str(error).splitlines() or [""])[0]
            said = first if isinstance(error, MonetError) else f"{type(error).__name__}: {first}"
            self._say(f"training steps run without CUDA graphs, and compute the same: {said}")
            return said
        return self._graphs

    def _refuse(self, step: Step, reason: str) -> None:
        """Have a form run without graphs if there is a reason."""
        self._refusals[step] = reason
        if reason:
            self._say(f"training steps of a form run without CUDA graphs, and compute the same: {reason}")

    def _told(self, reason: str) -> None:
        if self.captures >= MOST_CAPTURES:
            self._say(
                f"training steps run without CUDA graphs from now on: they were captured {MOST_CAPTURES} times, and "
                f"{reason}"
            )

    def _say(self, message: str) -> None:
        """Warn those who have asked for graphs; tell others in the log."""
        if self.always:
            warn_caller(message)
        else:
            _log.info(message)
