"""The search for the fastest plan: a heuristic start, the integer program, an honest bound, the simulator's word."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, Literal

from ...errors import InfeasibleError, SolverError
from ...ir.program import Cost, Program
from ...ir.schedule import Schedule
from ...ir.simulate import Report, simulate
from ...solvers.pool import Pool
from ...units import format_bytes, format_seconds
from ..analysis import default_pin_bytes, find_needs, floor_bytes
from ..local_search.searcher import Searcher, find_start, smallest_known
from ..result import Plan
from .decode import decode, encode, neighbourhood
from .formulation import Formulation, Options, estimated_columns
from .lagrangian import Parts
from .lowest_peak import Ask, Lowest, find_lowest, is_small
from .primal_recovery import compose
from .refinement import Refinement

if TYPE_CHECKING:
    from ...solvers.interface import Solution, Watch

#: Seconds of the time limit for each round of annealing, at the start and at the end; see `find_start`.
SECONDS_PER_ROUND = 30.0
#: Programs with more columns than this are searched with a start window first.
MOST_COLUMNS = 14_000
#: Programs with more columns than this are not solved without restrictions: it would take minutes.
MOST_UNRESTRICTED = 200_000
#: Share of the time limit that must be left to go on from a restricted program's optimum to the unrestricted one.
SECOND_SHARE = 0.25
#: Programs with more columns than this even with a window are composed from parts and annealed, without a solver
#: for the whole: building the program alone would take longer than that.
MOST_WINDOWED = 60_000
#: Share of the time limit for solving parts.
PARTS_SHARE = 0.3
#: Slots before its first use from which a task may run again, in large programs (measured: wider windows give
#: the same relaxation on ResNet-50 to 0.01 %, and several times the columns).
WINDOW = 32
#: Reruns that take this share of the budget have their memory rows from the start.
BIG_SHARE = 0.08
#: Slots before a broken row that are opened to mend it, at first.
MEND_REACH = 24
#: Share of the time limit in which, at the end, the best plan is annealed once more.
POLISH_SHARE = 0.05
#: How many times as long as by default large programs are annealed from the parts' plan once more (measured: ResNet-50
#: at 33 %: the best valley known by three of twelve pairs of seeds, by none of four as long as by default).
LARGE_EFFORT = 3
#: How often what waits for the bound looks up.
POLL_SECONDS = 0.2
#: The chosen solver's share of the time before HiGHS, which takes a start, goes on from its plan.
FIRST_SHARE = 0.4


def ask(
    program: Program,
    costs: Mapping[str, Cost],
    budget_bytes: int,
    seconds: float,
    solver: str,
    extra_bytes: int = 0,
    **options: Any,
) -> tuple[Schedule, Report]:
    """Any schedule within a budget, and its report; see `Ask` and `Search`."""
    search = Search(
        program, costs, budget_bytes, solver, seconds, gap=0.99, extra_bytes=extra_bytes, resort=False, **options
    )
    plan = search.run()
    return plan.schedule, plan.report


@dataclass
class Search:
    """One search; `run` is called once.

    Attributes:
        solver, time_limit_seconds, gap, extra_bytes, progress: as of `monet_like.plan.plan`.
        options: restrictions of the integer program; None: chosen by its size.
        fallback: whether HiGHS, which takes a start, goes on from another solver's plan.
        threads: of the solver.
        allowed: a further condition on plans, such as another system's rules; what it refuses is not a plan.
        evaluations: of each annealing; 0: none; None: a second or two's worth.
        start: a schedule that is known.
        resort: where nothing fits, whether to look for the lowest peak, for as long again as the time limit says.
        seconds: wall seconds of every stage so far.
        best: the fastest plan so far, its report, and what found it.
        bounds: by kind, the best so far.
    """

    program: Program
    costs: Mapping[str, Cost]
    budget_bytes: int
    solver: str = "CBC"
    time_limit_seconds: float = 60.0
    gap: float = 0.01
    extra_bytes: int = 0
    progress: Callable[[str], None] | None = None
    options: Options | None = None
    fallback: bool = True
    threads: int = 1
    allowed: Callable[[Schedule], bool] = lambda schedule: True
    evaluations: int | None = None
    start: Schedule | None = None
    resort: bool = True
    seconds: dict[str, float] = field(
        init=False,
        default_factory=lambda: {"parts": 0.0, "heuristic": 0.0, "bound": 0.0, "build": 0.0, "solve": 0.0},
    )
    best: tuple[Schedule, Report, str] | None = field(init=False, default=None)
    bounds: dict[str, float] = field(init=False, default_factory=dict)
    lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def run(self) -> Plan:
        """The best plan found.

        Raises:
            InfeasibleError: proven that no schedule fits.
            SolverError: out of time without a plan, or the solver failed.
        """
        from ...solvers.interface import check_solver

        self.started = time.monotonic()
        self.pin_bytes = default_pin_bytes(self.program, self.budget_bytes)
        solver = check_solver(self.solver)
        self._check_floor()
        if self.start is not None:
            self._accept(self.start, "start")
        formulation: Formulation | None = None
        interrupted = False
        try:
            too_large = (
                self.options is None and self._columns(Options(window=WINDOW, reading_only=True)) > MOST_WINDOWED
            )
            if not too_large and self.evaluations is None:  # at once a plan to keep, should Ctrl-C come
                self._accept(
                    find_start(
                        self.program, self.costs, self.budget_bytes, extra_bytes=self.extra_bytes, evaluations=0
                    ),
                    "greedy",
                )
                if self.best is None and is_small(self.program):  # where annealing would try for long
                    self._lower(None)
            composed = self._compose()
            rounds = 1 + int(self.time_limit_seconds / SECONDS_PER_ROUND)
            if too_large:
                if not self._closed():
                    self._heuristic(rounds, composed)
                if self.best is None:
                    self._lower(self._ask)
                if self.best is None:
                    raise self._infeasible(proven=False)
                return self._plan(None, "", interrupted)
            annealing = 0.0
            if composed is None:
                self._heuristic(rounds)
            elif not self._closed():  # where parts gave a plan the solver has more use for the time
                annealing = self._heuristic(1)
                if self.left > 0.5 * self.time_limit_seconds:
                    self._heuristic(1, composed)
            options = self.options or self._choose_options()
            with self._refining(options.restricted):
                large = composed is not None and options.window is not None
                if large and not self._closed() and self.left > LARGE_EFFORT * annealing:
                    self._heuristic(1, composed, effort=LARGE_EFFORT)
                formulation = self._search(self._build(options), solver)
            if self.best is not None and self.evaluations != 0 and not self._closed() and self.left > 0:
                self._heuristic(1, self.best[0])
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
        self.started = time.monotonic()
        self.pin_bytes = default_pin_bytes(self.program, self.budget_bytes)
        self.evaluations = evaluations
        self._check_floor()
        self._heuristic(1)
        if self.best is None:
            raise self._infeasible(proven=False)
        self._refine(self._closed, time.monotonic() + 0.25 * self.time_limit_seconds, plans=False)
        return self._plan(None, "", False)

    def _search(self, formulation: Formulation, solver: str) -> Formulation:
        """Solve; where a restricted program has no solution, or time is left after its optimum, the unrestricted one.

        Returns:
            The formulation that was solved last.
        """
        verdict = self._solve(formulation, solver)
        restricted = formulation.options.restricted
        chosen = self.options is None  # restrictions that were asked for stay
        enough = self.left > SECOND_SHARE * self.time_limit_seconds or self.best is None
        done = verdict == "infeasible" if self.best is None else not self._closed("unrestricted")
        if restricted and chosen and enough and done and self._columns(Options()) < MOST_UNRESTRICTED:
            formulation = self._build(Options())
            verdict = self._solve(formulation, solver)
            restricted = False
        if self.best is None and verdict == "infeasible" and not restricted:
            raise self._infeasible(proven=True)
        if self.best is None:
            self._lower(self._ask)
        if self.best is None and verdict == "infeasible":
            raise self._infeasible(proven=False)
        if self.best is None:
            smallest = f"; {self._known_to_do(self.lowest)}" if self.lowest else ""
            raise SolverError(
                f"{solver} found no plan within {format_bytes(self.budget_bytes)} in {self.time_limit_seconds:g} s"
                f" ({verdict}){smallest}; allow more time or more memory"
            )
        return formulation

    def _columns(self, options: Options) -> int:
        return estimated_columns(self.program, find_needs(self.program), options)

    def _choose_options(self) -> Options:
        """Small values are kept, and tasks run again only where the backward reads; large programs get a window."""
        options = Options(pin_bytes=self.pin_bytes, reading_only=True)
        return options if self._columns(options) <= MOST_COLUMNS else replace(options, window=WINDOW)

    # ---- steps --------------------------------------------------------------------------------------------

    def _say(self, who: str, incumbent: float = inf, bound: float = 0.0, kind: str = "unrestricted") -> None:
        """Who is at work, and the incumbent, bound, gap and seconds so far."""
        if self.progress is None:
            return
        best = min(incumbent, self.best[1].seconds if self.best is not None else inf)
        honest = max(self.bounds.get("unrestricted", 0.0), bound if kind == "unrestricted" else 0.0)
        least = max(honest, bound, self.bounds.get("restricted", 0.0))
        words = [f"incumbent {format_seconds(best)}" if best < inf else "no incumbent"]
        if least > 0:
            words.append(f"bound {format_seconds(least)}")
        if least > 0 and best < inf:
            words.append(f"gap {100 * max(0.0, best - least) / best:.2f} %{'' if least == honest else ' restricted'}")
        self.progress(f"{who}: {', '.join(words)}, {time.monotonic() - self.started:.0f} s")

    def _watch(self, who: str, formulation: Formulation) -> Watch:
        kind = "restricted" if formulation.options.restricted else "unrestricted"
        return lambda incumbent, bound: self._say(who, incumbent, bound, kind)

    @property
    def left(self) -> float:
        """Wall seconds left."""
        return self.time_limit_seconds - (time.monotonic() - self.started)

    def _accept(self, schedule: Schedule | None, by: str) -> bool:
        """Judge a schedule and keep it if it fits and is the fastest so far; whether it fits."""
        if schedule is None:
            return False
        report = simulate(self.program, schedule, self.costs, extra_bytes=self.extra_bytes)
        fits = report.peak_bytes <= self.budget_bytes and self.allowed(schedule)
        with self.lock:
            better = fits and (self.best is None or report.seconds < self.best[1].seconds)
            if better:
                self.best = (schedule, report, by)
        if better:
            self._say(by)
        return fits

    def _check_floor(self) -> None:
        """A slot that does not fit by itself, in any of its ways, needs no solver to be refused."""
        self.floor = floor_bytes(self.program, self.costs, self.extra_bytes)
        if self.floor[0] > self.budget_bytes:
            raise self._infeasible(proven=True, floor=self.floor)

    def _infeasible(self, proven: bool, floor: tuple[int, str] | None = None) -> InfeasibleError:
        """Nothing fits: ``proven`` for all schedules, or only not found."""
        known, budget = self.lowest, format_bytes(self.budget_bytes)
        message = f"no schedule fits into {budget} (proven)" if proven else f"found no schedule that fits into {budget}"
        step = floor[1] if floor else ""
        if floor:
            message += f": {floor[1]} alone needs {format_bytes(floor[0])}"
        smallest = None
        if known is not None:
            smallest, step = known[1].peak_bytes, step or known[1].peak_step.task
            message += f"; {self._known_to_do(known)}, where {known[1].peak_step.task} needs the most"
        return InfeasibleError(message + "; give more memory or a smaller batch", smallest, step, proven=proven)

    @staticmethod
    def _known_to_do(known: tuple[Schedule, Report]) -> str:
        return f"{format_bytes(known[1].peak_bytes)} ({known[1].peak_bytes} bytes) is known to do"

    def _ask(self, budget_bytes: int, seconds: float) -> tuple[Schedule, Report]:
        """Any schedule within another budget."""
        return ask(self.program, self.costs, budget_bytes, seconds, self.solver, self.extra_bytes, allowed=self.allowed)

    def _lower(self, ask: Ask | None) -> None:
        """Look for the lowest peak, as `smallest_budget` does, till it fits; and anneal from there.

        Args:
            ask: of `find_lowest`; None: small programs only.

        Raises:
            InfeasibleError: proven on the way.
        """
        if not self.resort or self.lowest is None:
            return
        begin = time.monotonic()
        found = find_lowest(
            self.program, self.costs, Lowest(*self.lowest, self.floor[0]), ask, enough_bytes=self.budget_bytes,
            extra_bytes=self.extra_bytes, solver=self.solver, seconds=self.left + self.time_limit_seconds,
        )  # fmt: skip
        self.lowest = found.schedule, found.report
        self.seconds["solve"] += time.monotonic() - begin
        if found.proven_bytes > self.budget_bytes:
            raise self._infeasible(proven=True)
        if self._accept(found.schedule, "lowest peak") and self.evaluations != 0 and self.left > 0:
            begin = time.monotonic()
            self._accept(self._annealed(30_000, 1, found.schedule), "heuristic")
            self.seconds["heuristic"] += time.monotonic() - begin

    def _compose(self) -> Schedule | None:
        """A bound and a schedule from the parts of the program; see parts.py."""
        from ...solvers.interface import installed_solvers

        if "HIGHS" not in installed_solvers() or self.evaluations == 0:
            return None
        begin = time.monotonic()
        ends = begin + PARTS_SHARE * self.time_limit_seconds
        searcher = Searcher(self.program, self.costs, self.extra_bytes, self.pin_bytes)
        with Pool() as pool:
            parts = Parts(self.program, self.costs, pool, self.extra_bytes, lambda: ends - time.monotonic())
            found = compose(parts, searcher, self.budget_bytes) if len(parts.parts) > 1 else None
        schedule = None
        if found is not None:
            self._bound("unrestricted", found.bound_seconds)
            self._say(f"{len(parts.parts)} parts")
            planned = found.found and searcher.plan(found.found.policy, self.budget_bytes)
            if planned and self._accept(planned[0], "parts"):
                schedule = planned[0]
        self.seconds["parts"] += time.monotonic() - begin
        return schedule

    def _heuristic(self, rounds: int, start: Schedule | None = None, effort: int = 1) -> float:
        """Anneal; the wall seconds that it took."""
        begin = time.monotonic()
        seed = 0 if start is None else 10_000 * effort
        self._accept(self._annealed(seed, rounds, start, effort), "heuristic")
        if self.best is None and self.evaluations != 0 and self.lowest and self._accept(self.lowest[0], "heuristic"):
            self._accept(self._annealed(seed, rounds, self.lowest[0], effort), "heuristic")
        took = time.monotonic() - begin
        self.seconds["heuristic"] += took
        return took

    @cached_property
    def lowest(self) -> tuple[Schedule, Report] | None:
        """The schedule with the lowest peak that is known, and its report."""
        return smallest_known(self.program, self.costs, extra_bytes=self.extra_bytes)

    def _annealed(self, seed: int, rounds: int, start: Schedule | None, effort: int = 1) -> Schedule | None:
        return find_start(
            self.program,
            self.costs,
            self.budget_bytes,
            extra_bytes=self.extra_bytes,
            pin_bytes=self.pin_bytes if self.options is None else self.options.pin_bytes,
            seed=seed,
            evaluations=self.evaluations,
            rounds=rounds,
            start=start,
            effort=effort,
            enough=self._over,
        )

    def _over(self, fits: bool) -> bool:
        """Whether the local search has had its time: the limit, and as long again where nothing fits yet."""
        known = fits or self.best is not None
        return self.evaluations is None and self.left <= (0 if known else -self.time_limit_seconds)

    def _build(self, options: Options) -> Formulation:
        begin = time.monotonic()
        admit = self.best[0] if self.best is not None else None
        if admit is not None and admit.rerun_count > 3 * len(self.program.tasks):
            admit = None  # a start of this kind is worth less than the columns it would need
        result = Formulation(self.program, self.costs, self.budget_bytes, self.extra_bytes, options, admit)
        self.seconds["build"] += time.monotonic() - begin
        return result

    @contextmanager
    def _refining(self, wanted: bool) -> Iterator[None]:
        """Beside what is done meanwhile, and after it, a bound for all schedules by HiGHS gets finer; see refine.py."""
        from ...solvers.interface import installed_solvers

        if not wanted or "HIGHS" not in installed_solvers() or self._closed():
            yield
            return
        ended = threading.Event()
        failed: list[BaseException] = []

        def work() -> None:
            try:
                ends = self.started + (1 - POLISH_SHARE) * self.time_limit_seconds
                self._refine(lambda: ended.is_set() or self._closed("unrestricted"), ends)
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=work, name="bound")
        thread.start()
        try:
            yield
            while thread.is_alive():  # short waits, for Ctrl-C
                thread.join(POLL_SECONDS)
        finally:
            ended.set()
            thread.join()
        if failed:
            raise failed[0]

    def _refine(self, stop: Callable[[], bool], ends: float, plans: bool = True) -> None:
        """Until ``stop`` or the monotonic clock's ``ends``. ``plans``: whether what it comes across may become the plan."""
        refinement = Refinement(self.program, self.costs, self.budget_bytes, self.extra_bytes)
        begin, seed = time.monotonic(), 20_000
        while not stop() and (left := ends - time.monotonic()) > 0.5:
            best, seconds = (self.best[0], self.best[1].seconds) if self.best is not None else (None, inf)
            step = refinement.step(best, seconds, self.gap, left, stop)
            self._bound("unrestricted", step.bound_seconds)
            self._say("bound for all schedules")
            fits = plans and step.schedule is not None and self._accept(step.schedule, "bound")
            if plans and step.schedule is not None and not fits and self.evaluations != 0 and not stop():
                seed += 10
                self._accept(self._annealed(seed, 1, step.schedule), "heuristic")
            if not step.finer:
                break
        self.seconds["bound"] += time.monotonic() - begin

    def _bound(self, kind: str, seconds: float) -> None:
        # A hair below what the solver says: it works in floating point.
        with self.lock:
            self.bounds[kind] = max(self.bounds.get(kind, 0.0), seconds * (1 - 1e-9))

    def _gap(self, kind: str = "restricted") -> float:
        """Relative distance of the best plan from a bound; ``unrestricted``: of one for all schedules."""
        assert self.best is not None
        seconds = self.best[1].seconds
        bounds = [self.bounds.get("unrestricted", 0.0), self.bounds.get(kind, 0.0)]
        return (seconds - max(bounds)) / seconds if seconds else 0.0

    def _closed(self, kind: str = "restricted") -> bool:
        return self.best is not None and self._gap(kind) <= self.gap

    def _solve(self, formulation: Formulation, solver: str) -> str:
        """Solve, simulate, add the run rows that were broken, and again; returns the last status."""
        kind = "restricted" if formulation.options.restricted else "unrestricted"
        begin = time.monotonic()
        self._near_rows(formulation)
        verdict = "no_incumbent"
        current = solver
        polish = POLISH_SHARE * self.time_limit_seconds
        first_end = self.left * (1 - FIRST_SHARE)
        while not self._closed(kind) and self.left > 0.3 + polish:
            share = self.left - (first_end if current == solver and self._can_fall_back(solver) else polish)
            if share < 0.5:
                current, share = "HIGHS", self.left - polish
            solution = self._solve_once(formulation, current, share)
            verdict = solution.status
            if verdict == "infeasible":
                break
            self._bound(kind, solution.bound_seconds)
            if solution.x is not None:
                schedule = decode(formulation, solution.x)
                broken = [] if self._accept(schedule, current) else self._broken_rows(formulation, schedule)
                if broken:
                    self._mend(formulation, schedule, current, broken)
                    continue
            if verdict == "optimal" and self.best is not None:
                break
            if current != solver or not self._can_fall_back(solver):
                break
            current = "HIGHS"
        self.seconds["solve"] += time.monotonic() - begin
        return verdict

    def _can_fall_back(self, solver: str) -> bool:
        from ...solvers.interface import installed_solvers

        return self.fallback and solver != "HIGHS" and "HIGHS" in installed_solvers()

    def _solve_once(self, formulation: Formulation, solver: str, seconds: float) -> Solution:
        from ...solvers.interface import solve

        start: Any = encode(formulation, self.best[0]) if self.best is not None else None
        matrix, watch = formulation.matrix(), self._watch(solver, formulation)
        return solve(
            matrix,
            solver,
            time_limit_seconds=seconds,
            gap=self.gap,
            start=start,
            watch=watch,
            threads=self.threads,
            stop=lambda: self._closed("restricted" if formulation.options.restricted else "unrestricted"),
        )

    def _near_rows(self, formulation: Formulation, share: float = 0.97) -> None:
        """Run rows where the start comes near the budget: the likeliest to be broken."""
        if self.best is not None:
            self._add_rows(formulation, self.best[0], self.best[1], self.budget_bytes * share)
        for t, group in formulation.big_runs(BIG_SHARE):
            formulation.add_run_row(t, group)

    def _broken_rows(self, formulation: Formulation, schedule: Schedule) -> list[int]:
        """Add the rows that the schedule breaks; the stages of those that were missing."""
        report = simulate(self.program, schedule, self.costs, extra_bytes=self.extra_bytes)
        return self._add_rows(formulation, schedule, report, self.budget_bytes)

    def _add_rows(self, formulation: Formulation, schedule: Schedule, report: Report, over_bytes: float) -> list[int]:
        added: list[int] = []
        for step, (t, p) in zip(report.steps, schedule.runs(), strict=True):
            if p >= 0 and step.bytes > over_bytes and formulation.add_run_row(t, formulation.group_of[p]):
                added.append(t)
        return added

    def _mend(self, formulation: Formulation, schedule: Schedule, solver: str, stages: list[int]) -> None:
        """A good schedule breaks a few rows that were left out: change only what is near them."""
        from ...solvers.interface import solve

        for turn in range(4):
            for t in set(stages):
                for group in range(len(formulation.needs.groups)):
                    formulation.add_run_row(t, group)
            x = encode(formulation, schedule, check=False)
            if x is None or self.left < 2:
                return
            free = neighbourhood(formulation, x, stages, MEND_REACH * (turn + 1))
            small = formulation.matrix().fixed(free, x)
            limit = min(20.0, self.left * 0.3)
            found = solve(small, solver, time_limit_seconds=limit, gap=self.gap / 4)
            if found.x is None:
                continue
            x[free] = found.x
            schedule = decode(formulation, x)
            if self._accept(schedule, solver):
                return
            stages = self._broken_rows(formulation, schedule) or stages

    def _plan(self, formulation: Formulation | None, solver: str, interrupted: bool) -> Plan:
        assert self.best is not None
        schedule, report, by = self.best
        if report.peak_bytes > self.budget_bytes:
            raise SolverError("internal: the plan is over the budget")
        kinds: tuple[Literal["unrestricted", "restricted"], ...] = ("unrestricted", "restricted")
        kind: Literal["unrestricted", "restricted", "none"] = "none"
        bound = 0.0
        for candidate in kinds:  # the restricted bound is named only where it says more than the honest one
            if min(self.bounds.get(candidate, 0.0), report.seconds) > bound * (1 if kind == "none" else 1.001):
                kind, bound = candidate, min(self.bounds[candidate], report.seconds)
            if report.seconds - bound <= self.gap * report.seconds:
                break
        gap = (report.seconds - bound) / report.seconds if report.seconds else 0.0
        return Plan(
            schedule=schedule,
            report=report,
            status="optimal" if gap <= self.gap + 1e-9 else "feasible",
            bound_seconds=bound,
            bound_kind=kind,
            gap=gap,
            rows=len(formulation.builder._upper) if formulation else 0,
            columns=len(formulation.builder.cost) if formulation else 0,
            solver=solver,
            found_by=by,
            stage_seconds=dict(self.seconds),
            pin_bytes=formulation.options.pin_bytes if formulation else self.pin_bytes,
            window=formulation.options.window if formulation else None,
            interrupted=interrupted,
        )
