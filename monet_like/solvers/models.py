"""A `MatrixProgram` as an object of PuLP or of cvxpy, for their solvers and for whoever wants to look at it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .matrix import MatrixProgram

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The column that carries the objective's constant in PuLP's objects. It is fixed at 1: PuLP leaves constants out of
#: files, and CBC's gap is then relative to the whole objective.
CONSTANT = "constant"


def pulp_problem(
    problem: MatrixProgram,
    columns: Sequence[str] | None = None,
    rows: Sequence[str] | None = None,
    *,
    start: NDArray[Any] | None = None,
) -> Any:
    """The program as a `pulp.LpProblem`.

    Args:
        problem: each of its rows is an equality or has an upper bound only.
        columns, rows: names of the columns and rows, all different; default: x and r with numbers.
        start: a point, for solvers that take one (``warmStart=True``).
    """
    import numpy as np
    import pulp

    columns = columns or numbered("x", problem.columns)
    rows = rows or numbered("r", problem.rows)
    result = pulp.LpProblem("plan", pulp.LpMinimize)
    kinds = np.where(problem.integral, pulp.LpInteger, pulp.LpContinuous).tolist()
    variables = [result.add_variable(title, 0, 1, kind) for title, kind in zip(columns, kinds, strict=True)]
    constant = result.add_variable(CONSTANT, 1, 1)
    costs = zip(variables, problem.cost.tolist(), strict=True)
    objective = {variable: cost for variable, cost in costs if cost} | {constant: problem.offset}
    result.setObjective(pulp.LpAffineExpression(objective))
    matrix = problem.matrix.tocsr()
    places, indices, values = matrix.indptr.tolist(), matrix.indices.tolist(), matrix.data.tolist()
    equal, upper = (problem.lower == problem.upper).tolist(), problem.upper.tolist()
    for row, title in enumerate(rows):
        begin, end = places[row], places[row + 1]
        terms = {variables[k]: value for k, value in zip(indices[begin:end], values[begin:end], strict=True)}
        sense = pulp.LpConstraintEQ if equal[row] else pulp.LpConstraintLE
        expression = pulp.LpAffineExpression(terms)
        result.addConstraint(pulp.LpConstraint(expression, sense, title, upper[row]), title)
    if start is not None:
        for variable, value in zip((*variables, constant), (*start.tolist(), 1.0), strict=True):
            variable.setInitialValue(value, check=False)
    return result


def pulp_values(solved: Any, count: int) -> NDArray[Any]:
    """The values of the ``count`` columns of a solved `pulp_problem`, which has been made without names."""
    import numpy as np

    values = {name: variable.varValue for name, variable in solved.variablesDict().items()}
    # PuLP leaves out columns without coefficients.
    return np.array([values.get(name, 0.0) for name in numbered("x", count)])


def numbered(letter: str, count: int) -> tuple[str, ...]:
    """Names for columns or rows."""
    return tuple(f"{letter}{number}" for number in range(count))


def cvxpy_problem(problem: MatrixProgram) -> tuple[Any, list[Any], NDArray[Any]]:
    """The program as a `cvxpy.Problem` in matrix form.

    Args:
        problem: each of its rows is an equality or has an upper bound only.

    Returns:
        The problem, its variables (``decisions``: 0 or 1, ``following``: between them; either may be missing), and for
        their elements, one variable after the other, the numbers of the columns.
    """
    import cvxpy
    import numpy as np

    cp: Any = cvxpy  # its functions carry no types
    integral = problem.integral
    order = np.concatenate([np.flatnonzero(integral), np.flatnonzero(~integral)])
    count = int(integral.sum())
    variables = []
    if count:
        variables.append(cp.Variable(count, integer=True, bounds=[0, 1], name="decisions"))
    if count < len(order):
        variables.append(cp.Variable(len(order) - count, bounds=[0, 1], name="following"))
    x = cp.hstack(variables) if len(variables) > 1 else variables[0]
    matrix, cost = problem.matrix.tocsc()[:, order].tocsr(), problem.cost[order]
    equal = problem.lower == problem.upper
    constraints = [matrix[~equal] @ x <= problem.upper[~equal]] if (~equal).any() else []
    if equal.any():
        constraints.append(matrix[equal] @ x == problem.upper[equal])
    return cp.Problem(cp.Minimize(cost @ x + problem.offset), constraints), variables, order
