"""The rows of `benchmarks.inductor_fronts`, and the table and the words that are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.rows import markdown_table

MB = 10**6
#: The contenders.
COMPILE, ABOVE = "torch.compile", "activation_memory_budget"
OWN = "planned"
#: How near a peak is to its prediction, and what counts as equal of two peaks or two prices.
NEAR, SAME = 0.03, 0.01


@dataclass(frozen=True)
class Row:
    """A contender at one setting.

    Attributes:
        setting: ``0.5 dp``: a share of the saved activations, and the solver. Of ours: ``70%`` of ``torch.compile``'s
            peak, ``at 0.5 dp``: the peak that was measured there, or ``least``.
        status: measured, refused (there is no such plan) or failed; ``reason`` then says why.
        budget_bytes, predicted_bytes: what was asked for, and the planner's peak; 0: none.
        peak_bytes: measured.
        operations: floating-point operations of products, convolutions and attention; 0: not counted.
        priced_seconds: of a step, by one list of prices for all contenders; 0: not priced.
    """

    net: str
    contender: str
    setting: str = ""
    status: str = ""
    reason: str = ""
    budget_bytes: int = 0
    peak_bytes: int = 0
    predicted_bytes: int = 0
    operations: int = 0
    priced_seconds: float = 0.0
    torch: str = str(torch.__version__)

    @property
    def key(self) -> tuple[str, str, str]:
        """What there is one row of."""
        return self.net, self.contender, self.setting

    @property
    def label(self) -> str:
        """Contender and setting."""
        return f"{self.contender} {self.setting}".strip()

    @property
    def told(self) -> str:
        """For people who wait."""
        found = f"{self.peak_bytes / MB:.2f} MB" if self.status == "measured" else f"{self.status}: {self.reason}"
        return f"{self.net}, {self.label}: {found}"


def markdown(rows: Sequence[Row], nets: Mapping[str, str], device: str) -> str:
    """The page: for each net a table of its rows and what holds.

    Args:
        nets: a net's size in words, by name; its rows have this order.
        device: its name.
    """
    parts = [
        "# `python -m benchmarks.inductor_fronts`",
        f"{device}, torch {torch.__version__}, float32. *Peak*: measured in Inductor's own code, fusion included, "
        "without running the insides of its kernels. *Predicted*: the plan's peak against the measured one. "
        "*Arithmetic*: floating-point operations of products, convolutions and attention, against `torch.compile`'s. "
        "*Priced*: the step by one list of prices, of operators that were timed alone and of bytes that generated "
        "kernels move, against `torch.compile`'s. No step was timed. `activation_memory_budget`: a share of saved "
        "activations, and its solver. Planned: a share of `torch.compile`'s peak, or the peak that was measured at a "
        "setting of the former.",
        _run_so_far(rows, nets),
        _summary(rows, nets),
    ]
    for net, what in nets.items():
        mine = [row for row in rows if row.net == net]
        if mine:
            parts += [f"## {net}", f"{what}.", _table(mine), "\n".join(f"* {line}" for line in findings(mine))]
    return "\n\n".join(parts) + "\n"


def _run_so_far(rows: Sequence[Row], nets: Mapping[str, str]) -> str:
    solvers = dict.fromkeys(row.setting.split()[1] for row in rows if row.contender == ABOVE)
    left = [net for net in nets if net not in {row.net for row in rows}]
    return (
        f"Solvers that were run: {', '.join(solvers) or 'none'}. Nets that were not run: {', '.join(left) or 'none'}."
    )


def findings(rows: Sequence[Row]) -> list[str]:
    """What holds of the rows of one net, and what does not, in words."""
    measured = [row for row in rows if row.status == "measured"]
    own = [row for row in measured if row.contender == OWN]
    above = [row for row in measured if row.contender == ABOVE]
    if not own:
        return ["No plan was measured."]
    return [_monotone(own), _predicted(own), _within(own), _front(own, above), _solvers(above)]


def _monotone(own: Sequence[Row]) -> str:
    ordered = sorted(own, key=lambda row: row.budget_bytes)
    wrong = [
        f"{b.label} ({_mb(b.peak_bytes)}) is below {a.label} ({_mb(a.peak_bytes)})"
        for a, b in zip(ordered, ordered[1:], strict=False)
        if b.peak_bytes < a.peak_bytes * (1 - SAME)
    ]
    more = [
        f"{b.label} takes {100 * (b.priced_seconds / a.priced_seconds - 1):.1f} % longer than {a.label}"
        for a, b in zip(ordered, ordered[1:], strict=False)
        if b.priced_seconds > a.priced_seconds * (1 + SAME)
    ]
    return "Planned peaks and priced steps are monotone in the budget." if not wrong + more else (
        f"Not monotone in the budget: {'; '.join(wrong + more)}."
    )  # fmt: skip


def _predicted(own: Sequence[Row]) -> str:
    errors = {row.label: row.predicted_bytes / row.peak_bytes - 1 for row in own}
    worst = max(errors, key=lambda label: abs(errors[label]))
    said = f"the largest error is {100 * errors[worst]:+.1f} % ({worst})"
    return f"Peaks are within {100 * NEAR:g} % of the prediction: {said}." if abs(errors[worst]) <= NEAR else (
        f"Not all peaks are within {100 * NEAR:g} % of the prediction: {said}."
    )  # fmt: skip


def _within(own: Sequence[Row]) -> str:
    over = [
        f"{row.label} by {100 * (row.peak_bytes / row.budget_bytes - 1):.1f} %"
        for row in own
        if row.peak_bytes > row.budget_bytes
    ]
    return "No peak is above its budget." if not over else f"Above the budget: {', '.join(over)}."


def _front(own: Sequence[Row], above: Sequence[Row]) -> str:
    behind = []
    for other in above:
        fitting = [row for row in own if row.peak_bytes <= other.peak_bytes * (1 + SAME)]
        best = min(fitting, key=lambda row: row.priced_seconds, default=None)
        if best is None:
            least = min(row.peak_bytes for row in own)
            behind.append(f"{other.label} needs {_mb(other.peak_bytes)}, the least plan {_mb(least)}")
        elif best.priced_seconds > other.priced_seconds * (1 + SAME):
            less = 100 * (1 - other.priced_seconds / best.priced_seconds)
            behind.append(f"{other.label} ({_mb(other.peak_bytes)}) takes {less:.1f} % less time than {best.label}")
    if not above:
        return "No other contender was measured."
    return (
        f"On or below `activation_memory_budget` at all of its settings that were measured ({len(above)})."
        if not behind
        else f"Above the front: {'; '.join(behind)}."
    )


def _solvers(above: Sequence[Row]) -> str:
    wrong = []
    if len(above) == len({row.setting.split()[1] for row in above}):
        return "Whether `activation_memory_budget` is monotone was not looked at: one budget of a solver was measured."
    for solver in dict.fromkeys(row.setting.split()[1] for row in above):
        mine = sorted(
            (row for row in above if row.setting.endswith(solver)), key=lambda row: float(row.setting.split()[0])
        )
        pairs = [(a, b) for a, b in zip(mine, mine[1:], strict=False) if a.peak_bytes > b.peak_bytes * (1 + SAME)]
        wrong += [
            f"{solver}: {_mb(a.peak_bytes)} at {a.setting.split()[0]}, {_mb(b.peak_bytes)} at {b.setting.split()[0]}"
            for a, b in pairs
        ]
    return (
        f"`activation_memory_budget` is not monotone: {'; '.join(wrong)}."
        if wrong
        else "`activation_memory_budget` is monotone here."
    )


def _summary(rows: Sequence[Row], nets: Mapping[str, str]) -> str:
    """A line for each net."""
    lines = []
    for net in nets:
        found = [row for row in rows if row.net == net and row.status == "measured"]
        own = [row for row in found if row.contender == OWN]
        plain = next((row for row in found if row.contender == COMPILE), None)
        if plain is None or not own:
            continue
        others = [row.peak_bytes for row in found if row.contender == ABOVE]
        error = max((abs(row.predicted_bytes / row.peak_bytes - 1) for row in own), default=0.0)
        least, planned = _mb(min(others)) if others else "-", _mb(min(row.peak_bytes for row in own))
        lines.append((net, _mb(plain.peak_bytes), least, planned, f"{100 * error:.1f} %"))
    heads = ("net", "torch.compile", "least measured, its budget", "least, planned", "largest error")
    return markdown_table(heads, lines)


def _table(rows: Sequence[Row]) -> str:
    plain = next((row for row in rows if row.contender == COMPILE and row.operations), None)
    lines = []
    order = {COMPILE: 0, ABOVE: 1, OWN: 2}
    for row in sorted(rows, key=lambda r: (order[r.contender], -r.peak_bytes)):
        peak, predicted, arithmetic, priced = f"{row.status}: {row.reason.split(';')[0]}", "-", "-", "-"
        if row.status == "measured":
            peak = _mb(row.peak_bytes)
            predicted = _off(row.predicted_bytes, row.peak_bytes) if row.predicted_bytes else "-"
        if plain is not None and row.operations:
            arithmetic = _off(row.operations, plain.operations)
            priced = _off(row.priced_seconds, plain.priced_seconds)
        lines.append((row.label, peak, predicted, arithmetic, priced))
    return markdown_table(("", "peak", "predicted", "arithmetic", "priced"), lines)


def _off(one: float, other: float) -> str:
    """By how much the one is more than the other."""
    return f"{100 * (one / other - 1):+.1f} %"


def _mb(count: int) -> str:
    return f"{count / MB:,.2f} MB"
