"""The programs of a decoder's parts at one size: each distinct block is captured once, whatever the number of its
copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..capture.absent_gpu.attention import Absent, attention
from ..capture.captured import Captured, allocated_bytes
from ..capture.example_inputs import Example
from ..capture.trace.meta_tensors import as_fakes
from ..compiler.request import Request, captured_for
from ..errors import UsageError
from .decoder import Question

CUDA = torch.device("cuda", 0)
#: Compute capability of a card; None: unknown.
Capability = tuple[int, int] | None


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of the model and its program.

    Attributes:
        name: for people, such as ``block``.
        captured: with the variants that our plans may use.
    """

    name: str
    captured: Captured

    @cached_property
    def gradient_bytes(self) -> int:
        """Gradients of parameters that exist when the part's backward has ended."""
        mine = {tensor.value for _, tensor in self.captured.parameter_gradients}
        program = self.captured.program
        return sum(program.values[v].bytes for v in mine & set(program.gradients))


@dataclass(frozen=True, eq=False)
class Pieces:
    """A decoder at one batch and length.

    Attributes:
        batch, length: of the tokens.
        kinds: the distinct blocks.
        kind_of: for each block, its place in ``kinds``.
        end: the last norm, the head and the loss.
        start: the embedding; None: nothing in it is trained, so it has no backward.
        stream_bytes: of the residual stream between two blocks.
        table_bytes: of the tensors that all blocks read.
        input_bytes: of tokens and labels.
    """

    batch: int
    length: int
    kinds: tuple[Piece, ...]
    kind_of: tuple[int, ...]
    end: Piece
    start: Piece | None
    stream_bytes: int
    table_bytes: int
    input_bytes: int

    @property
    def every(self) -> tuple[Piece, ...]:
        """All distinct parts: blocks, end, start."""
        return (*self.kinds, self.end, *([self.start] if self.start else []))


class Capturing:
    """Captures the parts of a decoder; what does not depend on the card is captured once for each size.

    Args:
        question: the decoder.
        say: called with what is being captured.
    """

    def __init__(self, question: Question, say: Callable[[str], None] = lambda _: None) -> None:
        self.question, self.say = question, say
        self._known: dict[tuple[Any, ...], Piece] = {}
        signatures = [_signature(block) for block in question.parts.blocks]
        self.distinct = list(dict.fromkeys(signatures))
        self.kind_of = tuple(self.distinct.index(signature) for signature in signatures)
        self.first = [self.kind_of.index(kind) for kind in range(len(self.distinct))]

    def at(self, batch: int, length: int, capability: Capability, like: Pieces | None = None) -> Pieces:
        """The parts at a size, for a card of this compute capability.

        Args:
            like: the parts at another size, whose gradients are made last here, too: which ones it pays for depends on
                the size, and schedules of one size are schedules of another only where the order is the same.

        Raises:
            CaptureError: a part cannot be captured.
        """
        parts, tokens = self.question.parts, _tokens(batch, length)
        if self.question.attention:  # the same on all cards
            capability = None
        x, *tables = self._started(tokens, capability)
        stream = x.detach().requires_grad_()
        last = {} if like is None else {piece.name: piece.captured.made_last for piece in like.every}
        size = (batch, length)
        kinds = []
        for kind, place in enumerate(self.first):
            name = "block" if len(self.first) == 1 else f"block {place}"
            example: Example = ((stream, *tables), {})
            kinds.append(
                self._piece((*size, capability, kind), name, parts.blocks[place], example, capability, last.get(name))
            )
        name, example = "head and loss", ((stream, _tokens(batch, length)), {})
        end = self._piece((*size, "end"), name, parts.end, example, capability, last.get(name))
        start = None
        if any(p.requires_grad for p in parts.start.parameters()):
            name, example = "embedding", ((tokens,), {})
            start = self._piece((*size, "start"), name, parts.start, example, capability, last.get(name))
        return Pieces(
            batch,
            length,
            tuple(kinds),
            self.kind_of,
            end,
            start,
            _bytes(x),
            sum(map(_bytes, tables)),
            2 * _bytes(tokens),
        )

    def _started(self, tokens: torch.Tensor, capability: Capability) -> tuple[torch.Tensor, ...]:
        """The results of the first part, as meta tensors."""
        start = self.question.parts.start
        target = Absent(CUDA, capability, self.question.attention)
        with as_fakes(start, (tokens,), {}) as ((given,), _), given.fake_mode, torch.no_grad(), attention(target):
            found = start(given)
        results = found if isinstance(found, tuple) else (found,)
        if not all(isinstance(result, torch.Tensor) for result in results):
            raise UsageError(
                f"{type(start).__name__} must return tensors: the residual stream, and what all blocks read"
            )
        return tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in results)

    def _piece(
        self, key: tuple[Any, ...], name: str, part: nn.Module, example: Example, capability: Capability,
        made_last: tuple[str, ...] | None,
    ) -> Piece:  # fmt: skip
        key = (*key, made_last)
        if key not in self._known:
            asked = self.question
            self.say(f"capturing {name} at {key[0]} x {key[1]}")
            request = Request(
                part, example, asked.mode, target=CUDA, attention=asked.attention, capability=capability,
                optimizer_in_backward=asked.optimizer_in_backward, made_last=made_last,
            )  # fmt: skip
            self._known[key] = Piece(name, captured_for(request, example))
        return self._known[key]


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.empty(batch, length, dtype=torch.long, device="meta")


def _bytes(tensor: torch.Tensor) -> int:
    return allocated_bytes(tensor.untyped_storage().nbytes(), CUDA)


def _signature(block: nn.Module) -> str:
    """Equal for blocks with equal programs: the same modules, and tensors of the same names, shapes and dtypes."""

    def described() -> Iterator[str]:
        yield repr(block)
        for name, tensor in (*block.named_parameters(), *block.named_buffers()):
            yield f"{name}{tuple(tensor.shape)}{tensor.stride()}{tensor.dtype}{tensor.requires_grad}"

    return "\n".join(described())


def resident_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers on a GPU; tied ones count once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return sum(map(_bytes, tensors.values()))
