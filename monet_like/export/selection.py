"""Selective checkpointing: which operators of checkpointed regions keep their results, by a small integer program.

The mechanism is that of ``torch.utils.checkpoint`` with a policy for every operator. A region is a part of the forward,
such as a layer. Its operators are *saved* or *recomputed*. When the backward of the region begins, all its recomputed
operators run in their order, up to the last one whose results the backward reads; saved ones hand out what they have.
So an operator runs again even if only saved ones read its result, and no operator runs a third time. A region's inputs
stay until its backward has ended. Outside all regions the step is plain PyTorch's.

Indices: i an item (operators that are saved together), t a run of the step in which nothing is saved that need not be.
Data: seconds_i, bytes_i; base_t the memory at t; own_t the item that runs again at t and workspace_t; between_i the
runs after i's results are freed in the forward and before they are made again.
Variables: s_i = 1: item i is saved.

    minimise   sum_i seconds_i (1 - s_i)
    (memory)   base_t + sum_{i: t in between_i} bytes_i s_i - workspace_t s_{own_t} <= budget    for every t
    (implied)  s_i <= s_j                                                                         for every (i, j) of
    `Item.implies`

The rows overstate the memory a little: a saved result can also make others die earlier. The simulator judges each
choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import InfeasibleError, SolverError
from ..ir.defaults import SOLVER
from ..ir.program import Cost, Program, Task
from ..ir.schedule import Schedule
from ..ir.simulate import Report, cost_of, running, simulate
from ..ir.units import format_bytes
from ..solvers.interface import solve
from ..solvers.matrix import Builder, Expr, MatrixProgram

#: How often the program is solved with less memory, because the simulator finds more than its rows do.
MOST_SOLVES = 4
GAP = 0.002


@dataclass(frozen=True, slots=True)
class Region:
    """A checkpointed part of the step.

    Attributes:
        name: of the module.
        tasks: forward tasks, ascending.
        slots: backward slots, ascending; those of its operators.
    """

    name: str
    tasks: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """Operators of a region that are saved together or recomputed together.

    Attributes:
        region: its number.
        tasks: forward tasks.
        always: it must be saved: what it does may happen once only.
        implies: items that must be saved if this one is.
        never: it must be recomputed.
    """

    region: int
    tasks: tuple[int, ...]
    always: bool = False
    implies: tuple[int, ...] = ()
    never: bool = False


@dataclass(frozen=True)
class StepOfRegions:
    """Plain PyTorch's step and the regions of it that are checkpointed.

    Attributes:
        program, schedule: of plain PyTorch, as `plain_step` returns them.
        costs: of its tasks.
        extra_bytes: resident memory beyond the program's.
        regions, items: as above; every task of a region that makes something is in one item.
        held: for a forward task of a region, values of the region that exist until it has run though nothing reads them
            any more: a variable of the model names them.
    """

    program: Program
    schedule: Schedule
    costs: Mapping[str, Cost]
    extra_bytes: int
    regions: tuple[Region, ...]
    items: tuple[Item, ...]
    held: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Selection:
    """The saved items, and the step with them as the simulator counts it.

    Attributes:
        saved: numbers of items.
        report: peak, seconds, and every run.
        bound_seconds: no choice of this mechanism is faster, by the rows above.
    """

    saved: frozenset[int]
    report: Report
    bound_seconds: float


def choose(
    step: StepOfRegions, budget_bytes: int, *, solver: str = SOLVER, time_limit_seconds: float = 60.0
) -> Selection:
    """The fastest choice of saved items with which the step fits.

    Args:
        budget_bytes: of the whole step.
        solver: a name that `monet_like.solvers.interface.check_solver` accepts.
        time_limit_seconds: wall seconds of one solve.

    Raises:
        InfeasibleError: no choice fits; says what would.
        SolverError: the solver is missing, or found nothing in time.
    """
    least = frozenset(i for i, item in enumerate(step.items) if item.always)
    lowest = report_of(step, least)
    if lowest.peak_bytes > budget_bytes:
        raise InfeasibleError(
            f"selective checkpointing cannot fit the step into {format_bytes(budget_bytes)}: with nothing saved that "
            f"may be recomputed it needs {format_bytes(lowest.peak_bytes)}, in {lowest.peak_step.task}; give that "
            "much, or use the full schedule, which recomputes in smaller parts",
            lowest.peak_bytes,
            lowest.peak_step.task,
        )
    table = _Table.of(step, least)
    bound, limit = 0.0, budget_bytes
    for _ in range(MOST_SOLVES):
        matrix, columns = table.program(step, limit)
        found = solve(matrix, solver, time_limit_seconds=time_limit_seconds, gap=GAP)
        if found.x is None:
            if found.status == "infeasible" or limit < budget_bytes:
                break
            raise SolverError(f"the choice of saved operators was not found: {found.message or found.status}")
        bound = bound or lowest.seconds - table.most_seconds + found.bound_seconds
        saved = least.union(i for i, column in columns.items() if column.value(found.x) > 0.5)
        report = report_of(step, saved)
        if report.peak_bytes <= budget_bytes:
            return Selection(saved, report, min(bound, report.seconds))
        limit -= report.peak_bytes - budget_bytes
    return Selection(least, lowest, min(bound, lowest.seconds))


def report_of(step: StepOfRegions, saved: frozenset[int]) -> Report:
    """The simulator's report on the step with these items saved."""
    made = checkpointed(step, saved)
    return simulate(made.program, made.schedule, step.costs, extra_bytes=step.extra_bytes)


@dataclass(frozen=True)
class Checkpointed:
    """The step of a choice as a program: recomputed values are values of their own.

    Attributes:
        program, schedule: of the step.
        again: of each forward task that runs again, the task that does so.
    """

    program: Program
    schedule: Schedule
    again: Mapping[int, int]


def checkpointed(step: StepOfRegions, saved: frozenset[int]) -> Checkpointed:
    """The step with these items saved."""
    editing = _Editing(step, saved)
    for region in step.regions:
        if region.slots:
            editing.recompute(region)
    return editing.finished()


class _Editing:
    """Adds the recomputation of regions to plain PyTorch's step."""

    def __init__(self, step: StepOfRegions, saved: frozenset[int]) -> None:
        self.step = step
        self.values, self.tasks = list(step.program.values), list(step.program.tasks)
        for p, held in step.held.items():
            self.tasks[p] = _reading(self.tasks[p], held)
        self.slots = [ways[k] for ways, k in zip(step.program.slots, step.schedule.ways, strict=True)]
        self.runs = [list(runs) for runs in step.schedule.again]
        self.kept = {p for i in saved for p in step.items[i].tasks}
        self.again: dict[int, int] = {}

    def recompute(self, region: Region) -> None:
        """Have the recomputed tasks of a region run when its backward begins, and the backward read their results."""
        wanted = _read_by(self.step, region.slots)
        last = max((p for p in region.tasks if not wanted.isdisjoint(self.tasks[p].writes)), default=-1)
        first = self._first_reading_slot(region)
        over = {self.tasks[p].overwrites for p in region.tasks}
        # A variable of the model may name a value until the recomputation stops.
        made = {v for p in region.tasks if p <= last for v in self.tasks[p].writes}
        at_last = [v for p in region.tasks if p > last for v in self.step.held.get(p, ()) if v in made]
        twins: dict[int, int] = {}
        late: list[int] = []  # what stays to the end of the region's backward
        for p in region.tasks:
            stored = tuple(v for v in self.tasks[p].writes if v not in over)
            if p in self.kept and p <= last:  # handed out as the recomputation comes to it
                held = (*self.step.held.get(p, ()), *(at_last if p == last else ()))
                task = Task(f"{self.tasks[p].name}.saved", stored, (), runs="again")
                self._run(first, _reading(task, [twins.get(v, v) for v in held]))
            elif p in self.kept:
                late += stored
            elif p <= last:
                for v in self.tasks[p].writes:
                    twins[v] = len(self.values)
                    self.values.append(replace(self.values[v], name=f"{self.values[v].name}.again"))
                self.again[p] = len(self.tasks)
                task = _reading(self.tasks[p], at_last) if p == last else self.tasks[p]
                again = replace(_mapped(task, twins), name=f"{task.name}.again", runs="again")
                self._run(first, again)
        for k in region.slots:
            self.slots[k] = _mapped(self.slots[k], twins)
            for p in self.step.schedule.again[k]:  # forward operators that only the backward runs
                self.tasks[p] = _mapped(self.tasks[p], twins)
        end = region.slots[-1]
        self.slots[end] = _reading(self.slots[end], (*_inputs(self.step.program, region.tasks), *late))

    def _run(self, slot: int, task: Task) -> None:
        self.runs[slot].append(len(self.tasks))
        self.tasks.append(task)

    def _first_reading_slot(self, region: Region) -> int:
        """The slot at whose beginning autograd asks for a saved tensor of the region, parameters included."""
        for k in region.slots:
            reads = any(self.values[v].kind != "backward" for v in self.slots[k].reads)
            if reads or self.step.schedule.again[k]:
                return k
        return region.slots[0]

    def finished(self) -> Checkpointed:
        """The step with all that was added."""
        program = replace(
            self.step.program,
            values=tuple(self.values),
            tasks=tuple(self.tasks),
            slots=tuple((slot,) for slot in self.slots),
        )
        again = tuple(tuple(sorted(runs)) for runs in self.runs)
        return Checkpointed(program, Schedule(self.step.schedule.forward, again, (0,) * len(again)), self.again)


def _reading(task: Task, values: Iterable[int]) -> Task:
    """The task that reads these values, too, so that they exist until it has run."""
    more = (v for v in values if v not in task.writes)
    return replace(task, reads=tuple(dict.fromkeys((*task.reads, *more))))


def _mapped(task: Task, twins: Mapping[int, int]) -> Task:
    """The task on recomputed values."""
    taken = task.overwrites
    return replace(
        task,
        reads=tuple(dict.fromkeys(twins.get(v, v) for v in task.reads)),
        writes=tuple(twins.get(v, v) for v in task.writes),
        overwrites=None if taken is None else twins.get(taken, taken),
    )


def _read_by(step: StepOfRegions, slots: Sequence[int]) -> set[int]:
    """The forward values that these slots, and what runs just before them, read."""
    program, schedule = step.program, step.schedule
    tasks = [program.slots[k][schedule.ways[k]] for k in slots]
    tasks += [program.tasks[p] for k in slots for p in schedule.again[k]]
    return {v for task in tasks for v in program.forward_reads(task)}


def _inputs(program: Program, tasks: Sequence[int]) -> list[int]:
    """The forward values that a region reads and does not make."""
    made = {v for p in tasks for v in program.tasks[p].writes}
    read = (v for p in tasks for v in program.forward_reads(program.tasks[p]))
    return list(dict.fromkeys(v for v in read if v not in made))


@dataclass(frozen=True, slots=True)
class Row:
    """The row (memory) of one run.

    Attributes:
        base_bytes: memory if nothing is saved that need not be.
        added: (item, bytes) of the results that are there if the item is saved.
        own: the item that runs again then, with ``workspace_bytes``.
    """

    base_bytes: int
    added: frozenset[tuple[int, int]]
    own: int | None
    workspace_bytes: int


@dataclass(frozen=True)
class _Table:
    """The data of the integer program.

    Attributes:
        seconds: that each item takes again if it is not saved, of those for which there is a choice.
        rows: memory.
    """

    seconds: Mapping[int, float]
    rows: Sequence[Row]

    @property
    def most_seconds(self) -> float:
        """Of recomputation, if nothing is saved."""
        return sum(self.seconds.values())

    @staticmethod
    def of(step: StepOfRegions, least: frozenset[int]) -> _Table:
        """The data, from the step in which nothing is saved that need not be."""
        made = checkpointed(step, least)
        tasks, stages = step.program.tasks, made.schedule.runs()
        free = [
            i
            for i, item in enumerate(step.items)
            if i not in least and not item.never and any(p in made.again for p in item.tasks)
        ]
        owner = {made.again[p]: i for i in free for p in step.items[i].tasks if p in made.again}
        when = {p: t for t, (stage, p) in enumerate(stages) if stage and p in owner}
        there: list[frozenset[int]] = []
        rows: list[Row] = []
        for (stage, p), moment in zip(
            stages, running(made.program, made.schedule, step.costs, extra_bytes=step.extra_bytes), strict=True
        ):
            there.append(frozenset(moment.alive).union(moment.task.writes))
            own = owner.get(p) if stage else None
            workspace = cost_of(moment.task, step.costs).workspace_bytes if own is not None else 0
            rows.append(Row(moment.step.bytes, frozenset(), own, workspace))
        active: list[dict[int, int]] = [{} for _ in rows]
        over = {task.overwrites for task in tasks}
        for i in free:
            for p in step.items[i].tasks:
                end = when.get(made.again.get(p, -1), 0)
                for v in (v for v in tasks[p].writes if v not in over):
                    begin = next((t + 1 for t in reversed(range(end)) if v in there[t]), 0)
                    for t in range(begin, end):
                        active[t][i] = active[t].get(i, 0) + step.program.values[v].bytes
        seconds = {
            i: sum(cost_of(tasks[p], step.costs).seconds for p in step.items[i].tasks if p in made.again) for i in free
        }
        return _Table(
            seconds, _highest(replace(row, added=frozenset(a.items())) for row, a in zip(rows, active, strict=True))
        )

    def program(self, step: StepOfRegions, limit: int) -> tuple[MatrixProgram, dict[int, Expr]]:
        """The program for a limit in bytes, and the column of each item."""
        builder = Builder()
        unit = self.most_seconds or 1.0
        columns = {i: builder.column(-seconds / unit) for i, seconds in self.seconds.items()}
        builder.offset = self.most_seconds / unit
        for row in self.rows:
            if row.base_bytes + sum(count for _, count in row.added) <= limit:
                continue
            parts = [Expr(float(row.base_bytes)), *(columns[i] * float(count) for i, count in sorted(row.added))]
            if row.own is not None:
                parts.append(columns[row.own] * -float(row.workspace_bytes))
            builder.fits(parts, limit)
        for i, column in columns.items():
            for j in step.items[i].implies:
                if j in columns:
                    builder.at_most(column, columns[j])
                elif step.items[j].never:
                    builder.at_most(column)
        return builder.finish(unit), columns


def _highest(rows: Iterable[Row]) -> list[Row]:
    """Of the rows that differ in their base alone, the one with the most memory."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        key = (row.added, row.own, row.workspace_bytes)
        if key not in found or found[key].base_bytes < row.base_bytes:
            found[key] = row
    return list(found.values())
