"""One budget over many blocks: a schedule for each block, chosen so that the whole step of a model fits.

A step is a row of **moments**: the forward or the backward of one block, or what the rest of the model does between two of
them. Block ``b`` has a menu of points ``p`` (`block_points`), of which it takes one. With

* ``x[b,p]``: 1 if block ``b`` takes point ``p``;
* ``seconds``, ``carried``, ``forward``, ``backward`` and ``adding``: of a point;
* ``base[m]``: the bytes that exist at moment ``m`` whatever the blocks' schedules are: parameters, gradients so far, buffers
  of a sharded model, the rest's own activations;
* ``n[m,b]``: calls of block ``b`` whose forward has ended and whose backward has not, the running one included;

the program is::

    minimise    sum[b,p] calls[b] seconds[b,p] x[b,p]                                              `_program`
    (choice)    sum[p] x[b,p] = 1                                             for every block      `_program`
    (memory)    base[m] + sum[b,p] (n[m,b] carried[b,p] + running[m,b,p]) x[b,p] <= budget
                                                                              for every moment     `_contents`

where ``running[m,b,p]`` is ``forward[b,p]`` if the forward of ``b`` runs at ``m``, ``backward[b,p] - carried[b,p]`` if its
backward does, else 0. A backward whose gradients are added to those of an earlier micro-batch has ``adding[b,p]`` in the place of
``backward[b,p]``. Several micro-batches may be in flight, as in a pipeline: ``n[m,b]`` counts their calls.

Blocks and moments are few, so HiGHS solves the program to optimality, mostly within a second. Where it finds nothing in time or
fails, a search chooses (`_searched`), and `Choice.status` says so. Every result is counted again in whole bytes (`peak_of`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import warn_caller
from ..ir.defaults import SOLVER
from ..solvers.interface import Solution, solve
from ..solvers.matrix import Builder, Expr, total
from .block_points import Point

#: A menu for every block.
Menus = Sequence[Sequence[Point]]
Stage = Literal["", "forward", "backward"]
#: ``optimal``: proven to the gap asked for; ``feasible``: a solver's choice, not proven; ``searched``: by a search without a solver.
ChoiceStatus = Literal["optimal", "feasible", "searched"]

#: Relative gap at which the outer program is solved.
GAP = 1e-4
#: A solver may be over the budget by its tolerance: then it is asked again for so much less.
SPARE = 1e-6


@dataclass(frozen=True)
class Moment:
    """A part of the step and the memory that it takes whatever the blocks' schedules are.

    Attributes:
        name: for people, such as ``backward of layers.3``.
        base_bytes: everything that exists then, without what blocks carry and without what the running block makes.
        carrying: (block, calls) of the calls whose forward has ended and whose backward has not; the one whose backward
            runs is among them.
        running: the block whose forward or backward runs; None: the rest of the model.
        stage: which of the two.
        adds: the gradients of the running block's parameters exist already, and its own are added to them.
    """

    name: str
    base_bytes: int
    carrying: tuple[tuple[int, int], ...] = ()
    running: int | None = None
    stage: Stage = ""
    adds: bool = False

    def bytes(self, points: Sequence[Point]) -> int:
        """The memory at this moment if every block has the point given for it."""
        carried = sum(calls * points[block].carried_bytes for block, calls in self.carrying)
        return self.base_bytes + carried + (0 if self.running is None else self.rise(points[self.running]))

    def rise(self, point: Point) -> int:
        """What the running block adds by a point, above what is carried."""
        if self.stage == "backward":
            return (point.adding_peak_bytes if self.adds else point.backward_peak_bytes) - point.carried_bytes
        return point.forward_peak_bytes if self.stage == "forward" else 0


@dataclass(frozen=True)
class Choice:
    """A point for every block.

    Attributes:
        points: by block.
        peak_bytes: of the whole step.
        moment: name of the moment with that peak.
        seconds: of all blocks together.
        bound_seconds: no choice within the budget is faster.
        status: how well it is known to be the fastest, or of `smallest` to have the lowest peak.
        reason: where it was ``searched``: why the solver found nothing, in its own words.
    """

    points: tuple[Point, ...]
    peak_bytes: int
    moment: str
    seconds: float
    bound_seconds: float
    status: ChoiceStatus = "optimal"
    reason: str = ""


def peak_of(points: Sequence[Point], moments: Iterable[Moment]) -> tuple[int, str]:
    """The largest memory of all moments, and the name of that moment."""
    found = max(moments, key=lambda moment: moment.bytes(points))
    return found.bytes(points), found.name


def seconds_of(points: Sequence[Point], calls: Sequence[int]) -> float:
    """Seconds of all blocks together, each run as often as ``calls`` says."""
    return sum(count * point.seconds for count, point in zip(calls, points, strict=True))


def choose(
    menus: Menus,
    moments: Sequence[Moment],
    budget_bytes: int,
    *,
    calls: Sequence[int] | None = None,
    solver: str = SOLVER,
    time_limit_seconds: float = 60.0,
    enough_seconds: float = 0.0,
) -> Choice | None:
    """The fastest points with which every moment of the step is within the budget; None if none are found.

    Args:
        menus: the points of every block.
        moments: the step.
        budget_bytes: of the whole step.
        calls: how often every block runs in a step; default: once.
        solver: a name that `monet_like.solvers.interface.check_solver` accepts.
        time_limit_seconds: wall seconds.
        enough_seconds: HiGHS stops at a choice that is as fast as this.

    A solver that fails is told by a warning, and the search chooses.

    Raises:
        SolverError: the solver is missing.
    """
    calls = calls or [1] * len(menus)
    fastest = tuple(min(menu, key=lambda p: p.numbers) for menu in menus)
    seconds = seconds_of(fastest, calls)
    if peak_of(fastest, moments)[0] <= budget_bytes:
        return _choice(fastest, moments, calls, seconds)
    bound, unit = 0.0, seconds / len(menus) or 1.0
    target = {"objective_target": enough_seconds / unit} if enough_seconds and solver.upper() == "HIGHS" else None
    for limit in (budget_bytes, int(budget_bytes * (1 - SPARE))):
        builder, columns = _program(menus, calls, unit)
        for row in distinct_moments(moments):
            builder.fits(_contents(row, menus, columns), limit)
        found = solve(builder.finish(unit), solver, time_limit_seconds=time_limit_seconds, gap=GAP, options=target)
        if found.x is None and found.status != "infeasible":
            _tell_failure(solver, found)
            searched = _searched(menus, moments, budget_bytes, calls)
            return None if searched is None else _choice(searched, moments, calls, seconds, "searched", found.message)
        if found.x is None:
            return None
        points = _points(menus, columns, found.x)
        bound = bound or found.bound_seconds
        if peak_of(points, moments)[0] <= budget_bytes:
            return _choice(points, moments, calls, min(bound, seconds_of(points, calls)), _known(found))
    return None


def _choice(
    points: tuple[Point, ...], moments: Sequence[Moment], calls: Sequence[int], bound_seconds: float,
    status: ChoiceStatus = "optimal", reason: str = "",
) -> Choice:  # fmt: skip
    """The points with what they promise."""
    return Choice(points, *peak_of(points, moments), seconds_of(points, calls), bound_seconds, status, reason)


def _known(found: Solution) -> ChoiceStatus:
    """The status of a choice that a solver has made."""
    return "optimal" if found.status == "optimal" else "feasible"


def _tell_failure(solver: str, found: Solution) -> None:
    """Warn of a solver that failed; to run out of time is no failure."""
    if found.status == "error":
        warn_caller(
            f"the solver {solver} failed ({found.message}), so a local search chooses the blocks' schedules, which proves nothing and "
            "may find slower ones; try another solver= (monet-like doctor lists those that are installed)"
        )


def _searched(
    menus: Menus, moments: Sequence[Moment], budget_bytes: int, calls: Sequence[int]
) -> tuple[Point, ...] | None:
    """Points within the budget, by a search that needs no solver; None if it finds none.

    It begins with the points that carry least, or with those whose backward has the lowest peak. It changes one block at a time:
    first so that the step's peak falls most, until it fits; then so that most seconds are gained and it still fits.
    """

    def peak(points: tuple[Point, ...]) -> int:
        return peak_of(points, moments)[0]

    def seconds(points: tuple[Point, ...]) -> float:
        return seconds_of(points, calls)

    starts = (lambda p: (p.carried_bytes, p.numbers), lambda p: (p.backward_peak_bytes, p.numbers))
    points = min((tuple(min(menu, key=key) for menu in menus) for key in starts), key=peak)
    while peak(points) > budget_bytes:
        lower = min(_one_changed(points, menus), key=peak)
        if peak(lower) >= peak(points):
            return None
        points = lower
    while True:
        faster = sorted((p for p in _one_changed(points, menus) if seconds(p) < seconds(points)), key=seconds)
        fitting = next((p for p in faster if peak(p) <= budget_bytes), None)
        if fitting is None:
            return points
        points = fitting


def _one_changed(points: tuple[Point, ...], menus: Menus) -> Iterator[tuple[Point, ...]]:
    """The same points with another one for one block."""
    for block, menu in enumerate(menus):
        for point in menu:
            yield (*points[:block], point, *points[block + 1 :])


def smallest(
    menus: Menus, moments: Sequence[Moment], *, solver: str = SOLVER, time_limit_seconds: float = 60.0
) -> Choice:
    """The points with the lowest peak of the whole step; where the solver finds none in time, those that carry least."""
    lean = tuple(min(menu, key=lambda p: (p.carried_bytes, p.numbers)) for menu in menus)
    above = peak_of(lean, moments)[0]
    builder, columns = _program(menus, None, 1.0)
    share = builder.column(1.0, integral=False)  # of that peak
    for row in distinct_moments(moments):
        builder.at_most(total(_contents(row, menus, columns)) * (1 / above), share)
    found = solve(builder.finish(1.0), solver, time_limit_seconds=time_limit_seconds, gap=SPARE)
    calls = [1] * len(menus)
    if found.x is None:
        _tell_failure(solver, found)
        return _choice(lean, moments, calls, 0.0, "searched", found.message)
    points = min(lean, _points(menus, columns, found.x), key=lambda p: peak_of(p, moments))
    return _choice(points, moments, calls, 0.0, _known(found))


def _program(menus: Menus, calls: Sequence[int] | None, unit: float) -> tuple[Builder, list[list[Expr]]]:
    """The columns with their seconds, in units of ``unit``, and the rows (choice). No ``calls``: seconds do not count."""
    builder = Builder()
    columns: list[list[Expr]] = []
    for block, menu in enumerate(menus):
        count = calls[block] if calls is not None else 0
        mine = [builder.column(count * point.seconds / unit) for point in menu]
        builder.equal(total(mine), Expr(1.0))
        columns.append(mine)
    return builder, columns


def _contents(moment: Moment, menus: Menus, columns: Sequence[Sequence[Expr]]) -> list[Expr]:
    """The terms of the row (memory) of a moment, in bytes."""
    parts = [Expr(float(moment.base_bytes))]
    for block, calls in moment.carrying:
        parts += [x * float(calls * p.carried_bytes) for x, p in zip(columns[block], menus[block], strict=True)]
    if moment.running is not None:
        of = zip(columns[moment.running], menus[moment.running], strict=True)
        parts += [x * float(moment.rise(p)) for x, p in of]
    return parts


def distinct_moments(moments: Iterable[Moment]) -> list[Moment]:
    """One moment of all that differ in their base alone: the one with the largest."""
    found: dict[object, Moment] = {}
    for moment in moments:
        running = None if moment.running is None else (moment.running, moment.stage, moment.adds)
        key = (moment.carrying, running)
        if key not in found or found[key].base_bytes < moment.base_bytes:
            found[key] = moment
    return list(found.values())


def _points(menus: Menus, columns: Sequence[Sequence[Expr]], x: Any) -> tuple[Point, ...]:
    """The points that a solution takes."""
    return tuple(
        menu[max(range(len(menu)), key=lambda p, mine=mine: mine[p].value(x))]  # type: ignore[misc]
        for menu, mine in zip(menus, columns, strict=True)
    )
