"""The incumbent of a search: the fastest plan so far, the bounds proven so far, and the gap between them.

Several threads may offer plans and bounds at the same time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

from ...errors import SolverError
from ...ir.schedule import Schedule
from ...ir.simulate import Report
from ...ir.units import format_seconds
from ..instance import Instance
from ..result import Plan

BoundKind = Literal["unrestricted", "restricted"]


class Best(NamedTuple):
    """A schedule within the budget, the simulator's report on it, and what found it."""

    schedule: Schedule
    report: Report
    found_by: str


@dataclass
class Incumbent:
    """The best plan and the best bounds of one search.

    Attributes:
        instance, budget_bytes: what is planned.
        gap: relative gap at which the search may stop.
        allowed: a further condition on plans; a schedule that it refuses does not become the incumbent.
        progress: called with a line for people at every change.
        best: the fastest plan so far; None: none yet.
        bounds: seconds by kind: no schedule (``unrestricted``), or none of the restricted program's, is faster.
        started: when the search began, on the monotonic clock.
    """

    instance: Instance
    budget_bytes: int
    gap: float
    allowed: Callable[[Schedule], bool]
    progress: Callable[[str], None] | None
    best: Best | None = field(init=False, default=None)
    bounds: dict[str, float] = field(init=False, default_factory=dict)
    started: float = field(init=False, default_factory=time.monotonic)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)

    def offer(self, schedule: Schedule | None, found_by: str) -> bool:
        """Simulate a schedule and keep it if it fits and is the fastest so far; returns whether it fits."""
        if schedule is None:
            return False
        report = self.instance.simulate(schedule)
        fits = report.peak_bytes <= self.budget_bytes and self.allowed(schedule)
        with self._lock:
            faster = fits and (self.best is None or report.seconds < self.best.report.seconds)
            if faster:
                self.best = Best(schedule, report, found_by)
        if faster:
            self.say(found_by)
        return fits

    def prove(self, kind: BoundKind, bound_seconds: float) -> None:
        """Note a bound, lowered by 1e-9 of its value: solvers work in floating point."""
        with self._lock:
            self.bounds[kind] = max(self.bounds.get(kind, 0.0), bound_seconds * (1 - 1e-9))

    def closed(self, kind: BoundKind = "restricted") -> bool:
        """Whether the plan is within the gap of a bound of this kind, or of one for all schedules."""
        if self.best is None:
            return False
        seconds = self.best.report.seconds
        bound = max(self.bounds.get("unrestricted", 0.0), self.bounds.get(kind, 0.0))
        return ((seconds - bound) / seconds if seconds else 0.0) <= self.gap

    def say(self, who: str, incumbent: float = inf, bound: float = 0.0, kind: BoundKind = "unrestricted") -> None:
        """Report who is at work, and the incumbent, bound, gap and seconds so far.

        Args:
            incumbent, bound: of the running solver, in seconds of a step.
            kind: of that bound.
        """
        if self.progress is None:
            return
        best = min(incumbent, self.best.report.seconds if self.best is not None else inf)
        unrestricted = max(self.bounds.get("unrestricted", 0.0), bound if kind == "unrestricted" else 0.0)
        highest = max(unrestricted, bound, self.bounds.get("restricted", 0.0))
        words = [f"incumbent {format_seconds(best)}" if best < inf else "no incumbent"]
        if highest > 0:
            words.append(f"bound {format_seconds(highest)}")
        if highest > 0 and best < inf:
            restricted = "" if highest == unrestricted else " restricted"
            words.append(f"gap {100 * max(0.0, best - highest) / best:.2f} %{restricted}")
        self.progress(f"{who}: {', '.join(words)}, {time.monotonic() - self.started:.0f} s")

    def plan(self) -> Plan:
        """The best plan with its bound and gap; the fields about the integer program and the search are left empty.

        A restricted bound is named only where it is at least 0.1 % higher than the bound for all schedules.
        """
        assert self.best is not None
        schedule, report, found_by = self.best
        if report.peak_bytes > self.budget_bytes:
            raise SolverError("internal: the plan is over the budget")
        named: Literal["unrestricted", "restricted", "none"] = "none"
        bound = 0.0
        kinds: tuple[BoundKind, ...] = ("unrestricted", "restricted")
        for kind in kinds:
            if min(self.bounds.get(kind, 0.0), report.seconds) > bound * (1 if named == "none" else 1.001):
                named, bound = kind, min(self.bounds[kind], report.seconds)
            if report.seconds - bound <= self.gap * report.seconds:
                break
        gap = (report.seconds - bound) / report.seconds if report.seconds else 0.0
        status: Literal["optimal", "feasible"] = "optimal" if gap <= self.gap + 1e-9 else "feasible"
        return Plan(schedule, report, status, bound, named, gap, found_by=found_by)
