"""OGC's table (Feng and Huang, CVPR 2021) and ours: python -m benchmarks.ogc [--arch resnet101,darts]

The 18 nets at OGC's batches, planned and simulated with the rates of an RTX 2080 Ti; nothing is run. Rows are kept in
benchmarks/results/ogc.json, and those that are asked for are made anew; benchmarks/results/ogc.md is written from all.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch

from monet_like.cli.benchmark import ARCHS, accumulating, find_arch, weight_bytes
from monet_like.cli.problem import read_problem
from monet_like.compiler.pipeline import plan_for, prepare
from monet_like.compiler.prepared import Prepared
from monet_like.errors import InfeasibleError, SolverError
from monet_like.files import write_atomically
from monet_like.ir.defaults import MODE
from monet_like.ir.json_fields import read_as
from monet_like.ir.units import MIB
from monet_like.plan import Plan
from monet_like.plan.budgets import smallest_budget
from monet_like.plan.strategies.checkpointing import NO_LIMIT
from monet_like.profile.devices import DEVICES

CPU = torch.device("cpu")
LIMITS = DEVICES["rtx2080ti"]
ROWS = Path(__file__).parent / "results" / "ogc.json"
TABLE = ROWS.with_suffix(".md")
#: Goals: of OGC's overhead in time, and seconds of planning.
SHARE_OF_OVERHEAD, MOST_SECONDS = 1 / 3, 60.0


@dataclass(frozen=True)
class Published:
    """A row of the table in OGC's README: MB (2**20 bytes) and seconds of plain PyTorch and of OGC."""

    plain_mb: int
    ogc_mb: int
    plain_seconds: float
    ogc_seconds: float

    @property
    def share(self) -> float:
        """OGC's memory in units of plain PyTorch's."""
        return self.ogc_mb / self.plain_mb

    @property
    def overhead(self) -> float:
        """OGC's further time in units of plain PyTorch's."""
        return self.ogc_seconds / self.plain_seconds - 1


PUBLISHED: Mapping[str, Published] = {
    "alexnet": Published(4955, 3287, 0.388, 0.519),
    "vgg11": Published(3577, 2781, 0.266, 0.356),
    "vgg13": Published(5136, 3565, 0.418, 0.558),
    "vgg16": Published(5136, 3565, 0.503, 0.666),
    "vgg19": Published(5189, 3565, 0.581, 0.774),
    "resnet18": Published(5635, 3677, 0.422, 0.548),
    "resnet34": Published(4079, 1838, 0.364, 0.493),
    "resnet50": Published(5323, 1973, 0.394, 0.516),
    "resnet101": Published(3934, 1024, 0.356, 0.482),
    "resnet152": Published(2767, 526, 0.241, 0.331),
    "densenet121": Published(4027, 898, 0.218, 0.292),
    "densenet161": Published(3751, 666, 0.252, 0.341),
    "densenet169": Published(4862, 897, 0.270, 0.357),
    "densenet201": Published(3146, 474, 0.200, 0.306),
    "inception_v3": Published(3074, 881, 0.291, 0.374),
    "nasnet": Published(5832, 1129, 0.408, 0.535),
    "amoebanet": Published(4944, 1058, 0.331, 0.450),
    "darts": Published(5627, 1115, 0.318, 0.494),
}


@dataclass(frozen=True)
class Planned:
    """A schedule: memory without stationary memory, seconds of the step, and what planning took.

    Attributes:
        gap: from a bound for all schedules; None where none was sought or proven.
        wall, cpu: seconds of planning, of all its processes.
    """

    bytes: int
    seconds: float
    wall: float
    cpu: float
    gap: float | None = None

    @property
    def at_most(self) -> float:
        """Seconds that planning takes at most on an idle machine."""
        return min(self.wall, self.cpu)


@dataclass(frozen=True)
class Row:
    """What was found for a net; ``milp`` is None where no plan within ``budget_bytes`` was found."""

    plain_bytes: int
    plain_seconds: float
    budget_bytes: int
    capture_seconds: float
    ogc: Planned
    milp: Planned | None
    smallest: Planned


def clocked(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """A result, and wall and CPU seconds, those of worker processes included."""
    wall, before = time.monotonic(), os.times()
    result = work()
    after = os.times()
    return result, {"wall": time.monotonic() - wall, "cpu": sum(after[:4]) - sum(before[:4])}


def measure(name: str, seconds: float, smallest_seconds: float) -> Row:
    """Plan a net in three ways; memory is without stationary memory throughout."""
    arch, published = find_arch(name), PUBLISHED[name]
    problem = read_problem(
        model=arch.model, batch=str(arch.batch), budget="1", mode=MODE, solver="HIGHS", device="cpu", dtype="float32", input_shape=f"3,{arch.size},{arch.size}", time_limit=seconds,
    )  # fmt: skip
    ready: Prepared
    request = replace(problem.request, made_last=())  # gradients exist before the step as well as after it
    ready, captured = clocked(lambda: accumulating(prepare(request, CPU, profile=LIMITS)))
    weights = weight_bytes(ready)
    plain = ready.plain.peak_bytes - weights

    def planned(found: Plan, spent: dict[str, float]) -> Planned:
        proven = found.gap if found.bound_kind == "unrestricted" else None
        return Planned(found.report.peak_bytes - weights, found.report.seconds, **spent, gap=proven)

    ogc = planned(*clocked(lambda: plan_for(ready, problem.request, NO_LIMIT, strategy="ogc")))
    budget = int(min(published.ogc_mb * MIB, published.share * plain, ogc.bytes))
    try:
        milp = planned(*clocked(lambda: plan_for(ready, problem.request, weights + budget)))
    except (InfeasibleError, SolverError):
        milp = None
    least, spent = clocked(
        lambda: smallest_budget(ready.captured.program, ready.costs, time_limit_seconds=smallest_seconds)
    )
    smallest = Planned(least.report.peak_bytes - weights, least.report.seconds, **spent)
    return Row(plain, ready.plain.seconds, budget, captured["wall"], ogc, milp, smallest)


INTRODUCTION = f"""# OGC's 18 nets: `python -m benchmarks.ogc`

OGC's columns are of its README, measured on a GPU that it does not name. Ours are the simulator's, with the rates of
an RTX 2080 Ti, the one GPU that its README mentions ({LIMITS.source}),
all operator variants, HiGHS on one thread. MB are 2^20 bytes.

How memory is compared. OGC subtracts from the peak what exists before and after a step: weights, buffers and the
gradients of weights, which a first step has made; the input stays in, and there is no optimizer. Ours is counted in the
same way: every gradient exists before the step, a new one lives until it is added, and weights, buffers and those
gradients are subtracted. What remains different: OGC's figures hold workspaces of cuDNN and rounding of the allocator,
ours none, so the two plain columns are not equal (AlexNet and the nets of cells most). Cuts are therefore shares of each
one's own plain column, and the budget of `milp` "at OGC's memory" is the smallest of OGC's MB, OGC's share of our plain
column, and what `ogc` needs here. A cut is as deep as OGC's if it is as deep as both of its cuts.

How time is compared. OGC's seconds are wall time without synchronisation, mean of 70 steps; ours are datasheet rates,
against plain PyTorch's operators at the same rates, fused operators included where a schedule takes them. `ogc` is our
implementation of OGC's planner with plain operators, the last segment not run again.

The nets are torchvision's, with dropout on (OGC switches it off) and auxiliary heads off, as there. torchvision's
DenseNets concatenate all features of a block in every layer, OGC's a layer's input and result: there are fewer
single-entry, single-exit segments in torchvision's, and `ogc` here finds less in them.

Goals: at OGC's memory at most a third of its overhead; a smallest memory (whatever its time) that is cut at least as
deep; each plan in under {MOST_SECONDS:.0f} s. A miss is **bold**. Planning seconds are those of CPU, of all processes, and in brackets
of the clock, on two cores shared with other work (densenet201 and inception_v3: idle ones), where a plan had about a third
of one core; an idle machine takes at
most the smaller of the two.

| net (batch, side) | plain MB: OGC's, ours | OGC: MB (cut), time | `ogc`: MB (cut), time | `milp` at OGC's memory: MB, time, gap | `milp`, smallest: MB (cut), time | planning s: `ogc`, `milp`, smallest |
|---|---|---|---|---|---|---|
"""


def line(name: str, row: Row) -> str:
    """A row of the table."""
    arch, published = ARCHS[name], PUBLISHED[name]

    def memory(planned: Planned) -> str:
        return f"{planned.bytes / MIB:,.0f} ({100 * (1 - planned.bytes / row.plain_bytes):.0f} %)"

    def change(planned: Planned) -> str:
        return f"{100 * (planned.seconds / row.plain_seconds - 1):+.1f} %"

    if row.milp is None:
        milp = f"**no plan** within {row.budget_bytes / MIB:,.0f}"
    else:
        gap = "no bound" if row.milp.gap is None else f"{100 * row.milp.gap:.1f} %"
        milp = f"{row.milp.bytes / MIB:,.0f}, {_bold(change(row.milp), _cheap(name, row))}, {gap}"
    cells = (
        f"{name} ({arch.batch}, {arch.size})",
        f"{published.plain_mb:,}, {row.plain_bytes / MIB:,.0f}",
        f"{published.ogc_mb:,} ({100 * (1 - published.share):.0f} %), {100 * published.overhead:+.0f} %",
        f"{memory(row.ogc)}, {change(row.ogc)}",
        milp,
        f"{_bold(memory(row.smallest), _deep(name, row))}, {change(row.smallest)}",
        ", ".join(_spent(planned) for planned in (row.ogc, row.milp, row.smallest)),
    )
    return f"| {' | '.join(cells)} |"


def _bold(text: str, good: bool) -> str:
    return text if good else f"**{text}**"


def _spent(planned: Planned | None) -> str:
    if planned is None:
        return "-"
    return _bold(f"{planned.cpu:.0f} ({planned.wall:.0f})", planned.at_most < MOST_SECONDS)


def _cheap(name: str, row: Row) -> bool:
    """Whether `milp` at OGC's memory has at most a third of its overhead."""
    limit = 1 + SHARE_OF_OVERHEAD * PUBLISHED[name].overhead
    return row.milp is not None and row.milp.seconds <= limit * row.plain_seconds


def _deep(name: str, row: Row) -> bool:
    """Whether the smallest memory is cut at least as deep as OGC's, published and here."""
    return row.smallest.bytes <= min(PUBLISHED[name].share * row.plain_bytes, row.ogc.bytes)


def render(rows: Mapping[str, Row]) -> str:
    """The document."""
    done = {name: rows[name] for name in ARCHS if name in rows}
    text = INTRODUCTION + "".join(line(name, row) + "\n" for name, row in done.items())

    def sentence(goal: str, good: Callable[[str, Row], bool]) -> str:
        missed = [name for name, row in done.items() if not good(name, row)]
        return f"* {goal}: {len(done) - len(missed)} of {len(done)}" + (
            f"; not {', '.join(missed)}.\n" if missed else ".\n"
        )

    text += "\n" + sentence("At OGC's memory at most a third of its overhead", _cheap)
    text += sentence("Cut at least as deep as OGC's", _deep)
    text += sentence(
        f"Each plan in under {MOST_SECONDS:.0f} s",
        lambda _, row: all(p is None or p.at_most < MOST_SECONDS for p in (row.ogc, row.milp, row.smallest)),
    )
    left = [name for name in ARCHS if name not in done]
    return text + (f"\nNot run: {', '.join(left)}.\n" if left else "")


def load(path: Path) -> dict[str, Row]:
    """The rows that are known."""
    return {name: read_as(row, Row) for name, row in json.loads(path.read_text()).items()} if path.exists() else {}


def write(rows: Mapping[str, Row]) -> None:
    """The rows and the table."""
    write_atomically(ROWS, (json.dumps({name: asdict(row) for name, row in rows.items()}, indent=1) + "\n").encode())
    write_atomically(TABLE, render(rows).encode())


@click.command()
@click.option("--arch", default="", help="Some of the nets, such as resnet101,darts.  [default: those without a row]")
@click.option("--seconds", default=40.0, show_default=True, help="For milp, per plan; it stops within 1 % of a bound.")
@click.option("--smallest", default=20.0, show_default=True, help="Seconds for the smallest memory.")
def main(arch: str, seconds: float, smallest: float) -> None:
    """Make rows and write the table after each; without any to make, write the table."""
    rows = load(ROWS)
    names = arch.split(",") if arch else [name for name in ARCHS if name not in rows]
    for name in names:
        find_arch(name)
    write(rows)
    for name in names:
        rows[name] = measure(name, seconds, smallest)
        write(rows)
        click.echo(line(name, rows[name]))


if __name__ == "__main__":
    main()
