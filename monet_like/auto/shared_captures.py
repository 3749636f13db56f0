"""Captured programs that equal blocks share: of 32 equal layers one is captured.

Two blocks are equal if nothing that a capture fixes differs between them: the call (shapes, dtypes, autocast, other
arguments), the modules with their classes, names and training flags, the looks of their tensors and which of them are
one, and all Python values that the captured block's forward and backward read (`monet_like.capture.guards.reads`). What
tensors contain does not matter: a program reads that when it runs. A block that holds tensors which it has not
registered shares nothing.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..capture.captured import Captured
from ..capture.guards.traversal import form_of_plain
from ..capture.trace.answers import Answer
from ..inductor.planned_graph import Settings
from ..ir.schedule import Schedule
from ..replay.training_step import CompiledStep

#: Programs that are kept: as many as `ScheduleWrapper` keeps of one model.
KEPT = 32
_PLAIN_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer)
#: What a module notes about some of its hooks, and where all of them are.
_HOOK_NOTES = {
    "_forward_hooks_with_kwargs": "_forward_hooks",
    "_forward_pre_hooks_with_kwargs": "_forward_pre_hooks",
    "_forward_hooks_always_called": "_forward_hooks",
}


@dataclass(eq=False)
class _Shared:
    """A program and what it was captured for.

    Attributes:
        call: everything but the block that the capture depends on.
        outline: of the block.
        steps: by schedule, and how Inductor's graphs are planned; None: it compiles none.
    """

    call: Any
    outline: Any
    captured: Captured
    steps: dict[tuple[Schedule, Settings | None], CompiledStep] = field(default_factory=dict)


class SharedCaptures:
    """The captured programs of a model's blocks. A copy of a model begins with none.

    Attributes:
        told: calls that run as plain PyTorch and that a warning told of, whichever block it was.
    """

    def __init__(self) -> None:
        self._found: list[_Shared] = []
        self.told: set[Any] = set()

    def __reduce__(self) -> Any:
        return SharedCaptures, ()

    def forget(self) -> None:
        """Begin anew with no program."""
        self._found = []

    def find(self, block: nn.Module, call: Any, known: tuple[Answer, ...] = ()) -> Captured | None:
        """The program of an equal block that was called alike; None if there is none.

        ``known``: its first answers to questions about values.
        """
        if not self._found or (outline := outline_of(block)) is None:
            return None
        for found in reversed(self._found):
            answered = found.captured.answers[: len(known)] == known
            if answered and found.call == call and found.outline == outline and _reads_alike(found.captured, block):
                return found.captured
        return None

    def keep(self, block: nn.Module, call: Any, captured: Captured) -> None:
        """Keep a program for equal blocks."""
        outline = outline_of(block)
        sets_own = captured.effects is not None and not captured.effects.shared  # objects that no other block has
        if outline is None or captured.reads is None or captured.constants.tensors or sets_own:
            return
        if self._of(captured) is None:
            self._found = [*self._found[1 - KEPT :], _Shared(call, outline, captured)]

    def step(self, captured: Captured, schedule: Schedule, settings: Settings | None) -> CompiledStep | None:
        """The compiled step of an equal block by the same schedule, as an object of its own; None if there is none."""
        known = self._of(captured)
        return copy.copy(known.steps.get((schedule, settings))) if known else None

    def keep_step(self, captured: Captured, schedule: Schedule, step: CompiledStep, settings: Settings | None) -> None:
        """Keep a compiled step for blocks that share its program."""
        if known := self._of(captured):
            known.steps[schedule, settings] = copy.copy(step)

    def _of(self, captured: Captured) -> _Shared | None:
        return next((known for known in self._found if known.captured is captured), None)


def _reads_alike(captured: Captured, block: nn.Module) -> bool:
    """Whether all Python values that a program's block reads are the same in another block."""
    return captured.reads is not None and captured.reads.of(block).change() is None


def outline_of(block: nn.Module) -> Any:
    """Everything about a block's modules and tensors that a capture may depend on, as comparable data; None: it cannot
    be told.
    """
    modules: dict[int, int] = {}
    tensors: dict[int, int] = {}
    storages: dict[int, int] = {}
    found: list[Any] = []
    for _, module in block.named_modules(remove_duplicate=False):
        found.append((modules.setdefault(id(module), len(modules)), type(module), module.training))
        notes = vars(module)
        noted = ((notes.get(note, ()), notes[hooks]) for note, hooks in _HOOK_NOTES.items())
        found.append(tuple(tuple([hook in some for hook in hooks]) for some, hooks in noted))  # without their numbers
        found.append((bool(getattr(module, "no_dropit", False)), tuple(notes["_modules"])))
        for members in (module._parameters, module._buffers):
            for member, tensor in members.items():
                if tensor is None:
                    found.append((member, None))
                    continue
                look = _look(tensor)
                if look is None:
                    return None
                number = tensors.setdefault(id(tensor), len(tensors))
                memory = storages.setdefault(tensor.untyped_storage()._cdata, len(storages))
                found.append((member, number, memory, look))
    return tuple(found)


def _look(tensor: torch.Tensor) -> Any:
    """All of a tensor but its content; None for a tensor of a class, or with attributes, whose meaning is not known."""
    own = [(name, form_of_plain(value)) for name, value in sorted(vars(tensor).items())]
    unknown = any(form is None for _, form in own)
    if type(tensor) not in _PLAIN_TYPES or tensor.layout != torch.strided or unknown:
        return None
    storage = tensor.untyped_storage().nbytes(), tensor.storage_offset()
    flags = tensor.requires_grad, tensor.is_leaf, tensor.is_conj(), tensor.is_neg(), bool(tensor._backward_hooks)
    looks = tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride()
    return type(tensor), *looks, *storage, *flags, tuple(own)
