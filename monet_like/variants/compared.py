"""Values that a program asks to be equal are the same bits whenever they are made."""

from __future__ import annotations

from dataclasses import replace

from ..ir.mode import ALGORITHMS
from ..ir.program import Program

_COMPARING = ("aten.eq.", "aten.ne.")
#: What reads a tensor for its shape and dtype only.
_OF_ITS_SHAPE = ("aten.new_", "_like.")
#: Words of variants that agree to rounding only.
_ROUNDING = frozenset({"conv", ALGORITHMS})


def bitwise_where_compared(program: Program) -> Program:
    """Without the producers that round in their own way of what an equality of floats depends on.

    The gradient of ``amax`` goes to the elements that equal the maximum. Where the maximum was kept and the elements are
    made anew by another algorithm, none of them may.
    """
    needed = {
        value
        for task in program.every_task()
        if any(call.op.startswith(_COMPARING) for call in task.calls)
        for value in program.forward_reads(task)
        if program.values[value].spec.startswith(("float", "bfloat", "complex"))
    }
    pending = [*needed]
    while pending:
        for index in program.producers[pending.pop()]:
            task = program.tasks[index]
            if any(word in task.calls[-1].op for word in _OF_ITS_SHAPE):
                continue
            more = {*program.forward_reads(task)} - needed
            needed |= more
            pending += more
    tasks = tuple(t for t in program.tasks if t.word not in _ROUNDING or needed.isdisjoint(t.writes))
    return replace(program, tasks=tasks)
