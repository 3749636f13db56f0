"""Plans with copies on the host: copies are planned as tasks that the step waits for, then overlapped with computing.

A strategy sees one task that sends a value and one that fetches it, each with its time, like any other task. `simulate`
has two clocks, one of them for the copy engine, so much of that time may be hidden. Three steps:

1. Plan without copies, and with copies at several prices: a copy that will be hidden costs little.
2. Overlap one copy after the other, as long as the simulated step becomes faster within the budget: end a send later in
   the forward, start a fetch before an earlier slot. Either holds the value for longer.
3. Take the fastest plan by `simulate`, with the copies' real times.

Every plan is simulated with both clocks, so none is faster in the report than its order of runs and copies allows. The
bound of a strategy's program does not hold for steps with hidden copies, so none is given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import inf
from typing import Any, TypeVar, cast

from ..errors import InfeasibleError, ScheduleError, SolverError
from ..ir.program import Cost, Program
from ..ir.schedule import Schedule
from ..ir.simulate import Report
from ..ir.units import format_bytes
from .instance import Instance
from .result import Plan
from .subprogram import has_overlap, without_overlap

#: Prices of a copy's second while planning, in seconds of the step; None: no copies.
PRICES = (None, 1.0, 0.3, 0.1)
#: How many slots earlier a fetch may start.
AHEAD = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
#: Smaller gains than this share of the step do not count.
LEAST_GAIN = 1e-6

Strategy = TypeVar("Strategy", bound=Callable[..., Plan])


def plans_with_copies(strategy: Strategy) -> Strategy:
    """Decorator: a strategy that plans copies that overlap with computing, and is asked for plans without such copies.

    Each of ``prices`` (default: `PRICES`) has an equal share of the time limit. A schedule given as ``start`` is the
    plan where nothing faster is found. Plans with more than ``host_bytes`` on the host are left out. When a plan is
    there and time is up by ``enough``, of `find_start`, nothing more is tried. Programs without such copies go to
    ``strategy`` as they are.
    """

    @functools.wraps(strategy)
    def planned(program: Program, costs: Mapping[str, Cost], budget_bytes: int, **settings: Any) -> Plan:
        room, prices = settings.pop("host_bytes", inf), settings.pop("prices", PRICES)
        if not has_overlap(program):
            return strategy(program, costs, budget_bytes, **settings)
        start, instance = settings.pop("start", None), Instance(program, costs, settings.get("extra_bytes", 0))
        enough = settings.get("enough", lambda fits: False)
        if "time_limit_seconds" in settings:
            settings["time_limit_seconds"] /= len(prices)
        copying = {task.cost for task in program.tasks if task.copies}
        best: Plan | None = None
        if start is not None:
            report = instance.simulate(start)
            best = Plan(start, report, "feasible", found_by="start") if report.peak_bytes <= budget_bytes else None
        failure: InfeasibleError | SolverError | None = None
        seconds: dict[str, float] = {}
        for price in prices:
            small = without_overlap(program, copies=price is not None)
            priced = {
                key: Cost(cost.seconds * (price or 1.0), cost.workspace_bytes) if key in copying else cost
                for key, cost in costs.items()
            }
            try:
                with small.planning():
                    found = strategy(small.program, priced, budget_bytes, **settings)
            except (InfeasibleError, SolverError) as error:
                failure = error
                continue
            schedule, report = hide(instance, small.whole(found.schedule), budget_bytes, enough)
            seconds = {name: seconds.get(name, 0.0) + spent for name, spent in found.stage_seconds.items()}
            if report.host_bytes > room:
                failure = failure or SolverError(
                    f"plans were found with {format_bytes(report.host_bytes)} on the host, which has room for "
                    f"{format_bytes(room)}"
                )
            elif best is None or report.seconds < best.report.seconds:
                best = Plan(
                    schedule, report, "feasible", solver=found.solver, found_by=found.found_by, rows=found.rows,
                    columns=found.columns, interrupted=found.interrupted,
                )  # fmt: skip
            if found.interrupted or (best is not None and enough(True)):
                break
        if best is None:
            assert failure is not None
            raise failure
        return replace(best, stage_seconds=seconds)

    return cast(Strategy, planned)


def hide(
    instance: Instance, schedule: Schedule, budget_bytes: int, enough: Callable[[bool], bool] = lambda fits: False
) -> tuple[Schedule, Report]:
    """Overlap the schedule's copies with computing, as far as that makes it faster within the budget.

    Args:
        enough: returns whether time is up; asked before every copy.
    """
    report = instance.simulate(schedule)
    for moves in _moves(instance.program, schedule):
        if enough(True):
            break
        best = schedule, report
        for move in moves:
            try:
                moved = move(schedule)
                judged = instance.simulate(moved)
            except ScheduleError:  # the same value is fetched twice: the two copies would overlap
                continue
            if judged.peak_bytes <= budget_bytes and judged.seconds < best[1].seconds - LEAST_GAIN * report.seconds:
                best = moved, judged
        schedule, report = best
    return schedule, report


def _moves(program: Program, schedule: Schedule) -> Iterator[list[Callable[[Schedule], Schedule]]]:
    """For every copy of a schedule, in order, the changes that overlap it; the shortest overlap first.

    A send ends later in the forward, a fetch starts before an earlier slot.
    """
    for stage, tasks in enumerate((schedule.forward, *schedule.again)):
        begins = [stage - ahead for ahead in AHEAD if ahead < stage] if stage else [0]
        for whole in tasks:
            if program.tasks[whole].copies == "whole":
                yield [
                    functools.partial(_overlapped, whole=whole, stage=stage, begin=begin, start=start, end=end)
                    for start, end in _starts_and_ends(program, whole)
                    for begin in begins
                ]


def _overlapped(schedule: Schedule, *, whole: int, stage: int, begin: int, start: int, end: int) -> Schedule:
    """The copy ``whole`` of a stage as a task that starts it in stage ``begin``, and one that ends it."""
    stages = [schedule.forward, *schedule.again]
    stages[stage] = tuple(sorted({*stages[stage], end} - {whole}))
    stages[begin] = tuple(sorted({*stages[begin], start}))
    return replace(schedule, forward=stages[0], again=tuple(stages[1:]))


def _starts_and_ends(program: Program, whole: int) -> list[tuple[int, int]]:
    """Pairs of tasks that start and end the same copy as the task ``whole``, which waits for it."""
    found = []
    for value in program.tasks[whole].writes:
        for end in program.producers[value]:
            task = program.tasks[end]
            if task.copies == "end" and task.overwrites is not None:
                found.append((program.producers[task.overwrites][0], end))
    return found
