"""The integer program: which values to keep, which tasks to run again, which way each backward slot takes.

Stage 0 is the forward; stage t = 1..m is backward slot t - 1. A forward task may be recomputed only in stages where
that can save memory or time (`Needs.stages`): those whose slot reads a forward value and, between two of these, those
before which the backward's own values take less memory than in all stages before, or than in all after. ``t'`` is the
stage of that kind before t. All columns are 0 or 1.

    e[p,t]   forward task p runs in stage t                                      (_run_columns)
    w[k,t]   the slot of stage t takes its way k                                 (_way_columns)
    K[v,t]   forward value v is carried from stage t to the next                 (_carry_columns)
    Y[v,t]   v is needed by the way of stage t or carried: alive at the slot     (_alive_at_slot)
    L[v,g,t] v is needed by the tasks of stage t from group g on, or Y[v,t]      (_alive_from)

A task or way that certainly runs is the constant 1 and has no column; Y and L are columns only where they are
the maximum of several things. A group g is a run of neighbouring tasks with nested results (`Needs.groups`):
variants of one operation. In one stage only one of them is of use. M(v) are the producers of v.

     (1) min   sum seconds(p) e[p,t] + sum seconds(k) w[k,t]                     [seconds]
     (2) sum_{p in g} e[p,t] <= 1;  = 1 in stage 0 if an output needs g          (_run_columns)
         sum_{p in M(v)} e[p,0] = 1 for outputs v, none of which runs again      (_output_rows)
     (3) sum_k w[k,t] = 1                                                        (_way_columns)
     (4) K[v,t] <= K[v,t'] + sum_{p in M(v)} e[p,t]                              (_carry_columns)
         K[v,t] = K[v,t'] where stage t can neither make nor read v
     (5) sum_{p in g reads u} e[p,t] <= K[u,t'] + sum_{q in M(u)} e[q,t]         (_read_rows)
         sum_{k reads u} w[k,t]      <= K[u,t'] + sum_{q in M(u)} e[q,t]
     (6) r overwrites u:  e[r,t] + sum_{p in g reads u} e[p,t] <= 1, g after r   (_overwrite_rows)
                          e[r,t] + sum_{k reads u} w[k,t] <= 1,  e[r,t] + K[u,t] <= 1
     (7) Y[v,t] >= K[v,t],  Y[v,t] >= sum_{k reads v} w[k,t]                     (_alive_at_slot)
         L[v,g,t] >= L[v,g+1,t],  L[v,g,t] >= sum_{p in g reads v} e[p,t]        (_alive_from)
     (8) slot:  during(t) + sum_v b(v) Y[v,t] + sum_k extra(k) w[k,t] <= B       (_slot_row)     [bytes]
     (9) run:   before(t) + sum_v b(v) alive(v,g,t) + sum_{p in g} extra(p) e[p,t] <= B   (add_run_row)
         alive = L[v,g,t] once all of M(v) stand before g, K[v,t'] while all stand at or after g, else _alive_between;
                 L[v,g,t] for t >= 1 also where M(v) runs in stage 0 alone and something that runs again stands before
                 it
         extra = results + workspace - storage taken over; before and during: resident, outputs and backward values

(9) is written for stage 0 from the start, and for other stages only once a solved schedule breaks it: most never
bind. Without the missing rows the program is a relaxation, so its bound holds.

With ``above_bytes`` the objective is the peak: every row (8) and (9) may exceed B by one and the same share ``over`` of
these bytes, and (1) is min above_bytes over.

Why this is exact. A carried value costs memory in (8) and (9) at least as long as `simulate` counts it, so a
solution's schedule never has a higher peak than its rows. Conversely, take a schedule that passes `simulate`, with its
useless runs removed and dominated variants replaced (`dominated_tasks`, `useful_ways`). It satisfies every row with
K[v,t] = "v is read in a later stage before it is made again", and then each row's left side is the simulated memory.
Three options make the program smaller and are *not* exact:

* pinned: values of at most ``pin_bytes`` are always kept once made and always counted; tasks that make nothing
  else never run again.
* window: a task runs again at most ``window`` slots before the first slot that can use its results.
* reading_only: tasks run again only in stages whose slot reads a forward value, or where the start has a rerun.

`Columns` makes the columns; the rows and the objective are written here, those that the relaxation has as well in
`Rows`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ...solvers.matrix import ONE, ZERO, Expr, MatrixProgram
from .columns import Columns


class Formulation(Columns):
    """The integer program of one instance and a budget, as columns and rows of a matrix."""

    def _build(self) -> None:
        super()._build()
        self._output_rows()
        for stage in self.stages:
            self._read_rows(stage)
            self._overwrite_rows(stage)
        self._slot_rows()
        self.add_run_rows((0,))

    # ---- rows ---------------------------------------------------------------------------------------------

    def _output_rows(self) -> None:
        """Rows (2) for outputs."""
        for v in self.outputs:
            made = self._made(v, 0)
            if made.terms or made.const != 1:
                self.builder.equal(made, ONE)

    def _read_rows(self, t: int) -> None:
        """Rows (5)."""
        for group, members in enumerate(self.needs.groups):
            running = [p for p in members if (p, t) in self.e]
            reads = {u for p in running for u in self.program.forward_reads(self.program.tasks[p])}
            for u in reads:
                self.builder.at_most(self._group_reads(u, group, t), self._available(u, t))
        if t:
            for u in {u for way in self.program.slots[t - 1] for u in self.program.forward_reads(way)}:
                self.builder.at_most(self._way_reads(u, t), self._available(u, t))

    def _slot_rows(self) -> None:
        """Rows (8). Of neighbouring slots between which nothing can change, only the largest constant one is kept."""
        stage, worst = 0, 0
        for t in range(1, len(self.program.slots) + 1):
            if t in self._previous:
                self._constant_row(stage, worst)
                stage, worst = t, 0
            extra = self._extra_of_ways(t - 1, self.w[t])
            if t == stage:
                self._slot_row(stage, self.backward.during[t - 1], extra, at_slot=True)
            elif extra.terms:
                self._slot_row(stage, self.backward.during[t - 1], extra, at_slot=False)
            else:
                worst = max(worst, self.backward.during[t - 1] + int(extra.const))
        self._constant_row(stage, worst)

    def _constant_row(self, stage: int, worst: int) -> None:
        if worst:
            self._slot_row(stage, worst, ZERO, at_slot=False)

    def _slot_row(self, t: int, base: int, extra: Expr, at_slot: bool) -> None:
        parts = [extra, Expr(self.resident + self.output_bytes + base)]
        for v in self.tracked:
            alive = self._alive_at_slot(v, t) if at_slot else self.K.get((v, t), ZERO)
            if not alive.is_zero:
                parts.append(alive * self.sizes[v])
        self._fits(parts, t, -1)

    def add_run_row(self, t: int, group: int) -> bool:
        """Add row (9) for the tasks of a group in stage t; returns False if it is there already or no such task can
        run.
        """
        if (t, group) in self._run_rows:
            return False
        outputs = (self._made(v, 0, high=group) * self.sizes[v] for v in self.outputs if self.sizes[v])
        parts = self._run_bytes(t, group, () if t else outputs)
        if not parts:
            return False
        self._run_rows.add((t, group))
        fixed = self.resident + (self.output_bytes + self.backward.before[t - 1] if t else 0)
        self._fits([*parts, Expr(fixed)], t, group)
        return True

    def add_run_rows(self, stages: Iterable[int]) -> None:
        """Add every row (9) of these stages; with those of all, the program is no relaxation, but the whole."""
        for t in stages:
            for group in range(len(self.needs.groups)):
                self.add_run_row(t, group)

    def _fits(self, parts: list[Expr], t: int, group: int) -> None:
        number = self.builder.rows
        self.builder.fits([*parts, self.over * -self.above_bytes], self.budget)
        if self.builder.rows > number:  # else it always holds
            self.memory_rows[number] = t, group

    def big_runs(self, share: float) -> list[tuple[int, int]]:
        """(stage, group) of the reruns that take at least ``share`` of the budget: their rows (9) bind most often."""
        found = set()
        for p, t in self.e:
            task = self.program.tasks[p]
            size = sum(self.sizes[v] for v in task.writes) + self.instance.cost_of(task).workspace_bytes
            if t and size >= share * self.budget:
                found.add((t, self.group_of[p]))
        return sorted(found)

    def helper_columns(self) -> dict[int, tuple[int, int, int]]:
        """For the number of every column Y or L, or of `_alive_between`: its value, stage and group."""
        found: dict[int, tuple[int, int, int]] = {}
        for (v, group, t), expr in (*self._alive.items(), *self._between.items()):
            if expr.terms:
                found.setdefault(expr.terms[0][0], (v, t, group))
        return found

    def matrix(self) -> MatrixProgram:
        """The matrix form of all rows so far."""
        matrix = self.builder.finish(self.seconds_per_unit)
        if not self.above_bytes:
            return matrix
        cost = 0.0 * matrix.cost
        cost[self.over_column] = 1.0
        return replace(matrix, cost=cost, offset=0.0, seconds_per_unit=float(self.above_bytes))

    @property
    def over_column(self) -> int:
        """The column number of ``over``; only with ``above_bytes``."""
        return self.over.terms[0][0]
