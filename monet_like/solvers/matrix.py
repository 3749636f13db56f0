"""A 0/1 program as one sparse matrix (`MatrixProgram`), and the `Builder` that collects its columns and rows.

Rows are written with expressions (`Expr`): a constant plus columns with coefficients. A decision that is certain (a
task that must run, a slot with one way) is then the constant 1 instead of a column, without special cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Expr:
    """``const + sum(coefficient * column)``."""

    const: float = 0.0
    terms: tuple[tuple[int, float], ...] = ()

    def __add__(self, other: Expr) -> Expr:
        if not other.terms and not other.const:
            return self
        if not self.terms and not self.const:
            return other
        merged = dict(self.terms)
        for column, coefficient in other.terms:
            merged[column] = merged.get(column, 0.0) + coefficient
        return Expr(self.const + other.const, tuple(merged.items()))

    def __mul__(self, factor: float) -> Expr:
        return Expr(self.const * factor, tuple((column, c * factor) for column, c in self.terms))

    @property
    def is_zero(self) -> bool:
        """Whether the expression is the constant 0."""
        return not self.terms and not self.const

    def value(self, x: Sequence[float] | NDArray[Any]) -> float:
        """The expression at a point."""
        return self.const + sum(c * float(x[column]) for column, c in self.terms)


ZERO = Expr()
ONE = Expr(1.0)


def total(parts: Iterable[Expr]) -> Expr:
    """The sum of many expressions."""
    const = 0.0
    merged: dict[int, float] = {}
    for part in parts:
        const += part.const
        for column, coefficient in part.terms:
            merged[column] = merged.get(column, 0.0) + coefficient
    return Expr(const, tuple(merged.items()))


@dataclass(frozen=True)
class MatrixProgram:
    """``min offset + cost @ x`` over ``lower <= matrix @ x <= upper`` and ``0 <= x <= 1``.

    Attributes:
        matrix: scipy.sparse CSR, one row per constraint.
        lower, upper: bounds of the rows; -inf or inf where there is none.
        cost: objective coefficients, in units of ``seconds_per_unit``.
        integral: which columns must be 0 or 1; the others follow from them.
        offset: the objective's constant, in the same units.
        seconds_per_unit: what an objective of 1 means.
        contradiction: a row without columns that cannot hold; the program is infeasible.
    """

    matrix: Any
    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    cost: NDArray[np.float64]
    integral: NDArray[np.bool_]
    offset: float
    seconds_per_unit: float
    contradiction: bool = False

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.matrix.shape[0])

    @property
    def columns(self) -> int:
        """Number of columns."""
        return int(self.matrix.shape[1])

    def violation(self, x: NDArray[np.float64]) -> float:
        """The largest violation of a row or a column bound at ``x``; 0 if there is none."""
        import numpy as np

        activity = self.matrix @ x
        worst = np.concatenate([self.lower - activity, activity - self.upper, -x, x - 1.0, np.zeros(1)])
        return float(worst.max())

    def fixed(self, free: NDArray[np.bool_], x: NDArray[np.float64]) -> MatrixProgram:
        """The program in the ``free`` columns alone, the others being fixed at their values in ``x``."""
        import numpy as np

        given = np.where(free, 0.0, x)
        activity = self.matrix @ given
        return MatrixProgram(
            matrix=self.matrix[:, free].tocsr(),
            lower=self.lower - activity,
            upper=self.upper - activity,
            cost=self.cost[free],
            integral=self.integral[free],
            offset=self.offset + float(self.cost @ given),
            seconds_per_unit=self.seconds_per_unit,
            contradiction=self.contradiction,
        )


@dataclass
class Builder:
    """Collects columns and rows."""

    cost: list[float] = field(default_factory=list)
    integral: list[bool] = field(default_factory=list)
    follows: list[tuple[int, tuple[Expr, ...]]] = field(default_factory=list)
    offset: float = 0.0
    contradiction: bool = False
    _starts: list[int] = field(default_factory=lambda: [0])
    _columns: list[int] = field(default_factory=list)
    _values: list[float] = field(default_factory=list)
    _lower: list[float] = field(default_factory=list)
    _upper: list[float] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Number of rows so far."""
        return len(self._upper)

    @property
    def columns(self) -> int:
        """Number of columns so far."""
        return len(self.cost)

    def column(self, cost: float = 0.0, integral: bool = True) -> Expr:
        """A new column between 0 and 1."""
        self.cost.append(cost)
        self.integral.append(integral)
        return Expr(0.0, ((len(self.cost) - 1, 1.0),))

    def at_most(self, left: Expr, right: Expr = ZERO) -> None:
        """The row ``left <= right``; left out if it always holds."""
        self._row(left + right * -1.0, equal=False)

    def equal(self, left: Expr, right: Expr) -> None:
        """The row ``left == right``."""
        self._row(left + right * -1.0, equal=True)

    def _row(self, expr: Expr, equal: bool) -> None:
        terms = [(column, c) for column, c in expr.terms if c]
        if not terms:
            self.contradiction |= expr.const > 1e-9 or (equal and expr.const < -1e-9)
            return
        if not equal and expr.const + sum(c for _, c in terms if c > 0) <= 0:
            return
        for column, c in terms:
            self._columns.append(column)
            self._values.append(c)
        self._starts.append(len(self._columns))
        self._upper.append(-expr.const)
        self._lower.append(-expr.const if equal else float("-inf"))

    def fits(self, parts: Iterable[Expr], budget_bytes: int) -> None:
        """The row "the sum of these bytes is at most the budget", in units of an 8192nd of the budget.

        With half a byte to spare: bytes are whole, so nothing more is let in.
        """
        unit = max(1.0, budget_bytes / 2**13)
        self.at_most(total(parts) * (1 / unit), Expr((budget_bytes + 0.5) / unit))

    def highest(self, parts: Iterable[Expr]) -> Expr:
        """An upper bound of 0/1 expressions: a new column that follows from them, or the only one of them."""
        some = tuple(dict.fromkeys(part for part in parts if not part.is_zero))
        if not some:
            return ZERO
        if any(not part.terms and part.const >= 1 for part in some):
            return ONE
        if len(some) == 1:
            return some[0]
        result = self.column(integral=False)
        for part in some:
            self.at_most(part, result)
        self.follows.append((result.terms[0][0], some))
        return result

    def finish(self, seconds_per_unit: float) -> MatrixProgram:
        """The matrix form of what has been collected so far. More may be added and finished again."""
        import numpy as np
        import scipy.sparse as sp

        shape = (len(self._upper), len(self.cost))
        data = (np.array(self._values), np.array(self._columns, dtype=np.int32), np.array(self._starts, dtype=np.int32))
        return MatrixProgram(
            matrix=sp.csr_matrix(data, shape=shape),
            lower=np.array(self._lower),
            upper=np.array(self._upper),
            cost=np.array(self.cost, dtype=float),
            integral=np.array(self.integral, dtype=bool),
            offset=self.offset,
            seconds_per_unit=seconds_per_unit,
            contradiction=self.contradiction,
        )
