"""Orders the tasks of a step so that those that Inductor can fuse stand together, within the step's memory.

What it cannot fuse keeps its order: products, convolutions, random operators, questions. So do the ends of the segments
of the backward, by which gradients and what they are the gradients of are left alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from ..capture.captured import Captured
from ..ir.order import Arrangement, Item, arranged, chain_of
from ..ir.program import RESIDENT_KINDS, Program, Task
from ..profile.rates import limits_like
from ..runtime.codegen import liveness
from .branches import written_values
from .fusible import is_fusible, writes_into_views
from .segments import Runs, Stretch


@dataclass(frozen=True, slots=True)
class Level:
    """Memory of the step when a task runs.

    Attributes:
        before_bytes: of all that exists when it begins.
        bytes: while it runs.
        group: only tasks of one group fit into memory together, as far as is known; 0: not known.
    """

    before_bytes: int
    bytes: int
    group: int = 0


def levels_of(program: Program, runs: Runs, beside: Sequence[int] = ()) -> list[Level]:
    """The memory of every task of a step; ``beside``: its workspaces, if they are known."""
    backward = tuple(chain(*runs[1:]))
    ended = {*program.outputs, *program.gradients}
    _, between = liveness(backward, ended)
    left = iter(beside)
    found: list[Level] = []
    for tasks, needed in ((runs[0], {*between, *program.outputs} - {*program.tangents}), (backward, ended)):
        dying, first = liveness(tasks, needed)
        alive = {v: _bytes(program, v) for v in first}
        memory = program.resident_bytes + sum(alive.values())
        for task, dead in zip(tasks, dying, strict=True):
            more = sum(_bytes(program, v) for v in task.writes)
            taken = 0 if task.overwrites is None else program.values[task.overwrites].bytes
            found.append(Level(memory, memory + more - taken + next(left, 0)))
            memory += sum(_bytes(program, v) for v in task.writes if v not in alive)
            alive.update((v, _bytes(program, v)) for v in task.writes)
            memory -= sum(alive.pop(v) for v in dead if v in alive)
    return found


def _bytes(program: Program, value: int) -> int:
    return 0 if program.values[value].kind in RESIDENT_KINDS else program.values[value].bytes


def workspaces_of(program: Program, runs: Runs) -> tuple[list[int], int] | None:
    """Of every task, and what exists besides the step; None: the memory of a task is not known."""
    known = [task.run_bytes for task in chain(*runs)]
    if not known or None in known:
        return None
    more = [said - level.bytes for said, level in zip(known, levels_of(program, runs), strict=True) if said is not None]
    return [count - min(more) for count in more], min(more)


@dataclass(frozen=True, slots=True)
class _Step:
    """A task with its workspace, or the end of a segment (None), after which nothing touches some values."""

    task: Task | None
    beside_bytes: int = 0
    over: frozenset[int] = frozenset()
    group: int = 0


def in_fusion_order(
    captured: Captured, runs: Runs, stretches: Sequence[Stretch], beside: Sequence[int], limit_bytes: int
) -> tuple[list[tuple[Task, ...]], list[int], list[int]]:
    """The tasks in the order in which the fewest bytes move that is found, their workspaces, and their groups.

    Args:
        stretches: of the segments.
        beside: the workspace of every task.
        limit_bytes: of the memory at any time, with all that is resident.
    """
    program = captured.program
    ended = {*program.outputs, *program.gradients}
    _, between = liveness([*chain(*runs[1:])], ended)
    residents = {v for v, value in enumerate(program.values) if value.kind in RESIDENT_KINDS}
    start = residents | {*between, *program.tangents, *program.outputs}
    space = iter(beside)
    forward = [_Step(task, next(space)) for task in runs[0]]
    backward: list[_Step] = []
    for tasks, over in zip(runs[1:], _over(captured, stretches), strict=True):
        backward += [*(_Step(task, next(space)) for task in tasks), _Step(None, 0, over)]
    steps = _ordered(captured, forward, residents, start - {*program.tangents}, limit_bytes)
    made: list[list[Task]] = [[step.task for step in steps if step.task is not None], []]
    for step in (last := _ordered(captured, backward, start, residents | ended, limit_bytes)):
        made[-1].append(step.task) if step.task is not None else made.append([])
    ran = [step for step in (*steps, *last) if step.task is not None]
    return [tuple(run) for run in made[:-1]], [step.beside_bytes for step in ran], [step.group for step in ran]


def _over(captured: Captured, stretches: Sequence[Stretch]) -> Iterator[frozenset[int]]:
    """For every segment, the gradients that it returns and what they are the gradients of."""
    parameters = [value for _, value in captured.parameters]
    for _, _, gradients in stretches:
        of = (parameters[i] if kind == "parameter" else captured.inputs[i] for kind, i, _ in gradients)
        yield frozenset((*of, *(tensor.value for _, _, tensor in gradients)))


def _ordered(
    captured: Captured, steps: Sequence[_Step], start: Collection[int], kept: Collection[int], limit_bytes: int
) -> list[_Step]:
    """Steps in their best order; as given, if even that is taken to need more than there is."""
    program, limits = captured.program, limits_like(captured.device)
    launch, room = int(limits.launch_seconds * limits.bytes_per_second), limit_bytes - program.resident_bytes
    touching: dict[int, list[int]] = defaultdict(list)
    items = []
    for k, step in enumerate(steps):
        over, task = set(step.over), step.task
        item = Item((), (), moves=False)
        if task is not None:
            changed = {v for v in written_values([task]) if isinstance(v, int)}
            changed |= {*task.reads} if writes_into_views(task) else set()
            taken = set[int]() if task.overwrites is None else {task.overwrites}
            again = (v for v in changed if v not in task.writes and v not in taken)
            beside = step.beside_bytes - sum(program.values[v].bytes for v in taken)
            item = Item(task.reads, (*task.writes, *again), is_fusible(task), beside)
            over = changed | taken
        items.append(replace(item, after=tuple({j for v in over for j in touching[v]})))
        for v in dict.fromkeys((*item.reads, *item.writes)):
            touching[v].append(k)
    found = chain_of(program.values, items, start, kept, launch)
    if max(Arrangement(found, found.spots).followed(room)[0], default=0) > room:
        return list(steps)
    made = arranged(found, room)
    groups = made.followed(room)[1]
    return [replace(steps[k], group=groups[k] + 1) for k in made.order()]
