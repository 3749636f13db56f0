"""One budget over the pieces of a step: a point for each, chosen so that the whole step fits and is fastest.

With the notation of `monet_like.ir.step` and

* ``x[b,p]``: 1 if piece ``b`` takes point ``p`` of its menu;
* ``rise[m,b,p]``: what ``p`` adds at moment ``m`` if ``b`` runs there, else 0

the program is::

    minimise    sum[b,p] calls[b] seconds[p] x[b,p]                                                `_program`
    (choice)    sum[p] x[b,p] = 1                                             for every piece      `_program`
    (memory)    base[m] + sum[b,p] (n[m,b] carried[p] + rise[m,b,p]) x[b,p]
                + sum[p] offloaded[p] x[moving[m],p] <= budget                for every moment     `_contents`
    (host)      sum[b,p] calls[b] offloaded[p] x[b,p] <= host                                      `_program`

Pieces and moments are few, so HiGHS solves the program to optimality, mostly within a second. Where it finds nothing in
time or fails, a search chooses (`_searched`), and `Choice.status` says so. Every result is counted again in whole bytes
(`peak_of`).

Where frozen weights may be streamed and that may save time, the program is solved once more for each way to do so, with
the columns and rows of `monet_like.plan.step.streaming`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Literal

from ...errors import InfeasibleError, warn_caller
from ...ir.defaults import SOLVER
from ...ir.step import (
    Moment,
    Point,
    Step,
    bytes_on_host,
    moments_of,
    peak_of,
    seconds_of,
    streamed_bytes,
    without_offloads,
)
from ...ir.units import format_bytes
from ...solvers.interface import Solution, solve
from ...solvers.matrix import Builder, Expr, total
from .streaming import Streams, as_given

#: ``optimal``: proven to the gap asked for; ``feasible``: a solver's choice, not proven; ``searched``: by a search
#: without a solver.
ChoiceStatus = Literal["optimal", "feasible", "searched"]

#: Relative gap at which the outer program is solved.
GAP = 1e-4
#: The same where weights may be streamed: their program has clocks, and takes longer.
STREAMING_GAP = 5e-3
#: A solver may be over the budget by its tolerance: then it is asked again for so much less.
SPARE = 1e-6


@dataclass(frozen=True)
class Choice:
    """A point for every piece.

    Attributes:
        points: by piece.
        peak_bytes: of the whole step.
        moment: name of the moment with that peak.
        seconds: of all pieces together.
        bound_seconds: no choice within the budget is faster, of the menus' points or, by
            `monet_like.plan.step.proof`, of all.
        status: how well it is known to be the fastest, or of `smallest` to have the lowest peak.
        reason: where it was ``searched``: why the solver found nothing, in its own words.
        moments: name and bytes of every moment, for people.
    """

    points: tuple[Point, ...]
    peak_bytes: int
    moment: str
    seconds: float
    bound_seconds: float
    status: ChoiceStatus = "optimal"
    reason: str = ""
    moments: tuple[tuple[str, int], ...] = ()

    @staticmethod
    def of(
        step: Step, points: tuple[Point, ...], status: ChoiceStatus = "feasible", reason: str = "",
        bound_seconds: float = 0.0,
    ) -> Choice:  # fmt: skip
        """Points with what they promise in a step."""
        moments = moments_of(step, points)
        moment, peak = max(moments, key=itemgetter(1))
        return Choice(points, peak, moment, seconds_of(step, points), bound_seconds, status, reason, moments)

    def check_fits(self, budget_bytes: int, solver: str, more: str = "") -> None:
        """Refuse a budget that this choice, the one with the lowest peak that was found, exceeds.

        Args:
            more: to be said of what else would do.

        Raises:
            InfeasibleError: says what would do.
        """
        if self.peak_bytes <= budget_bytes:
            return
        without = f"; they were found without the solver {solver} ({self.reason})" if self.status == "searched" else ""
        raise InfeasibleError(
            f"no schedules of the blocks fit the step into {format_bytes(budget_bytes)}: with the smallest that were "
            f"found it needs {format_bytes(self.peak_bytes)} ({self.peak_bytes} bytes), {self.moment}; give that much, "
            f"a smaller batch or shorter sequences, or shard the model over more processes{more}{without}",
            self.peak_bytes,
            self.moment,
        )


def fastest(
    step: Step,
    budget_bytes: int,
    *,
    solver: str = SOLVER,
    time_limit_seconds: float = 60.0,
    enough_seconds: float = 0.0,
) -> Choice:
    """The fastest points of the menus with which every moment is within the budget; where none are found, those of
    `smallest`.

    Args:
        budget_bytes: of the whole step.
        solver: a name that `monet_like.solvers.interface.check_solver` accepts.
        time_limit_seconds: wall seconds, and as many for `smallest`.
        enough_seconds: a bound, about: HiGHS stops at a choice that is as fast as this, and it is ``optimal``.

    A solver that fails is told by a warning, and the search chooses.

    Raises:
        SolverError: the solver is missing.
    """
    step, ends = as_given(step), time.monotonic() + time_limit_seconds
    best = _fastest(step, None, budget_bytes, solver, time_limit_seconds, enough_seconds)
    ways = [] if best is not None and best.seconds <= _least_seconds(step) else Streams.of(step)
    for place, way in enumerate(ways):
        left = max(0.0, ends - time.monotonic()) / (len(ways) - place)
        found = _fastest(step, way, budget_bytes, solver, left, enough_seconds)
        if found is not None and best is not None:
            bound = min(best.bound_seconds, found.bound_seconds)
            found = replace(min(best, found, key=lambda one: one.seconds), bound_seconds=bound)
        best = found or best
    return best or smallest(step, solver=solver, time_limit_seconds=time_limit_seconds)


def _least_seconds(step: Step) -> float:
    """Those of all pieces by their fastest points, which need not fit."""
    return sum(piece.calls * min(point.seconds for point in piece.menu) for piece in step.pieces)


def _fastest(
    step: Step, way: Streams | None, budget_bytes: int, solver: str, time_limit_seconds: float, enough_seconds: float
) -> Choice | None:
    """Points within the budget; None if none are found.

    Args:
        way: how weights may be streamed; None: as the menus' points have it.
    """
    points = tuple(min(menu, key=lambda p: p.numbers) for menu in step.menus)
    seconds = seconds_of(step, points)
    if peak_of(step, points)[0] <= budget_bytes:
        return Choice.of(step, points, "optimal", bound_seconds=seconds)
    bound, unit = 0.0, seconds / len(step.pieces) or 1.0
    target = {"objective_target": enough_seconds / unit} if enough_seconds and solver.upper() == "HIGHS" else None
    ends, gap = time.monotonic() + time_limit_seconds, GAP if way is None else STREAMING_GAP
    for limit in (budget_bytes, int(budget_bytes * (1 - SPARE))):
        builder, columns = _program(step, unit)
        streamed, more = _streaming(step, way, builder)
        if way is not None:
            way.clocks(builder, streamed, columns, unit)
        for row in step.distinct_moments:
            builder.fits([*_contents(row, step, columns), *more], limit)
        left = max(0.0, ends - time.monotonic())
        found = solve(builder.finish(unit), solver, time_limit_seconds=left, gap=gap, options=target)
        if found.x is None and found.status != "infeasible":
            _tell_failure(solver, found)
            searched = _searched(step, way, budget_bytes)
            return None if searched is None else Choice.of(step, searched, "searched", found.message, seconds)
        if found.x is None:
            return None
        points = _points(step, columns, found.x)
        if way is not None:
            points = way.taken(points, streamed, found.x)
        bound = bound or found.bound_seconds
        if peak_of(step, points)[0] <= budget_bytes:
            mine = seconds_of(step, points)
            status = "optimal" if mine <= enough_seconds else _known(found)
            return Choice.of(step, points, status, bound_seconds=min(bound, mine))
    return None


def _streaming(step: Step, way: Streams | None, builder: Builder) -> tuple[list[Expr], list[Expr]]:
    """The columns that say which pieces stream their weights, and what that adds to each moment, in bytes."""
    if way is not None:
        return way.rows(builder)
    return [], [Expr(float(streamed_bytes(step, [menu[0] for menu in step.menus])))]


def _known(found: Solution) -> ChoiceStatus:
    """The status of a choice that a solver has made."""
    return "optimal" if found.status == "optimal" else "feasible"


def _tell_failure(solver: str, found: Solution) -> None:
    """Warn of a solver that failed; to run out of time is no failure."""
    if found.status == "error":
        warn_caller(
            f"the solver {solver} failed ({found.message}), so a local search chooses the blocks' schedules, which "
            "proves nothing and may find slower ones; try another solver= (monet-like doctor lists those that are "
            "installed)"
        )


def _searched(step: Step, way: Streams | None, budget_bytes: int) -> tuple[Point, ...] | None:
    """Points within the budget, by a search that needs no solver; None if it finds none.

    It begins with the leanest points, streams all weights that it may, and changes one piece at a time: first so that
    the step's peak falls most, until it fits; then so that most seconds are gained and it still fits.
    """

    def peak(points: tuple[Point, ...]) -> int:
        return peak_of(step, points)[0]

    def seconds(points: tuple[Point, ...]) -> float:
        return seconds_of(step, points)

    points = _leanest(step)
    points = points if way is None else way.all(points)
    while peak(points) > budget_bytes:
        lower = min(_one_changed(step, way, points), key=peak)
        if peak(lower) >= peak(points):
            return None
        points = lower
    while True:
        now, timed = seconds(points), ((seconds(p), p) for p in _one_changed(step, way, points))
        faster = sorted((each for each in timed if each[0] < now), key=itemgetter(0))
        fitting = next((p for _, p in faster if peak(p) <= budget_bytes), None)
        if fitting is None:
            return points
        points = fitting


def _leanest(step: Step) -> tuple[Point, ...]:
    """Of the points that are least of their menus, by what they carry, by their backward or by both, those with the
    lowest peak; the host has room for all their copies, or they have none.
    """
    orders: tuple[Callable[[Point], Any], ...] = (
        lambda p: (p.carried_bytes, p.backward_peak_bytes, p.numbers),
        lambda p: (p.backward_peak_bytes, p.carried_bytes, p.numbers),
        lambda p: (p.carried_bytes + p.backward_peak_bytes, p.numbers),
    )
    steps = (step, without_offloads(step))
    every = (tuple(min(menu, key=order) for menu in one.menus) for one in steps for order in orders)
    with_room = (points for points in every if bytes_on_host(step, points) <= step.host_bytes)
    return min(with_room, key=lambda points: peak_of(step, points)[0])


def _one_changed(step: Step, way: Streams | None, points: tuple[Point, ...]) -> Iterator[tuple[Point, ...]]:
    """The same points with another one for one piece, or with its weights elsewhere; the host has room for them."""
    for place, menu in enumerate(step.menus):
        for point in menu:
            changed = point if way is None else replace(point, ahead=points[place].ahead)
            every = (*points[:place], changed, *points[place + 1 :])
            if bytes_on_host(step, every) <= step.host_bytes:
                yield every
    if way is not None:
        yield from way.one_changed(points)


def smallest(step: Step, *, solver: str = SOLVER, time_limit_seconds: float = 60.0) -> Choice:
    """The points with the lowest peak of the whole step; where the solver finds none in time, the leanest."""
    ways = (None, *Streams.of(step))
    found = [_smallest(step, way, solver, time_limit_seconds / len(ways)) for way in ways]
    return min(found, key=lambda choice: choice.peak_bytes)


def _smallest(step: Step, way: Streams | None, solver: str, time_limit_seconds: float) -> Choice:
    lean = _leanest(step)
    lean = lean if way is None else way.all(lean)
    above = max(1, peak_of(step, lean)[0])
    builder, columns = _program(step, None)
    streamed, more = _streaming(step, way, builder)
    share = builder.column(1.0, integral=False)  # of that peak
    for row in step.distinct_moments:
        builder.at_most(total([*_contents(row, step, columns), *more]) * (1 / above), share)
    found = solve(builder.finish(1.0), solver, time_limit_seconds=time_limit_seconds, gap=SPARE)
    if found.x is None:
        _tell_failure(solver, found)
        return Choice.of(step, lean, "searched", found.message)
    taken = _points(step, columns, found.x)
    points = min(lean, taken if way is None else way.taken(taken, streamed, found.x), key=lambda p: peak_of(step, p))
    return Choice.of(step, points, _known(found))


def _program(step: Step, unit: float | None) -> tuple[Builder, list[list[Expr]]]:
    """The columns with their seconds, in units of ``unit``, and the rows (choice) and (host). No unit: seconds do not
    count.
    """
    builder = Builder()
    columns: list[list[Expr]] = []
    for piece in step.pieces:
        mine = [builder.column(piece.calls * point.seconds / unit if unit else 0.0) for point in piece.menu]
        builder.equal(total(mine), Expr(1.0))
        columns.append(mine)
    if bytes_on_host(step, [max(menu, key=lambda p: p.offloaded_bytes) for menu in step.menus]) > step.host_bytes:
        each = zip(step.pieces, columns, strict=True)
        there = (x * float(b.calls * p.offloaded_bytes) for b, of in each for x, p in zip(of, b.menu, strict=True))
        builder.fits(there, step.host_bytes)
    return builder, columns


def _contents(moment: Moment, step: Step, columns: Sequence[Sequence[Expr]]) -> list[Expr]:
    """The terms of the row (memory) of a moment, in bytes."""
    parts = [Expr(float(moment.base_bytes))]
    for place, calls in moment.carrying:
        menu = step.pieces[place].menu
        parts += [x * float(calls * p.carried_bytes) for x, p in zip(columns[place], menu, strict=True)]
    if moment.moving is not None:
        of = zip(columns[moment.moving], step.pieces[moment.moving].menu, strict=True)
        parts += [x * float(p.offloaded_bytes) for x, p in of if p.offloaded_bytes]
    if moment.running is not None:
        of = zip(columns[moment.running], step.pieces[moment.running].menu, strict=True)
        parts += [x * float(moment.rise(p)) for x, p in of]
    return parts


def _points(step: Step, columns: Sequence[Sequence[Expr]], x: Any) -> tuple[Point, ...]:
    """The points that a solution takes."""
    return tuple(
        menu[max(range(len(menu)), key=lambda p, mine=mine: mine[p].value(x))]  # type: ignore[misc]
        for menu, mine in zip(step.menus, columns, strict=True)
    )
