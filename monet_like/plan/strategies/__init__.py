"""Ways to make a schedule, by name. Each is ``(program, costs, budget_bytes, **options) -> Schedule``.

``milp``, ``heuristic``, ``checkmate``, ``chen_greedy``, ``griewank`` and ``torch_budget`` plan for the budget; the
others make one schedule, whatever the budget. All use only what `Program` says and are judged by `simulate`.
"""

from __future__ import annotations

from collections.abc import Callable

from ...errors import UsageError
from ...ir.schedule import Schedule
from ..baseline import store_all_strategy
from .checkmate import checkmate
from .chen import chen_greedy
from .chen_sqrt import chen_sqrt
from .griewank import griewank
from .heuristic import heuristic
from .milp import milp
from .ogc import ogc
from .torch_budget import torch_budget

Strategy = Callable[..., Schedule]

STRATEGIES: dict[str, Strategy] = {
    "milp": milp,
    "heuristic": heuristic,
    "store_all": store_all_strategy,
    "chen_sqrt": chen_sqrt,
    "chen_greedy": chen_greedy,
    "griewank": griewank,
    "checkmate": checkmate,
    "ogc": ogc,
    "torch_budget": torch_budget,
}


def check_strategy(name: str) -> None:
    """Refuse a name that is no strategy.

    Raises:
        UsageError: lists the names.
    """
    if name not in STRATEGIES:
        raise UsageError(f"unknown strategy {name!r}; there are: {', '.join(sorted(STRATEGIES))}")
