"""A quick plan of blocks has one limit of wall seconds for all its stages, by a clock that is planted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from block_models import EXACT, Decoder, Short, loss_of, tokens

import monet_like
from monet_like.auto import block_menus
from monet_like.errors import InfeasibleError
from monet_like.plan.step import proof

#: Where each stage is called, by what name, the argument that limits it, and how often it may take that.
STAGES = (
    (block_menus, "prepare", "quick_seconds", 1), (block_menus, "menu", "time_limit_seconds", 1),
    (proof, "step_bound", "time_limit_seconds", 1), (proof, "fastest", "time_limit_seconds", 2),
)  # fmt: skip


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """What each stage was given; it takes all of it, by the clock of the plan."""
    monkeypatch.setattr(block_menus, "QUICK_SECONDS", 20.0)
    found: list[tuple[str, float]] = []
    clock = SimpleNamespace(monotonic=lambda: sum(seconds for _, seconds in found if seconds < float("inf")))
    for module in (block_menus, proof):
        monkeypatch.setattr(module, "time", clock)

    def timed(name: str, limit: str, most: int, own: Callable[..., Any]) -> Callable[..., Any]:
        def stage(*args: Any, **options: Any) -> Any:
            found.append((name, most * options[limit]))
            return own(*args, **{**options, limit: 600.0})

        return stage

    for module, name, limit, most in STAGES:
        monkeypatch.setattr(module, name, timed(name, limit, most, getattr(module, name)))
    return found


class Other(Short):
    """Another kind of block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sigmoid()


def planned(effort: str, budget: str) -> None:
    kinds = itertools.cycle((Short, Other))
    model = Decoder(lambda width: next(kinds)(width), blocks=4)
    monet_like.auto_schedule(
        model, tokens(), memory_budget=budget, blocks="layers.*", mode=EXACT, loss=loss_of, effort=effort
    )  # fmt: skip


def test_all_stages_of_a_quick_plan_have_one_limit(taken: list[tuple[str, float]]) -> None:
    planned("quick", "90%")
    names = [name for name, _ in taken]
    assert names[:5] == ["prepare", "menu", "prepare", "menu", "step_bound"] and "fastest" in names
    assert all(seconds > 0 for _, seconds in taken)
    menus = sum(seconds for name, seconds in taken if name in ("prepare", "menu"))
    assert menus == pytest.approx(20.0 * block_menus.MENUS_SHARE)  # both kinds have as much
    assert taken[0][1] == pytest.approx(taken[2][1]) and taken[1][1] == pytest.approx(taken[3][1])
    assert sum(seconds for _, seconds in taken) <= 20.0


def test_a_budget_that_nothing_fits_ends_within_the_limit(taken: list[tuple[str, float]]) -> None:
    with pytest.raises(InfeasibleError, match="no schedules of the blocks fit"):
        planned("quick", "100 KB")
    assert sum(seconds for _, seconds in taken) <= 20.0


@pytest.mark.slow
def test_a_full_plan_has_a_limit_for_each_menu(taken: list[tuple[str, float]]) -> None:
    planned("full", "90%")
    assert {seconds for name, seconds in taken if name == "prepare"} == {float("inf")}
    assert {seconds for name, seconds in taken if name == "menu"} == {60.0}
