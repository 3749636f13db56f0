"""The integer program: the fastest schedule within the budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...ir.program import Cost, Program
from ...ir.schedule import Schedule
from ..ilp.search import Search


def milp(program: Program, costs: Mapping[str, Cost], budget_bytes: int, **options: Any) -> Schedule:
    """The schedule of `Search`; options are its fields, such as ``solver`` and ``time_limit_seconds``."""
    return Search(program, costs, budget_bytes, **options).run().schedule
