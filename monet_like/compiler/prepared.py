"""What planning needs of a model: its program, the costs of all tasks, and what counts beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..capture.captured import Captured
from ..ir.display import short_repr
from ..ir.profile_file import Profile
from ..ir.program import Cost
from ..ir.schedule_file import ScheduleRecord
from ..ir.simulate import Launches, Report
from ..plan.baseline import plain_report
from ..profile.cublas import multiplies
from ..profile.launches import launches_of
from .request import Request


@dataclass(frozen=True, repr=False)
class Prepared:
    """Result of capture and profile: all that planning needs.

    Attributes:
        captured: the program with the admitted variants.
        profile: where the costs come from.
        costs: of all tasks of the program.
        extra_bytes: the optimizer's state, and cuBLAS's workspaces where plain PyTorch multiplies.
        cublas_bytes: of them the latter.
        variants_cublas_bytes: the workspaces where only variants multiply: for schedules that take one.
        plain: the simulator's report on plain PyTorch's schedule; its seconds are the device's alone.
        stage_seconds: wall seconds of capture and profile.
        guessed: keys of costs whose workspace was not measured at this batch, with the most bytes it may be.
    """

    __repr__ = short_repr

    captured: Captured
    profile: Profile
    costs: Mapping[str, Cost]
    extra_bytes: int
    plain: Report
    stage_seconds: Mapping[str, float]
    cublas_bytes: int = 0
    variants_cublas_bytes: int = 0
    guessed: Mapping[str, int] = field(default_factory=dict)


def prepared(
    request: Request, captured: Captured, profile: Profile, costs: Mapping[str, Cost], seconds: Mapping[str, float]
) -> Prepared:
    """Combine a captured program and its costs into what planning needs."""
    plain, every = multiplies(captured.plain.every_task()), multiplies(captured.every_task())
    cublas, by_variants = (profile.cublas_bytes * counts for counts in (plain, every and not plain))
    extra = request.optimizer_bytes + cublas
    report = plain_report(captured.plain, costs, extra, autograd_nodes=captured.autograd_nodes)
    return Prepared(captured, profile, costs, extra, report, seconds, cublas, by_variants)


def with_workspaces_of(record: ScheduleRecord, ready: Prepared) -> Prepared:
    """Count as many bytes for cuBLAS's workspaces as a given schedule does; none for files that do not say."""
    optimizer, counted = ready.extra_bytes - ready.cublas_bytes, record.cublas_bytes
    plain = plain_report(
        ready.captured.plain, ready.costs, optimizer + counted * bool(ready.cublas_bytes),
        autograd_nodes=ready.captured.autograd_nodes,
    )  # fmt: skip
    return replace(ready, extra_bytes=optimizer + counted, cublas_bytes=counted, variants_cublas_bytes=0, plain=plain)


def launches(ready: Prepared, *, planned: bool) -> Launches | None:
    """The CPU's clock of a scheduled or of plain PyTorch's step; None where no times were measured on a GPU."""
    program = ready.captured.program if planned else ready.captured.plain
    return launches_of(program, ready.profile.device, planned=planned) if ready.plain.seconds else None


def plain_seconds(ready: Prepared) -> float:
    """Predicted time of plain PyTorch's step; on a GPU by its clock and the CPU's."""
    captured, clock = ready.captured, launches(ready, planned=False)
    if clock is None:
        return ready.plain.seconds
    return plain_report(captured.plain, ready.costs, 0, autograd_nodes=captured.autograd_nodes, launches=clock).seconds
