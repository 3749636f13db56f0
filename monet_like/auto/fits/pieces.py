"""The pieces of a training step at one size: its recorded forward is cut at equal layers, and each distinct piece is
captured once, whatever the number of its copies.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...capture.captured import Captured, allocated_bytes
from ...capture.example_inputs import Example
from ...compiler.request import Request, captured_for
from ...runtime.frozen_weights import LEAST_BYTES
from .part import Part
from .question import Question
from .recorded import Recording, Span

CUDA = torch.device("cuda", 0)
#: Compute capability of a card; None: unknown.
Capability = tuple[int, int] | None
#: Calls of PyTorch's functions in a layer that is a piece of its own, if there are equal ones.
LEAST_CALLS, MOST_CALLS = 6, 400


@dataclass(frozen=True, eq=False)
class Piece:
    """A distinct part of the step and its program.

    Attributes:
        name: for people, of the first of its copies.
        captured: with the variants that our plans may use.
    """

    name: str
    captured: Captured


@dataclass(frozen=True)
class Range:
    """A part of the step, in the order of the forward.

    Attributes:
        name: for people, such as ``layers.3``.
        kind: its place among the distinct pieces; -1: nothing in it has a gradient, so it has no backward.
        takes, gives: what its inputs and results are: places in `Pieces.crossing`; -1: an input of the step.
        gradients: of its trained parameters: (number, bytes), those with the same number are one.
        frozen: bytes of each of its weights that may lie on the host: those of a layer that no other part reads.
    """

    name: str
    kind: int
    takes: tuple[int, ...]
    gives: tuple[int, ...]
    gradients: tuple[tuple[int, int], ...]
    frozen: tuple[int, ...] = ()


@dataclass(frozen=True)
class Crossing:
    """A tensor that one part makes and later ones read.

    Attributes:
        storage: the same for tensors in one storage.
        bytes: of the storage; 0: it is a parameter's.
        gradient_bytes: 0: it has none.
        maker: number of the part.
        readers: of the parts.
        is_end: a result of the step, such as the loss: the caller holds it, and its gradient comes from there.
    """

    storage: int
    bytes: int
    gradient_bytes: int
    maker: int
    readers: tuple[int, ...]
    is_end: bool


@dataclass(frozen=True, eq=False)
class Pieces:
    """A training step at one size.

    Attributes:
        kinds: the distinct pieces.
        ranges: all parts, in the forward's order.
        crossing: the tensors between them.
        input_bytes: of the step's inputs.
    """

    kinds: tuple[Piece, ...]
    ranges: tuple[Range, ...]
    crossing: tuple[Crossing, ...]
    input_bytes: int

    @property
    def outline(self) -> object:
        """Equal for steps that differ in sizes alone."""
        return self.ranges, [(one.maker, one.readers, one.gradient_bytes > 0) for one in self.crossing]

    @property
    def trained(self) -> list[int]:
        """Numbers of the parts that have a backward."""
        return [number for number, part in enumerate(self.ranges) if part.kind >= 0]

    @property
    def order(self) -> list[Piece]:
        """The piece of each of them."""
        return [self.kinds[self.ranges[number].kind] for number in self.trained]


class Capturing:
    """Records a step and captures its pieces; what does not depend on the card is done once for each size.

    Args:
        question: the model and its step.
        say: called with what is being captured.
    """

    def __init__(self, question: Question, say: Callable[[str], None] = lambda _: None) -> None:
        self.question, self.say = question, say
        self._cuts: dict[tuple[int, int], _Cut] = {}
        self._known: dict[tuple[Any, ...], Piece] = {}

    def at(self, batch: int, length: int, capability: Capability, like: Pieces | None = None) -> Pieces:
        """The pieces at a size, for a card of this compute capability.

        Args:
            like: the pieces at another size, whose gradients are made last here, too: which ones it pays for depends on
                the size, and schedules of one size are schedules of another only where the order is the same.

        Raises:
            CaptureError: a piece cannot be captured.
        """
        if self.question.attention:  # the same on all cards
            capability = None
        if (batch, length) not in self._cuts:
            self.say(f"recording the step at {batch} x {length}")
            self._cuts[batch, length] = _Cut(self.question.steps.recorded(batch, length))
        cut = self._cuts[batch, length]
        last = dict(enumerate(piece.captured.made_last for piece in like.kinds)) if like else {}
        kinds = []
        for kind, (name, part) in enumerate(cut.kinds):
            key = (batch, length, capability, kind, last.get(kind))
            if key not in self._known:
                self.say(f"capturing {name} at {batch} x {length}")
                self._known[key] = Piece(name, self._captured(cut.recording, part, capability, last.get(kind)))
            kinds.append(self._known[key])
        return Pieces(tuple(kinds), cut.ranges, cut.crossing, cut.input_bytes)

    def _captured(
        self, recording: Recording, part: Part, capability: Capability, made_last: tuple[str, ...] | None
    ) -> Captured:
        asked = self.question
        example: Example = (tuple(map(recording.meta, part.takes)), {})
        request = Request(
            part, example, asked.mode, target=CUDA, attention=asked.attention, capability=capability,
            optimizer_in_backward=asked.optimizer_in_backward, made_last=made_last,
        )  # fmt: skip
        return captured_for(request, example)


class _Cut:
    """A recording in parts.

    Attributes:
        kinds: name and first part of each distinct piece.
        ranges, crossing, input_bytes: see `Pieces`.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.kinds: list[tuple[str, Part]] = []
        self.storages: dict[int, int] = {}
        parts = _parts(recording)
        makers = {number: place for place, (_, part) in enumerate(parts) for number in part.gives}
        layers, reads = {*recording.names.values()}, Counter(n for _, part in parts for n in part.held.values())
        readers = {number: [i for i, (_, part) in enumerate(parts) if number in part.takes] for number in makers}
        places = {number: place for place, number in enumerate(makers)}
        self.crossing = tuple(self._crossing(number, maker, readers[number]) for number, maker in makers.items())
        known: dict[str, int] = {}
        ranges = []
        for name, part in parts:
            kind = -1
            if any(self._fake(number).requires_grad for number in part.gives):
                kind = known.setdefault(part.outline(exact=True), len(known))
                if kind == len(self.kinds):
                    self.kinds.append((name, part))
            takes, gives = (tuple(places.get(number, -1) for number in of) for of in (part.takes, part.gives))
            gradients, frozen = ((), ()) if kind < 0 else (self._gradients(part), self._frozen(part, reads))
            frozen = frozen if name in layers else ()
            ranges.append(Range(name, kind, takes, gives, tuple(gradients), tuple(frozen)))
        self.ranges = tuple(ranges)
        inputs = {number for _, part in parts for number in part.takes if number not in makers}
        self.input_bytes = sum({self._storage(number): _bytes(self._fake(number)) for number in inputs}.values())

    def _fake(self, number: int) -> torch.Tensor:
        return self.recording.tensors[number]

    def _storage(self, number: int) -> int:
        return self._fake(number).untyped_storage()._cdata

    def _crossing(self, number: int, maker: int, readers: list[int]) -> Crossing:
        tensor, storage, is_end = self._fake(number), self._storage(number), number in self.recording.ends
        size = 0 if storage in self.recording.resident_storages else _bytes(tensor)
        gradient = allocated_bytes(tensor.numel() * tensor.element_size(), CUDA) if tensor.requires_grad else 0
        place = self.storages.setdefault(storage, len(self.storages))
        return Crossing(place, size, gradient, maker, tuple(readers), is_end)

    def _gradients(self, part: Part) -> Iterator[tuple[int, int]]:
        for number in part.held.values():
            if self._fake(number).requires_grad:
                yield number, _bytes(self._fake(number))

    def _frozen(self, part: Part, reads: Mapping[int, int]) -> Iterator[int]:
        for number in self.recording.frozen_weights.intersection(part.held.values()):
            if reads[number] == 1 and (size := _bytes(self._fake(number))) >= LEAST_BYTES:
                yield size


def _parts(recording: Recording) -> list[tuple[str, Part]]:
    """The parts that the results depend on, in order, with names."""
    parts: list[tuple[str, Part]] = []
    later = {*recording.ends}
    for (start, name), (end, _) in reversed([*itertools.pairwise(_bounds(recording))]):
        part = Part(recording, start, end, later)
        if part.gives:
            parts.append((name, part))
            later |= {*part.takes}
    return parts[::-1]


def _bounds(recording: Recording) -> list[tuple[int, str]]:
    """Where the calls are cut: the first call of each part, and its name; at last the number of all calls."""
    count, names, layers = len(recording.calls), recording.names, _layers(recording)
    found = {0: f"what is before {names[layers[0].module]}" if layers else "the whole step"}
    for place, span in enumerate(layers):
        name, following = names[span.module], layers[place + 1] if place + 1 < len(layers) else None
        found[span.start] = name
        if following is None:
            found[span.end] = f"what is after {name}"
        elif following.start > span.end:
            found[span.end] = f"what is between {name} and {names[following.module]}"
    return [
        *sorted((p, name) for p, name in found.items() if p < count and p not in recording.written_later),
        (count, ""),
    ]


def _layers(recording: Recording) -> list[Span]:
    """The outermost calls of modules that are as large as a layer and of which there are several equal ones."""
    spans = [span for span in recording.spans if LEAST_CALLS <= span.end - span.start <= MOST_CALLS]
    outlines = {span: Part(recording, span.start, span.end, set()).outline(exact=False) for span in spans}
    while True:
        found = _outermost(outlines)
        times = Counter(outlines[span] for span in found)
        alone = [span for span in found if times[outlines[span]] == 1]  # its equals stand within others
        if not alone:
            return found
        for span in alone:
            del outlines[span]


def _outermost(spans: Iterable[Span]) -> list[Span]:
    end, found = 0, list[Span]()
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if span.start >= end:
            found.append(span)
            end = span.end
    return found


def _bytes(tensor: torch.Tensor) -> int:
    return allocated_bytes(tensor.untyped_storage().nbytes(), CUDA)


def resident_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers on a GPU; tied ones count once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(map(_bytes, tensors.values()))
