"""Delayed gradients: large gradients of parameters that are computed at the end of the backward, to save memory.

Autograd makes the gradient of VGG-16's first linear layer, 411 MB, among the first, and it stays in ``.grad``. Its
inputs take a tenth of that memory, and the product hardly any time. Computed at the end, when the activations are gone,
the gradient does not add to the peak. Its bits are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...ir.program import RESIDENT_KINDS, Program, Task

#: A gradient must be so many times as large as the values that are kept to compute it later.
RATIO = 4
#: Each delayed gradient must lower the bound of the step's peak by this part of it. Delaying many small gradients would
#: tie the two ends of the backward together, so that planners cannot partition it.
LEAST_GAIN = 0.005


def find_delayed_gradients(program: Program, candidates: Collection[int]) -> tuple[int, ...]:
    """The slots whose gradients are delayed to the end of the backward, in a program without variants.

    Args:
        candidates: slots that write a gradient of a parameter, which no other slot reads.
    """
    slots = [ways[0] for ways in program.slots]
    made = [sum(program.values[v].bytes for v in slot.writes) for slot in slots]
    delayed: list[int] = []
    least = _least_bytes(program, slots)
    for slot in sorted(candidates, key=lambda i: -made[i]):
        if made[slot] < LEAST_GAIN * least:
            break
        if made[slot] < RATIO * _held_bytes(program, slots, slot):
            continue
        found = _least_bytes(program, delay(slots, (*delayed, slot)))
        if found <= (1 - LEAST_GAIN) * least:
            delayed.append(slot)
            least = found
    return tuple(sorted(delayed))


def delay(slots: Sequence[Task], delayed: Collection[int]) -> list[Task]:
    """``slots`` with those at the positions ``delayed`` delayed to the end, in their order."""
    last = frozenset(delayed)
    return [s for i, s in enumerate(slots) if i not in last] + [slots[i] for i in sorted(last)]


def _held_bytes(program: Program, slots: Sequence[Task], slot: int) -> int:
    """Bytes of the values that live longer when ``slot`` comes last: those of which it is the last reader."""
    later = {v for other in slots[slot + 1 :] for v in other.reads} | {*program.outputs, *program.gradients}
    values = program.values
    return sum(values[v].bytes for v in slots[slot].reads if v not in later and values[v].kind not in RESIDENT_KINDS)


def _least_bytes(program: Program, slots: Sequence[Task]) -> int:
    """A lower bound of any schedule's peak, without workspaces: live gradients, and what each task reads and writes."""
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
