"""The columns of the integer program (2)-(4) and the expressions of them (7) in which `formulation` writes its rows."""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.schedule import Schedule
from ...solvers.matrix import ONE, ZERO, Expr, total
from ..analysis import pinned_values
from ..instance import Instance
from ..rows import Rows


@dataclass(frozen=True)
class Options:
    """Restrictions of the integer program; the default is exact.

    Attributes:
        pin_bytes: values up to this size are always kept.
        window: slots before the first use from which a task may run again; None: from the first on.
        reading_only: tasks run again only in `Needs.reading_stages` and where an admitted schedule has a rerun.
    """

    pin_bytes: int = 0
    window: int | None = None
    reading_only: bool = False

    @property
    def restricted(self) -> bool:
        """Whether a bound of the program is not one for all schedules."""
        return self != Options()


class Columns(Rows):
    """The columns of one instance and a budget; see `Formulation`."""

    def __init__(
        self,
        instance: Instance,
        budget_bytes: int,
        options: Options = Options(),
        admit: Schedule | None = None,
        above_bytes: int = 0,
    ) -> None:
        """Build all columns, and all rows but the memory rows (9) of reruns.

        Args:
            admit: a schedule whose runs get columns whatever the options say, to start from it.
            above_bytes: if not 0, the peak may exceed the budget by at most this many bytes, and the objective is the
                bytes by which it does, instead of seconds.
        """
        super().__init__(instance, budget_bytes, pinned_values(instance.program, options.pin_bytes))
        self.options, self.above_bytes = options, above_bytes
        #: The share of ``above_bytes`` by which the peak is above the budget.
        self.over: Expr = self.builder.column(integral=False) if above_bytes else ZERO
        self.admitted = {(p, slot + 1) for slot, tasks in enumerate(admit.again if admit else ()) for p in tasks}
        self.resident += sum(self.sizes[v] for v in self.pinned)
        some = (*self.needs.reading_stages, *(t for _, t in self.admitted))
        self._set_stages(sorted(set(some)) if options.reading_only else self.needs.stages)
        self._ways_reading: dict[int, dict[int, Expr]] = {0: {}}
        self._between: dict[tuple[int, int, int], Expr] = {}
        self._run_rows: set[tuple[int, int]] = set()
        #: Stage and group of every memory row, by the row's number; group -1: the row is the slot's (8).
        self.memory_rows: dict[int, tuple[int, int]] = {}
        self._build()

    def _build(self) -> None:
        self._run_columns()
        self._way_columns()
        self._carry_columns()

    def _run_columns(self) -> None:
        """Columns e and rows (2). A task that certainly runs in the forward has no column."""
        needed = self._needed_groups()
        for group, members in enumerate(self.needs.groups):
            first = [p for p in members if self.program.tasks[p].runs != "again" and p not in self.dominated]
            if group in needed and len(first) == 1:
                self.e[first[0], 0] = ONE
                self.builder.offset += self._units(self.program.tasks[first[0]])
            else:
                for p in first:
                    self.e[p, 0] = self.builder.column(self._units(self.program.tasks[p]))
                self._choose_one([self.e[p, 0] for p in first], must=group in needed)
            stages = [(p, t) for p in members for t in self._stages_of(p)]
            for p, t in stages:
                self.e[p, t] = self.builder.column(self._units(self.program.tasks[p]))
            for t in {t for _, t in stages}:
                self._choose_one([self.e[p, t] for p in members if (p, t) in self.e], must=False)

    def _choose_one(self, choices: list[Expr], must: bool) -> None:
        if must:
            self.builder.equal(total(choices), ONE)
        elif len(choices) > 1:
            self.builder.at_most(total(choices), ONE)

    def _needed_groups(self) -> set[int]:
        """Groups of which one task must run in the forward, because an output comes from nowhere else."""
        needed: set[int] = set()
        wanted = set(self.outputs)
        for group in reversed(range(len(self.needs.groups))):
            members = [p for p in self.needs.groups[group] if self.program.tasks[p].runs != "again"]
            for v in wanted:
                makers = {p for p in self.program.producers[v] if self.program.tasks[p].runs != "again"}
                if makers and makers <= set(members):
                    needed.add(group)
            if group in needed and members:
                reads = [set(self.program.forward_reads(self.program.tasks[p])) for p in members]
                wanted |= set.intersection(*reads)
        return needed

    def _stages_of(self, p: int) -> list[int]:
        """The stages >= 1 in which task p may run again: while its results can still be needed."""
        task = self.program.tasks[p]
        results = [v for v in task.writes if v not in self.pinned]
        if not self.needs.rerun[p] or p in self.dominated:
            return []
        if not results:
            return []
        last = max(self.needs.last[v] for v in results)
        window = self.options.window
        start = 1 if window is None else min(self.needs.first[v] for v in results) - window
        return [t for t in self.stages[1:] if t <= last and (t >= start or (p, t) in self.admitted)]

    def _way_columns(self) -> None:
        """Columns w and rows (3)."""
        for slot in range(len(self.program.slots)):
            self.w[slot + 1] = self._choose_way(slot)

    def _carry_columns(self) -> None:
        """Columns K and rows (4); a stage that can neither make nor read the value keeps the column of the stage
        before.
        """
        for v in self.tracked:
            held = ZERO
            for t in self.stages:
                if t >= self.needs.last[v]:
                    break
                makers = self._made(v, t)
                if t and makers.is_zero and not self._may_read(v, t):
                    self.K[v, t] = held
                    continue
                if held.is_zero and makers.is_zero:
                    continue
                column = self.builder.column()
                self.builder.at_most(column, held + makers)
                self.K[v, t] = held = column

    # ---- expressions --------------------------------------------------------------------------------------

    def stage_of(self, slot: int) -> int:
        """The stage of a slot, which may be one in which no task runs."""
        return slot + 1

    def _may_read(self, v: int, t: int) -> bool:
        return not self._way_reads(v, t).is_zero or any((p, t) in self.e for p in self.readers[v])

    def _way_reads(self, v: int, t: int) -> Expr:
        """Sum of w[k,t] over the ways that read v."""
        if t not in self._ways_reading:
            self._ways_reading[t] = self._reads_of_ways(t - 1, self.w[t])
        return self._ways_reading[t].get(v, ZERO)

    def _ends(self, v: int, stage: int) -> list[Expr]:
        return [self._way_reads(v, stage), self.K.get((v, stage), ZERO)]

    def _available(self, v: int, t: int) -> Expr:
        """Whether v can be read in stage t: carried into it, or made in it."""
        if v in self.outputs:
            return ONE if t else self._made(v, t)
        if v not in self.pinned:
            return self._incoming(v, t) + self._made(v, t)
        return self._made(v, 0)

    def _alive_at_slot(self, v: int, t: int) -> Expr:
        """Y, rows (7)."""
        return self._alive_from(v, len(self.needs.groups), t)

    def _alive_between(self, v: int, group: int, t: int) -> Expr:
        """For a value with producers on both sides of the group: carried in, or made before it, needed and not made
        later.
        """
        later = self._made(v, t, low=group)
        made = self._made(v, t, high=group)
        condition = self._alive_from(v, self.span[v][1] + 1, t) + made + later * -1.0 + Expr(-1.0)
        result = self.builder.column(integral=False)
        for part in (self._incoming(v, t), condition):
            self.builder.at_most(part, result)
        self.builder.follows.append((result.terms[0][0], (self._incoming(v, t), condition)))
        self._between[v, group, t] = result
        return result


def estimated_columns(instance: Instance, options: Options = Options()) -> int:
    """About how many columns the integer program has, at most: run columns, and as many for carrying."""
    runs, window, needs = 0, options.window, instance.needs
    stages = needs.reading_stages if options.reading_only else needs.stages
    for p, task in enumerate(instance.program.tasks):
        last = max((needs.last[v] for v in task.writes), default=0) if needs.rerun[p] else 0
        first = 1 if window is None else min((needs.first[v] for v in task.writes), default=last) - window
        runs += sum(max(1, first) <= t <= last for t in stages)
    return 2 * runs
