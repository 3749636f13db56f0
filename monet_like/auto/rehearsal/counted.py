"""What the events of a rehearsal say: the moments of the step, and which ends of blocks are held, alone or changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ...capture.captured import Captured
from ...ir.step import Moment, Piece, Step, with_offloads
from ...profile.measure import Stretch
from .stand_ins import Event, RehearsedCall


def held_values(events: Sequence[Event], stretches: Sequence[Stretch]) -> dict[int, frozenset[int]]:
    """For every block, incoming gradients and results that are still there when the block's stand-in has let go of
    them; all, of a block that has no backward in the step.

    The rest of the model holds them. Incoming gradients that do not come are among them: they are not freed, either.

    Args:
        events, stretches: of a rehearsal in which stand-ins keep everything; each event ends the stretch of its place.
    """
    found: dict[RehearsedCall, set[int]] = {}
    blocks: dict[int, frozenset[int]] = {}
    before = 0
    for event, stretch in zip(events, stretches, strict=False):
        call, values = event.call, event.call.captured.program.values
        if event.kind == "backward":
            found[call] = set(_ends(call.captured))
        if event.kind == "dropped" and before - stretch.end_bytes >= values[event.value].bytes:
            found[call].discard(event.value)
        before = stretch.end_bytes
    for call, held in found.items():
        blocks[call.block] = blocks.get(call.block, frozenset()) | held
    return {event.call.block: frozenset(_ends(event.call.captured)) for event in events} | blocks


def lone_inputs(events: Sequence[Event]) -> dict[int, dict[int, frozenset[int]]]:
    """For every block, the inputs that are gone when the block lets go of them, with the blocks of which they are
    results: nothing else holds them until the backward.

    Args:
        events: of a rehearsal in which stand-ins keep nothing.
    """
    calls = list({id(event.call): event.call for event in events}.values())
    given = Counter(storage for call in calls for storage in call.inputs.values())
    found: dict[int, dict[int, frozenset[int]]] = {}
    for call in calls:
        lone = {v: storage for v, storage in call.inputs.items() if v not in call.held and given[storage] == 1}
        makers = {v: frozenset(one.block for one in calls if storage in one.made) for v, storage in lone.items()}
        before = found.get(call.block, makers)
        found[call.block] = {v: blocks | before[v] for v, blocks in makers.items() if v in before}
    return found


def changed_values(events: Sequence[Event]) -> dict[int, frozenset[int]]:
    """For every block, inputs and results that the rest of the model changes in place before the block's backward.

    Args:
        events: of a rehearsal in which stand-ins keep everything.
    """
    found: dict[int, frozenset[int]] = {}
    for event in events:
        found[event.call.block] = found.get(event.call.block, frozenset()) | event.call.changed
    return found


@dataclass(frozen=True)
class Changed:
    """Inputs and results of a block, by their places, that the rest of the model changes in place, as in ``x +=
    block(x)``. Of what a schedule keeps of them there is a copy, since autograd takes no tensor that has changed.
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


def _ends(captured: Captured) -> Iterator[int]:
    """Incoming gradients and results of a block."""
    return (value for value in (*captured.tangents, *captured.program.outputs) if value is not None)


def counted(events: Sequence[Event], stretches: Sequence[Stretch], names: Sequence[str], resident_bytes: int) -> Step:
    """The step, with the memory of everything but the blocks' own; menus are empty.

    Args:
        events, stretches: of a rehearsal; there is one stretch more than there are events.
        names: of the blocks, for people.
        resident_bytes: what existed before the step.
    """
    found: list[Moment] = []
    carrying: Counter[int] = Counter()
    after, inside = "the start", False
    for event, stretch in zip(events, stretches, strict=False):
        block = event.call.block
        if event.kind == "backward done":
            carrying[block] -= 1
        there = tuple(sorted((b, calls) for b, calls in carrying.items() if calls))
        if not inside:
            before = f"the {event.kind} of {names[block]}"
            found.append(Moment(f"between {after} and {before}", resident_bytes + stretch.peak_bytes, there))
        if event.kind in ("forward", "backward"):
            stage: Any = event.kind
            name = f"the {stage} of {names[block]}"
            adds = stage == "backward" and event.call.adds
            found.append(Moment(name, resident_bytes + stretch.end_bytes, there, block, stage, adds))
            after, inside = name, True
        elif event.kind != "dropped":
            inside = False
            carrying[block] += event.kind == "forward done"
    found.append(Moment(f"after {after}", resident_bytes + stretches[-1].peak_bytes))
    calls = Counter(event.call.block for event in events if event.kind == "forward")
    step = Step(tuple(Piece(name, calls[block]) for block, name in enumerate(names)), tuple(found))
    return with_offloads(step) or step
