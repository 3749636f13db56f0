"""Finds the largest parts of a model that can be captured, where the whole cannot.

A training step is rehearsed: where the model calls a part, that part is captured with the arguments of the call, and a
stand-in runs in its place. If the part is refused, it runs as it is, and its own parts are tried in turn. A second step
has other values in inputs and weights: a part whose own inputs look otherwise then would need a capture in each step.
Parts that are left out after they were found run as they are in the next rehearsal, so that theirs are tried.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ..capture.captured import Captured
from ..capture.example_inputs import Example, device_of, version_of
from ..capture.guards.side_effects import generators_restored
from ..capture.replaced import replaced
from ..capture.trace.alone import one_at_a_time, quiet
from ..capture.trace.answers import Answer
from ..capture.trees import tensors_of
from ..errors import CaptureError
from ..ir.program import Task, refs
from .agreement import Sharing, all_do, collective_calls, gathered
from .block import BlockCall, BlockSchedule
from .kept_state import State
from .rehearsal.memory import drop_sparse_gradients, step_of, without_hooks
from .rehearsal.stand_ins import Rehearsal, RehearsedCall
from .shared_captures import SharedCaptures, outline_of

#: Limits of a search: parts that are captured, seconds, and pairs of rehearsals.
MOST_TRIED, MOST_SECONDS, MOST_ROUNDS = 64, 60.0, 4
#: A part has, with all that are like it, at least this share of the model's parameters.
LEAST_SHARE = 0.01


@one_at_a_time
def find_parts(
    model: nn.Module, example: Example, mode: str, shared: SharedCaptures, sharing: Sharing
) -> tuple[dict[str, nn.Module], Sharing]:
    """The largest submodules whose training step can be captured and equals plain PyTorch's to the bit, by name, in the
    order of their calls; none is within another. And how their plans are made: not alone, if a step waits for other
    processes, whose rehearsals must be as many.

    Everything that can be reached from the model and the example is afterwards what it was.

    Args:
        example: real inputs of a training call.
        mode: which variants may be used.
        shared: gets the programs of the parts.
        sharing: unless it is ``alone``, parts are found in all processes.

    Raises:
        Exception: what the model raises.
    """
    search = _Search(model, mode, shared)
    for _ in range(MOST_ROUNDS):
        before = collective_calls()
        all_do(lambda: search.rehearse(example), sharing)
        if sharing == "alone" and collective_calls() > before:
            sharing = "own"
        with contextlib.suppress(Exception):  # the model's own: such values need not be valid
            search.rehearse(example, other=True)
        if not any(gathered(search.left_out, "alone" if sharing == "alone" else "same")):
            break
    found = search.found()
    every = [set(names) for names in gathered(list(found), sharing)]
    return {name: module for name, module in found.items() if all(name in names for names in every)}, sharing


def pattern_of(name: str) -> str:
    """The name of a module with stars in the place of numbers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def in_words(model: nn.Module, parts: Mapping[str, nn.Module]) -> str:
    """Names of parts as a user gives blocks, those that differ in numbers as one pattern, and their share of the
    model's parameters.
    """
    there, patterns = Counter(pattern_of(name) for name, _ in model.named_modules()), Counter(map(pattern_of, parts))
    whole = {pattern for pattern, count in patterns.items() if count == there[pattern] > 1}
    named = dict.fromkeys(pattern if (pattern := pattern_of(name)) in whole else name for name in parts)
    inside = {p for part in parts.values() for p in part.parameters()}
    share = sum(p.numel() for p in inside) / sum(p.numel() for p in model.parameters())
    return f"blocks={json.dumps([*named])} with {100 * share:.0f} % of its parameters"


class _Tried(BlockSchedule):
    """A part as a block, which is captured within the limits of a search."""

    _block_search: _Search

    def _captured_call(self, key: Any, example: Example, known: tuple[Answer, ...] = ()) -> BlockCall:
        like = outline_of(self._model), key[1:]
        self._block_search.check(like)
        try:
            call = super()._captured_call(key, example, known)
            if any(answer.is_size for answer in call.captured.answers):
                raise CaptureError("its sizes depend on numbers that the model may have computed")
            if len(_forward(call.captured)) < 2:
                raise CaptureError("a single operator leaves nothing to be planned")
        except Exception as error:
            self._block_search.refused.append((like, str(error)))
            raise
        return call


@dataclass(eq=False)
class _Part:
    """A part that is tried.

    Attributes:
        block: it with stand-ins; None: it cannot be a block.
        refused: it is not to be found.
        calls: of a rehearsal.
        edges: of these calls, where the gradients go of what several of its operators read.
        versions: their inputs and results, with their numbers of changes in place.
    """

    block: _Tried | None
    refused: bool = False
    calls: list[RehearsedCall] = field(default_factory=list)
    edges: list[Any] = field(default_factory=list)
    versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    def note(self, call: RehearsedCall, example: Any, result: Any) -> None:
        """Keep what tells whether a call is equal to plain PyTorch's."""
        assert self.block is not None
        self.calls.append(call)
        self.edges += _edges(self.block, example)
        self.versions += [(tensor, version_of(tensor)) for tensor in (*tensors_of(example), *tensors_of(result))]

    def forget(self) -> None:
        """Keep nothing of calls."""
        for kept in (self.calls, self.edges, self.versions):
            kept.clear()

    @property
    def found(self) -> bool:
        """Whether it can be captured."""
        return not self.refused and self.block is not None and self.block._block_call is not None


class _Search:
    """The parts of a model that were tried.

    Attributes:
        parts: by name; those that are found in the order of their first calls in the latest rehearsal.
        refused: what could not be captured, for parts that are alike, and why.
        left_out: whether a part was found by the latest rehearsals that is not to be found any more.
    """

    def __init__(self, model: nn.Module, mode: str, shared: SharedCaptures) -> None:
        self.model, self.mode, self.shared = model, mode, shared
        self.names = {id(module): name for name, module in reversed([*model.named_modules()])}
        self.candidates = _candidates(model)
        self.parts: dict[str, _Part] = {}
        self.refused: list[tuple[Any, str]] = []
        self.left_out = False
        self._started, self._tried, self._thread = time.monotonic(), 0, threading.get_ident()
        self._running: set[int] = set()

    def check(self, like: tuple[Any, Any]) -> None:
        """Check that a part is to be captured."""
        if like[0] is not None and (known := next((why for other, why in self.refused if other == like), "")):
            raise CaptureError(known)
        self._tried += 1
        if self._tried > MOST_TRIED or time.monotonic() - self._started > MOST_SECONDS:
            raise CaptureError("the search for parts has ended")

    def found(self) -> dict[str, nn.Module]:
        """Those that can be captured; of one in another the other."""
        blocks = {name: part.block._model for name, part in self.parts.items() if part.found and part.block}
        inner = {id(part) for block in blocks.values() for part in block.modules() if part is not block}
        return {name: block for name, block in blocks.items() if id(block) not in inner}

    def rehearse(self, example: Example, *, other: bool = False) -> None:
        """Run a training step and capture parts where the model calls them.

        Args:
            other: with other values in inputs and weights.
        """
        self.left_out = self.left_out and other
        for part in self.parts.values():
            part.forget()
        args, kwargs = example
        state = State([self.model, example])
        try:
            with quiet(), generators_restored(device_of(self.model, example)), self._intercepted(other=other):
                if other:
                    _turn_around(self.model, example)
                without_hooks(self.model)
                drop_sparse_gradients(self.model, example)
                (result,), _ = step_of(self.model, example, None).run(*args, **kwargs)
                self._leave_out(result)
        finally:
            state.put_back()

    def _intercepted(self, *, other: bool) -> contextlib.AbstractContextManager[None]:
        """Have stand-ins run where parts of the model are called.

        Args:
            other: only those that the step itself has called.
        """
        own = nn.Module.__call__

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self.names.get(id(module), "")
            known = self.parts if other else self.candidates
            if name not in known or id(module) in self._running or not torch.is_grad_enabled():
                return own(module, *args, **kwargs)
            return self._called(name, module, aside, own, args, kwargs)

        @contextlib.contextmanager
        def aside(example: Example) -> Iterator[Example]:
            with replaced(nn.Module, __call__=own):
                yield example

        return replaced(nn.Module, __call__=called)

    def _called(self, name: str, module: nn.Module, aside: Any, own: Any, args: Any, kwargs: Any) -> Any:
        """A part's call, by its stand-in if it can be captured."""
        part = self.parts.get(name)
        if (part is None or not part.found) and threading.get_ident() != self._thread:
            return own(module, *args, **kwargs)  # autograd's, for which the search waits: it cannot capture
        if part is None:
            part = self.parts[name] = _Part(self._block(name, module))
        if part.refused or part.block is None:
            return own(module, *args, **kwargs)
        rehearsal = Rehearsal([()], lambda: None, defers=True, aside=aside)
        rehearsal.fake = False
        part.block._rehearsal, known = rehearsal, part.found
        self._running.add(id(module))
        try:
            result = own(part.block, *args, **kwargs)
        finally:
            self._running.discard(id(module))
            part.block._rehearsal = None
        if rehearsal.events:
            if not part.calls:
                self.parts[name] = self.parts.pop(name)
            part.note(rehearsal.events[0].call, (args, kwargs), result)
        elif rehearsal.error is not None:
            part.refused = True
        elif known:  # it is called in several ways, and others in its place would be
            for other, found in self.parts.items():
                found.refused = found.refused or pattern_of(other) == pattern_of(name)
            self.left_out = True
        return result

    def _block(self, name: str, module: nn.Module) -> _Tried | None:
        try:
            block = _Tried(module, name, self.mode, "eager", self.shared)
        except Exception:  # it is lazy, in TorchScript, or has a schedule
            return None
        block._block_search = self
        return block

    def _leave_out(self, result: Any) -> None:
        """Leave out parts whose inputs or results the rest of the model changes in place, and those that would round
        gradients in another way than plain PyTorch: that read several times what others, or another call of the same
        part, read, too, or get gradients in another layout than their results'.
        """
        uses = _uses(result)
        for part in self.parts.values():
            differs = any(uses[edge] > 1 for edge in part.edges) or any(call.copied for call in part.calls)
            changed = any(version_of(tensor) != version for tensor, version in part.versions)
            if part.found and (differs or changed):
                part.refused = self.left_out = True
            part.forget()


def _candidates(model: nn.Module) -> set[str]:
    """Names of the modules that may become parts: of several operators, and with enough of the model's parameters,
    together with all that look alike.
    """
    sizes: Counter[Any] = Counter()
    looks: dict[str, Any] = {}
    for name, module in model.named_modules():
        several = any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn.modules")
        if not name or not several or isinstance(module, BlockSchedule):
            continue
        parameters = [(tuple(p.shape), p.requires_grad) for p in module.parameters()]
        looks[name] = type(module), tuple(parameters)
        sizes[looks[name]] += sum(torch.Size(shape).numel() for shape, _ in parameters)
    total = sum(p.numel() for p in model.parameters())
    return {name for name, look in looks.items() if sizes[look] >= LEAST_SHARE * total > 0}


def _forward(captured: Captured) -> list[Task]:
    return [task for task in captured.plain.tasks if task.runs != "again"]


def _edges(block: BlockSchedule, example: Any) -> list[Any]:
    """Where the gradients go of those inputs and parameters of a call that several operators of the block read."""
    call = block._block_call
    assert call is not None
    captured = call.captured
    readers = Counter(ref.name for task in _forward(captured) for one in task.calls for ref in refs(one))
    own = dict(block._model.named_parameters())
    named = captured.parameters
    read: list[torch.Tensor] = [own[name] for name, value in named if name in own and readers[value] > 1]
    inputs = zip(captured.inputs, tensors_of(example), strict=False)
    read += [tensor for value, tensor in inputs if value is not None and readers[value] > 1]
    edges = [get_gradient_edge(tensor) for tensor in read if tensor.requires_grad]
    return [(edge.node, edge.output_nr) for edge in edges]


def _uses(result: Any) -> Counter[Any]:
    """How many operators of a forward, or of blocks, use each tensor with a gradient, by the edge of autograd's graph
    that leads to it.
    """
    uses: Counter[Any] = Counter()
    waiting = [tensor.grad_fn for tensor in tensors_of(result) if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        for edge in waiting.pop().next_functions:
            node, _ = edge
            if node is None:
                continue
            uses[edge] += 1
            if node not in seen:
                seen.add(node)
                waiting.append(node)
    return uses


def _turn_around(model: nn.Module, example: Example) -> None:
    """Give trained matrices, and inputs of more than two dimensions, other values of the same kind: their own in
    another order.
    """
    trained = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    inputs = [t for t in tensors_of(example) if t.is_floating_point() and t.dim() > 2]
    for tensor in (*trained, *inputs):
        with torch.no_grad(), contextlib.suppress(RuntimeError):  # one whose elements share memory
            content = getattr(tensor, "_local_tensor", tensor.data)
            content.copy_(content.flip(-1))
