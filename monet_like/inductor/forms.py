"""Which graphs of a compiled model exist at the same time: those of its parts, but not other forms of one part, such as
the graphs for another batch size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch._guards import CompileContext, detect_fake_mode

from .planned_graph import PlannedGraph


@dataclass(frozen=True)
class Part:
    """A part of a model for which a graph is compiled.

    Attributes:
        frame: the Python code that it is made of; None: nobody says.
        compilation: of this code, counted from 0.
        parameters: identities of those that the compilation has seen.
    """

    frame: int | None
    compilation: int | None
    parameters: frozenset[int]

    @staticmethod
    def of(inputs: Sequence[object]) -> Part:
        """The one that is compiled now; ``inputs`` are fake ones of its graph."""
        now = CompileContext.current_compile_id()
        if now is None:
            return Part(None, None, frozenset())
        mode: Any = detect_fake_mode(inputs)
        seen = mode.fake_tensor_converter.meta_converter.describer.lookup_tensor if mode is not None else ()
        mine = (id(tensor) for tensor in seen if isinstance(tensor, nn.Parameter))
        return Part(now.frame_id, now.frame_compile_id, frozenset(mine))

    def is_form_of(self, other: Part) -> bool:
        """Whether it is another form of this part: compiled anew from the same code for the same parameters."""
        if self.frame is None or self.frame != other.frame or self.compilation == other.compilation:
            return False
        return self.parameters == other.parameters or not self.parameters.isdisjoint(other.parameters)


class Parts:
    """The parts of a model in the order of its forward, each in its latest form."""

    def __init__(self) -> None:
        self._parts: list[tuple[Part, PlannedGraph | None]] = []

    def place_of(self, part: Part) -> int:
        """Where a part stands: in the place of another form of it, or behind all."""
        every = (place for place, (known, _) in enumerate(self._parts) if part.is_form_of(known))
        return next(every, len(self._parts))

    def has_form_of(self, part: Part) -> bool:
        """Whether another form of it was compiled before: training has begun."""
        return self.place_of(part) < len(self._parts)

    def held_bytes(self, part: Part) -> int:
        """What the parts before it hold until its backward ends."""
        return sum(graph.held_bytes for _, graph in self._parts[: self.place_of(part)] if graph is not None)

    def step_bytes(self, part: Part) -> int:
        """What the other form of it was planned for; 0: there is none."""
        place = self.place_of(part)
        return sum(graph.step_bytes for _, graph in self._parts[place : place + 1] if graph is not None)

    def put(self, part: Part, graph: PlannedGraph | None) -> None:
        """Note the graph of a part; None: it has no plan."""
        place = self.place_of(part)
        self._parts[place : place + 1] = [(part, graph)]
