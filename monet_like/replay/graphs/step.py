"""The graphs of one training step: one of its forward, one of each segment of its backward, and calls by them.

Parameters and buffers are read where they lie. All that the step makes lies in the graphs' pool, at the same places in
every call; inputs and incoming gradients are copied in, results and gradients are copied out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch

from ...capture.guards.objects import default_generators
from ...capture.trace.undone import Contents
from ...errors import UsageError
from ...runtime.codegen import compile_block, compile_chain
from ..segments import Segment
from .copies import CopiesOut, Tensors, copy_in
from .recorder import Recorder
from .refusals import DRAWS, Step, kernel_settings
from .trial import Run, Trial


class StepGraphs:
    """The graphs of a step, recorded for the parameters and buffers of a call, and for its stream.

    Args:
        residents: the call's parameters, buffers and inputs. What recording changes of them is undone, and what is
            drawn.
        trial: compares the graphs with the step without; None: they are not compared.

    Attributes:
        inputs, tangents: where the graphs read inputs and incoming gradients.
        made: positions among the saved values of those that the forward makes, which lie in the pool.
        of_residents: by position among the saved values, which resident it is.
        first_input: number of parameters and buffers.
        stream: on which the graphs are replayed.

    Raises:
        Unused: the trial is lost.
        UsageError: results cannot be copied as they lie.
        Exception: an operator cannot be recorded.
    """

    def __init__(
        self, step: Step, recorder: Recorder, residents: Sequence[torch.Tensor], trial: Trial | None = None
    ) -> None:
        metas = step.captured.metas
        self.step, self.recorder, self.stream = step, recorder, recorder.stream()
        self.first_input = len(residents) - len(step.captured.inputs)
        place = {value: i for i, value in enumerate(step.residents)}
        self.of_residents = {i: place[value] for i, value in enumerate(step.saved) if value in place}
        self.made = [i for i, value in enumerate(step.saved) if value not in place]
        self.inputs = [metas[value].empty() for value in step.captured.inputs]
        self.tangents = [metas[value].empty().zero_() for _, value in step.tangents]
        self._addresses = _addresses(residents[: self.first_input])
        self._settings = kernel_settings()
        self._copies: dict[int, CopiesOut] = {}
        with torch.no_grad(), torch._C._DisableAutocast():
            copy_in(self.inputs, residents[self.first_input :])
            lying = [*map(torch.Tensor.detach, residents[: self.first_input]), *self.inputs]
            parts, gradients = _Parts(step, lying, self.tangents), _incoming(self.tangents)
            ordinary, replayed = partial(parts.run, gradients), partial(self._replayed, residents, gradients)
            with self._undone(parts, residents) as undo:
                expected = self._rehearse(ordinary, residents, keep=trial is not None)
                undo()
                if trial is not None:
                    trial.before(expected, ordinary)
                    expected.clear()  # the trial lets go of it in turn
                    undo()
                with recorder.session():
                    self.forward = recorder.record(parts.forward)
                    self.segments = [recorder.record(parts.of_segment(number)) for number in range(len(step.segments))]
                if trial is not None:
                    trial.compare(chain(replayed(), self._changed(residents)))
                    trial.after(replayed)

    def outdated(self, residents: Sequence[torch.Tensor]) -> str:
        """Why a call cannot be replayed by these graphs nor a later one; "" if it may be."""
        if _addresses(residents[: self.first_input]) != self._addresses:
            return "its parameters or buffers have moved in memory"
        return "settings of PyTorch for kernels have changed" if kernel_settings() != self._settings else ""

    def serve(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether they can be replayed now, on their stream; see `may_serve`."""
        return self.recorder.stream() == self.stream and may_serve(self.recorder, given)

    @contextmanager
    def _undone(self, parts: _Parts, residents: Sequence[torch.Tensor]) -> Iterator[Callable[[], None]]:
        """Undo at the end what was computed; gives a function that does so before the end."""
        contents = Contents()
        for generator in default_generators(self.step.captured.device):
            contents.keep_generator(generator)
        for position in self.step.written:
            contents.keep(residents[position])

        def undo() -> None:
            parts.end()
            contents.restore()

        try:
            yield undo
        finally:
            undo()

    def _rehearse(self, ordinary: Run, residents: Sequence[torch.Tensor], *, keep: bool) -> list[Tensors]:
        """Run the step once in this thread, without a trace: what libraries make in their first call, or what cuDNN
        keeps for each thread, cannot be made in a capture. By it is known which changes in place versions count.

        Returns:
            If they are to be kept, the results, the gradients of each segment and what `_changed` yields.
        """
        before = {position: residents[position]._version for position in self.step.written}
        kept: list[Tensors] = []
        for found in ordinary():
            _check(found)
            kept += [found] if keep else []
        self.changes = {p: n for p, version in before.items() if (n := residents[p]._version - version)}
        return [*kept, *self._changed(residents)] if keep else []

    def _changed(self, residents: Sequence[torch.Tensor]) -> Iterator[Tensors]:
        """Copies of what a step changes in place, and the states of the generators."""
        yield [residents[position].detach().clone() for position in self.step.written]
        yield [generator.get_state() for generator in default_generators(self.step.captured.device)]

    def _replayed(self, residents: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> Iterator[Tensors]:
        """Replay a step as a call does: its results, and the gradients of one segment after the other."""
        call = GraphedCall(self)
        outputs, saved = call.forward(residents)
        yield [*outputs]
        yield from call.backward(call.filled(saved), gradients)

    def out(self, number: int, found: Tensors) -> Tensors:
        """Copies of what a graph has made, by its number: the forward's results are 0."""
        if number not in self._copies:
            self._copies[number] = CopiesOut(found, shared=number == 0)
        return self._copies[number]()


def may_serve(recorder: Recorder, given: Sequence[torch.Tensor]) -> bool:
    """Whether graphs can serve a call now, and inputs or incoming gradients are to kernels as their copies are.

    Not while somebody sees each operator (``TorchDispatchMode``), or each saved tensor.
    """
    return (
        recorder.stream() is not None
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and all(tensor.data_ptr() % recorder.alignment_bytes == 0 for tensor in given)
    )


def _incoming(places: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Incoming gradients of a step that is not part of the training, as large as places; nothing is drawn for them."""
    numbers = (torch.linspace(-1.0, 1.0, place.numel(), device=place.device) for place in places)
    return [torch.empty_like(place).copy_(some.view(place.shape)) for place, some in zip(places, numbers, strict=True)]


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _check(results: Tensors) -> None:
    """Check that results can be copied as they lie.

    Raises:
        UsageError: they have elements that lie otherwise than as strides say.
    """
    for result in results:
        if result is not None and (result.layout is not torch.strided or result.is_conj() or result.is_neg()):
            raise UsageError("a result or a gradient is sparse, or conjugated or negated by a bit")


class _Parts:
    """The functions that are recorded.

    Args:
        lying: parameters and buffers, and where inputs are copied to.
        tangents: where incoming gradients are copied to.
    """

    def __init__(self, step: Step, lying: list[torch.Tensor], tangents: list[torch.Tensor]) -> None:
        # No graph reads the generator's state on the host, and these steps never put it back (`refusal`).
        functions: dict[str, Callable[..., Any]] = {DRAWS: lambda device: None}
        self._lying, self._tangents = lying, tangents
        self._count, self._segments = len(step.captured.outputs), len(step.segments)
        self._forward = compile_block(step.blocks[0], "forward", functions)
        self._backward = compile_chain(step.blocks[1:], "backward", functions)
        residents = set(step.residents)
        self._made = [i for i, value in enumerate(step.saved) if value not in residents]
        self.end()

    def end(self) -> None:
        """Hold nothing of a run."""
        self._saved: list[Any] = []
        self._chain: Iterator[list[Any]] = iter(())

    def run(self, gradients: Sequence[torch.Tensor]) -> Iterator[Tensors]:
        """Run a whole step: its results, and the gradients of one segment after the other.

        Args:
            gradients: the incoming ones.
        """
        copy_in(self._tangents, gradients)
        yield self.forward()[: self._count]
        for number in range(self._segments):
            yield self.of_segment(number)()

    def forward(self) -> Tensors:
        """The results, and the saved values that it makes."""
        outputs, self._saved = self._forward([*self._lying])
        return [*outputs, *(self._saved[place] for place in self._made)]

    def of_segment(self, number: int) -> Callable[[], Tensors]:
        """A function that returns the gradients of one segment; to be called in turn."""

        def run() -> Tensors:
            if number == 0:
                saved, self._saved = self._saved, []
                saved += self._tangents
                self._chain = self._backward(saved)
            handed = next(self._chain)
            found = [*handed]
            handed.clear()
            return found

        return run


class GraphedCall:
    """One call by the graphs of a step. While it exists no other call uses them."""

    def __init__(self, graphs: StepGraphs) -> None:
        self._graphs = graphs
        self._made: Tensors = []
        #: By position among the saved values: the storage that the graphs read it from, and where it lies.
        self._lie: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def forward(self, residents: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], list[Any]]:
        """Replay the forward.

        Returns:
            Copies of the results.
            What ``saved`` of the step lists, without what lies in the pool.
        """
        graphs = self._graphs
        copy_in(graphs.inputs, residents[graphs.first_input :])
        found = graphs.forward()
        count = len(graphs.step.captured.outputs)
        self._made = found[count:]
        outputs = graphs.out(0, found[:count])
        for position, changes in graphs.changes.items():
            for _ in range(changes):
                torch.autograd.graph.increment_version(residents[position])
        saved: list[Any] = [None] * len(graphs.step.saved)
        for place, position in graphs.of_residents.items():
            resident = saved[place] = residents[position]
            self._lie[place] = resident.untyped_storage(), resident.data_ptr()
        return tuple(outputs), saved

    def filled(self, given: Sequence[torch.Tensor | None]) -> list[Any]:
        """What ``saved`` of the step lists, with what lies in the pool."""
        filled = [*given]
        for place, made in zip(self._graphs.made, self._made, strict=True):
            filled[place] = made
        return filled

    def can(self, step: Step, gradients: Sequence[torch.Tensor]) -> bool:
        """Whether a backward can be replayed: of this step, on its stream, with these incoming gradients."""
        return step is self._graphs.step and self._graphs.serve(gradients)

    def backward(self, given: Sequence[Any], gradients: Sequence[torch.Tensor]) -> Iterator[list[Any]]:
        """Replay one segment after the other; copies of the gradients of each."""
        graphs = self._graphs
        copy_in(graphs.tangents, gradients)
        for number, (segment, replay) in enumerate(zip(graphs.step.segments, graphs.segments, strict=True), 1):
            with self._as_it_lay(segment, given):
                found = replay()
            yield graphs.out(number, found)

    def ordinary(self, backward: Iterator[list[Any]]) -> Iterator[list[Any]]:
        """A backward without graphs of what the graphs' forward has left, which stays until it ends."""
        yield from backward

    @contextmanager
    def _as_it_lay(self, segment: Segment, given: Sequence[Any]) -> Iterator[None]:
        """While a segment runs, what has got other memory since the forward is copied to where it lay then."""
        undo: list[tuple[torch.Tensor, torch.Tensor]] = []
        for place in segment.reads:
            storage, address = self._lie[place]
            now: torch.Tensor = given[place]
            if now.data_ptr() == address:
                continue
            position = self._graphs.of_residents[place] - self._graphs.first_input
            if position >= 0:
                self._graphs.inputs[position].copy_(now)
                continue
            meta = self._graphs.step.captured.metas[self._graphs.step.saved[place]]
            at = torch.empty(0, dtype=meta.dtype, device=meta.device)
            at.set_(storage, (address - storage.data_ptr()) // meta.dtype.itemsize, meta.shape, meta.stride)
            undo.append((at, at.clone()))
            at.copy_(now)
        yield
        for at, before in undo:
            at.copy_(before)
