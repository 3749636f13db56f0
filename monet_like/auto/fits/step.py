"""The step of a model as moments, from its pieces: what exists when each of them runs.

Parameters, buffers, the optimizer's state, inputs and cuBLAS's workspaces exist throughout. A tensor between pieces
exists until its last reader has run in the forward, and in the backward until the last piece has run that keeps it. Its
gradient exists from the backward of its last reader to that of its maker. Gradients of parameters stay; an optimizer in
the backward frees them at once, except those of a parameter that several pieces use, which are complete with the first
of them alone. Otherwise the optimizer steps with all gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from ...capture.captured import Captured
from ...compiler.request import OPTIMIZERS
from ...ir import step
from ...ir.step import Moment, Point, Step, Streaming, with_offloads
from ...profile.devices import DeviceLimits
from ...runtime.frozen_weights import host_bytes
from ...runtime.offload import host_parts
from .pieces import CUDA, Pieces, resident_bytes
from .question import Question

#: Values of its program that a piece keeps: what `Point.shared` says, by piece.
Kept = Sequence[Collection[int]]


def step_of(
    question: Question, pieces: Pieces, cublas_bytes: int, kept: Kept, streaming: Streaming | None = None
) -> Step:
    """The step, in the order of the forward; menus are empty. The host is as large as need be.

    Args:
        cublas_bytes: that cuBLAS keeps on the card.
        kept: by piece, its inputs and results that it keeps for its backward.
        streaming: of frozen weights; None: all are on the card.
    """
    base = resident_bytes(question.model) + question.optimizer_bytes + pieces.input_bytes + cublas_bytes
    names = (pieces.ranges[number].name for number in pieces.trained)
    made = Step(tuple(map(step.Piece, names)), tuple(_Moments(question, pieces, base, kept)), streaming, 1 << 60)
    return with_offloads(made) or made


def streaming_of(pieces: Pieces, card: DeviceLimits) -> Streaming | None:
    """What the planner has to know of frozen weights of layers, by the datasheet's link; None: there are none."""
    sizes = tuple(sum(pieces.ranges[number].frozen) for number in pieces.trained)
    return Streaming(sizes, sizes, tuple(size / card.host_bytes_per_second for size in sizes)) if any(sizes) else None


def pinned_bytes(pieces: Pieces, points: Sequence[Point]) -> int:
    """What streamed weights and offloaded values take of the host's memory, by a point for each piece."""
    found: list[int] = []
    for number, point in zip(pieces.trained, points, strict=True):
        found += pieces.ranges[number].frozen if point.ahead else ()
        found += host_parts(point.offloaded_bytes, CUDA)
    return sum(host_bytes(count, CUDA) for count in found)


def lone_inputs(pieces: Pieces, menus: Sequence[Sequence[Point]]) -> list[frozenset[int]]:
    """By piece, the inputs that exist only while it keeps them: no other part reads them, and what makes them does not
    keep its results.

    Args:
        menus: by piece.
    """
    storages = Counter(one.storage for one in pieces.crossing)
    keep: set[int] = set()
    for number, piece, menu in zip(pieces.trained, pieces.order, menus, strict=True):
        keep.update(_results(pieces, number, piece.captured, {v for point in menu for v in point.shared}))
    found = []
    for number, piece in zip(pieces.trained, pieces.order, strict=True):
        each = zip(piece.captured.inputs, pieces.ranges[number].takes, strict=True)
        of = {value: place for value, place in each if place >= 0 and place not in keep}
        crossing = {value: pieces.crossing[place] for value, place in of.items()}
        found.append(frozenset(
            value
            for value, one in crossing.items()
            if one.readers == (number,) and one.bytes and not one.is_end and storages[one.storage] == 1
        ))  # fmt: skip
    return found


def all_shared(menus: Iterable[Iterable[Point]]) -> Kept:
    """What any point of a menu keeps, by piece."""
    return [{value for point in menu for value in point.shared} for menu in menus]


def least_shared(menus: Iterable[Iterable[Point]]) -> Kept:
    """What every point of a menu keeps, by piece."""
    return [set.intersection(*({*point.shared} for point in menu)) for menu in menus]


class _Moments:
    """The moments of a step."""

    def __init__(self, question: Question, pieces: Pieces, base: int, kept: Kept) -> None:
        self.question, self.pieces, self.base = question, pieces, base
        self.keepers: dict[int, list[int]] = {}
        for number, piece, values in zip(pieces.trained, pieces.order, kept, strict=True):
            for place in _places(pieces, number, piece.captured, values):
                self.keepers.setdefault(place, []).append(number)

    def __iter__(self) -> Iterator[Moment]:
        pieces, trained = self.pieces, self.pieces.trained
        piece_of = {number: piece for piece, number in enumerate(trained)}
        for number, part in enumerate(pieces.ranges):
            there = tuple((piece, 1) for piece, other in enumerate(trained) if other < number)
            held, name = self.base + self._forward(number), f"forward of {part.name}"
            if number in piece_of:
                yield Moment(name, held, there, piece_of[number], "forward")
            else:
                yield Moment(name, held + sum(pieces.crossing[place].bytes for place in part.gives), there)
        yield from self._backward()

    def _backward(self) -> Iterator[Moment]:
        pieces, trained = self.pieces, self.pieces.trained
        waits = self.question.optimizer_in_backward
        gradients: dict[int, int] = {}  # of parameters, by number
        for piece in reversed(range(len(trained))):
            number = trained[piece]
            part = pieces.ranges[number]
            mine = dict(part.gradients)
            adds = bool(mine) and mine.keys() <= gradients.keys()
            there = tuple((other, 1) for other in range(piece + 1))
            held = self.base + self._between(number) + sum(gradients.values())
            yield Moment(f"backward of {part.name}", held, there, piece, "backward", adds)
            earlier = {n for other in trained[:piece] for n, _ in pieces.ranges[other].gradients}
            gradients.update((n, size) for n, size in mine.items() if not waits or n in earlier)
            for n in mine if waits else ():
                if n not in earlier:
                    gradients.pop(n, None)
        if not waits:
            total = sum(gradients.values())
            # For Adam one list of tensors as large as the gradients: PyTorch's documentation of ``torch.optim.Adam``.
            more = total if OPTIMIZERS[self.question.optimizer].temporaries else 0
            yield Moment("the optimizer's step", self.base + self._results() + total + more)

    def _results(self) -> int:
        """Bytes of the loss, or of the results that the caller holds."""
        return sum({one.storage: one.bytes for one in self.pieces.crossing if one.is_end}.values())

    def _forward(self, number: int) -> int:
        """Bytes of tensors between pieces when the forward of a part begins."""
        there = {
            one.storage: one.bytes
            for place, one in enumerate(self.pieces.crossing)
            if one.maker < number
            and (one.is_end or one.readers[-1] >= number or any(k < number for k in self.keepers.get(place, ())))
        }
        return sum(there.values())

    def _between(self, number: int) -> int:
        """Bytes of tensors between pieces, and of their gradients, when the backward of a part begins."""
        there: dict[int, int] = {}
        gradients = 0
        for place, one in enumerate(self.pieces.crossing):
            if one.is_end or any(keeper <= number for keeper in self.keepers.get(place, ())):
                there[one.storage] = one.bytes
            if one.maker <= number and (one.is_end or any(reader > number for reader in one.readers)):
                gradients += one.gradient_bytes
        return sum(there.values()) + gradients


def _places(pieces: Pieces, number: int, captured: Captured, values: Collection[int]) -> Iterator[int]:
    """The tensors between pieces that values of a piece's program are."""
    part = pieces.ranges[number]
    for value, place in zip(captured.inputs, part.takes, strict=True):
        if value in values and place >= 0:
            yield place
    yield from _results(pieces, number, captured, values)


def _results(pieces: Pieces, number: int, captured: Captured, values: Collection[int]) -> Iterator[int]:
    """The tensors between pieces that results of a piece are."""
    for tensor, positions in zip(captured.outputs, captured.output_positions, strict=True):
        if tensor.value in values:
            yield from (pieces.ranges[number].gives[position] for position in positions)
