"""`SolvedPlan`: a schedule for one budget, and all that can be done with it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..compiler.pipeline import Compiled
from ..compiler.prepared import with_workspaces_of
from ..compiler.progress import Progress
from ..compiler.request import Request
from ..errors import UsageError
from ..files import check_writable
from ..ir.schedule import Schedule
from ..ir.schedule_file import ScheduleRecord
from ..ir.units import format_bytes, format_seconds
from ..plan.ilp.export import Milp, milp
from ..replay.wrapper import ScheduleWrapper
from ..report.figures import Course
from ..report.page import Figures, vega
from ..report.write import figures_of, schedule_course, write_report

if TYPE_CHECKING:
    import pandas


class SolvedPlan:
    """A schedule for one budget, and all that can be done with it. Peak and seconds are predicted.

    Attributes:
        compiled: the result of the compiler: the planner's `Plan`, and wall seconds of its stages.
        ready: the program and its costs.
        request, device: as those of the job.
    """

    def __init__(
        self,
        compiled: Compiled,
        request: Request,
        device: torch.device,
        progress: Callable[[], AbstractContextManager[Progress]],
    ) -> None:
        self.compiled, self.ready, self.request, self.device = compiled, compiled.ready, request, device
        self._progress = progress

    @property
    def record(self) -> ScheduleRecord:
        """The content of the schedule file."""
        return self.compiled.record

    @property
    def schedule(self) -> Schedule:
        """What to run; ``to_frame(program)`` is a table of the backward slots."""
        return self.record.schedule

    @property
    def status(self) -> str:
        """``optimal``: proven to be within the gap asked for; ``feasible``: not proven."""
        return self.record.status

    @property
    def budget_bytes(self) -> int:
        """The budget, of which ``peak_bytes`` is not more."""
        return self.record.budget_bytes

    @property
    def peak_bytes(self) -> int:
        """Predicted peak memory of the step."""
        return self.record.peak_bytes

    @property
    def seconds(self) -> float:
        """Predicted time of the step."""
        return self.record.seconds

    @property
    def bound(self) -> float | None:
        """Seconds below which no schedule is possible (of the kind that ``record.bound_kind`` names); None: nothing is
        proven.
        """
        return self.record.bound_seconds

    @property
    def gap(self) -> float | None:
        """``(seconds - bound) / seconds``; None where nothing is proven."""
        return self.record.gap

    @cached_property
    def timeline(self) -> Course:
        """The step run by run, with its memory by kind and by layer."""
        return schedule_course(self.record, with_workspaces_of(self.record, self.ready))

    @cached_property
    def milp(self) -> Milp:
        """The integer program whose optimum is the fastest schedule within the budget, starting from this one.

        ``plan.milp.write("p.mps")`` writes it to a file; see `Milp`. Large models have millions of coefficients.
        """
        ready = with_workspaces_of(self.record, self.ready)
        program = ready.captured.program
        return milp(program, ready.costs, self.budget_bytes, extra_bytes=ready.extra_bytes, start=self.schedule)

    def to_frame(self) -> pandas.DataFrame:
        """The memory timeline: one row per task that runs, in order; see `Course.to_frame`."""
        return self.timeline.to_frame()

    def save(self, path: str | Path) -> None:
        """Write the schedule file (JSON), for `ScheduleWrapper` and the commands.

        Raises:
            UsageError: it cannot be written.
        """
        self.record.save(Path(path))

    def wrap(self, backend: str = "eager", *, cuda_graphs: bool | None = None) -> ScheduleWrapper:
        """The job's model, which from now on trains by this schedule; as `ScheduleWrapper`."""
        request = self.request
        if request.target is not None:
            raise UsageError("this plan is for a GPU that is not here; save it, and wrap the model there")
        return ScheduleWrapper(
            request.model, self.record, example=request.example, captured=self.ready.captured, backend=backend,
            cuda_graphs=cuda_graphs,
        )  # fmt: skip

    def report(self, path: str | Path, *, front: str = "quick", live: bool = False, png: bool = False) -> Figures:
        """Write a page for a browser: memory over the step, layer by layer, and what is recomputed.

        Args:
            path: of the page, such as ``s.html``.
            front: strategies to compare with: ``off``, ``quick`` (those that need no solver) or ``full``.
            live: run a real step, and show what is measured.
            png: every picture also as a PNG beside the page.

        Raises:
            UsageError: a package for pictures is missing, or the page cannot be written.
        """
        vega()  # said before anything takes time
        check_writable(Path(path))
        with self._progress() as progress:
            figures = figures_of(
                self.record, self.ready, self.request, self.device, front=front, live=live, progress=progress.at
            )
            progress.at("draw")
            write_report(figures, Path(path), png=png)
        return figures

    def _rows(self) -> list[tuple[str, str]]:
        record = self.record
        found = self.compiled.plan

        def against(mine: float, plain: float) -> str:
            return f" ({100 * (mine / plain - 1):+.1f} %)" if plain else ""

        gap = "none proven"
        if record.bound_seconds is not None and record.gap is not None:
            gap = f"{format_seconds(record.bound_seconds)}, gap {100 * record.gap:.2f} % ({record.bound_kind})"
        return [
            ("plan", f"{record.status}, budget {format_bytes(record.budget_bytes)}, found by {found.found_by}"),
            (
                "predicted peak",
                f"{format_bytes(record.peak_bytes)}, plain PyTorch {format_bytes(record.plain_peak_bytes)}"
                + against(record.peak_bytes, record.plain_peak_bytes),
            ),
            (
                "predicted step",
                f"{format_seconds(record.seconds)}, plain PyTorch {format_seconds(record.plain_seconds)}"
                + against(record.seconds, record.plain_seconds),
            ),
            ("bound", gap),
        ]

    def __repr__(self) -> str:
        return "\n".join(f"{what + ':':16}{text}" for what, text in self._rows())
