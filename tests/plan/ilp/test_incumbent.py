"""The incumbent keeps the fastest plan that fits, and names the bound that closes the gap."""

from __future__ import annotations

import pytest
from planning import network

from monet_like.ir.schedule import Schedule
from monet_like.ir.simulate import simulate
from monet_like.plan import store_all
from monet_like.plan.ilp.incumbent import Incumbent
from monet_like.plan.instance import Instance

PROGRAM, COSTS = network(6)
PLAIN = store_all(PROGRAM)
SLOW = Schedule(PLAIN.forward, ((0,), *PLAIN.again[1:]), PLAIN.ways)  # a useless rerun
STEP_SECONDS = simulate(PROGRAM, PLAIN, COSTS).seconds


def incumbent(
    budget_bytes: int = 10**9, gap: float = 0.1, refused: Schedule | None = None
) -> tuple[Incumbent, list[str]]:
    lines: list[str] = []
    given = Instance(PROGRAM, COSTS)
    return Incumbent(given, budget_bytes, gap, lambda schedule: schedule != refused, lines.append), lines


def test_the_fastest_offer_that_fits_is_kept() -> None:
    found, lines = incumbent()
    assert found.offer(SLOW, "first") and found.offer(PLAIN, "second") and found.offer(SLOW, "third")
    assert not found.offer(None, "nothing")
    assert found.best is not None and found.best.found_by == "second"
    assert [line.partition(":")[0] for line in lines] == ["first", "second"]


def test_schedules_over_the_budget_or_not_allowed_are_not_kept() -> None:
    peak = simulate(PROGRAM, PLAIN, COSTS).peak_bytes
    over, _ = incumbent(peak - 1)
    refusing, _ = incumbent(peak, refused=PLAIN)
    assert not over.offer(PLAIN, "x") and not refusing.offer(PLAIN, "x")
    assert over.best is None and refusing.best is None


def test_gap_closes_by_a_bound_of_the_kind_asked_for() -> None:
    found, lines = incumbent()
    assert not found.closed()
    found.offer(PLAIN, "x")
    found.prove("restricted", 0.95 * STEP_SECONDS)
    assert found.closed() and not found.closed("unrestricted")
    found.say("x")
    assert lines[-1].startswith("x: incumbent") and "gap 5.00 % restricted" in lines[-1]
    found.prove("unrestricted", 0.92 * STEP_SECONDS)
    found.prove("unrestricted", 0.5 * STEP_SECONDS)  # a lower bound does not replace a higher one
    assert found.closed("unrestricted")


@pytest.mark.parametrize(
    ("unrestricted", "restricted", "kind", "status"),
    [
        (0.0, 0.0, "none", "feasible"),
        (0.8, 0.0, "unrestricted", "feasible"),
        (0.8, 0.8004, "unrestricted", "feasible"),  # less than 0.1 % higher
        (0.8, 0.95, "restricted", "optimal"),
        (0.91, 0.95, "unrestricted", "optimal"),  # it closes the gap by itself
        (0.0, 2.0, "restricted", "optimal"),  # no bound is above the plan
    ],
)
def test_plans_name_a_restricted_bound_only_where_it_says_more(
    unrestricted: float, restricted: float, kind: str, status: str
) -> None:
    found, _ = incumbent()
    found.offer(PLAIN, "x")
    found.prove("unrestricted", unrestricted * STEP_SECONDS)
    found.prove("restricted", restricted * STEP_SECONDS)
    plan = found.plan()
    assert (plan.bound_kind, plan.status, plan.found_by) == (kind, status, "x")
    assert plan.bound_seconds <= plan.report.seconds
    assert plan.gap == pytest.approx(1 - plan.bound_seconds / plan.report.seconds)
