"""Schedules for calls of a block that its plan has not foreseen: each within the memory that the plan gives to the
block.

A call differs from the planned one if padding appears, a layer is frozen, dropout is off, or the batch is another one.
The block decides alone, so processes need not agree, and the peak of the whole step stays as it was planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..capture.captured import Captured
from ..capture.example_inputs import specs_in_words
from ..compiler.prepared import Prepared
from ..compiler.progress import Progress
from ..errors import InfeasibleError
from ..inductor.planned_graph import Limits
from ..ir.program import Program
from ..ir.schedule_file import ScheduleRecord
from ..ir.step import Point
from ..ir.units import format_bytes
from .block import BlockCall
from .block_menus import (
    COSTS_SHARE,
    Deadline,
    Kind,
    costs_of_call,
    digest_of_call,
    plain_point,
    points_of,
    record_of,
    schedules_of,
)
from .offloaded import lone_looks
from .planning import Settings
from .rehearsal.counted import Changed


@dataclass(frozen=True)
class Share:
    """What a plan gives to a block, in bytes; inputs and results that the block keeps are in all numbers but the
    forward's.

    Attributes:
        carried_bytes, forward_bytes, backward_bytes, adding_bytes, offloaded_bytes: see `Point`.
        held: places of incoming gradients and results that the rest of the model holds (`_ends`).
        lone: places of inputs that count as carried.
        changed: what there is a copy of, if a schedule keeps it.
    """

    carried_bytes: int
    forward_bytes: int
    backward_bytes: int
    adding_bytes: int
    offloaded_bytes: int
    held: tuple[int, ...]
    lone: tuple[int, ...]
    changed: Changed

    @staticmethod
    def of(point: Point, captured: Captured, kind: Kind) -> Share:
        """The share of a block of this kind whose plan has this point."""
        held = tuple(place for place, value in enumerate(_ends(captured)) if value in kind.held)
        moved = {v for v, _ in kind.lone} - {*point.shared, *kind.changed}
        lone = tuple(place for place, value in enumerate(captured.inputs) if value in moved)
        return Share(*needed_bytes(point, captured.program), held, lone, Changed.of(kind.changed, captured))

    def limits(self, room: int, captured: Captured) -> Limits:
        """Those of Inductor's graph of a call; ``room``: what the whole step leaves to the block that runs."""
        backward = min(self.backward_bytes, self.adding_bytes)  # it returns all gradients together
        lone = lone_looks(captured, self.lone_in(captured))
        return Limits(self.carried_bytes, self.forward_bytes + room, backward + room, self.offloaded_bytes, lone)

    def excess(self, point: Point, program: Program) -> tuple[int, str, int, int]:
        """By how many bytes another call of the block by this point needs more at most, where, what it needs and what
        there is.
        """
        needs = needed_bytes(point, program)
        there = self.carried_bytes, self.forward_bytes, self.backward_bytes, self.adding_bytes, self.offloaded_bytes
        return max((need - has, where, need, has) for where, need, has in zip(_WHERE, needs, there, strict=True))

    def has_room(self, point: Point, program: Program) -> bool:
        """Whether another call of the block by this point needs no more."""
        return self.excess(point, program)[0] <= 0

    def lone_in(self, captured: Captured) -> tuple[int, ...]:
        """The inputs of another call's program that no other block gets; none, if it has other inputs."""
        alike = max(self.lone, default=-1) < len(captured.inputs)
        return tuple(sorted(captured.inputs[place] for place in self.lone)) if alike else ()

    def held_in(self, captured: Captured) -> tuple[int, ...]:
        """The values of another call's program that the rest of the model holds; all of them, if it has
        other results.
        """
        ends = list(_ends(captured))
        alike = max(self.held, default=-1) < len(ends)
        return tuple(
            sorted(
                {value for place, value in enumerate(ends) if value is not None and (place in self.held or not alike)}
            )
        )


#: The numbers of a share, in words.
_WHERE = (
    "between its forward and its backward",
    "in its forward",
    "in its backward",
    "in a backward that adds gradients",
    "on its way to the host",
)


def _ends(captured: Captured) -> Iterator[int | None]:
    """Results and their gradients."""
    for tensor, tangent in zip(captured.outputs, captured.tangents, strict=True):
        yield tensor.value
        yield tangent


def needed_bytes(point: Point, program: Program) -> tuple[int, int, int, int, int]:
    """What a point needs, as `Share` has it."""
    kept = sum(program.values[value].bytes for value in point.shared)
    return (
        point.carried_bytes + kept, point.forward_peak_bytes, point.backward_peak_bytes + kept,
        point.adding_peak_bytes + kept, point.offloaded_bytes,
    )  # fmt: skip


class OwnPlans:
    """Plans calls of single blocks; equal calls once.

    Args:
        settings: of the whole model's plan.
        link: see `menus_of`.
    """

    def __init__(self, settings: Settings, link: float = 0.0) -> None:
        self.settings, self.link = replace(settings, effort="quick"), link
        self._costs: dict[str, Prepared] = {}
        self._found: dict[tuple[str, Share], ScheduleRecord | InfeasibleError | None] = {}

    def record(self, call: BlockCall, share: Share) -> ScheduleRecord | None:
        """The fastest schedule of a call within a share; None: plain PyTorch is within it, and no schedule was found
        that is.

        Raises:
            InfeasibleError: nothing is within it.
        """
        key = digest_of_call(call), share
        if key not in self._found:
            try:
                self._found[key] = self._planned(call, share, key[0])
            except InfeasibleError as error:
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, InfeasibleError):
            raise found
        return found

    def _planned(self, call: BlockCall, share: Share, digest: str) -> ScheduleRecord | None:
        deadline = Deadline.of(self.settings)
        with Progress(quiet=True) as progress:
            if digest not in self._costs:
                device, costs = call.captured.device, deadline.part(COSTS_SHARE)
                self._costs[digest] = costs_of_call(call, digest, device, self.settings, progress, costs)
            ready = self._costs[digest]
            program = ready.captured.program
            changed = tuple(sorted(share.changed.values(ready.captured)))
            kind, lone = Kind(digest, share.held_in(ready.captured), changed), share.lone_in(ready.captured)
            link = self.link if share.offloaded_bytes else 0.0

            def fastest() -> Point:
                schedules = schedules_of(ready, digest, self.settings, progress, deadline)
                points = points_of(ready, kind, schedules, link, lone)
                if fitting := [point for point in points if share.has_room(point, program)]:
                    return min(fitting, key=lambda point: point.numbers)
                _, where, needed, there = min(share.excess(point, program) for point in points)
                raise InfeasibleError(
                    f"no schedule for {specs_in_words(call.inputs)} fits what the plan of the whole step leaves to the "
                    f"block: {where} it needs {format_bytes(needed)} ({needed} bytes) of {format_bytes(there)} "
                    f"({there} bytes); plan with the largest inputs, with all layers that are to be trained, or give a "
                    "larger memory_budget",
                    needed,
                    call.request.expression,
                )

            try:
                return record_of(call, ready, self.settings.earlier.tried(fastest, "alone"))
            except InfeasibleError:
                if share.has_room(plain_point(ready, kind), ready.captured.plain):
                    return None
                raise

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnPlans, (self.settings, self.link)
