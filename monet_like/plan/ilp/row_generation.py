"""Solves the integer program by row generation: memory rows are added when a solution's schedule breaks them.

Most memory rows never bind, so `Formulation` leaves them out at first. A schedule that breaks some is repaired near
them, and the program is solved again with these rows.
"""

from __future__ import annotations

from collections.abc import Callable

from ...ir.schedule import Schedule
from ...ir.simulate import Report
from ...solvers.interface import Solution, solve
from .decode import decode, neighbourhood
from .formulation import Formulation
from .incumbent import BoundKind, Incumbent

#: Reruns that take this share of the budget have their memory rows from the start.
BIG_SHARE = 0.08
#: So do the runs of the incumbent that come this close to the budget, as a share of it.
NEAR_SHARE = 0.97
#: Slots before a broken row whose columns are freed to repair a schedule, in the first of `REPAIRS` attempts.
REPAIR_REACH, REPAIRS = 24, 4
#: The chosen solver's share of the time before HiGHS goes on from its plan.
FIRST_SHARE = 0.4


class RowGeneration:
    """The solution of one formulation; plans and bounds go to the incumbent.

    Args:
        time_left: wall seconds left for the whole search.
        threads: of the solver.

    Attributes:
        failed: which solver failed, and how it put it; "" if none has.
    """

    def __init__(
        self, formulation: Formulation, incumbent: Incumbent, time_left: Callable[[], float], threads: int
    ) -> None:
        self.formulation, self.incumbent, self.time_left, self.threads = formulation, incumbent, time_left, threads
        self.failed = ""
        self.kind: BoundKind = "restricted" if formulation.options.restricted else "unrestricted"

    def solve(self, solver: str, reserved_seconds: float) -> str:
        """Solve, simulate, add the rows that the schedule breaks, and again until the gap is closed or time is up.

        HiGHS goes on from another solver's plan, after `FIRST_SHARE` of the time.

        Args:
            reserved_seconds: wall seconds to leave for what comes after.

        Returns:
            The status of the last `Solution`.
        """
        self._add_likely_rows()
        status = "no_incumbent"
        current = solver
        first_end = self.time_left() * (1 - FIRST_SHARE)
        while not self.incumbent.closed(self.kind) and self.time_left() > 0.3 + reserved_seconds:
            kept = first_end if current == solver != "HIGHS" else reserved_seconds
            seconds = self.time_left() - kept
            if seconds < 0.5:
                current, seconds = "HIGHS", self.time_left() - reserved_seconds
            solution = self._solve_once(current, seconds)
            status = solution.status
            if status == "error":
                self.failed = f"{current} failed: {solution.message}"
            if status == "infeasible":
                break
            self.incumbent.prove(self.kind, solution.bound_seconds)
            if solution.x is not None:
                schedule = decode(self.formulation, solution.x)
                broken = [] if self.incumbent.offer(schedule, current) else self._add_broken_rows(schedule)
                if broken:
                    self._repair(schedule, current, broken)
                    continue
            if current == "HIGHS" or (status == "optimal" and self.incumbent.best is not None):
                break
            current = "HIGHS"
        return status

    def _solve_once(self, solver: str, seconds: float) -> Solution:
        best = self.incumbent.best
        start = self.formulation.point(best.schedule) if best is not None else None
        return solve(
            self.formulation.matrix(),
            solver,
            time_limit_seconds=seconds,
            gap=self.incumbent.gap,
            start=start,
            watch=lambda incumbent, bound: self.incumbent.say(solver, incumbent, bound, self.kind),
            threads=self.threads,
            stop=lambda: self.incumbent.closed(self.kind),
        )

    def _add_likely_rows(self) -> None:
        """Add the rows that are likeliest to be broken: where the incumbent comes near the budget, and of
        big reruns.
        """
        best = self.incumbent.best
        if best is not None:
            self._add_rows(best.schedule, best.report, self.incumbent.budget_bytes * NEAR_SHARE)
        for t, group in self.formulation.big_runs(BIG_SHARE):
            self.formulation.add_run_row(t, group)

    def _add_broken_rows(self, schedule: Schedule) -> list[int]:
        """Add the rows that a schedule breaks; returns the stages of those that were missing."""
        report = self.incumbent.instance.simulate(schedule)
        return self._add_rows(schedule, report, self.incumbent.budget_bytes)

    def _add_rows(self, schedule: Schedule, report: Report, over_bytes: float) -> list[int]:
        """Add the rows of the runs that take more than so many bytes; returns the stages of the new ones."""
        added: list[int] = []
        for step, (t, p) in zip(report.steps, schedule.runs(), strict=True):
            if p >= 0 and step.bytes > over_bytes and self.formulation.add_run_row(t, self.formulation.group_of[p]):
                added.append(t)
        return added

    def _repair(self, schedule: Schedule, solver: str, stages: list[int]) -> None:
        """Repair a good schedule that breaks a few missing rows: solve again with only the columns near them free."""
        for attempt in range(1, REPAIRS + 1):
            self.formulation.add_run_rows(set(stages))
            x = self.formulation.point(schedule, check=False)
            if x is None or self.time_left() < 2:
                return
            free = neighbourhood(self.formulation, x, stages, REPAIR_REACH * attempt)
            small = self.formulation.matrix().fixed(free, x)
            limit = min(20.0, self.time_left() * 0.3)
            found = solve(small, solver, time_limit_seconds=limit, gap=self.incumbent.gap / 4)
            if found.x is None:
                continue
            x[free] = found.x
            schedule = decode(self.formulation, x)
            if self.incumbent.offer(schedule, solver):
                return
            stages = self._add_broken_rows(schedule) or stages
