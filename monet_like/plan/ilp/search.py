"""The search for the fastest plan: local search, integer program, bounds for all schedules, simulator.

`Search.run` goes through these stages. Each starts from the incumbent and ends early once the gap is closed:

1. A greedy schedule, then a bound and a plan from the program's parts (bound/parts.py, primal_recovery.py).
2. Simulated annealing (local_search/).
3. The integer program (formulation.py), restricted where it is large. Beside it, in a thread, a bound for all schedules
   is refined (refinement.py).
4. Where nothing fits: the schedule with the lowest peak (lowest_peak.py).
5. Annealing from the best plan.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from ...errors import SolverError, warn_caller
from ...ir.schedule import Schedule
from ...ir.simulate import Report
from ...ir.units import format_bytes
from ...solvers.interface import check_solver
from ...solvers.pool import Pool
from ..bound.parts import PartsRelaxation
from ..bound.refinement import Refinement
from ..instance import Instance
from ..local_search.searcher import Searcher, find_start
from ..result import Plan
from .columns import Options, estimated_columns
from .formulation import Formulation
from .lowest_peak import FindWithin, find_lowest, is_small, smallest_known_budget
from .primal_recovery import recover_plan
from .row_generation import RowGeneration
from .search_state import SearchState

#: Programs with more columns than this are searched with a start window first.
MOST_COLUMNS = 14_000
#: Programs with more columns than this are not solved without restrictions: it would take minutes.
MOST_UNRESTRICTED = 200_000
#: Share of the time limit that must be left to go on from a restricted program's optimum to the unrestricted one.
SECOND_SHARE = 0.25
#: Programs with more columns than this even with a window are planned from their parts and annealed, without a solver
#: for the whole: building the program alone would take longer than that.
MOST_WINDOWED = 60_000
#: Share of the time limit for solving parts.
PARTS_SHARE = 0.3
#: Slots before its first use from which a task may run again, in large programs (measured: wider windows give
#: the same relaxation on ResNet-50 to 0.01 %, and several times the columns).
WINDOW = 32
#: Share of the time limit in which, at the end, the best plan is annealed once more.
POLISH_SHARE = 0.05
#: How many times as long as by default large programs are annealed from the parts' plan once more (measured: ResNet-50
#: at 33 %: the best valley known by three of twelve pairs of seeds, by none of four as long as by default).
LARGE_EFFORT = 3


def find_within(
    instance: Instance, budget_bytes: int, seconds: float, solver: str, **options: Any
) -> tuple[Schedule, Report]:
    """Any schedule within a budget, and its report; options are fields of `Search`. See `FindWithin`."""
    search = Search(
        instance.program, instance.costs, budget_bytes, solver, seconds, gap=0.99, extra_bytes=instance.extra_bytes,
        lower_peak=False, **options,
    )  # fmt: skip
    plan = search.run()
    return plan.schedule, plan.report


@dataclass
class Search(SearchState):
    """One search for the fastest plan; `run` is called once."""

    def run(self) -> Plan:
        """The best plan found.

        Raises:
            InfeasibleError: proven that no schedule fits.
            SolverError: out of time without a plan, or the solver failed.
        """
        solver = check_solver(self.solver)
        self._check_lower_bound()
        if self.start is not None:
            self.incumbent.offer(self.start, "start")
        formulation: Formulation | None = None
        interrupted = False
        try:
            windowed = Options(window=WINDOW, reading_only=True)
            if self.options is None and estimated_columns(self.instance, windowed) > MOST_WINDOWED:
                self._plan_large()
                return self._plan(None, "")
            formulation = self._plan_whole(solver)
            if self.best is not None and self.evaluations != 0 and not self._closed() and self.left > 0:
                self._anneal(1, self.best)
        except KeyboardInterrupt:
            if self.best is None:
                raise
            interrupted = True
        return self._plan(formulation, solver, interrupted)

    def run_counted(self, evaluations: int) -> Plan:
        """As `run`, by the local search alone: counted in evaluations and seeded, not clocked.

        So the same program gives the same schedule every time. The bound is the best that a quarter of
        ``time_limit_seconds`` allows.
        """
        self.evaluations = evaluations
        self._check_lower_bound()
        self._anneal(1)
        if self.best is None:
            raise self._infeasible(proven=False)
        self._refine(self._closed, time.monotonic() + 0.25 * self.time_limit_seconds, plans=False)
        return self._plan(None, "")

    # ---- stages -------------------------------------------------------------------------------------------

    def _plan_large(self) -> None:
        """Plan a program that is too large for a solver: from its parts and by annealing."""
        composed = self._plan_from_parts()
        if not self._closed():
            self._anneal(self._rounds, composed)
        if self.best is None:
            self._minimise_peak(self._find_within)
        if self.best is None:
            raise self._infeasible(proven=False)

    def _plan_whole(self, solver: str) -> Formulation:
        """Plan by local search and integer program; returns the formulation that was solved last."""
        if self.evaluations is None:  # a plan at once, to keep should Ctrl-C come
            self.incumbent.offer(find_start(self.instance, self.budget_bytes, evaluations=0), "greedy")
            if self.best is None and is_small(self.instance):  # annealing would try for long here
                self._minimise_peak(None)
        composed = self._plan_from_parts()
        annealing_seconds = 0.0
        if composed is None:
            self._anneal(self._rounds)
        elif not self._closed():  # with a plan from the parts the solver makes better use of the time
            annealing_seconds = self._anneal(1)
            if self.left > 0.5 * self.time_limit_seconds:
                self._anneal(1, composed)
        options = self.options or self._choose_options()
        with self._refining(options.restricted):
            large = composed is not None and options.window is not None
            if large and not self._closed() and self.left > LARGE_EFFORT * annealing_seconds:
                self._anneal(1, composed, effort=LARGE_EFFORT)
            return self._solve_formulations(self._build(options), solver)

    def _solve_formulations(self, formulation: Formulation, solver: str) -> Formulation:
        """Solve; where a restricted program has no solution, or time is left after its optimum, the unrestricted one.

        Returns:
            The formulation that was solved last.
        """
        verdict = self._solve(formulation, solver)
        restricted = formulation.options.restricted
        chosen = self.options is None  # restrictions that were asked for stay
        enough = self.left > SECOND_SHARE * self.time_limit_seconds or self.best is None
        done = verdict == "infeasible" if self.best is None else not self._closed("unrestricted")
        if restricted and chosen and enough and done and estimated_columns(self.instance) < MOST_UNRESTRICTED:
            formulation = self._build(Options())
            verdict = self._solve(formulation, solver)
            restricted = False
        if self.best is None and verdict == "infeasible" and not restricted:
            raise self._infeasible(proven=True)
        if self.best is None:
            self._minimise_peak(self._find_within)
        if self.best is None and verdict == "infeasible":
            raise self._infeasible(proven=False)
        if self.best is None:
            smallest = f"; {smallest_known_budget(self.lowest.report)}" if self.lowest else ""
            error = SolverError(
                f"{solver} found no plan within {format_bytes(self.budget_bytes)} in {self.time_limit_seconds:g} s"
                f" ({self.failed or verdict}){smallest}; allow more time or more memory",
                self.lowest.report.peak_bytes if self.lowest else None,
            )
            error.smallest = self.lowest and self.lowest.schedule
            raise error
        return formulation

    def _plan_from_parts(self) -> Schedule | None:
        """A bound and a plan from the parts of the program; the plan, if it fits. See bound/parts.py."""
        if self.evaluations == 0:
            return None
        begin = time.monotonic()
        ends = begin + PARTS_SHARE * self.time_limit_seconds
        searcher = Searcher(self.instance, self.pin_bytes)
        with Pool() as pool:
            parts = PartsRelaxation(self.instance, pool, lambda: ends - time.monotonic())
            found = recover_plan(parts, searcher, self.budget_bytes) if len(parts.parts) > 1 else None
        schedule = None
        if found is not None:
            self.incumbent.prove("unrestricted", found.bound_seconds)
            self.incumbent.say(f"{len(parts.parts)} parts")
            planned = found.found and searcher.plan(found.found.policy, self.budget_bytes)
            if planned and self.incumbent.offer(planned[0], "parts"):
                schedule = planned[0]
        self.seconds["parts"] += time.monotonic() - begin
        return schedule

    def _anneal(self, rounds: int, start: Schedule | None = None, effort: int = 1) -> float:
        """Anneal, from a schedule or from the local search's own starts; returns the wall seconds that it took."""
        begin = time.monotonic()
        seed = 0 if start is None else 10_000 * effort
        self.incumbent.offer(self._annealed(seed, rounds, start, effort), "heuristic")
        lowest = self.lowest if self.best is None and self.evaluations != 0 else None
        if lowest and self.incumbent.offer(lowest.schedule, "heuristic"):
            self.incumbent.offer(self._annealed(seed, rounds, lowest.schedule, effort), "heuristic")
        took = time.monotonic() - begin
        self.seconds["heuristic"] += took
        return took

    def _annealed(self, seed: int, rounds: int, start: Schedule | None, effort: int = 1) -> Schedule | None:
        return find_start(
            self.instance,
            self.budget_bytes,
            pin_bytes=self.pin_bytes if self.options is None else self.options.pin_bytes,
            seed=seed,
            evaluations=self.evaluations,
            rounds=rounds,
            start=start,
            effort=effort,
            enough=self._is_time_up,
        )

    def _minimise_peak(self, find: FindWithin | None) -> None:
        """Lower the peak, as `smallest_budget` does, until it fits; then anneal from that schedule.

        Args:
            find: as of `find_lowest`; None: only small programs are asked.

        Raises:
            InfeasibleError: it was proven on the way that nothing fits.
        """
        if not self.lower_peak or self.lowest is None:
            return
        begin = time.monotonic()
        seconds = self.left + self.time_limit_seconds
        found = find_lowest(self.instance, self.lowest, find, enough_bytes=self.budget_bytes, seconds=seconds)
        self.lowest = found
        self.seconds["solve"] += time.monotonic() - begin
        if found.proven_bytes > self.budget_bytes:
            raise self._infeasible(proven=True)
        if self.incumbent.offer(found.schedule, "lowest peak") and self.evaluations != 0 and self.left > 0:
            begin = time.monotonic()
            self.incumbent.offer(self._annealed(30_000, 1, found.schedule), "heuristic")
            self.seconds["heuristic"] += time.monotonic() - begin

    def _find_within(self, budget_bytes: int, seconds: float) -> tuple[Schedule, Report]:
        """Any schedule within another budget."""
        return find_within(self.instance, budget_bytes, seconds, self.solver, allowed=self.allowed)

    @contextmanager
    def _refining(self, wanted: bool) -> Iterator[None]:
        """Refine a bound for all schedules by HiGHS in a thread, during the body and after it; see refinement.py."""
        if not wanted or self._closed():
            yield
            return
        ended = threading.Event()
        ends = self.incumbent.started + (1 - POLISH_SHARE) * self.time_limit_seconds
        with ThreadPoolExecutor(1, "bound") as pool:
            refined = pool.submit(self._refine, lambda: ended.is_set() or self._closed("unrestricted"), ends)
            try:
                yield
                refined.result()
            finally:
                ended.set()

    def _refine(self, stop: Callable[[], bool], ends: float, plans: bool = True) -> None:
        """Refine the bound until ``stop`` or until the monotonic clock's ``ends``.

        Args:
            plans: whether schedules met on the way may become the plan.
        """
        refinement = Refinement(self.instance, self.budget_bytes)
        begin, seed = time.monotonic(), 20_000
        while not stop() and (left := ends - time.monotonic()) > 0.5:
            best = self.incumbent.best
            known, seconds = (best.schedule, best.report.seconds) if best is not None else (None, inf)
            step = refinement.step(known, seconds, self.gap, left, stop)
            self.incumbent.prove("unrestricted", step.bound_seconds)
            self.incumbent.say("bound for all schedules")
            fits = plans and step.schedule is not None and self.incumbent.offer(step.schedule, "bound")
            if plans and step.schedule is not None and not fits and self.evaluations != 0 and not stop():
                seed += 10
                self.incumbent.offer(self._annealed(seed, 1, step.schedule), "heuristic")
            if not step.finer:
                break
        self.seconds["bound"] += time.monotonic() - begin

    # ---- the integer program ------------------------------------------------------------------------------

    def _choose_options(self) -> Options:
        """Small values are kept, and tasks run again only where the backward reads; large programs get a window."""
        options = Options(pin_bytes=self.pin_bytes, reading_only=True)
        has_few = estimated_columns(self.instance, options) <= MOST_COLUMNS
        return options if has_few else replace(options, window=WINDOW)

    def _build(self, options: Options) -> Formulation:
        begin = time.monotonic()
        admit = self.best
        if admit is not None and admit.rerun_count > 3 * len(self.program.tasks):
            admit = None  # a start with this many reruns is worth less than the columns it would need
        result = Formulation(self.instance, self.budget_bytes, options, admit)
        self.seconds["build"] += time.monotonic() - begin
        return result

    def _solve(self, formulation: Formulation, solver: str) -> str:
        """Solve one formulation; returns the last status."""
        begin = time.monotonic()
        rows = RowGeneration(formulation, self.incumbent, lambda: self.left, self.threads)
        status = rows.solve(solver, POLISH_SHARE * self.time_limit_seconds)
        self.failed = rows.failed or self.failed
        self.seconds["solve"] += time.monotonic() - begin
        return status

    def _plan(self, formulation: Formulation | None, solver: str, interrupted: bool = False) -> Plan:
        if self.failed:
            warn_caller(
                f"{self.failed}. The plan fits, and is the best that was found without it; plan again, with another "
                "solver or more memory for the process"
            )
        plan = replace(
            self.incumbent.plan(),
            solver=solver,
            stage_seconds=dict(self.seconds),
            pin_bytes=self.pin_bytes,
            interrupted=interrupted,
        )
        if formulation is None:
            return plan
        builder, options = formulation.builder, formulation.options
        return replace(
            plan, rows=builder.rows, columns=builder.columns, pin_bytes=options.pin_bytes, window=options.window
        )
