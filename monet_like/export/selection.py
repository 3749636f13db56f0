"""Selective checkpointing: which operators of checkpointed regions keep their results, by a small integer program.

The mechanism is that of ``torch.utils.checkpoint`` with a policy for every operator. A region is a part of the forward,
such as a layer. Its operators are *saved* or *recomputed*. When the backward of the region begins, all its recomputed
operators run in their order, up to the last one whose results the backward reads; saved ones hand out what they have.
So an operator runs again even if only saved ones read its result, and no operator runs a third time. A region's inputs
stay until its backward has ended. Outside all regions the step is plain PyTorch's.

In another mechanism, that of ``torch_remat``, saved operators keep what plain PyTorch keeps of them and what recomputed
ones read; the recomputation goes on to the end of the region. It is the same program without `StepOfRegions.caches`.

Indices: i an item (operators that are saved together), t a run of the step in which nothing is saved that need not be;
v a result of i that nobody but recomputed operators of other items reads.
Data: seconds_i, bytes_i; base_t the memory at t; own_t the item that runs again at t and workspace_t; between_i the
runs after i's results are freed in the forward and before they are made again.
Variables: s_i = 1: item i is saved; k_v = 1: v is kept.

    minimise   sum_i seconds_i (1 - s_i)
    (memory)   base_t + sum_{i: t in between_i} (bytes_i s_i + sum_v bytes_v k_v) - workspace_t s_{own_t} <= budget
                                                                                                  for every t
    (implied)  s_i <= s_j                                               for every (i, j) of `Item.implies`
    (kept)     s_i <= k_v + s_j                                         for every v, of each j that reads it

The rows overstate the memory a little: a saved result can make others die earlier. The simulator judges each choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import InfeasibleError, SolverError
from ..ir.defaults import SOLVER
from ..ir.simulate import Report, cost_of, running, simulate
from ..ir.units import format_bytes
from ..solvers.interface import solve
from ..solvers.matrix import Builder, Expr, MatrixProgram
from .checkpointed import StepOfRegions, checkpointed, read_by

#: How often the program is solved with less memory, because the simulator finds more than its rows do.
MOST_SOLVES = 4
GAP = 0.002


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
        alone: for the column of a value that only recomputed operators read: the item that makes it and those that read
            it; -1 stands for operators that always run again.
    """

    seconds: Mapping[int, float]
    rows: Sequence[Row]
    alone: Mapping[int, tuple[int, frozenset[int]]]

    @property
    def most_seconds(self) -> float:
        """Of recomputation, if nothing is saved."""
        return sum(self.seconds.values())

    @staticmethod
    def of(step: StepOfRegions, least: frozenset[int]) -> _Table:
        """The data, from the step in which nothing is saved that need not be."""
        made = checkpointed(step, least)
        tasks, stages = step.program.tasks, made.schedule.runs()
        choice = [(i, item) for i, item in enumerate(step.items) if i not in least and not item.never]
        free = [i for i, item in choice if any(p in made.again for p in item.tasks)]
        owner = {made.again[p]: i for i in free for p in step.items[i].tasks if p in made.again}
        alone: dict[int, tuple[int, frozenset[int]]] = {}
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
        readers, kept = ({}, set()) if step.caches else _readers(step)
        for i in free:
            for p in step.items[i].tasks:
                end = when.get(made.again.get(p, -1), 0)
                for v in (v for v in tasks[p].writes if v not in over):
                    others = readers.get(v, frozenset()) - {i} - least
                    if not step.caches and v not in kept and not others:
                        continue
                    column = i if step.caches or v in kept else len(step.items) + v  # columns of items come first
                    begin = next((t + 1 for t in reversed(range(end)) if v in there[t]), 0)
                    for t in range(begin, end):
                        active[t][column] = active[t].get(column, 0) + step.program.values[v].bytes
                    if column != i:
                        alone[column] = (i, others)
        seconds = {
            i: sum(cost_of(tasks[p], step.costs).seconds for p in step.items[i].tasks if p in made.again) for i in free
        }
        highest = _highest(replace(row, added=frozenset(a.items())) for row, a in zip(rows, active, strict=True))
        return _Table(seconds, highest, alone)

    def program(self, step: StepOfRegions, limit: int) -> tuple[MatrixProgram, dict[int, Expr]]:
        """The program for a limit in bytes, and the column of each item."""
        builder = Builder()
        unit = self.most_seconds or 1.0
        columns = {i: builder.column(-seconds / unit) for i, seconds in self.seconds.items()}
        columns |= {k: builder.column(0.0) for k in self.alone}
        builder.offset = self.most_seconds / unit
        for row in self.rows:
            if row.base_bytes + sum(count for _, count in row.added) <= limit:
                continue
            parts = [Expr(float(row.base_bytes)), *(columns[i] * float(count) for i, count in sorted(row.added))]
            if row.own is not None:
                parts.append(columns[row.own] * -float(row.workspace_bytes))
            builder.fits(parts, limit)
        for k, (i, readers) in self.alone.items():
            for j in readers:
                builder.at_most(columns[i], columns[k] + columns[j] if j in columns else columns[k])
        for i in self.seconds:
            column = columns[i]
            for j in step.items[i].implies:
                if j in columns:
                    builder.at_most(column, columns[j])
                elif step.items[j].never:
                    builder.at_most(column)
        return builder.finish(unit), {i: columns[i] for i in self.seconds}


def _readers(step: StepOfRegions) -> tuple[dict[int, frozenset[int]], set[int]]:
    """The items that read each value in the forward of its region, -1 for operators of none, and the values that the
    backward reads in any case."""
    of = {p: i for i, item in enumerate(step.items) for p in item.tasks}
    found: dict[int, set[int]] = {}
    for region in step.regions:
        for p in region.tasks:
            for v in step.program.tasks[p].reads:
                always = p not in of or step.items[of[p]].never
                found.setdefault(v, set()).add(-1 if always else of[p])
    return {v: frozenset(items) for v, items in found.items()}, read_by(step, range(len(step.program.slots)))


def _highest(rows: Iterable[Row]) -> list[Row]:
    """Of the rows that differ in their base alone, the one with the most memory."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        key = (row.added, row.own, row.workspace_bytes)
        if key not in found or found[key].base_bytes < row.base_bytes:
            found[key] = row
    return list(found.values())
