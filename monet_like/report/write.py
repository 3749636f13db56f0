"""Makes the report of a schedule: its figures, and the page with its pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..capture.absent_gpu.attention import attention_as
from ..capture.precision import autocast_as
from ..compiler.comparison import strategy_points
from ..compiler.prepared import Prepared, launches, with_workspaces_of
from ..compiler.request import Request
from ..errors import UsageError
from ..files import write_atomically
from ..ir.schedule_file import ScheduleRecord
from ..plan import STRATEGIES
from ..profile.cublas import multiplies
from ..profile.devices import device_name
from ..replay.verify.steps import real_example
from .charts import Fronts
from .figures import Course, course, plain_course
from .live import live_step
from .page import Figures, charts, page, pictures

#: How much of the time-memory front is drawn.
FRONTS = ("off", "quick", "full")
#: Budgets of the front, in parts of plain PyTorch's peak.
_SHARES = (1.0, 0.75, 0.5, 0.3)
#: What the quick front leaves out, and how little it searches.
_SLOW = ("milp", "checkmate")
_QUICK = {"heuristic": {"evaluations": 5000}}

#: Called with a stage's name, what is done, how many are done and how many there are.
Told = Callable[..., None]


def schedule_course(record: ScheduleRecord, ready: Prepared) -> Course:
    """The step of a schedule, run by run; ``ready`` counts as many workspaces as it does (`with_workspaces_of`)."""
    captured = ready.captured
    return course(
        captured, captured.program, record.schedule, ready.costs, ready.extra_bytes, ready.cublas_bytes,
        launches(ready, planned=True),
    )  # fmt: skip


def figures_of(
    record: ScheduleRecord,
    ready: Prepared,
    request: Request,
    device: torch.device,
    *,
    front: str = "quick",
    live: bool = False,
    progress: Told,
) -> Figures:
    """The figures of a schedule's report.

    Args:
        ready: the program of the schedule, and its costs.
        front: one of `FRONTS`: none, by the strategies that need no solver, or by all.
        live: run a real step and measure its memory.

    Raises:
        UsageError: no such front.
    """
    if front not in FRONTS:
        raise UsageError(f"front {front!r} is unknown; give {', '.join(FRONTS)}")
    captured, ready = ready.captured, with_workspaces_of(record, ready)
    by_plain = record.cublas_bytes if multiplies(captured.plain.every_task()) else 0
    figures = Figures(
        record,
        plain_course(
            captured, ready.costs, record.optimizer_bytes + by_plain, by_plain, launches(ready, planned=False)
        ),
        schedule_course(record, ready),
        ready.profile.device,
        _fronts(ready, request, record, front, progress) if front != "off" else {},
    )
    if not live:
        return figures
    progress("step", "measured")
    if request.target is not None:
        raise UsageError("a real step needs the device that was planned for, and that is not here; leave live out")
    with autocast_as(record.autocast, device), attention_as(record.attention):
        found = live_step(
            request.model, captured, record.schedule, real_example(request.example, device), ready.extra_bytes,
            device_name(device),
        )  # fmt: skip
    return replace(figures, live=found)


def write_report(figures: Figures, path: Path, *, png: bool = False) -> list[Path]:
    """Write the page; returns the pictures that were written beside it.

    Args:
        png: every picture also as a file of its own.

    Raises:
        UsageError: vl-convert is not installed, or a file cannot be written.
    """
    specs = charts(figures)
    write_atomically(path, page(figures, specs).encode())
    drawn = {path.with_name(f"{path.stem}_{n}.png"): data for n, data in (pictures(specs) if png else {}).items()}
    for picture, data in drawn.items():
        write_atomically(picture, data)
    return list(drawn)


def _fronts(ready: Prepared, request: Request, record: ScheduleRecord, kind: str, progress: Any) -> Fronts:
    """Plans of the strategies at several budgets and at the schedule's own; ``store_all`` is plain PyTorch's point."""
    names = [name for name in STRATEGIES if name != "store_all" and (kind == "full" or name not in _SLOW)]
    limits = sorted({*(int(share * ready.plain.peak_bytes) for share in _SHARES), record.budget_bytes}, reverse=True)
    points = strategy_points(ready, request, names, limits, progress, options=_QUICK if kind == "quick" else None)
    found: dict[str, list[tuple[int, float]]] = {}
    for point in points:
        if point.report is not None:
            line = found.setdefault(point.strategy, [])
            here = point.report.peak_bytes, point.report.seconds
            if here not in line:
                line.append(here)
    return found
