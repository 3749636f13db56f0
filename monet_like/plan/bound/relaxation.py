"""A relaxation of the integer program: a bound for all schedules, in which the backward is a few blocks of stages.

Within a block of neighbouring stages nothing has an order. A task that runs in it runs once, however often it runs in a
schedule; values made anywhere in a block can be read anywhere in it; and memory is counted only where a block begins,
and in slots that are blocks by themselves. Every schedule, its useless runs removed, is a solution of this program, at
no more seconds. So the optimum of the program, or any bound of it, is a bound for all schedules, those with many reruns
included.

    x[p]    task p runs in the forward                 e[p,b]  task p runs again in block b
    w[k,t]  slot t takes its way k                     K[v,b]  value v is carried into block b

     (1) min  sum seconds(p) x[p] + sum seconds(p) e[p,b] + sum seconds(k) w[k,t]
     (2) sum_{p in M(v)} x[p] = 1 for outputs v;   x[p] <= sum_{q in M(u)} x[q] for every u that p reads
     (3) sum_k w[k,t] = 1
     (4) K[v,0] <= sum_{p in M(v)} x[p];           K[v,b+1] <= K[v,b] + sum_{p in M(v)} e[p,b]
     (5) e[p,b] <= K[u,b] + sum_{q in M(u)} e[q,b] for every u that p reads
         sum_{k reads u} w[k,t] <= K[u,b] + sum_{q in M(u)} e[q,b] for t in block b
     (6) resident + before(t) + sum_v b(v) K[v,b] <= B, t being the first slot of block b
     (7) resident + during(t) + sum_v b(v) Y[v] + sum_k extra(k) w[k,t] <= B where slot t is block b by itself,
         Y[v] >= K[v,b+1] and Y[v] >= sum_{k reads v} w[k,t]: row (8) of `Formulation`
     (8) the run rows (9) of `Formulation` that are asked for: of the forward, and of slots that are blocks
     (9) r overwrites u, in the forward or a slot that is a block: rows (6) of `Formulation`
    (10) where slots are blocks, for big values, Z[v,b]: v is made again in block b or later,
         Z[v,b] <= sum_{p in M(v), c >= b} e[p,c]
         Z[v,b] <= K[u,b] + Z[u,b] + sum_{p in M(v) not reading u, c >= b} e[p,c] for every u that some of M(v) read
         sum_{k reads u} w[k,t] <= K[u,b] + Z[u,b] for t in block b or later

Rows (10) follow from the others where all columns are 0 or 1; they strengthen the linear relaxation. Without them half
of u, read in two blocks, makes two halves of v, hence a whole one: with every further block more of the cost of a long
chain was lost.

With one block the program decides what the forward keeps, in some thousand columns. Measured on MONeT's P100 costs: in
two seconds it proves 964.5 ms for ResNet-50 at 5 GB and 921.2 ms at 8 GB, where MONeT's own program, of some
hundred times the size, proves 943.8 and 916.0 ms in 24 hours. Where other runs than the start of the backward need the
most memory (U-Net), the bound is weak until these have blocks and rows of their own: refinement.py finds out which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...ir.program import Program
from ...ir.schedule import Schedule, prune
from ...solvers.matrix import ONE, ZERO, Expr, MatrixProgram, total
from ..instance import Instance
from ..rows import Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Stands for no budget, in bytes.
NO_BUDGET = 2**62
#: Values of at least this share of the budget have rows (10): most of the gain at a fraction of the columns.
BIG_SHARE = 0.01


@dataclass(frozen=True)
class BlockProgram:
    """The relaxation of a program, and the translation of its points to schedules and back.

    Attributes:
        program: the program that is relaxed.
        matrix: the relaxation.
        starts: the first slot of every block.
        first: x of the forward's tasks.
        again: for every block, e of the tasks that may run in it.
        carried: for every block, K of the values that may be carried into it.
        ways: for every slot, w of its useful ways.
        follows: columns that are the maximum of others; see `Builder.highest`.
    """

    program: Program
    matrix: MatrixProgram
    starts: tuple[int, ...]
    first: Mapping[int, Expr]
    again: tuple[Mapping[int, Expr], ...]
    carried: tuple[Mapping[int, Expr], ...]
    ways: tuple[Mapping[int, Expr], ...]
    follows: tuple[tuple[int, tuple[Expr, ...]], ...]

    def priced(self, seconds_per_byte: float) -> MatrixProgram:
        """The program with a price on every byte that the forward keeps."""
        price = seconds_per_byte / self.matrix.seconds_per_unit
        cost = self.matrix.cost.copy()
        for v, kept in self.carried[0].items() if self.carried else ():
            cost[kept.terms[0][0]] += price * self.program.values[v].bytes
        return replace(self.matrix, cost=cost)

    def kept(self, x: NDArray[Any]) -> tuple[int, ...]:
        """The values that the forward keeps."""
        return tuple(v for v, held in self.carried[0].items() if held.value(x) > 0.5) if self.carried else ()

    def chosen(self, x: NDArray[Any]) -> tuple[int, ...]:
        """The way of every slot."""
        return tuple(max(ways, key=lambda k, w=ways: w[k].value(x)) for ways in self.ways)  # type: ignore[misc]

    def slots_of(self, block: int) -> range:
        """The slots of a block."""
        return range(self.starts[block], [*self.starts, len(self.program.slots)][block + 1])

    def schedule(self, x: NDArray[Any]) -> Schedule:
        """A schedule with the runs of a point; in blocks of several slots each runs just before the slots that need it.

        Such blocks have no order, so in them tasks in place are replaced by others that make the same values. The
        schedule may still be over the budget, or read a value whose storage was taken over.
        """
        tasks, ways = self.program.tasks, self.chosen(x)
        again: list[list[int]] = [[] for _ in self.program.slots]
        for b in range(len(self.starts)):
            left = sorted(p for p, run in self.again[b].items() if run.value(x) > 0.5)
            if len(self.slots_of(b)) > 1:
                left = sorted({self._out_of_place(p, self.again[b]) for p in left})
            for slot in self.slots_of(b):
                wanted = set(self.program.forward_reads(self.program.slots[slot][ways[slot]]))
                for p in reversed(left):
                    if wanted & set(tasks[p].writes):
                        again[slot].append(p)
                        wanted |= set(self.program.forward_reads(tasks[p]))
                left = [p for p in left if p not in again[slot]]
            again[self.slots_of(b)[-1]] += left  # values that only a later block reads
        forward = (p for p, run in self.first.items() if run.value(x) > 0.5)
        return prune(self.program, Schedule(tuple(sorted(forward)), tuple(tuple(sorted(r)) for r in again), ways))

    def _out_of_place(self, p: int, among: Iterable[int]) -> int:
        """A task that makes what task p makes without taking over storage; p itself where there is none."""
        task = self.program.tasks[p]
        if task.overwrites is None:
            return p
        others = {q for v in task.writes for q in self.program.producers[v]}.intersection(among)
        same = (q for q in others if set(self.program.tasks[q].writes) >= set(task.writes))
        return min((q for q in same if self.program.tasks[q].overwrites is None), default=p)

    def point(self, schedule: Schedule) -> NDArray[Any] | None:
        """The point of a schedule, to start a solver from; None if it uses tasks or ways that others dominate."""
        import numpy as np

        schedule = prune(self.program, schedule)
        x = np.zeros(self.matrix.columns)
        chosen = [self.first.get(p) for p in schedule.forward]
        wanted: set[int] = set()
        for b in reversed(range(len(self.starts))):
            runs = {p for slot in self.slots_of(b) for p in schedule.again[slot]}
            readers = [*(self.program.tasks[p] for p in runs)]
            for slot in self.slots_of(b):
                chosen.append(self.ways[slot].get(schedule.ways[slot]))
                readers.append(self.program.slots[slot][schedule.ways[slot]])
            chosen += [self.again[b].get(p) for p in runs]
            wanted |= {u for reader in readers for u in self.program.forward_reads(reader)}
            wanted -= {v for p in runs for v in self.program.tasks[p].writes}
            chosen += [self.carried[b][v] for v in wanted if v in self.carried[b]]
        if any(expr is None for expr in chosen):
            return None
        x[[column for expr in chosen if expr is not None for column, _ in expr.terms]] = 1.0
        for column, parts in self.follows:
            x[column] = min(1.0, max(0.0, *(part.value(x) for part in parts)))
        return x if self.matrix.violation(x) < 1e-6 else None


def block_program(
    instance: Instance,
    budget_bytes: int = NO_BUDGET,
    alone: Iterable[int] = (),
    required: Iterable[int] = (),
    runs: Iterable[tuple[int, int]] = (),
) -> BlockProgram:
    """Build the relaxation; the module's docstring has its equations.

    Args:
        alone: slots that are blocks by themselves; the slots between two of them form the other blocks.
        required: values that the forward must make besides the outputs.
        runs: (stage, group) of run rows, stages as in `Formulation`: 0 the forward, else a slot of ``alone`` plus one.
    """
    return RelaxationBuilder(instance, budget_bytes, set(alone)).build(set(required), runs)


class RelaxationBuilder(Rows):
    """Builds the columns and rows of a `BlockProgram`. Block -1 stands for the forward."""

    def __init__(self, instance: Instance, budget_bytes: int, alone: set[int]) -> None:
        super().__init__(instance, budget_bytes)
        self.makers = [[p for p in tasks if p not in self.dominated] for tasks in self.program.producers]
        self.span = [[self.group_of[p] for p in makers] for makers in self.makers]
        self.alone = {slot for slot in alone if slot + 1 in self.needs.stages}
        cuts = {cut for slot in self.alone for cut in (slot, slot + 1)}
        self.starts = sorted({0, *cuts} & set(range(len(self.program.slots))))
        self.big_bytes = BIG_SHARE * budget_bytes
        self.carried: list[dict[int, Expr]] = []
        self.slot_reads: dict[int, dict[int, Expr]] = {}  # of the slots alone
        self.way_reads: list[dict[int, Expr]] = []  # of every slot: u -> sum_{k reads u} w[k,t]

    def build(self, required: set[int], runs: Iterable[tuple[int, int]]) -> BlockProgram:
        self.first = self._columns(
            p for p, task in enumerate(self.program.tasks) if task.runs != "again" and p not in self.dominated
        )
        every = [range(len(self.program.tasks))] * len(self.program.slots)
        fitting = self.instance.fitting_runs(self.budget) if self.alone else every
        ends = [*self.starts[1:], len(self.program.slots)]
        self.again = [
            self._columns(p for p in self._useful(start + 1) if any(p in fitting[slot] for slot in range(start, end)))
            for start, end in zip(self.starts, ends, strict=False)
        ]
        self.made_first = self._made(self.first)
        self.made = [self._made(columns) for columns in self.again]
        for v in self.outputs | required:
            self.builder.equal(self.made_first[v], ONE)
        for p, run in self.first.items():
            for u in self.program.forward_reads(self.program.tasks[p]):
                self.builder.at_most(run, self.made_first[u])
        forward = [v for v, makers in enumerate(self.makers) if makers and v not in self.outputs]
        for b in range(len(self.starts)):
            self._carry(b, forward)
        ways: list[Mapping[int, Expr]] = []
        for slot in range(len(self.program.slots)):
            ways.append(self._slot(slot))
        for b in (-1, *self.slot_reads):
            self._overwrite_rows(b)
        if self.alone:
            self._once_rows([v for v in forward if self.sizes[v] >= self.big_bytes])
        for stage, group in runs:
            self._run_row(stage, group, forward)
        return BlockProgram(
            self.program,
            self.builder.finish(self.seconds_per_unit),
            tuple(self.starts),
            self.first,
            tuple(self.again),
            tuple(self.carried),
            tuple(ways),
            tuple(self.builder.follows),
        )

    def _columns(self, tasks: Iterable[int]) -> dict[int, Expr]:
        return {p: self.builder.column(self._units(self.program.tasks[p])) for p in tasks}

    def _useful(self, stage: int) -> list[int]:
        """The tasks whose rerun in a stage or later can be of use."""
        last = [max((self.needs.last[v] for v in task.writes), default=0) for task in self.program.tasks]
        return [p for p, end in enumerate(last) if self.needs.rerun[p] and p not in self.dominated and end >= stage]

    def _made(self, columns: Mapping[int, Expr]) -> list[Expr]:
        return [total(columns[p] for p in makers if p in columns) for makers in self.makers]

    def _carry(self, b: int, forward: Sequence[int]) -> None:
        """Columns K, rows (4), (6) and the first of (5)."""
        held: dict[int, Expr] = {}
        for v in forward:
            source = self.made_first[v] if b == 0 else self.carried[-1].get(v, ZERO) + self.made[b - 1][v]
            if self.needs.last[v] > self.starts[b] and not source.is_zero:
                held[v] = self.builder.column()
                self.builder.at_most(held[v], source)
        self.carried.append(held)
        fixed = self.resident + self.output_bytes + self.backward.before[self.starts[b]]
        self._fits([*(held[v] * self.sizes[v] for v in held if self.sizes[v])], fixed)
        for p, run in self.again[b].items():
            for u in set(self.program.forward_reads(self.program.tasks[p])) - self.outputs:
                self.builder.at_most(run, held.get(u, ZERO) + self.made[b][u])

    def _fits(self, parts: list[Expr], fixed_bytes: int, forward: bool = False) -> None:
        """The row "these bytes are within the budget"; ``forward``: of a run of the forward."""
        self.builder.fits([*parts, Expr(float(fixed_bytes))], self.budget)

    def _slot(self, slot: int) -> dict[int, Expr]:
        """Columns w and rows (3), (5) and (7) of one slot; w."""
        b = max(k for k, start in enumerate(self.starts) if start <= slot)
        ways, chosen = self.program.slots[slot], self._choose_way(slot)
        every = self._reads_of_ways(slot, chosen)
        read = {u for k in chosen for u in self.program.forward_reads(ways[k])} - self.outputs
        reading = {u: every[u] for u in read}
        for u in reading:
            self.builder.at_most(reading[u], self.carried[b].get(u, ZERO) + self.made[b][u])
        self.way_reads.append(reading)
        if slot in self.alone:
            self.slot_reads[b] = reading
            after = self.carried[b + 1] if b + 1 < len(self.starts) else {}
            parts = [self._extra_of_ways(slot, chosen)]
            parts += [self._alive_from(v, len(self.needs.groups), b) * self.sizes[v] for v in {*after, *reading}]
            self._fits(parts, self.resident + self.output_bytes + self.backward.during[slot])
        return chosen

    def _run(self, p: int, stage: int) -> Expr | None:
        return (self.first if stage < 0 else self.again[stage]).get(p)

    def _ends(self, v: int, stage: int) -> list[Expr]:
        after = [self.carried[stage + 1].get(v, ZERO)] if stage + 1 < len(self.carried) else []
        return [*after, self.slot_reads[stage].get(v, ZERO)] if stage >= 0 else after

    def _run_row(self, stage: int, group: int, forward: Sequence[int]) -> None:
        """A row (8). Values that are made on both sides of the group are left out of it."""
        b = self.starts.index(stage - 1) if stage else -1
        parts = self._running_bytes(group, b)
        if not parts:
            return
        fixed = self.resident
        if stage:
            fixed += self.output_bytes + self.backward.before[stage - 1]
        else:
            fixed += sum(self.sizes[v] for v in self.outputs if max(self.span[v]) < group)
        for v in forward:
            before = any(self.group_of[p] < min(self.span[v]) for p in self.readers[v])
            if max(self.span[v]) < group or (stage and before):
                parts.append(self._alive_from(v, group, b) * self.sizes[v])
            elif stage and min(self.span[v]) >= group:
                parts.append(self.carried[b].get(v, ZERO) * self.sizes[v])
        self._fits(parts, fixed, forward=not stage)

    def _once_rows(self, big: Sequence[int]) -> None:
        """Columns Z and rows (10) of the big values."""
        once: dict[int, Expr] = {}
        for b in reversed(range(len(self.starts))):
            for v in big:
                runs = [self.again[b][p] for p in self.makers[v] if p in self.again[b]]
                if parts := [*runs, *([once[v]] if v in once else [])]:
                    once[v] = self._any_of(parts)
            had = {u: self.carried[b].get(u, ZERO) + once.get(u, ZERO) for u in big}
            for v, made in once.items():
                makers = [p for p in self.makers[v] if any(p in columns for columns in self.again[b:])]
                for u in {u for p in makers for u in self.program.forward_reads(self.program.tasks[p])} & had.keys():
                    others = [p for p in makers if u not in self.program.tasks[p].reads]
                    runs = [columns[p] for columns in self.again[b:] for p in others if p in columns]
                    self.builder.at_most(made, total([had[u], *runs]))
            for reads in self.way_reads[self.starts[b] :]:
                for u in reads.keys() & had.keys():
                    self.builder.at_most(reads[u], had[u])

    def _any_of(self, parts: list[Expr]) -> Expr:
        """A column that may be 1 if one of these is."""
        if len(parts) == 1:
            return parts[0]
        result = self.builder.column(integral=False)
        self.builder.at_most(result, total(parts))
        self.builder.follows.append((result.terms[0][0], tuple(parts)))
        return result
