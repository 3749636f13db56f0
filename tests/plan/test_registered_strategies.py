"""Strategies from outside the package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from planning import network, peak

import monet_like
from monet_like.errors import UsageError
from monet_like.ir.program import Program
from monet_like.ir.schedule import Schedule
from monet_like.plan import Plan, check_strategy, plan, store_all
from monet_like.plan.strategies import STRATEGIES, register_strategy, unregister_strategy


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What a test registers is taken out again."""
    strategies = set(STRATEGIES)
    yield
    for name in set(STRATEGIES) - strategies:
        unregister_strategy(name)


def test_a_registered_strategy_is_one_like_any_other() -> None:
    given: list[dict[str, Any]] = []

    @monet_like.register_strategy
    def keep_all(
        program: Program, costs: Any, budget_bytes: int, *, extra_bytes: int = 0, gap: float = 1.0
    ) -> Schedule:
        given.append({"extra_bytes": extra_bytes, "gap": gap})
        return store_all(program)

    def by_the_heuristic(program: Program, costs: Any, budget_bytes: int, **settings: Any) -> Plan:
        given.append(settings)
        return STRATEGIES["heuristic"](program, costs, budget_bytes, **settings)

    register_strategy(by_the_heuristic, name="planned")

    program, costs = network(4)
    check_strategy("keep_all")
    found = plan(program, costs, peak(program, costs), strategy="keep_all", gap=0.25)
    assert (found.found_by, found.schedule) == ("keep_all", store_all(program))
    assert given == [{"extra_bytes": 0, "gap": 0.25}]
    found = plan(program, costs, peak(program, costs) * 2 // 3, strategy="planned", threads=2)
    assert found.found_by == "heuristic"
    assert {"solver", "threads", "gap", "time_limit_seconds", "extra_bytes", "progress"} <= set(given[1])


def test_wrong_strategies_are_refused_in_words() -> None:
    with pytest.raises(UsageError, match=r"a strategy 'milp' already; give another name$"):
        register_strategy(lambda program, costs, budget_bytes, *, extra_bytes=0: None, name="milp")
    with pytest.raises(
        UsageError, match=r"strategy two must be a function \(program, costs, budget_bytes, \*, extra_bytes=0\)"
    ):
        register_strategy(lambda program, costs: None, name="two")
    with pytest.raises(UsageError, match="no strategy 'milp' has been registered; registered: none"):
        unregister_strategy("milp")
    program, costs = network(3)
    register_strategy(lambda program, costs, budget_bytes, **settings: None, name="nothing")
    with pytest.raises(UsageError, match=r"a strategy 'nothing' already; .* unregister_strategy\('nothing'\) first"):
        register_strategy(lambda program, costs, budget_bytes, **settings: None, name="nothing")
    with pytest.raises(UsageError, match="strategy nothing returned NoneType, not a Schedule or a Plan"):
        plan(program, costs, peak(program, costs), strategy="nothing")
