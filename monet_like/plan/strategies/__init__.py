"""Ways to make a schedule, by name. Each is ``(program, costs, budget_bytes, **options) -> Schedule``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...errors import UsageError
from ...schedule import Schedule
from .chen import chen
from .milp import milp
from .store_all import store_all_strategy

Strategy = Callable[..., Schedule]

STRATEGIES: Mapping[str, Strategy] = {"milp": milp, "store_all": store_all_strategy, "chen": chen}


def check_strategy(name: str) -> None:
    """Refuse a name that is no strategy.

    Raises:
        UsageError: lists the names.
    """
    if name not in STRATEGIES:
        raise UsageError(f"unknown strategy {name!r}; there are: {', '.join(sorted(STRATEGIES))}")
