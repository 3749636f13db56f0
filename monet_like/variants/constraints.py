"""Restrictions of a program's choices: the marks that a user put on values, and equality of values that are compared.

`monet_like.capture.annotations` says what the marks mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..capture.captured import Captured
from ..ir.mode import ALGORITHMS
from ..ir.program import Program, Ref, Task, may_meet
from .editor import in_turn, with_names

_COMPARING = ("aten.eq.", "aten.ne.")
#: Parts of the names of operators that read only shape and dtype of a tensor.
_OF_ITS_SHAPE = ("aten.new_", "_like.")
#: Words of variants that agree with PyTorch's operators only up to rounding.
_ROUNDING = frozenset({"conv", ALGORITHMS})


def obeying_marks(captured: Captured) -> Captured:
    """Take away the choices that the user's marks exclude from a program that has the variants its mode admits."""
    groups: dict[tuple[str, int], set[int]] = {}
    for value, mark in captured.marks.items():
        groups.setdefault(mark, set()).add(value)
    for (kind, _), values in groups.items():
        if kind == "together":
            captured = replace(captured, program=_together(captured, values))
        elif kind == "keep":
            captured = replace(captured, program=_once(captured.program, values))
    return _recomputed(captured, {v for (kind, _), found in groups.items() if kind == "recompute" for v in found})


def _once(program: Program, values: set[int]) -> Program:
    """Let the tasks that write ``values`` run in the forward only."""
    tasks = tuple(
        task if values.isdisjoint(task.writes) else replace(task, runs="first")
        for task in program.tasks
        if task.runs != "again" or values.isdisjoint(task.writes)
    )
    return replace(program, tasks=tasks)


def _together(captured: Captured, values: set[int]) -> Program:
    """Let one task alone recompute all of ``values`` together."""
    program = captured.program
    members: list[Task] = []
    made: set[int] = set()
    for task in sorted(program.tasks, key=lambda task: task.variant != "aten"):  # PyTorch's own first
        free = task.runs != "first" and task.overwrites is None and made.isdisjoint(task.writes)
        if free and values.issuperset(task.writes):
            members.append(task)
            made.update(task.writes)
    if len(members) < 2:
        return program
    members.sort(key=program.tasks.index)
    outside = [task for task in program.tasks if values.isdisjoint(task.writes)]
    readers = (*outside, *(way for ways in program.slots for way in ways))
    seen = {v for reader in readers for v in reader.reads}.union(program.outputs)
    name = f"{members[-1].name}.together"
    whole = in_turn(members, made - seen, captured.metas, name=name, variant="together", runs="again")
    once = list(_once(program, made).tasks)
    place = 1 + max(index for index, task in enumerate(once) if not made.isdisjoint(task.writes))
    return replace(program, tasks=_in_order([*once[:place], whole, *once[place:]]))


def _in_order(tasks: Sequence[Task]) -> tuple[Task, ...]:
    """Keep the order of tasks, except that readers of the new task's results come after it."""
    import networkx as nx  # which takes a tenth of a second to import

    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(tasks)))
    makers: dict[int, list[int]] = {}
    for index, task in enumerate(tasks):
        for value in task.writes:
            makers.setdefault(value, []).append(index)
    for index, task in enumerate(tasks):
        made = (maker for value in task.reads for maker in makers.get(value, ()))
        graph.add_edges_from((maker, index) for maker in made if may_meet(tasks[maker], task))
    return tuple(tasks[index] for index in nx.lexicographical_topological_sort(graph, key=int))


def _recomputed(captured: Captured, values: set[int]) -> Captured:
    """Let the backward read recomputed values: each of ``values`` gets a second one, which only the backward makes."""
    program = captured.program
    again = {v for task in program.tasks if task.runs != "first" for v in task.writes}
    chosen = sorted(values & again - set(program.outputs))
    anew = {v: len(program.values) + number for number, v in enumerate(chosen)}
    if not anew:
        return captured
    refs = {Ref(old): Ref(new) for old, new in anew.items()}

    def second(task: Task) -> Task:
        calls = tuple(with_names(call, refs) for call in task.calls)
        reads, writes = (tuple(anew.get(v, v) for v in found) for found in (task.reads, task.writes))
        taken = task.overwrites if task.overwrites is None else anew.get(task.overwrites, task.overwrites)
        return replace(task, reads=reads, writes=writes, overwrites=taken, calls=calls)

    tasks: list[Task] = []
    for task in program.tasks:
        touches = not anew.keys().isdisjoint((*task.reads, *task.writes))
        if not touches:
            tasks.append(task)
            continue
        if task.runs != "again":
            tasks.append(replace(task, runs="first"))
        if task.runs != "first":
            tasks.append(replace(second(task), name=f"{task.name}.anew", runs="again"))
    slots = tuple(tuple(map(second, ways)) for ways in program.slots)
    added = tuple(replace(program.values[v], name=f"{program.values[v].name}.anew") for v in anew)
    program = replace(program, values=(*program.values, *added), tasks=tuple(tasks), slots=slots)
    program.check()
    return replace(captured, program=program, metas=(*captured.metas, *(captured.metas[v] for v in anew)))


def reading_once(captured: Captured) -> Captured:
    """``captured`` without the variants that would read a changed tensor after the forward."""
    if not captured.changed:
        return captured
    program, changed = captured.program, captured.changed
    tasks = tuple(
        replace(task, runs="first") if not changed.isdisjoint(task.reads) else task
        for task in program.tasks
        if task.runs != "again" or changed.isdisjoint(task.reads)
    )
    slots = tuple(tuple(way for way in slot if changed.isdisjoint(way.reads)) for slot in program.slots)
    return replace(captured, program=replace(program, tasks=tasks, slots=slots))


def bitwise_where_compared(program: Program) -> Program:
    """Remove producers that round differently from PyTorch's for every value on which a comparison of floats depends.

    For example, the gradient of ``amax`` goes to the elements that equal the maximum. If the maximum was kept and the
    elements were recomputed by another algorithm, maybe none of them would equal it. A value that only the forward
    makes is the same for every comparison.
    """

    def made_once(value: int) -> bool:
        makers = [program.tasks[index] for index in program.producers[value]]
        return bool(makers) and all(task.runs == "first" for task in makers)

    needed = {
        value
        for task in program.every_task()
        if any(call.op.startswith(_COMPARING) for call in task.calls)
        for value in program.forward_reads(task)
        if program.values[value].spec.startswith(("float", "bfloat", "complex")) and not made_once(value)
    }
    pending = [*needed]
    while pending:
        for index in program.producers[pending.pop()]:
            task = program.tasks[index]
            if any(word in task.calls[-1].op for word in _OF_ITS_SHAPE):
                continue
            more = {v for v in program.forward_reads(task) if not made_once(v)} - needed
            needed |= more
            pending += more
    tasks = tuple(t for t in program.tasks if t.word not in _ROUNDING or needed.isdisjoint(t.writes))
    return replace(program, tasks=tasks)
