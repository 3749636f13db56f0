"""What a search for the fastest plan knows: what was asked for, the best plan, the bounds, and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ...errors import InfeasibleError
from ...ir.program import Cost, Program
from ...ir.schedule import Schedule
from ...ir.units import format_apart
from ..analysis import default_pin_bytes
from ..instance import Instance
from ..local_search.searcher import smallest_known
from ..result import Smallest
from .columns import Options
from .incumbent import BoundKind, Incumbent
from .lowest_peak import smallest_known_budget

#: Seconds of the time limit for each round of annealing, at the start and at the end; see `find_start`.
SECONDS_PER_ROUND = 30.0


@dataclass
class SearchState:
    """What a search was asked for, and what it has found.

    Attributes:
        solver, time_limit_seconds, gap, extra_bytes, progress: as of `monet_like.plan.plan`.
        options: restrictions of the integer program; None: chosen by its size.
        threads: of the solver.
        allowed: a further condition on plans, such as another system's rules; a schedule that it refuses is not a plan.
        evaluations: of each annealing; 0: none; None: a second or two's worth.
        start: a schedule to begin with.
        lower_peak: whether to look for the lowest peak where nothing fits, for as long again as the time limit says.
        seconds: wall seconds of every stage so far.
        failed: which solver failed, and how; "" if none has.
        instance: the program, its costs and the extra bytes.
        incumbent: the best plan and the bounds so far.
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
    threads: int = 1
    allowed: Callable[[Schedule], bool] = lambda schedule: True
    evaluations: int | None = None
    start: Schedule | None = None
    lower_peak: bool = True
    seconds: dict[str, float] = field(
        init=False,
        default_factory=lambda: {"parts": 0.0, "heuristic": 0.0, "bound": 0.0, "build": 0.0, "solve": 0.0},
    )
    failed: str = field(init=False, default="")
    instance: Instance = field(init=False)
    incumbent: Incumbent = field(init=False)

    def __post_init__(self) -> None:
        self.instance = Instance(self.program, self.costs, self.extra_bytes)
        self.incumbent = Incumbent(self.instance, self.budget_bytes, self.gap, self.allowed, self.progress)
        self.pin_bytes = default_pin_bytes(self.program, self.budget_bytes)

    @property
    def best(self) -> Schedule | None:
        """The fastest schedule so far."""
        return self.incumbent.best.schedule if self.incumbent.best is not None else None

    def _closed(self, kind: BoundKind = "restricted") -> bool:
        return self.incumbent.closed(kind)

    @property
    def left(self) -> float:
        """Wall seconds left."""
        return self.time_limit_seconds - (time.monotonic() - self.incumbent.started)

    @property
    def _rounds(self) -> int:
        return 1 + int(self.time_limit_seconds / SECONDS_PER_ROUND)

    def _is_time_up(self, fits: bool) -> bool:
        """Whether the local search must end: at the time limit, or after as long again where nothing fits yet."""
        known = fits or self.best is not None
        return self.evaluations is None and self.left <= (0 if known else -self.time_limit_seconds)

    @cached_property
    def lowest(self) -> Smallest | None:
        """The schedule with the lowest peak that is known."""
        return smallest_known(self.instance)

    def _check_lower_bound(self) -> None:
        """Refuse without a solver a budget in which one slot does not fit even by itself, in any of its ways."""
        if self.instance.floor[0] > self.budget_bytes:
            raise self._infeasible(proven=True, alone=self.instance.floor)

    def _infeasible(self, proven: bool, alone: tuple[int, str] | None = None) -> InfeasibleError:
        """The error that nothing fits.

        Args:
            proven: for all schedules; else none was found.
            alone: bytes and name of a task that does not fit by itself.
        """
        known, least = self.lowest, alone[0] if alone else None
        budget, *needed = format_apart(self.budget_bytes, *(() if least is None else (least,)))
        message = f"no schedule fits into {budget} (proven)" if proven else f"found no schedule that fits into {budget}"
        step = alone[1] if alone else ""
        if alone:
            message += f": {alone[1]} alone needs {needed[0]}"
        smallest = None
        if known is not None:
            smallest, step = known.report.peak_bytes, step or known.step
            message += f"; {smallest_known_budget(known.report)}, which {known.step} needs"
        advice = "; give more memory or a smaller batch"
        error = InfeasibleError(message + advice, smallest, step, proven=proven, least_bytes=least)
        error.smallest = known and known.schedule
        return error
