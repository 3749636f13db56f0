"""Programs whose schedules obey the marks of their values, see `monet_like.capture.annotations`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..capture.captured import Captured
from ..ir.program import Program, Ref, Task, may_meet
from .editor import in_turn, renamed


def obeying_marks(captured: Captured) -> Captured:
    """``captured``, with the variants that its mode admits, where marks take choices away."""
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
    """What writes ``values`` runs in the forward only."""
    tasks = tuple(
        task if values.isdisjoint(task.writes) else replace(task, runs="first")
        for task in program.tasks
        if task.runs != "again" or values.isdisjoint(task.writes)
    )
    return replace(program, tasks=tasks)


def _together(captured: Captured, values: set[int]) -> Program:
    """One task runs all again that makes ``values``, and nothing else does."""
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
    """As they stand, but for readers of what the task that is new now makes after them."""
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
    """The backward reads a second value instead of each of ``values`` that can be made again, and only it makes them."""
    program = captured.program
    again = {v for task in program.tasks if task.runs != "first" for v in task.writes}
    chosen = sorted(values & again - set(program.outputs))
    anew = {v: len(program.values) + number for number, v in enumerate(chosen)}
    if not anew:
        return captured
    refs = {Ref(old): Ref(new) for old, new in anew.items()}

    def second(task: Task) -> Task:
        calls = tuple(
            replace(
                call,
                args=renamed(call.args, refs),
                kwargs=renamed(call.kwargs, refs),
                outs=renamed(call.outs, refs),
            )
            for call in task.calls
        )
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
