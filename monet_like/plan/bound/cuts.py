"""Partition of a program: its forward is cut where at most one large value crosses.

`PartsRelaxation` solves the parts one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ...ir.program import Program

#: Values of at most this size may cross any cut: they are not counted.
SMALL_BYTES = 4096
#: A part has at least this many tasks. (Small programs are solved whole in any case.)
LEAST_TASKS = 12


@dataclass(frozen=True)
class Part:
    """Neighbouring forward tasks and the slots that read their results.

    Attributes:
        tasks, slots: indices in the whole program.
        enters: large values of earlier parts that it or a later part reads.
        leaves: large values, of it or of earlier parts, that later parts read.
    """

    tasks: tuple[int, ...]
    slots: tuple[int, ...]
    enters: tuple[int, ...]
    leaves: tuple[int, ...]


def split(program: Program) -> tuple[Part, ...]:
    """The parts of a program, in order; a single part where it cannot be cut."""
    count = len(program.tasks)
    places = _places(program)
    first, last, slot_places = _spans(program, places)
    crossing, closed = [0] * (count + 1), [False] * (count + 1)
    for v, makers in enumerate(program.producers):
        for cut in range(first[v] + 1, last[v] + 1):
            crossing[cut] += program.values[v].bytes > SMALL_BYTES
            closed[cut] |= cut <= max(places[p] for p in makers)
    starts = [0]
    for cut in range(1, count):
        if crossing[cut] <= 1 and not closed[cut] and cut - starts[-1] >= LEAST_TASKS:
            starts.append(cut)
    ends = [*starts[1:], count]
    crossings = [
        tuple(
            v
            for v, value in enumerate(program.values)
            if first[v] < start <= last[v] and value.bytes > SMALL_BYTES and program.producers[v]
        )
        for start in starts
    ]
    tasks: list[list[int]] = [[] for _ in starts]
    for p, place in enumerate(places):
        tasks[bisect_right(starts, place) - 1].append(p)
    slots: list[list[int]] = [[] for _ in starts]
    for slot, place in slot_places.items():
        slots[bisect_right(starts, place) - 1].append(slot)
    return tuple(
        Part(tuple(tasks[k]), tuple(slots[k]), crossings[k], crossings[k + 1] if k + 1 < len(ends) else ())
        for k in range(len(starts))
    )


def _places(program: Program) -> list[int]:
    """For every task, the place in the order to which it counts.

    A task that only the backward uses counts to the place of its last input's producer: capture puts such tasks at the
    end of the forward. Tasks that only run again may stand before a producer that runs only first; they count to where
    they are.
    """
    outputs, read = set(program.outputs), set[int]()
    trunk = [False] * len(program.tasks)
    for p in reversed(range(len(program.tasks))):
        task = program.tasks[p]
        trunk[p] = not (outputs | read).isdisjoint(task.writes)
        if trunk[p]:
            read.update(program.forward_reads(task))
    places: list[int] = []
    for p, task in enumerate(program.tasks):
        made = [min(places[q] if q < p else p for q in program.producers[v]) for v in program.forward_reads(task)]
        places.append(p if trunk[p] or not made else max(made))
    _move_later(program, places, trunk)
    return places


def _move_later(program: Program, places: list[int], trunk: Sequence[bool]) -> None:
    """Move tasks that only the backward uses to where they are first read, if all that they read crosses as far anyhow.

    Otherwise twice a block's input, which the backward of its norm uses, would cross the cut behind that input.
    """
    _, last, slot_places = _spans(program, places)
    reach = [len(places)] * len(places)  # how far a task may move
    for p, task in enumerate(program.tasks):
        for v in program.forward_reads(task):
            makers = [q for q in program.producers[v] if q < p and not trunk[q]]
            reach[p] = min(reach[p], min((reach[q] for q in makers), default=last[v]))
    read_at = [len(places)] * len(program.values)
    for slot, place in slot_places.items():
        for way in program.slots[slot]:
            for v in program.forward_reads(way):
                read_at[v] = min(read_at[v], place)
    for p in reversed(range(len(places))):
        task = program.tasks[p]
        until = min((read_at[v] for v in task.writes), default=0)
        if not trunk[p] and places[p] < until <= reach[p]:
            places[p] = until
        for v in program.forward_reads(task):
            read_at[v] = min(read_at[v], places[p])


def _spans(program: Program, places: Sequence[int]) -> tuple[list[int], list[int], dict[int, int]]:
    """For every value the places of its first producer and last reader; the places of slots that read any."""
    first = [min((places[p] for p in makers), default=0) for makers in program.producers]
    last = [max((places[p] for p in makers), default=0) for makers in program.producers]
    for p, task in enumerate(program.tasks):
        for v in program.forward_reads(task):
            last[v] = max(last[v], places[p])
    slot_places: dict[int, int] = {}
    for slot, ways in enumerate(program.slots):
        read = {v for way in ways for v in program.forward_reads(way)}
        if read:
            slot_places[slot] = max(first[v] for v in read)
            for v in read:
                last[v] = max(last[v], slot_places[slot])
    return first, last, slot_places
