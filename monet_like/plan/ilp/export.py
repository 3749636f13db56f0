"""The integer program behind a plan, to write to a file, to look at, or to solve by other means.

    program, costs, budget_bytes = ...
    whole = milp(program, costs, budget_bytes)
    whole.write("step.mps")                       # or step.lp
    problem = whole.to_pulp()                     # or to_cvxpy()
    problem.solve()
    schedule = whole.schedule(problem)

Its mathematics stands in formulation.py. The columns have these names, with the names of tasks and values as in the
program. Slots t of the backward count from 1, groups g of alternative tasks from 0:

    run.TASK              the forward runs the task
    rerun.TASK.t          the task runs again before slot t
    way.WAY               the backward takes this way of its slot
    keep.VALUE.t          the value is kept after slot t (0: after the forward)
    alive.VALUE.t         the value takes memory at slot t (between 0 and 1: it follows from the others)
    alive.VALUE.t.g       the value takes memory before slot t from the tasks of group g on (likewise)
    constant              1; its cost is what runs in every schedule
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import InfeasibleError, SolverError, UsageError
from ...ir.program import REFUSED, Cost, Program
from ...ir.schedule import Schedule
from ...ir.units import MOST_BYTES, format_bytes
from ...solvers.matrix import Expr, MatrixProgram
from ...solvers.models import cvxpy_problem, pulp_problem
from ..instance import Instance
from ..subprogram import Subprogram, has_overlap, without_refused
from .columns import Options
from .decode import decode
from .formulation import Formulation

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: PuLP writes no LP file with longer names than 100 characters; some are left for numbers that tell names apart.
MOST_CHARACTERS = 90


@dataclass(frozen=True)
class Milp:
    """The integer program of one training step and memory budget: the fastest schedule that fits is its optimum.

    Attributes:
        matrix: the program in matrix form. Its objective counts in units of ``matrix.seconds_per_unit``, about a
            thousandth of the step, so that solvers' tolerances mean the same for every model.
        columns, rows: names of the columns and rows; see the head of this module.
        start: the point of the schedule to start from, or None.
        complete: whether it has all memory rows; without some it is a relaxation.
    """

    matrix: MatrixProgram = field(repr=False)
    columns: tuple[str, ...] = field(repr=False)
    rows: tuple[str, ...] = field(repr=False)
    start: NDArray[Any] | None = field(repr=False)
    complete: bool
    _formulation: Formulation = field(repr=False)
    _part: Subprogram | None = field(repr=False)

    def __repr__(self) -> str:
        budget = format_bytes(self._formulation.budget)
        relaxed = "" if self.complete else ", without most memory rows of reruns"
        return f"Milp({len(self.columns)} columns, {len(self.rows)} rows, budget {budget}{relaxed})"

    def write(self, path: str | Path) -> None:
        """Write the program to a file, as MPS or LP by the name's ending: ``.mps`` or ``.lp``.

        Raises:
            UsageError: another ending, or the file cannot be written.
        """
        ending = Path(path).suffix.lower()
        if ending not in (".mps", ".lp"):
            raise UsageError(f"cannot tell the format of {path}: give a file name that ends in .mps or .lp")
        (self.to_mps if ending == ".mps" else self.to_lp)(path)

    def to_mps(self, path: str | Path) -> None:
        """Write the program in free MPS format."""
        self._write("writeMPS", path)

    def to_lp(self, path: str | Path) -> None:
        """Write the program in CPLEX's LP format, which people can read."""
        self._write("writeLP", path)

    def _write(self, method: str, path: str | Path) -> None:
        try:
            getattr(self.to_pulp(), method)(str(path))
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error

    def to_pulp(self) -> Any:
        """The program as a `pulp.LpProblem`; with ``start``, its variables have these values (``warmStart=True``)."""
        return pulp_problem(self.matrix, self.columns, self.rows, start=self.start)

    def to_cvxpy(self) -> Any:
        """The program as a `cvxpy.Problem` of vectors.

        Its variable ``decisions`` holds the columns that are 0 or 1, in their order, and ``following`` the others.
        """
        return cvxpy_problem(self.matrix)[0]

    def seconds(self, solved: Any) -> float:
        """The objective of a solution in seconds of a training step; ``solved`` as for `schedule`."""
        x = self._point(solved)
        return float(self.matrix.cost @ x + self.matrix.offset) * self.matrix.seconds_per_unit

    def schedule(self, solved: Any) -> Schedule:
        """The schedule of a solution, without useless runs.

        Args:
            solved: a `pulp.LpProblem` or `cvxpy.Problem` of this program after its ``solve``, the values by the
                columns' names, or the values in the columns' order.

        Raises:
            SolverError: it has no values, or they are no solution of this program.
        """
        x = self._point(solved)
        if (worst := self.matrix.violation(x)) > 1e-4:
            raise SolverError(f"these values are no solution of the integer program: they break a row by {worst:.3g}")
        schedule = decode(self._formulation, x)
        return self._part.whole(schedule) if self._part is not None else schedule

    def _point(self, solved: Any) -> NDArray[Any]:
        """The values of the columns; those that must be 0 or 1 are rounded."""
        import numpy as np

        if hasattr(solved, "variablesDict"):  # PuLP's; it leaves out columns without coefficients
            solved = {name: variable.varValue for name, variable in solved.variablesDict().items()}
        elif hasattr(solved, "variables"):  # cvxpy's
            parts = {variable.name(): variable.value for variable in solved.variables()}
            integral = self.matrix.integral
            solved = np.full(len(self.columns), np.nan)
            for name, place in (("decisions", integral), ("following", ~integral)):
                if parts.get(name) is not None:
                    solved[place] = parts[name]
        if isinstance(solved, Mapping):
            known = not solved.keys().isdisjoint(self.columns)
            solved = [solved.get(name, 0.0) if known else None for name in self.columns]
        x = np.array(solved, dtype=float)  # None becomes NaN
        if x.shape != (len(self.columns),) or np.isnan(x).any():
            raise SolverError(f"there are no values for the {len(self.columns)} columns: solve the problem first")
        return np.where(self.matrix.integral, np.round(x), np.clip(x, 0.0, 1.0))


def milp(
    program: Program,
    costs: Mapping[str, Cost],
    budget_bytes: int,
    *,
    extra_bytes: int = 0,
    options: Options | None = None,
    complete: bool = True,
    start: Schedule | None = None,
) -> Milp:
    """The integer program whose optimum is the fastest schedule within the budget.

    Args:
        program, costs, budget_bytes, extra_bytes: as of `monet_like.plan.plan`.
        options: restrictions, which make the program smaller; by default its optimum is the best of all schedules.
        complete: whether to write all memory rows. The planner leaves out most of those of reruns, and adds them where
            a solution breaks them. With all of them large models have millions of coefficients.
        start: a schedule that the program admits, whatever the options say, and whose point is its ``start``.

    Raises:
        UsageError: the budget is out of range, or the program has copies on the host that overlap with computing, which
            are planned by several programs.
        InfeasibleError: no schedule fits, as is seen while the rows are written.
        ProfileError: ``costs`` lacks a task.
    """
    if not 0 < budget_bytes <= MOST_BYTES:
        raise UsageError(f"budget_bytes ({budget_bytes:.4g}) must be more than 0 and at most {MOST_BYTES:.4g}")
    if has_overlap(program):
        raise UsageError(
            "copies on the host are planned by several integer programs, none of which is the whole: leave offload out "
            "of the mode"
        )
    part = without_refused(program, costs)
    if part is not None:
        program, start = part.program, part.part(start) if start is not None else None
        costs = {key: cost for key, cost in costs.items() if cost != REFUSED}
    formulation = Formulation(Instance(program, costs, extra_bytes), budget_bytes, options or Options(), start)
    if complete:
        formulation.add_run_rows(formulation.stages)
    matrix = formulation.matrix()
    if matrix.contradiction:
        raise InfeasibleError(f"no schedule fits into {format_bytes(budget_bytes)} (proven); give more memory")
    point = formulation.point(start) if start is not None else None
    return Milp(matrix, column_names(formulation), row_names(formulation), point, complete, formulation, part)


def column_names(formulation: Formulation) -> tuple[str, ...]:
    """The names of a formulation's columns, all different."""
    program = formulation.program
    names: dict[int, str] = {}

    def name(expr: Expr, title: str) -> None:
        if len(expr.terms) == 1:
            names.setdefault(expr.terms[0][0], title)

    for (p, t), expr in formulation.e.items():
        name(expr, f"rerun.{program.tasks[p].name}.{t}" if t else f"run.{program.tasks[p].name}")
    for t, chosen in formulation.w.items():
        for k, expr in chosen.items():
            name(expr, f"way.{program.slots[t - 1][k].name}")
    for (v, t), expr in formulation.K.items():
        name(expr, f"keep.{program.values[v].name}.{t}")
    for column, (v, t, group) in formulation.helper_columns().items():
        place = "" if group == len(formulation.needs.groups) else f".{group}"
        names.setdefault(column, f"alive.{program.values[v].name}.{t}{place}")
    return _legal(names.get(column, f"column.{column}") for column in range(formulation.builder.columns))


def row_names(formulation: Formulation) -> tuple[str, ...]:
    """The names of a formulation's rows, all different: memory rows by slot or task, the others by number."""
    program, names = formulation.program, []
    for row in range(formulation.builder.rows):
        t, group = formulation.memory_rows.get(row, (0, -2))
        if group == -1:
            names.append(f"memory.{program.slots[t - 1][0].name if t else 'forward'}")
        elif group >= 0:
            names.append(f"memory.{program.tasks[formulation.needs.groups[group][0]].name}.{t}")
        else:
            names.append(f"row.{row}")
    return _legal(names)


def _legal(names: Iterable[str]) -> tuple[str, ...]:
    """The names in characters that every file format admits, made different by numbers where they are equal."""
    made: dict[str, None] = {}
    for name in names:
        title = legal = re.sub(r"[^A-Za-z0-9_.]", "_", name)[:MOST_CHARACTERS]
        number = 1
        while title in made:
            number += 1
            title = f"{legal}.{number}"
        made[title] = None
    return tuple(made)
