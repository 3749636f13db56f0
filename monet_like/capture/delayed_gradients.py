"""Gradients that are made last: large ones, of little input, that would lie about while the rest of the backward runs.

Autograd makes the gradient of VGG-16's first linear layer, 411 MB, among the first, and it stays in ``.grad``; what it is
made from takes a tenth of that, and hardly any time. Made when all activations are gone, it is not there when they need
the memory. Its bits are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..ir.program import RESIDENT_KINDS, Program, Task

#: A gradient must be so many times what is kept to make it later.
RATIO = 4
#: By which part of it the step's least memory must shrink for every gradient that is moved: moving many small ones
#: would tie the two ends of the backward together, which planners then cannot take apart.
LEAST_GAIN = 0.005


def find_delayed_gradients(program: Program, candidates: Collection[int]) -> tuple[int, ...]:
    """The slots that are better done last, of a program without variants.

    Args:
        candidates: slots that write a gradient of a parameter, which no other slot reads.
    """
    slots = [ways[0] for ways in program.slots]
    made = _backward_bytes(program, slots)
    moved: list[int] = []
    least = _least_bytes(program, slots)
    for slot in sorted(candidates, key=lambda i: -made[i]):
        if made[slot] < LEAST_GAIN * least:
            break
        if made[slot] < RATIO * _held_bytes(program, slots, slot):
            continue
        found = _least_bytes(program, move_to_end(slots, (*moved, slot)))
        if found <= (1 - LEAST_GAIN) * least:
            moved.append(slot)
            least = found
    return tuple(sorted(moved))


def move_to_end(slots: Sequence[Task], late: Collection[int]) -> list[Task]:
    """``slots`` with those of these places at the end, one after the other as before."""
    last = frozenset(late)
    return [s for i, s in enumerate(slots) if i not in last] + [slots[i] for i in sorted(last)]


def _backward_bytes(program: Program, slots: Sequence[Task]) -> list[int]:
    return [sum(program.values[v].bytes for v in slot.writes) for slot in slots]


def _held_bytes(program: Program, slots: Sequence[Task], slot: int) -> int:
    """What lives longer when ``slot`` is done last: what it is the last to read."""
    later = {v for other in slots[slot + 1 :] for v in other.reads} | {*program.outputs, *program.gradients}
    values = program.values
    return sum(values[v].bytes for v in slots[slot].reads if v not in later and values[v].kind not in RESIDENT_KINDS)


def _least_bytes(program: Program, slots: Sequence[Task]) -> int:
    """What no schedule goes below, workspaces aside: gradients as they come and go, and what each task reads and writes."""
    values = program.values
    outputs = sum(values[v].bytes for v in program.outputs)
    most = max(
        (sum(values[v].bytes for v in {*t.reads, *t.writes} if _forward(program, v)) for t in program.tasks), default=0
    )
    last = {v: i for i, slot in enumerate(slots) for v in slot.reads}
    last |= dict.fromkeys(program.gradients, len(slots))
    there = outputs + sum(values[v].bytes for v in program.tangents)
    for index, slot in enumerate(slots):
        taken = 0 if slot.overwrites is None else values[slot.overwrites].bytes
        there += sum(values[v].bytes for v in slot.writes) - taken
        read = sum(values[v].bytes for v in slot.reads if _forward(program, v) and v not in program.outputs)
        most = max(most, there + read)
        gone = (v for v in {*slot.reads, *slot.writes} if last.get(v, index) == index and v != slot.overwrites)
        there -= sum(values[v].bytes for v in gone if values[v].kind == "backward")
    return program.resident_bytes + most


def _forward(program: Program, value: int) -> bool:
    return program.values[value].kind == "forward"
