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

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ...ir.schedule import Schedule, prune
from ...solvers.matrix import ONE, ZERO, Expr, MatrixProgram, total
from ..instance import Instance
from ..rows import Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray
Built = TypeVar("Built", bound="BlockProgram")
#: Stands for no budget, in bytes.
NO_BUDGET = 2**62
#: Values of at least this share of the budget have rows (10): most of the gain at a fraction of the columns.
BIG_SHARE = 0.01


class BlockProgram(Rows):
    """The relaxation of an instance, and the translation of its points to schedules. Block b is stage b + 1.

    Attributes:
        matrix: the relaxation.
        starts: the first slot of every block.
        big_bytes: the least size of values with rows (10).
        slot_reads: for the stages that are one slot, the values that it reads, and whether it does.
        way_reads: the same for every slot.
    """

    matrix: MatrixProgram

    def __init__(self, instance: Instance, budget_bytes: int = NO_BUDGET, alone: Iterable[int] = ()) -> None:
        """Without columns and rows; see `build`.

        Args:
            alone: slots that are blocks by themselves; the slots between two of them form the other blocks.
        """
        super().__init__(instance, budget_bytes)
        self.alone = {slot for slot in alone if slot + 1 in self.needs.stages}
        cuts = {cut for slot in self.alone for cut in (slot, slot + 1)}
        self.starts = sorted({0, *cuts} & set(range(len(self.program.slots))))
        self._set_stages(range(len(self.starts) + 1))
        self.big_bytes = BIG_SHARE * budget_bytes
        self.slot_reads: dict[int, dict[int, Expr]] = {}
        self.way_reads: list[dict[int, Expr]] = []

    def stage_of(self, slot: int) -> int:
        """The stage of a slot's block."""
        return bisect_right(self.starts, slot)

    def slots_of(self, stage: int) -> range:
        """The slots of a block."""
        return range(self.starts[stage - 1], [*self.starts, len(self.program.slots)][stage])

    def runs(self, stage: int) -> dict[int, Expr]:
        """Whether tasks run in a stage, for those that may."""
        return {p: self.e[p, stage] for p in range(len(self.program.tasks)) if (p, stage) in self.e}

    def carried(self, stage: int = 0) -> dict[int, Expr]:
        """Whether values are carried out of a stage, such as the forward, for those that may be."""
        return {v: held for (v, t), held in self.K.items() if t == stage}

    def priced(self, seconds_per_byte: float) -> MatrixProgram:
        """The program with a price on every byte that the forward keeps."""
        price = seconds_per_byte / self.matrix.seconds_per_unit
        cost = self.matrix.cost.copy()
        for v, kept in self.carried().items():
            cost[kept.terms[0][0]] += price * self.sizes[v]
        return replace(self.matrix, cost=cost)

    def kept(self, x: NDArray[Any]) -> tuple[int, ...]:
        """The values that the forward keeps."""
        return tuple(v for v, held in self.carried().items() if held.value(x) > 0.5)

    def schedule(self, x: NDArray[Any]) -> Schedule:
        """A schedule with the runs of a point; in blocks of several slots each runs just before the slots that need it.

        Such blocks have no order, so in them tasks in place are replaced by others that make the same values. The
        schedule may still be over the budget, or read a value whose storage was taken over.
        """
        tasks, ways = self.program.tasks, self.chosen(x)
        again: list[list[int]] = [[] for _ in self.program.slots]
        for t in self.stages[1:]:
            runs, slots = self.runs(t), self.slots_of(t)
            left = sorted(p for p, run in runs.items() if run.value(x) > 0.5)
            if len(slots) > 1:
                left = sorted({self._out_of_place(p, runs) for p in left})
            for slot in slots:
                wanted = set(self.program.forward_reads(self.program.slots[slot][ways[slot]]))
                for p in reversed(left):
                    if wanted & set(tasks[p].writes):
                        again[slot].append(p)
                        wanted |= set(self.program.forward_reads(tasks[p]))
                left = [p for p in left if p not in again[slot]]
            again[slots[-1]] += left  # values that only a later block reads
        forward = (p for p, run in self.runs(0).items() if run.value(x) > 0.5)
        return prune(self.program, Schedule(tuple(forward), tuple(tuple(sorted(r)) for r in again), ways))

    def _out_of_place(self, p: int, among: Iterable[int]) -> int:
        """A task that makes what task p makes without taking over storage; p itself where there is none."""
        task = self.program.tasks[p]
        if task.overwrites is None:
            return p
        others = {q for v in task.writes for q in self.program.producers[v]}.intersection(among)
        same = (q for q in others if set(self.program.tasks[q].writes) >= set(task.writes))
        return min((q for q in same if self.program.tasks[q].overwrites is None), default=p)

    # ---- columns and rows ---------------------------------------------------------------------------------

    def build(self: Built, required: Collection[int] = (), runs: Iterable[tuple[int, int]] = ()) -> Built:
        """Make all columns and rows; the module's docstring has the equations.

        Args:
            required: values that the forward must make besides the outputs.
            runs: (stage, group) of run rows, stages as in `Formulation`: 0 the forward, else a slot of ``alone`` plus
                one.
        """
        tasks, count = self.program.tasks, len(self.program.slots)
        self._columns(0, (p for p, task in enumerate(tasks) if task.runs != "again" and p not in self.dominated))
        fitting = self.instance.fitting_runs(self.budget) if self.alone else [range(len(tasks))] * count
        for t in self.stages[1:]:
            slots = self.slots_of(t)
            self._columns(t, (p for p in self._useful(slots[0] + 1) if any(p in fitting[slot] for slot in slots)))
        for v in self.outputs | set(required):
            self.builder.equal(self._made(v, 0), ONE)
        for p, run in self.runs(0).items():
            for u in self.program.forward_reads(tasks[p]):
                self.builder.at_most(run, self._made(u, 0))
        for t in self.stages[1:]:
            self._carry(t)
        for slot in range(count):
            self.w[slot + 1] = self._slot(slot)
        for t in (0, *self.slot_reads):
            self._overwrite_rows(t)
        if self.alone:
            self._once_rows([v for v in self.tracked if self.sizes[v] >= self.big_bytes])
        for stage, group in runs:
            self._run_row(stage and self.stage_of(stage - 1), group)
        self.matrix = self.builder.finish(self.seconds_per_unit)
        return self

    def _columns(self, t: int, tasks: Iterable[int]) -> None:
        for p in tasks:
            self.e[p, t] = self.builder.column(self._units(self.program.tasks[p]))

    def _useful(self, stage: int) -> list[int]:
        """The tasks whose rerun before a slot (stages as in `Formulation`) or later can be of use."""
        last = [max((self.needs.last[v] for v in task.writes), default=0) for task in self.program.tasks]
        return [p for p, end in enumerate(last) if self.needs.rerun[p] and p not in self.dominated and end >= stage]

    def _carry(self, t: int) -> None:
        """Columns K of the values that are carried into a block, rows (4), (6) and the first of (5)."""
        start, before = self.starts[t - 1], self._previous[t]
        for v in self.tracked:
            source = self._incoming(v, before) + self._made(v, before)
            if self.needs.last[v] > start and not source.is_zero:
                self.K[v, before] = self.builder.column()
                self.builder.at_most(self.K[v, before], source)
        fixed = self.resident + self.output_bytes + self.backward.before[start]
        self._fits([self._incoming(v, t) * self.sizes[v] for v in self.tracked if self.sizes[v]], fixed)
        for p, run in self.runs(t).items():
            for u in set(self.program.forward_reads(self.program.tasks[p])) - self.outputs:
                self.builder.at_most(run, self._incoming(u, t) + self._made(u, t))

    def _fits(self, parts: list[Expr], fixed_bytes: int, forward: bool = False) -> None:
        """The row "these bytes are within the budget"; ``forward``: of a run of the forward."""
        self.builder.fits([*parts, Expr(float(fixed_bytes))], self.budget)

    def _slot(self, slot: int) -> dict[int, Expr]:
        """Columns w and rows (3), (5) and (7) of one slot; w."""
        t, ways, chosen = self.stage_of(slot), self.program.slots[slot], self._choose_way(slot)
        every = self._reads_of_ways(slot, chosen)
        read = {u for k in chosen for u in self.program.forward_reads(ways[k])} - self.outputs
        reading = {u: every[u] for u in read}
        for u in reading:
            self.builder.at_most(reading[u], self._incoming(u, t) + self._made(u, t))
        self.way_reads.append(reading)
        if slot in self.alone:
            self.slot_reads[t] = reading
            parts = [self._extra_of_ways(slot, chosen)]
            parts += [
                self._alive_from(v, len(self.needs.groups), t) * self.sizes[v] for v in {*self.carried(t), *reading}
            ]
            self._fits(parts, self.resident + self.output_bytes + self.backward.during[slot])
        return chosen

    def _ends(self, v: int, stage: int) -> list[Expr]:
        reads = self.slot_reads[stage].get(v, ZERO) if stage else ZERO
        return [self.K.get((v, stage), ZERO), reads]

    def _run_row(self, t: int, group: int) -> None:
        """A row (8). Values that are made on both sides of the group are left out of it."""
        parts = self._run_bytes(t, group)
        if not parts:
            return
        if t:
            fixed = self.output_bytes + self.backward.before[self.starts[t - 1]]
        else:
            fixed = sum(self.sizes[v] for v in self.outputs if self.span[v][1] < group)
        self._fits(parts, self.resident + fixed, forward=not t)

    def _once_rows(self, big: Sequence[int]) -> None:
        """Columns Z and rows (10) of the big values."""
        once: dict[int, Expr] = {}
        for t in reversed(self.stages[1:]):
            later = self.stages[t:]
            for v in big:
                runs = [self.e[p, t] for p in self.program.producers[v] if (p, t) in self.e]
                if parts := [*runs, *([once[v]] if v in once else [])]:
                    once[v] = self._any_of(parts)
            had = {u: self._incoming(u, t) + once.get(u, ZERO) for u in big}
            for v, made in once.items():
                makers = [p for p in self.program.producers[v] if any((p, s) in self.e for s in later)]
                for u in {u for p in makers for u in self.program.forward_reads(self.program.tasks[p])} & had.keys():
                    others = [p for p in makers if u not in self.program.tasks[p].reads]
                    runs = [self.e[p, s] for s in later for p in others if (p, s) in self.e]
                    self.builder.at_most(made, total([had[u], *runs]))
            for reads in self.way_reads[self.starts[t - 1] :]:
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
