"""Refines the bound for all schedules: the relaxation gets blocks and rows where its solution exceeds the budget.

The relaxation (relaxation.py) counts little memory: with one block only that at the start of the backward. Its
solutions tell what is missing. A solution that is faster than the bound asked for is turned into a schedule and
simulated. The slots in which it takes more than the budget become blocks of their own, its runs over the budget get
their rows, and the program is solved again. Once no solution is that fast any more, the bound is proven. The schedules
on the way, which are faster than possible within the budget, are good starts for the local search.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...errors import ScheduleError
from ...ir.schedule import Schedule
from ...ir.simulate import Report
from ...solvers.interface import solve
from ..instance import Instance
from .relaxation import BlockProgram

#: Most slots that become blocks in a step: those with the most memory (measured on U-Net: two to six make little
#: difference).
SLOTS_A_STEP = 4
#: HiGHS's options where a good plan is known and only the proof is wanted (measured: U-Net at 40 % 28 instead of
#: 41 s, at 50 % 7 instead of 12).
PROVING = {"mip_allow_restart": False, "mip_heuristic_effort": 0.01}


@dataclass(frozen=True)
class Refined:
    """The result of one step of the refinement.

    Attributes:
        bound_seconds: no schedule is faster.
        schedule: of the relaxation's solution, faster than the best plan and mostly over the budget; None if there is
            none.
        finer: whether the next step's program differs from this one's.
    """

    bound_seconds: float
    schedule: Schedule | None
    finer: bool


class Refinement:
    """The state of the refinement: which slots are blocks of their own, and which runs have rows."""

    def __init__(self, instance: Instance, budget_bytes: int) -> None:
        self.instance, self.budget_bytes = instance, budget_bytes
        self.group_of = instance.needs.group_of
        # A slot before which no rerun is of use cannot be a block of its own.
        self.stages = frozenset(instance.needs.stages)
        self.alone: set[int] = set()
        self.runs: set[tuple[int, int]] = set()

    def step(
        self,
        best: Schedule | None,
        best_seconds: float,
        gap: float,
        time_limit_seconds: float,
        stop: Callable[[], bool] = lambda: False,
    ) -> Refined:
        """Solve the relaxation, and refine it where its solution exceeds the budget.

        Args:
            best: the fastest schedule known, which takes ``best_seconds``.
            gap: relative to ``best_seconds``: how far below it the bound may be in the end.
            time_limit_seconds: wall seconds.
            stop: called now and then; returns whether to end at once.
        """
        blocks = BlockProgram(self.instance, self.budget_bytes, self.alone).build(runs=sorted(self.runs))
        target = best_seconds * (1 - gap) / blocks.matrix.seconds_per_unit
        refined = bool(self.alone or self.runs)  # the unrefined program is solved in a second or two: a bound at once
        solved = solve(
            blocks.matrix,
            "HIGHS",
            time_limit_seconds=time_limit_seconds,
            gap=max(1e-4, 0.999 * gap) if refined else 1e-4,
            start=None if best is None else blocks.point(best),
            stop=stop,
            options=PROVING | {"objective_target": target} if refined and best is not None else {},
        )
        if solved.status in (
            "infeasible",
            "error",
        ):  # nothing is known; only the whole program can prove that nothing fits
            return Refined(0.0, None, False)
        if solved.x is None or solved.objective_seconds >= best_seconds:
            return Refined(solved.bound_seconds, None, False)
        schedule = blocks.schedule(solved.x)
        try:
            report = self.instance.simulate(schedule)
        except ScheduleError:  # a longer block may read a value after it was overwritten
            return Refined(solved.bound_seconds, None, False)
        return Refined(solved.bound_seconds, schedule, self._refine(schedule, report))

    def _refine(self, schedule: Schedule, report: Report) -> bool:
        """Add blocks and rows for the runs that are over the budget; returns whether there are new ones."""
        over = [
            (step.bytes, stage, p)
            for step, (stage, p) in zip(report.steps, schedule.runs(), strict=True)
            if step.bytes > self.budget_bytes
        ]
        fullest = [t - 1 for _, t, _ in sorted(over, reverse=True) if t in self.stages and t - 1 not in self.alone]
        known = len(self.alone), len(self.runs)
        self.alone.update(list(dict.fromkeys(fullest))[:SLOTS_A_STEP])
        self.runs |= {(t, self.group_of[p]) for _, t, p in over if p >= 0 and (t == 0 or t - 1 in self.alone)}
        return known != (len(self.alone), len(self.runs))
