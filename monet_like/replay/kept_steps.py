"""What a wrapper keeps of its calls, by their form: captured steps, branches, and forms that run as the plain model."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import nn

from ..capture.captured import Captured
from ..capture.guards.reads import Change, Reads
from ..capture.trace.answers import Answer
from ..errors import UsageError
from .branches import Branches
from .checks.call_keys import without_values
from .checks.changed_inputs import are_given_alike
from .training_step import CompiledStep

#: Number of captures of one form of call after which it runs as the plain model if its forward itself changes a value
#: that it reads.
OWN_STEPS = 4

#: Number of captured steps that are kept. Without a limit, a number that changes in every step would fill the memory.
KEPT_STEPS = 32


@dataclass(eq=False)
class KeptStep:
    """A captured step of a model.

    The graphs of a step's results hold the step, and the model may hold these results. So all that holds the model's
    own objects is here and not in the step: a model that is replaced is then freed.

    Attributes:
        captured: with the constants and the values that the model read.
        reads: Python values that the model read when it was captured; None: not recorded.
        parameter_slots, buffer_slots: (dict, key) where the model keeps the captured tensors.
        offloaded: see `ScheduleRecord`.
    """

    step: CompiledStep
    captured: Captured
    reads: Reads | None
    parameter_slots: Sequence[tuple[dict[str, Any], str]]
    buffer_slots: Sequence[tuple[dict[str, Any], str]]
    offloaded: frozenset[int] = frozenset()

    @classmethod
    def of(cls, step: CompiledStep, captured: Captured, model: nn.Module, offloaded: Iterable[int] = ()) -> KeptStep:
        """The step of a model which is, or is equal to, the one that was captured."""
        return cls(
            step,
            captured,
            captured.reads.of(model) if captured.reads is not None else None,
            tensor_slots(model, captured, "_parameters"),
            tensor_slots(model, captured, "_buffers"),
            frozenset(offloaded),
        )

    @cached_property
    def read_and_changed(self) -> frozenset[int]:
        """What the forward reads and changes, without what it only counts, as ``num_batches_tracked``."""
        program = self.captured.program
        return frozenset(
            value
            for task in program.every_task()
            for value in self.captured.changed.intersection(task.reads)
            if task.name != f"{program.values[value].name}.update"
        )

    def residents(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The parameters and the buffers, as they are now."""
        return [owner[name] for owner, name in self.parameter_slots], [owner[name] for owner, name in self.buffer_slots]

    def is_given_alike(self, inputs: Sequence[torch.Tensor]) -> bool:
        """See `are_given_alike`; and whether the model's attributes that are inputs are those of the capture."""
        if self.reads is not None and self.reads.holds_others(inputs):
            return False
        parameters, buffers = self.residents() if self.captured.changed else ([], [])
        return not self.captured.changed or are_given_alike(self.captured, [*parameters, *buffers, *inputs])

    def change(self) -> Change | None:
        """The first Python value or tensor read by the model that has changed since the capture; None if none has."""
        if not self.captured.constants.hold():
            return Change("a tensor that the model holds", "the one that was captured", "another")
        return self.reads.change() if self.reads is not None else None

    def forward_decides(self) -> bool:
        """Whether what the forward takes decides about a step: it fills nothing, and no Python runs in the backward."""
        fills = self.captured.effects is not None and self.captured.effects.fills
        return self.reads is not None and not (fills or self.reads.roots.late_names)

    def own_change(self) -> tuple[Change, str] | None:
        """A change of what the forward itself sets, and its path; None if there is none, or it is somebody else's."""
        effects, change = self.captured.effects, self.change()
        if effects is None or change is None:
            return None
        return next(((change, path) for path in effects.paths if path in change.path), None)


class KeptSteps:
    """Captured steps by the key of their form; the newest, and of most forms at least one. A copy begins with none.

    A key has the values beside tensors among a call's arguments. Those that a forward does not take are left out of it
    when they have changed once, see `share`.

    Attributes:
        plain: by key, why a form runs as the plain model.
        branches: of forms whose Python code asks for values of tensors.
    """

    def __init__(self) -> None:
        self._not_taken: dict[frozenset[int], None] = {}  # places of values that some keys are without
        self._steps: dict[Any, list[KeptStep]] = {}
        self._dropped: list[KeptStep] = []
        self.plain: dict[Any, str] = {}
        self.branches: dict[Any, Branches] = {}

    def __reduce__(self) -> Any:
        return KeptSteps, ()

    def __iter__(self) -> Iterator[KeptStep]:
        return (kept for steps in self._steps.values() for kept in steps)

    def __len__(self) -> int:
        return sum(map(len, self._steps.values()))

    def known(self, key: Any) -> Any:
        """The key as it is without values that its forward is known not to take."""
        shorter = (without_values(key, places) for places in self._not_taken)
        return next((each for each in shorter if each in self._steps or each in self.plain), key)

    def alike(self, key: Any, values: Container[int]) -> list[Any]:
        """The keys of forms that differ in nothing but values.

        Args:
            values: places of all values among the arguments.
        """
        form = without_values(key, values)
        kept = dict.fromkeys(each for each in (*self._steps, *self.plain) if not isinstance(each, str))
        return [each for each in kept if each != key and without_values(each, values) == form]

    def share(self, key: Any, alike: Sequence[Any], not_taken: frozenset[int]) -> Any:
        """Have what is kept of forms serve a call that differs from them in values which a forward does not take.

        Whatever decides about a forward's path is taken by it, so with equal values in the others both take the same
        path. That is not known of what the backward takes, nor of other branches.

        Args:
            alike: see `alike`.
            not_taken: places of values that a forward with the arguments of this call does not take.

        Returns:
            The key of these forms; ``key`` if there is none.
        """
        shorter = without_values(key, not_taken)
        for other in alike:
            if without_values(other, not_taken) != shorter or not all(
                kept.forward_decides() for kept in self.of(other)
            ):
                continue
            self._not_taken[not_taken] = None
            if other in self._steps:
                self._steps.setdefault(shorter, []).extend(self._steps.pop(other))
            if other in self.plain:
                self.plain.setdefault(shorter, self.plain.pop(other))
        return self.known(key)

    def of(self, key: Any) -> Sequence[KeptStep]:
        """All of a form, the one that served last at the end."""
        return self._steps.get(key, ())

    def find(self, key: Any, inputs: Sequence[torch.Tensor], known: tuple[Answer, ...] = ()) -> KeptStep | None:
        """A step captured for this key and these answers while all Python values that the model reads were as they are
        now. ``inputs``: of the call.
        """
        steps = self._steps.get(key, [])
        alike = (kept for kept in reversed(steps) if kept.captured.answers[: len(known)] == known)
        alike = (kept for kept in alike if kept.is_given_alike(inputs))
        found = next((kept for kept in alike if kept.change() is None), None)
        if found is not None and found is not steps[-1]:  # the latest one is tried first
            steps.append(steps.pop(steps.index(found)))
        return found

    def add(self, key: Any, kept: KeptStep) -> None:
        """Keep a step for later calls.

        If there are too many, the oldest step of the key with the most steps is dropped.
        """
        self._forget_replaced()
        self._steps.setdefault(key, []).append(kept)
        if len(self) > KEPT_STEPS:
            key = max(self._steps, key=lambda key: len(self._steps[key]))  # the first of those with the most steps
            del self._steps[key][0]
            if not self._steps[key]:
                del self._steps[key]

    def drop(self, key: Any) -> None:
        """Serve no more calls of a form; backwards of earlier ones may still come."""
        self._dropped += self._steps.pop(key, [])

    def key_of(self, kept: KeptStep | None) -> Any:
        """The key under which a step is kept; None if it no longer is."""
        return next((key for key, steps in self._steps.items() if kept in steps), None)

    def branches_of(self, key: Any) -> Branches:
        """Of a form."""
        return self.branches.setdefault(key, Branches())

    def check_own(self, key: Any) -> None:
        """Check that another capture of a form is not due to a value that each forward changes.

        Raises:
            UsageError: `OWN_STEPS` captures were.
        """
        own = [found for kept in self.of(key) if (found := kept.own_change()) is not None]
        if len(own) >= OWN_STEPS:
            change, path = own[-1]
            raise UsageError(
                f"its forward reads {path} and sets it to another value in each call ({change}), and each value needs "
                "a capture, which takes seconds; keep a number as a buffer (self.step.add_(1)), and empty a list after "
                "each step"
            )

    def _forget_replaced(self) -> None:
        """Drop what is kept for modules that no longer exist."""
        for kept in (self._steps, self.plain, self.branches):
            for key in [key for key in kept if not isinstance(key, str)]:
                (modules, *_), *_ = key
                if any(reference() is None for reference in modules):
                    del kept[key]


def tensor_slots(
    model: nn.Module, captured: Captured, kind: Literal["_parameters", "_buffers"]
) -> list[tuple[dict[str, Any], str]]:
    """The dicts and keys that hold the parameters or buffers that a program reads, or constants in their place: so that
    ``.to()`` and assignments are followed.
    """
    modules, constants = dict(model.named_modules()), captured.constants.tensors
    found: list[tuple[dict[str, Any], str]] = []
    for name, _ in captured.parameters if kind == "_parameters" else captured.buffers:
        owner, _, leaf = name.rpartition(".")
        if name in constants:
            found.append((constants, name))
            continue
        own, buffers = getattr(modules[owner], kind), modules[owner]._buffers
        found.append((own if leaf in own or leaf not in buffers else buffers, leaf))  # buffers may require gradients
    return found
