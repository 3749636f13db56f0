"""Schedules of one piece of a step: plain PyTorch's, with a checkpoint around the part, and our own, with their
costs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ...capture.captured import Captured
from ...ir.program import Cost, Program, Task
from ...ir.schedule import Schedule, prune
from ...ir.step import Point
from ...plan.baseline import plain_step, store_all
from ...plan.step.menus import efficient, offloading, owning, point_of
from ..block_menus import handed_plainly, own_point
from ..offloaded import offloadable


@dataclass(frozen=True)
class Priced:
    """A part with the costs of one card: what each way to run it takes.

    Attributes:
        plain: everything kept.
        checkpoint: nothing kept but the part's input (``torch.utils.checkpoint``).
        own: by our schedules.
        ours: an efficient choice of all these.
    """

    plain: Point
    checkpoint: Point
    own: tuple[Point, ...]
    ours: tuple[Point, ...]

    def of(self, way: str) -> Point:
        """The point of ``plain`` or ``checkpoint``."""
        return self.plain if way == "plain" else self.checkpoint


def priced(captured: Captured, schedules: Sequence[Schedule], costs: Mapping[str, Cost]) -> Priced:
    """Judge schedules of a part by the simulator.

    Args:
        schedules: of the program with variants.
    """
    program, schedule, eager = plain_step(captured.plain, costs, autograd_nodes=captured.autograd_nodes)
    handed = handed_plainly(captured)
    plain = point_of(program, schedule, eager, handed=handed)
    again = point_of(program, checkpointed(program), eager, handed=handed)
    own = efficient([own_point(captured, each, costs) for each in schedules])
    return Priced(plain, again, own, efficient([plain, again, *own]))


def with_host(captured: Captured, price: Priced, lone: Collection[int], bytes_per_second: float) -> tuple[Point, ...]:
    """Our choice with those that offload.

    Args:
        captured: with the variants that our plans may use.
        lone: inputs that exist only while the part keeps them (`lone_inputs`).
        bytes_per_second: of the card's link to the host, each way.
    """
    program, movable = captured.program, offloadable(captured, captured.program.outputs, lone)
    own = [owning(point, program, lone) for point in price.own]
    others = [owning(point, program, lone) for point in (price.plain, price.checkpoint)]
    more = (one for point in own for one in offloading(point, program, movable, bytes_per_second))
    return efficient([*own, *others, *more])


def checkpointed(program: Program) -> Schedule:
    """Plain PyTorch's operators with a checkpoint around them: the backward first runs the forward again.

    As with PyTorch's early stop, only what the backward needs is made again. Tasks that may run only once, such as
    random draws, and those that make a result, which the caller holds, are not run again: what they make is kept.
    """
    plain = store_all(program)
    maker = {v: index for index in plain.forward for v in program.tasks[index].writes}
    pending = [v for slot, way in zip(program.slots, plain.ways, strict=True) for v in program.forward_reads(slot[way])]
    pending += [v for tasks in plain.again for index in tasks for v in program.forward_reads(program.tasks[index])]
    results, again = set(program.outputs), set[int]()
    while pending:
        index = maker.get(pending.pop())
        task = None if index is None else program.tasks[index]
        if task is None or index is None or task.runs == "first" or results.intersection(task.writes):
            continue
        if index not in again:
            again.add(index)
            pending += program.forward_reads(program.tasks[index])
    # What has been overwritten in place and is not made again cannot be read again.
    while lost := {i for i in again if (old := program.tasks[i].overwrites) in maker and maker[old] not in again}:
        again -= lost
    if not again:
        return plain
    first, *others = plain.again
    return prune(program, replace(plain, again=(tuple(sorted({*first, *again})), *others)))


def alike(one: Captured, other: Captured) -> bool:
    """Whether schedules of one program are schedules of the other: the same tasks and slots, whatever they call."""

    def outline(task: Task) -> tuple[object, ...]:
        return task.variant, task.word, task.reads, task.writes, task.overwrites, task.runs

    def outlines(captured: Captured) -> list[object]:
        program = captured.program
        return [list(map(outline, program.tasks)), [list(map(outline, slot)) for slot in program.slots]]

    return outlines(one) == outlines(other)


class Sized:
    """A part at any size: bytes of values and workspaces are polynomials in the size, through captured ones.

    Args:
        sizes: of the captures: two for sizes that bytes are linear in, three for squares.
        costs: of each capture.
    """

    def __init__(self, sizes: Sequence[int], captured: Sequence[Captured], costs: Sequence[Mapping[str, Cost]]) -> None:
        self.sizes, self.captured, self.costs = tuple(sizes), tuple(captured), tuple(costs)

    @property
    def regular(self) -> bool:
        """Whether the program is the same at all sizes."""
        first, *others = self.captured
        return all(alike(first, other) for other in others)

    def priced(self, schedules: Sequence[Schedule], size: int) -> Priced:
        """The part at another size.

        Its bytes are exact up to the allocator's rounding; its seconds are the first capture's.
        """
        costs = dict(self.costs[0])
        for tasks in zip(*(each.every_task() for each in self.captured), strict=True):
            if tasks[0].cost:
                found = [known[task.cost].workspace_bytes for task, known in zip(tasks, self.costs, strict=True)]
                costs[tasks[0].cost] = replace(costs[tasks[0].cost], workspace_bytes=through(self.sizes, found, size))
        return priced(self.at(size), schedules, costs)

    def at(self, size: int) -> Captured:
        """The part's program at another size."""
        programs = [self._program([each.program for each in self.captured], size)]
        programs.append(self._program([each.plain for each in self.captured], size))
        return replace(self.captured[0], program=programs[0], as_called=programs[1])

    def _program(self, programs: Sequence[Program], size: int) -> Program:
        values = tuple(
            replace(value, bytes=through(self.sizes, [program.values[v].bytes for program in programs], size))
            for v, value in enumerate(programs[0].values)
        )
        return replace(programs[0], values=values)


def through(sizes: Sequence[int], values: Sequence[int], size: int) -> int:
    """The polynomial through points (Lagrange), at another place; at least 0, and rounded up."""
    found = 0.0
    for i, (at, value) in enumerate(zip(sizes, values, strict=True)):
        share = float(value)
        for j, other in enumerate(sizes):
            if j != i:
                share *= (size - other) / (at - other)
        found += share
    return max(0, int(-(-found // 1)))
