"""`Job`: a model with inputs on a device, captured at once and profiled when a cost is first asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from ..capture.captured import Captured
from ..capture.example_inputs import input_specs
from ..compiler.comparison import strategy_points
from ..compiler.pipeline import QUICK_SECONDS, compile_prepared, prepare
from ..compiler.prepared import Prepared
from ..compiler.progress import Progress
from ..compiler.request import Request, captured_for, solver_and_strategy
from ..compiler.sources import Source, capability_of, limits_in
from ..errors import UsageError
from ..ir.profile_file import Profile
from ..ir.program import Program
from ..ir.schedule import Schedule
from ..ir.simulate import Report
from ..ir.units import Budget, format_bytes, format_seconds, parse_budget, parse_budgets
from ..plan import STRATEGIES
from ..plan.budgets import pareto, smallest_budget
from ..plan.result import Smallest
from ..plan.strategies import check_strategy
from ..profile.card_budget import on_card
from ..profile.devices import DeviceLimits
from ..report.fronts import Comparison, Front
from ..solvers.interface import check_solver
from .solved import SolvedPlan

#: Budgets of a front, at most.
MOST_POINTS = 1000


class Job:
    """A model with example inputs on a device: its training step as a program, what that costs, and plans for it.

    Attributes:
        request: the model, its inputs, mode and the settings of the planner.
        device: where operators are measured.
        source: known costs, and the place for what is measured.
        progress: makes what shows progress during a ``with`` statement.
    """

    def __init__(
        self,
        request: Request,
        device: torch.device,
        source: Source,
        *,
        captured: Captured | None = None,
        progress: Callable[[], AbstractContextManager[Progress]] = Progress,
    ) -> None:
        if request.target is not None and request.capability is None:  # of the card that the costs are of
            request = replace(request, capability=capability_of(source.known))
        self.request, self.device, self.source = request, device, source
        self.progress = progress
        self._ready: Prepared | None = None
        self._quick: Prepared | None = None
        if captured is not None:
            self.__dict__["captured"] = captured

    @cached_property
    def captured(self) -> Captured:
        """The captured step, with the variants that the mode admits."""
        with self.progress():
            return captured_for(self.request, self.request.example)

    @property
    def program(self) -> Program:
        """The step as values and tasks; ``to_frame()`` is a table of its tasks."""
        return self.captured.program

    @property
    def ready(self) -> Prepared:
        """Program and costs together. The first access measures what is not known."""
        if self._ready is None:
            with self.progress() as shown:
                self._ready = self._prepared(None, shown, self.request)
        return self._ready

    @property
    def profile(self) -> Profile:
        """Seconds and workspace of every operator; ``to_frame()`` is a table.

        The first access measures what is not known.
        """
        return self.ready.profile

    @property
    def plain(self) -> Report:
        """Plain PyTorch's step, predicted; ``to_frame()`` is its memory timeline."""
        return self.ready.plain

    def plan(
        self,
        budget: str | int | Budget,
        *,
        solver: str | None = None,
        strategy: str | None = None,
        time_limit_seconds: float | None = None,
        gap: float | None = None,
        threads: int | None = None,
        quick: bool = False,
        **options: Any,
    ) -> SolvedPlan:
        """The fastest schedule within a memory budget.

        Args:
            budget: of the whole step: ``"8 GB"``, bytes as an int, ``"60%"`` of plain PyTorch's peak, or ``"card"``:
                what is free on the GPU, less 5 % of it and at least 1 GB.
            solver: of the integer program (default: HIGHS); ``"heuristic"``: the local search alone.
            strategy: another way to plan, such as ``"checkmate"``; see `monet_like.plan.strategies`.
            time_limit_seconds, gap, threads: of the solver (default: 60 s, 0.01, 1).
            quick: in about ten seconds: the local search, on times that are partly estimated where nothing is measured
                yet. Its peak is as exact. Nothing is saved, and a plan that is not quick measures all.
            options: further ones of the strategy.

        Raises:
            UsageError: an argument is wrong.
            InfeasibleError: no schedule fits; the message says what would.
            SolverError: none was found in time.
        """
        given = {"solver": solver, "strategy": strategy, "time_limit_seconds": time_limit_seconds, "gap": gap}
        request = self._request(**given, threads=threads)
        known = self.source.known
        absent = limits_in(known) if request.target is not None or isinstance(known, DeviceLimits) else None
        limit = on_card(parse_budget(budget), self.device, request.model, request.example, absent=absent).limit
        if quick and (request.strategy != "milp" or options):
            raise UsageError(
                "quick plans are made by the local search; leave quick out, or the strategy and its options"
            )
        with self.progress() as progress:
            if quick:
                ready = self._ready or self._quick or self._prepared(limit, progress, request, quick=True)
            else:
                ready = self._ready = self._ready or self._prepared(limit, progress, request)
            progress.at("plan", most=QUICK_SECONDS if quick else request.time_limit_seconds)
            found = compile_prepared(
                request, ready, limit, self.device, quick=quick, save_profile=self.source.save,
                progress=progress.profiling, plan_progress=progress.planning, **options,
            )  # fmt: skip
        if quick and self._ready is None:
            self._quick = found.ready
        else:
            self._ready = found.ready
        return SolvedPlan(found, request, self.device, self.progress)

    def pareto(
        self,
        budgets: str | Iterable[str | int | Budget] | None = None,
        *,
        points: int = 8,
        solver: str | None = None,
        time_limit_seconds: float | None = None,
        gap: float | None = None,
    ) -> Front:
        """The time-memory front: plans for several budgets, each search starting from the plan before.

        Args:
            budgets: as for `plan`, in any order, or in one text (``"80%,60%"``); None: ``points`` budgets from the
                smallest that is feasible to plain PyTorch's peak.
            solver, time_limit_seconds, gap: of each plan.

        Raises:
            UsageError: an argument is wrong.
        """
        if not 2 <= points <= MOST_POINTS:
            raise UsageError(f"points {points} must be at least 2 and at most {MOST_POINTS}")
        request = self._request(solver=solver, time_limit_seconds=time_limit_seconds, gap=gap)
        wanted = None if budgets is None else _read_budgets(budgets)
        ready = self.ready
        with self.progress() as progress:
            limits, start = self._budgets_of_front(wanted, points, request.solver)
            limits.sort()
            found = pareto(
                ready.captured.program,
                ready.costs,
                limits,
                extra_bytes=ready.extra_bytes,
                solver=request.solver,
                time_limit_seconds=request.time_limit_seconds,
                gap=request.gap,
                start=start,
                progress=lambda done, total: progress.at("plan", format_bytes(limits[done]), done, total),
            )
        return Front(found, ready.plain, self.title)

    def _budgets_of_front(
        self, wanted: Sequence[Budget] | None, points: int, solver: str
    ) -> tuple[list[int], Schedule | None]:
        """The budgets of a front in bytes, and a schedule for the smallest of them if one is known."""
        most = self.ready.plain.peak_bytes
        if wanted is not None:
            return [budget.of(most) for budget in wanted], None
        smallest = self._smallest(solver, 5.0)
        least = smallest.report.peak_bytes
        return [least + (most - least) * k // (points - 1) for k in range(points)], smallest.schedule

    def compare(
        self, budgets: str | Iterable[str | int | Budget], strategies: Iterable[str] | None = None
    ) -> Comparison:
        """Plan every budget with every strategy; one simulator judges all.

        Args:
            budgets: as for `pareto`; they are compared from the largest down.
            strategies: names in `monet_like.plan.STRATEGIES`; None: all.

        Raises:
            UsageError: an argument is wrong. Where a strategy finds nothing, the comparison says why.
        """
        names = list(STRATEGIES) if strategies is None else list(strategies)
        for name in names:
            check_strategy(name)
        wanted = _read_budgets(budgets)
        limits = sorted((budget.of(self.ready.plain.peak_bytes) for budget in wanted), reverse=True)
        with self.progress() as progress:
            points = strategy_points(self.ready, self.request, names, limits, progress.at)
        return Comparison(tuple(points), self.plain, self.title)

    def smallest(self, *, solver: str | None = None, time_limit_seconds: float | None = None) -> Smallest:
        """The smallest budget that is feasible: the lowest peak found, and what is proven.

        Raises:
            SolverError: not even one schedule was found.
        """
        request = self._request(solver=solver, time_limit_seconds=time_limit_seconds)
        return self._smallest(request.solver, request.time_limit_seconds)

    def _smallest(self, solver: str, time_limit_seconds: float) -> Smallest:
        ready = self.ready
        with self.progress() as progress:
            progress.at("plan", "the smallest budget", most=time_limit_seconds)
            return smallest_budget(
                ready.captured.program,
                ready.costs,
                extra_bytes=ready.extra_bytes,
                solver=solver,
                time_limit_seconds=time_limit_seconds,
            )

    def _request(self, **given: Any) -> Request:
        """The request with the settings that are given; checked."""
        request = replace(self.request, **{name: value for name, value in given.items() if value is not None})
        solver, strategy = solver_and_strategy(request.solver, request.strategy)
        check_solver(solver)
        check_strategy(strategy)
        return replace(request, solver=solver, strategy=strategy)

    def _prepared(
        self, budget: int | Callable[[int], int] | None, progress: Progress, request: Request, *, quick: bool = False
    ) -> Prepared:
        """Capture and profile; a budget that is proven not to fit is refused before that."""
        found = prepare(
            request, self.device, profile=self.source.known, save_profile=self.source.save,
            progress=progress.profiling, captured=self.__dict__.get("captured"), budget=budget, quick=quick,
        )  # fmt: skip
        self.__dict__["captured"] = found.captured
        return found

    @property
    def title(self) -> str:
        """Model, batch, mode, plain PyTorch's step and whose costs these are, in one line."""
        plain, request = self.plain, self.request
        return (
            f"{request.expression}, batch {request.batch}, {request.mode}; plain PyTorch: "
            f"{format_bytes(plain.peak_bytes)}, {format_seconds(plain.seconds)} predicted ({self.profile.device})"
        )

    def _rows(self) -> list[tuple[str, str]]:
        """The model and the figures that are known, as (what, text)."""
        request, program = self.request, self.program
        inputs = ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in input_specs(*request.example))
        tasks = f"{len(program.tasks)} forward tasks, {len(program.slots)} backward slots"
        count, held = program.parameters
        costs, plain = f"not measured yet, on {self.device}", "not known yet"
        if self._ready is not None or isinstance(self.source.known, DeviceLimits):  # nothing is measured for this
            costs, step = repr(self.profile), self.plain
            plain = f"peak {format_bytes(step.peak_bytes)}, step {format_seconds(step.seconds)} (predicted)"
        return [
            ("model", f"{request.expression}, {inputs}, {request.mode}"),
            ("program", f"{tasks}, {count} parameters in {format_bytes(held)}"),
            ("costs", costs),
            ("plain PyTorch", plain),
        ]

    def __repr__(self) -> str:
        return "\n".join(f"{what + ':':15}{text}" for what, text in self._rows())


def _read_budgets(budgets: str | Iterable[str | int | Budget]) -> list[Budget]:
    """Budgets in one text, or one by one."""
    found = parse_budgets(budgets) if isinstance(budgets, str) else [parse_budget(budget) for budget in budgets]
    if not found:
        raise UsageError('no budget is given; give a list, such as ["80%", "60%"]')
    return found
