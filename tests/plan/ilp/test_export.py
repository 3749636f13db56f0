"""The exported integer program, solved by others: from its files, as PuLP's object and as cvxpy's."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import highspy
import numpy as np
import pulp
import pytest
from planning import network, peak, solve_exactly

from monet_like.errors import InfeasibleError, SolverError, UsageError
from monet_like.ir.program import REFUSED
from monet_like.ir.simulate import simulate
from monet_like.plan import plan, store_all
from monet_like.plan.ilp.columns import Options
from monet_like.plan.ilp.export import Milp, milp
from monet_like.plan.ilp.formulation import Formulation
from monet_like.plan.instance import Instance
from monet_like.solvers.models import CONSTANT

#: The CBC that comes with PuLP.
CBC = pulp.PULP_CBC_CMD.pulp_cbc_path


def small(**options: Any) -> tuple[Milp, float]:
    """A program with reruns and two ways for most slots, and the seconds of its best schedule by the planner."""
    program, costs = network(7)
    budget = int(peak(program, costs) * 0.62)
    return milp(program, costs, budget, **options), planned_seconds()


@cache
def planned_seconds() -> float:
    program, costs = network(7)
    best = plan(program, costs, int(peak(program, costs) * 0.62), solver="HIGHS", time_limit_seconds=20, gap=1e-6)
    assert best.status == "optimal"
    assert best.schedule.rerun_count  # not plain PyTorch's schedule
    return best.report.seconds


def by_highs(path: Path) -> dict[str, float]:
    solver: Any = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("mip_rel_gap", 0.0)
    assert solver.readModel(str(path)) == highspy.HighsStatus.kOk
    solver.run()
    model, values = solver.getLp(), solver.getSolution().col_value
    return dict(zip(model.col_names_, values, strict=True))


def check(whole: Milp, solved: Any, seconds: float) -> None:
    formulation = whole._formulation
    assert whole.seconds(solved) == pytest.approx(seconds, rel=1e-6)
    report = formulation.instance.simulate(whole.schedule(solved))
    assert report.peak_bytes <= formulation.budget
    assert report.seconds == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("ending", ["mps", "lp"])
def test_another_solver_finds_the_planners_optimum_in_the_written_file(ending: str, tmp_path: Path) -> None:
    whole, seconds = small()
    path = tmp_path / f"step.{ending}"
    whole.write(path)
    values = by_highs(path)
    check(whole, values, seconds)
    assert values[CONSTANT] == 1.0
    assert set(whole.columns) <= set(values)


def test_pulps_object_is_solved_from_the_start(capfd: pytest.CaptureFixture[str]) -> None:
    whole, seconds = small()
    problem = whole.to_pulp()
    assert problem.solve(pulp.COIN_CMD(path=CBC, msg=False, gapRel=0.0)) == pulp.LpStatusOptimal
    check(whole, problem, seconds)
    assert pulp.value(problem.objective) * whole.matrix.seconds_per_unit == pytest.approx(seconds)
    started, _ = small(start=whole.schedule(problem))
    assert started.seconds(started.start) == pytest.approx(seconds)
    problem = started.to_pulp()
    capfd.readouterr()
    problem.solve(pulp.COIN_CMD(path=CBC, msg=True, gapRel=0.0, warmStart=True))
    assert "MIPStart provided solution with cost" in capfd.readouterr().out
    check(started, problem, seconds)


def test_cvxpys_object_is_solved_by_highs() -> None:
    whole, seconds = small()
    problem = whole.to_cvxpy()
    with pytest.raises(SolverError, match="solve the problem first"):
        whole.schedule(problem)
    problem.solve(solver="HIGHS", mip_rel_gap=0.0)
    check(whole, problem, seconds)
    assert problem.value * whole.matrix.seconds_per_unit == pytest.approx(seconds)


def test_names_say_what_is_decided(tmp_path: Path) -> None:
    whole, _ = small()
    assert len(set(whole.columns)) == len(whole.columns)
    assert {"rerun.f3.4", "way.b3.other", "keep.v2.0"} <= set(whole.columns)
    kinds = {name.partition(".")[0] for name in whole.columns}
    assert kinds <= {"run", "rerun", "way", "keep", "alive"}
    assert {"memory.b6", "memory.f2.1"} <= set(whole.rows)
    whole.to_lp(tmp_path / "step.lp")
    assert "way.b3 + way.b3.other = 1" in (tmp_path / "step.lp").read_text()
    assert repr(whole).startswith(f"Milp({len(whole.columns)} columns, ")


def test_names_of_equal_or_foreign_letters_are_told_apart(tmp_path: Path) -> None:
    program, costs = network(4)
    values = tuple(replace(value, name=f"größe -> {'long' * 60}") for value in program.values)
    budget = int(peak(program, costs) * 0.8)
    whole = milp(replace(program, values=values), costs, budget)
    assert len(set(whole.columns)) == len(whole.columns)
    whole.write(tmp_path / "step.lp")
    found = by_highs(tmp_path / "step.lp")
    assert whole.seconds(found) == pytest.approx(simulate(program, whole.schedule(found), costs).seconds)


def test_without_most_memory_rows_it_is_a_relaxation() -> None:
    whole, seconds = small()
    relaxed, _ = small(complete=False)
    assert len(relaxed.rows) < len(whole.rows)
    assert "without most memory rows" in repr(relaxed)
    problem = relaxed.to_pulp()
    problem.solve(pulp.COIN_CMD(path=CBC, msg=False, gapRel=0.0))
    assert relaxed.seconds(problem) <= seconds + 1e-9


def test_refused_tasks_are_left_out_and_schedules_name_the_whole_programs() -> None:
    program, costs = network(7)
    budget = int(peak(program, costs) * 0.62)
    refused = costs | {program.slots[3][0].cost: REFUSED}
    whole = milp(program, refused, budget)
    assert f"way.{program.slots[3][0].name}" not in whole.columns
    problem = whole.to_pulp()
    problem.solve(pulp.COIN_CMD(path=CBC, msg=False, gapRel=0.0))
    schedule = whole.schedule(problem)
    assert schedule.ways[3] == 1
    assert simulate(program, schedule, refused).peak_bytes <= budget


def test_wrong_use_is_refused_in_words(tmp_path: Path) -> None:
    whole, _ = small()
    with pytest.raises(
        UsageError, match=r"cannot tell the format of .*step\.txt: give a file name that ends in \.mps or \.lp"
    ):
        whole.write(tmp_path / "step.txt")
    with pytest.raises(UsageError, match=r"cannot write .*No such file"):
        whole.write(tmp_path / "nowhere" / "step.mps")
    with pytest.raises(SolverError, match="solve the problem first"):
        whole.schedule(whole.to_pulp())
    with pytest.raises(SolverError, match="solve the problem first"):
        whole.schedule({"another": 1.0})
    with pytest.raises(SolverError, match="break a row by 1"):
        whole.schedule(np.zeros(len(whole.columns)))
    program, costs = network(4)
    with pytest.raises(UsageError, match="budget_bytes"):
        milp(program, costs, 0)
    with pytest.raises(InfeasibleError, match=r"no schedule fits into .* \(proven\)"):
        milp(program, costs, 10)


def test_plain_pytorchs_schedule_is_a_start() -> None:
    program, costs = network(4)
    start = store_all(program)
    whole = milp(program, costs, peak(program, costs), start=start, options=Options(reading_only=True))
    assert whole.schedule(whole.start) == start
    formulation = Formulation(Instance(program, costs), peak(program, costs))
    found = solve_exactly(formulation)
    assert found is not None
    assert found[1] <= whole.seconds(whole.start) + 1e-9
