"""Ways to make a schedule, by name. Each is ``(program, costs, budget_bytes, **options) -> Schedule``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...schedule import Schedule
from .chen import chen
from .milp import milp
from .store_all import store_all_strategy

Strategy = Callable[..., Schedule]

STRATEGIES: Mapping[str, Strategy] = {"milp": milp, "store_all": store_all_strategy, "chen": chen}
