"""What the rest of a model changes in place of a block's inputs and results, as in ``x += block(x)``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain

from ..capture.captured import Captured


@dataclass(frozen=True)
class Changed:
    """Inputs and results of a block that are changed, by their places. Of what a schedule keeps of them there is a
    copy, since autograd takes no tensor that has changed.
    """

    inputs: tuple[int, ...] = ()
    results: tuple[int, ...] = ()

    @staticmethod
    def of(values: Collection[int], captured: Captured) -> Changed:
        """Those values of a program."""
        results = tuple(place for place, tensor in enumerate(captured.outputs) if tensor.value in values)
        return Changed(tuple(place for place, value in enumerate(captured.inputs) if value in values), results)

    def values(self, captured: Captured) -> frozenset[int]:
        """As values of another call's program, as far as it has so many inputs and results."""
        inputs = (captured.inputs[place] for place in self.inputs if place < len(captured.inputs))
        results = (captured.outputs[place].value for place in self.results if place < len(captured.outputs))
        return frozenset(chain(inputs, results))
