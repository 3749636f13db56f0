"""Backward slots that take over the storage of a forward value: the simulator's rule, and all planners under it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from monet_like.errors import InfeasibleError, ScheduleError
from monet_like.ir.program import Cost, Program, Task, Value
from monet_like.ir.schedule import Schedule
from monet_like.ir.simulate import simulate
from monet_like.plan import plan
from monet_like.plan.ilp.formulation import Formulation
from monet_like.plan.instance import Instance
from monet_like.plan.local_search.searcher import Searcher

X, H, Y, GY, GH, GX = range(6)
COSTS = {"t": Cost(1.0)}


def program(*, read_later: bool = False) -> Program:
    """x -> h -> y. The gradient of h is made from h, in its storage or not.

    Args:
        read_later: the gradient of x reads h, too.
    """
    sizes = {"x": 10, "h": 100, "y": 10, "gy": 10, "gh": 100, "gx": 10}
    kinds = ("input", "forward", "forward", "backward", "backward", "backward")
    values = tuple(Value(name, size, kind) for (name, size), kind in zip(sizes.items(), kinds, strict=True))  # type: ignore[arg-type]
    way = Task("gh", (H, GY), (GH,), "t")
    found = Program(
        values,
        (Task("h", (X,), (H,), "t"), Task("y", (H,), (Y,), "t")),
        (
            (way, replace(way, name="gh.over_h", overwrites=H)),
            (Task("gx", (X, GH, H) if read_later else (X, GH), (GX,), "t"),),
        ),
        (Y,), (GY,), (GX,),
    )  # fmt: skip
    found.check()
    return found


def test_the_storage_counts_once_and_is_gone_afterwards() -> None:
    kept = Schedule((0, 1), ((), ()), (0, 0))
    taken = Schedule((0, 1), ((), ()), (1, 0))
    # x, h, y, the incoming gradient and gh
    assert simulate(program(), kept, COSTS).peak_bytes == 10 + 100 + 10 + 10 + 100
    assert simulate(program(), taken, COSTS).peak_bytes == 10 + 100 + 10 + 10
    assert simulate(program(read_later=True), kept, COSTS).peak_bytes == 10 + 100 + 10 + 100 + 10
    with pytest.raises(ScheduleError, match=r"gx reads h in backward slot 1, after gh\.over_h took over its storage"):
        simulate(program(read_later=True), taken, COSTS)


@pytest.mark.parametrize("strategy", ["milp", "heuristic"])
def test_planners_take_over_what_no_later_slot_can_use(strategy: str) -> None:
    found = plan(program(), COSTS, 130, strategy=strategy)
    assert (found.report.peak_bytes, found.schedule.ways) == (130, (1, 0))
    with pytest.raises(InfeasibleError):
        plan(program(), COSTS, 129, strategy=strategy)
    found = plan(program(read_later=True), COSTS, 230, strategy=strategy)
    assert (found.report.peak_bytes, found.schedule.ways) == (230, (0, 0))


def test_neither_formulation_nor_tables_have_a_way_over_a_value_that_is_used_later() -> None:
    for later, possible in ((False, [1]), (True, [0])):
        made = program(read_later=later)
        ways = Formulation(Instance(made, COSTS), 1000).w[1]
        assert [*ways] == possible
        searcher = Searcher(Instance(made, COSTS))
        tables = searcher.tables
        assert [way.way for option in tables.options[0] for way in tables.ways[option]] == possible
        policy = tables.policy([True] * 6, hold=False, smallest=False)
        judged = searcher.judge(policy, 1000)
        assert judged is not None and judged.judgement.peak_bytes == (230 if later else 130)
