"""Step time against memory: the front of one strategy, and several strategies compared. Tables and pictures of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..compiler.comparison import StrategyPoint
from ..ir.frames import frame
from ..ir.simulate import Report
from ..ir.units import GIB, format_bytes, format_seconds
from ..plan.budgets import FrontPoint, percent_per_tenth
from .lines import Lines, Stars, draw_lines, new_axes

if TYPE_CHECKING:
    import pandas

#: Of the axes of both pictures.
LABELS = "memory budget, GB", "step, predicted seconds"


@dataclass(frozen=True, repr=False)
class Front:
    """The time-memory front of a model: a plan for every budget. Figures are predicted.

    Attributes:
        points: the smallest budget first.
        plain: plain PyTorch's step.
        title: model, batch, mode and device in one line.
    """

    points: tuple[FrontPoint, ...]
    plain: Report
    title: str

    def to_frame(self) -> pandas.DataFrame:
        """One row per budget. Figures are missing where no plan was found, the bound also where nothing is proven.

        ``percent_saved`` is by how much the step gets shorter with 10 % more memory, as far as the next budget says.
        """
        rows: list[tuple[Any, ...]] = []
        for point, saved in zip(self.points, percent_per_tenth(self.points), strict=True):
            plan = point.plan
            if plan is None:
                rows.append((point.budget_bytes, None, None, None, None, None, None))
                continue
            report, bound = plan.report, plan.bound_kind != "none"
            rows.append(
                (
                    point.budget_bytes, report.peak_bytes, report.seconds, plan.bound_seconds if bound else None,
                    plan.gap if bound else None, _overhead(report, self.plain), saved,
                )
            )  # fmt: skip
        columns = {"budget_bytes": "int64", "peak_bytes": "Int64", "seconds": "float64", "bound_seconds": "float64"}
        return frame(columns | {"gap": "float64", "overhead_percent": "float64", "percent_saved": "float64"}, rows)

    @property
    def lines(self) -> Lines:
        """(budget in GB, seconds) of every plan."""
        found = [(p.budget_bytes / GIB, p.plan.report.seconds) for p in self.points if p.plan is not None]
        return {"monet_like": found}

    def plot(self, axes: Any = None) -> Any:
        """Draw the front, and plain PyTorch's step as a star.

        Args:
            axes: matplotlib's to draw into; None: new ones.

        Returns:
            The axes.

        Raises:
            UsageError: matplotlib is not installed.
        """
        return _plotted(axes, self.title, self.lines, self.plain)

    def __repr__(self) -> str:
        planned = [point.plan.report for point in self.points if point.plan is not None]
        least = ""
        if planned:
            first, last = planned[0], planned[-1]
            least = (
                f": predicted peak {format_bytes(first.peak_bytes)} to {format_bytes(last.peak_bytes)}, "
                f"step {format_seconds(first.seconds)} to {format_seconds(last.seconds)}"
            )
        return f"Front({len(planned)} plans at {len(self.points)} budgets{least})"


@dataclass(frozen=True, repr=False)
class Comparison:
    """Strategies at several budgets, judged by one simulator. Figures are predicted.

    Attributes:
        points: by strategy, then by budget.
        plain: plain PyTorch's step.
        title: model, batch, mode and device in one line.
    """

    points: tuple[StrategyPoint, ...]
    plain: Report
    title: str

    @property
    def strategies(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(dict.fromkeys(point.strategy for point in self.points))

    def to_frame(self) -> pandas.DataFrame:
        """One row per strategy and budget; where a strategy found no schedule, ``reason`` says why."""
        rows = [
            (
                point.strategy, point.budget_bytes, point.report.peak_bytes if point.report else None,
                point.report.seconds if point.report else None, round(point.planning_seconds, 2), point.reason,
            )
            for point in self.points
        ]  # fmt: skip
        columns = {"strategy": "object", "budget_bytes": "int64", "peak_bytes": "Int64", "seconds": "float64"}
        return frame(columns | {"planning_seconds": "float64", "reason": "object"}, rows)

    @property
    def lines(self) -> Lines:
        """For every strategy, (budget in GB, seconds) of its schedules."""
        return {
            name: [
                (point.budget_bytes / GIB, point.report.seconds)
                for point in self.points
                if point.strategy == name and point.report
            ]
            for name in self.strategies
        }

    def plot(self, axes: Any = None) -> Any:
        """Draw a line for each strategy; as `Front.plot`."""
        return _plotted(axes, self.title, self.lines, self.plain)

    def __repr__(self) -> str:
        budgets = {point.budget_bytes for point in self.points}
        found = sum(point.report is not None for point in self.points)
        return f"Comparison({len(self.strategies)} strategies at {len(budgets)} budgets: {found} schedules)"


def stars(plain: Report) -> Stars:
    """Plain PyTorch's step as a point of such a picture."""
    return {"plain PyTorch": (plain.peak_bytes / GIB, plain.seconds)}


def _overhead(report: Report, plain: Report) -> float | None:
    """Percent by which a step is longer than plain PyTorch's; None where a profile says that nothing takes time."""
    return 100 * (report.seconds / plain.seconds - 1) if plain.seconds else None


def _plotted(axes: Any, title: str, lines: Lines, plain: Report) -> Any:
    axes = axes or new_axes()
    draw_lines(axes, title, lines, LABELS, stars(plain))
    return axes
