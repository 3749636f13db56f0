"""The step of a whole decoder as moments, from its parts: what exists when each part runs.

Parameters, buffers, the optimizer's state, tokens and cuBLAS's workspaces exist throughout. In the forward of block
``b`` the residual stream before each block up to ``b`` exists as well; blocks keep it for their backward. In the
backward of block ``b`` there are the residual streams before all blocks up to ``b``, the gradient of the one behind it,
and the gradients of all parameters behind it. An optimizer in the backward frees these at once, except those of a tied
weight, which are complete at the end alone. Otherwise the optimizer steps with all gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ..compiler.request import OPTIMIZERS
from ..ir import step
from ..ir.step import Moment, Step
from .decoder import Question
from .pieces import Piece, Pieces, resident_bytes

Found = TypeVar("Found")

#: The loss, and its gradient: one number each, as large as CUDA's allocator makes it.
_LOSS_BYTES = 2 * 512


def step_of(question: Question, pieces: Pieces, cublas_bytes: int) -> Step:
    """A decoder's step: its blocks from the first on, then the head with the loss, then the embedding; menus are empty.

    Args:
        cublas_bytes: that cuBLAS keeps on the card.
    """
    kinds = [pieces.kinds[kind] for kind in pieces.kind_of]
    base = resident_bytes(question.model) + question.optimizer_bytes + pieces.input_bytes + cublas_bytes
    moments = tuple(_moments(question, pieces, kinds, base))
    names = (*(f"block {b}" for b in range(len(kinds))), "head and loss", *(["embedding"] if pieces.start else []))
    return Step(tuple(map(step.Piece, names)), moments)


def _moments(question: Question, pieces: Pieces, kinds: Sequence[Piece], base: int) -> Iterator[Moment]:
    count, stream = len(kinds), pieces.stream_bytes
    end, start = count, count + 1
    if pieces.start is not None:
        yield Moment("forward of the embedding", base, (), start, "forward")
    base += pieces.table_bytes
    carried_start = ((start, 1),) if pieces.start is not None else ()
    for b in range(count):
        before = (*carried_start, *((other, 1) for other in range(b)))
        yield Moment(f"forward of block {b}", base + (b + 1) * stream, before, b, "forward")
    carried = (*carried_start, *((other, 1) for other in range(count)))
    streams = base + (count + 1) * stream
    yield Moment("forward of the head and loss", streams, carried, end, "forward")
    yield Moment("backward of the head and loss", streams + _LOSS_BYTES, (*carried, (end, 1)), end, "backward")
    gradients = pieces.end.gradient_bytes + _tied_bytes(question)
    for b in reversed(range(count)):
        there = (*carried_start, *((other, 1) for other in range(b + 1)))
        held = base + _LOSS_BYTES // 2 + (b + 2) * stream + gradients
        yield Moment(f"backward of block {b}", held, there, b, "backward")
        gradients += kinds[b].gradient_bytes
    if pieces.start is not None:
        held = base + _LOSS_BYTES // 2 + stream + gradients
        yield Moment("backward of the embedding", held, carried_start, start, "backward")
        gradients += pieces.start.gradient_bytes - _counted_twice(question, pieces)
    if not question.optimizer_in_backward:
        yield Moment("the optimizer's step", base + _LOSS_BYTES // 2 + gradients + _temporaries(question, gradients))


def _tied_bytes(question: Question) -> int:
    """The gradient of a tied weight, which an optimizer in the backward has to wait for until the
    embedding's is added.
    """
    if not question.optimizer_in_backward:
        return 0
    return sum(p.numel() * p.element_size() for p in _tied(question))


def _counted_twice(question: Question, pieces: Pieces) -> int:
    """The gradient of a tied weight: head and embedding make one each, which end as one."""
    return 0 if question.optimizer_in_backward else sum(p.numel() * p.element_size() for p in _tied(question))


def _tied(question: Question) -> list[Any]:
    mine = {id(p): p for p in question.parts.start.parameters() if p.requires_grad}
    return [mine[id(p)] for p in question.parts.end.parameters() if id(p) in mine]


def _temporaries(question: Question, gradients: int) -> int:
    """What a step of all parameters at once takes: for Adam one list of tensors as large as the gradients.

    PyTorch's documentation of ``torch.optim.Adam``: its default ``foreach`` needs about as much memory more as the
    parameters.
    """
    return gradients if OPTIMIZERS[question.optimizer].temporaries else 0


def with_way(pieces: Pieces, of: Callable[[Piece], Found]) -> tuple[Found, ...]:
    """What ``of`` says of each part, such as a point or a menu, for every part in the numbering of `step_of`."""
    found = [of(pieces.kinds[kind]) for kind in pieces.kind_of]
    return (*found, of(pieces.end), *([of(pieces.start)] if pieces.start is not None else []))
