"""Checkmate (Jain et al. 2020): optimal rematerialisation, every operator in one implementation.

Its decisions, run again (R) and keep (S), are those of `Formulation` on a program without variants; there the stages
of the forward, in which nothing is ever worth running again, are not unrolled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...ir.program import Cost, Program
from ...ir.schedule import Schedule
from ..ilp.search import Search
from .checkpointing import Plain


def checkmate(program: Program, costs: Mapping[str, Cost], budget_bytes: int, **options: Any) -> Schedule:
    """The fastest schedule of plain PyTorch's operators; options are fields of `Search`."""
    plain = Plain.of(program)
    return plain.whole(Search(plain.program, costs, budget_bytes, **options).run().schedule)
