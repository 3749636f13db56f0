"""A range of a recorded step as a module of its own, with the tensors that it takes from earlier ranges."""

from __future__ import annotations

import functools
import hashlib
import itertools
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from .recorded import Call, Named, Recording, Ref, in_modes

#: Arguments that are what they look like.
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


def _identity(function: Any) -> Any:
    if isinstance(function, Named):
        return function.name
    return getattr(function, "__qualname__", None) or repr(function), getattr(function, "__self__", None).__class__


class Part(nn.Module):
    """A range of a recording as a module on the meta device.

    Args:
        recording: the whole.
        start, end: the calls.
        later: tensors that are read behind it, the step's results among them.

    Attributes:
        takes, gives: the tensors of its inputs and of its results.
        held: parameters and buffers, by their names here.
    """

    def __init__(self, recording: Recording, start: int, end: int, later: set[int]) -> None:
        super().__init__()
        calls = recording.calls[start:end]
        made: set[int] = set()
        self.takes: list[int] = []
        self.held: dict[str, int] = {}
        for call in calls:
            for number in call.reads:
                if number not in made and number not in self.takes and number not in self.held.values():
                    if number in recording.residents:
                        self.held[f"p{len(self.held)}"] = number
                    else:
                        self.takes.append(number)
            made.update(number for number in call.makes if number not in self.takes)
        made -= {*self.held.values(), *self.takes}
        self.gives = sorted(made & later)
        for name, number in self.held.items():
            tensor = recording.meta(number)
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self._calls, self._recording = calls, recording
        self._replay = functools.partial(_replayed, calls, self.takes, self.gives)

    def outline(self, *, exact: bool) -> Any:
        """Equal for ranges that compute the same on tensors of the same kinds and sizes.

        Args:
            exact: also how inputs lie and whether they have gradients, and which results are read later.
        """
        places: dict[int, int] = {}
        tensors = self._recording.tensors

        def told(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                return "tensor", places[leaf.tensor]
            return leaf if isinstance(leaf, _PLAIN) else (type(leaf).__name__, repr(leaf))

        for number in (*self.takes, *self.held.values()):
            places.setdefault(number, len(places))
        found: list[Any] = [
            (t.shape, t.dtype, (t.stride(), t.requires_grad) if exact or number in self.held.values() else None)
            for number, t in ((number, tensors[number]) for number in places)
        ]
        for call in self._calls:
            leaves, spec = pytree.tree_flatten(call.args)
            found.append((_identity(call.function), tuple(map(told, leaves)), str(spec), call.modes))
            for number in call.makes:
                places.setdefault(number, len(places))
        gives = [places[number] for number in self.gives] if exact else []
        return hashlib.sha256(repr((found, list(self.held), gives)).encode()).hexdigest()

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The results of the range's calls."""
        return self._replay({number: getattr(self, name) for name, number in self.held.items()}, inputs)


def _replayed(
    calls: list[Call], takes: list[int], gives: list[int], there: dict[int, torch.Tensor], inputs: tuple[Any, ...]
) -> tuple[torch.Tensor, ...]:
    there.update(zip(takes, inputs, strict=True))
    last = {number: place for place, call in enumerate(calls) for number in (*call.reads, *call.makes)}
    ends: dict[int, list[int]] = {}
    for number, place in last.items():
        if number not in gives:
            ends.setdefault(place, []).append(number)
    for modes, group in itertools.groupby(enumerate(calls), key=lambda item: item[1].modes):
        with in_modes(modes):
            for place, call in group:
                args, kwargs = pytree.tree_map(
                    lambda leaf: there[leaf.tensor] if isinstance(leaf, Ref) else leaf, call.args
                )
                made = pytree.tree_leaves(call.function(*args, **kwargs))
                there.update((n, tensor) for n, tensor in zip(call.results, made, strict=True) if n is not None)
                for number in ends.get(place, ()):
                    there.pop(number, None)
    return tuple(there[number] for number in gives)
