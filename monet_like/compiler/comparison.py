"""Plans one program by several strategies at several budgets."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MonetError
from ..ir.simulate import Report
from ..ir.units import format_bytes
from .pipeline import plan_for
from .prepared import Prepared
from .request import Request


@dataclass(frozen=True)
class StrategyPoint:
    """Result of a strategy at one budget; ``report`` is None if it found no schedule that fits, for ``reason``."""

    strategy: str
    budget_bytes: int
    report: Report | None
    planning_seconds: float
    reason: str = ""


def strategy_points(
    ready: Prepared,
    request: Request,
    names: Sequence[str],
    budgets_bytes: Sequence[int],
    progress: Callable[[str, str, int, int], None],
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[StrategyPoint]:
    """Plan every budget with every strategy; one simulator judges all.

    Args:
        progress: called with a stage's name, what is done, how many are done and how many there are.
        options: for some strategies, further options.
    """
    found = []
    for done, (name, limit) in enumerate(itertools.product(names, budgets_bytes)):
        progress("plan", f"{name} at {format_bytes(limit)}", done, len(names) * len(budgets_bytes))
        started = time.monotonic()
        report, reason = None, ""
        try:
            report = plan_for(ready, request, limit, strategy=name, **(options or {}).get(name, {})).report
        except MonetError as error:
            reason = str(error)
        except Exception as error:  # of a strategy of the user's own; the other strategies are still compared
            reason = f"it raised {type(error).__name__}: {error}"
        found.append(StrategyPoint(name, limit, report, time.monotonic() - started, reason))
    return found
