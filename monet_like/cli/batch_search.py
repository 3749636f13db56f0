"""Plans one model at many batch sizes: it is captured at each, and measured at two of them only.

Seconds and workspace at another batch lie on the line through the two that were measured, kept between staying as
they are and growing in proportion: small batches have costs that do not shrink with them, and throughput is about
just those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..capture.captured import Captured
from ..compiler.costs import extended, measured_costs, profile_batch, to_profile, usable
from ..compiler.prepared import Prepared, prepared
from ..compiler.request import Request, captured_for
from ..compiler.sources import Source, capability_of
from ..errors import ProfileError, UsageError
from ..ir.profile_file import Profile
from ..ir.program import Cost
from ..ir.simulate import Report, simulate
from ..ir.units import format_bytes
from ..plan.budgets import fits, largest_size
from ..profile.cublas import measured_bytes, multiplies
from ..profile.devices import DEVICES, DeviceLimits, device_name
from ..profile.profiler import Progress
from ..profile.roofline import roofline
from ..profile.scaling import matched, on_line
from .problem import Problem, example_for

#: Batches below the largest that fits divided by this are tried only if the best one turns out to be there.
SPAN = 16
#: How often the batches beside the best one are tried.
REFINEMENTS = 3


@dataclass(frozen=True)
class Measured:
    """Costs measured at one batch."""

    batch: int
    captured: Captured
    costs: dict[str, Cost]


class Batches:
    """Programs and costs of a model at any batch.

    Args:
        problem: its request's batch is not used.
        source: of costs. Where it has a device's rates, nothing is measured on the problem's device.

    Attributes:
        limits: those rates, or None.
    """

    def __init__(self, problem: Problem, source: Source) -> None:
        self.problem, self.source = problem, source
        self.limits = source.known if isinstance(source.known, DeviceLimits) else None
        self.measured: tuple[Measured, ...] = ()
        self._made_last: tuple[str, ...] | None = None
        self._captured: dict[int, Captured] = {}
        self._prepared: dict[int, Prepared] = {}

    def extra_bytes(self, batch: int) -> int:
        """Resident memory beyond the program's: the optimizer's state, and cuBLAS's workspaces."""
        request, plain = self.problem.request, self.captured(batch).plain
        return request.optimizer_bytes + self._cublas_bytes * multiplies(plain.every_task())

    @cached_property
    def _cublas_bytes(self) -> int:
        return measured_bytes(self.problem.device) if self.limits is None else self.limits.cublas_bytes

    def request(self, batch: int) -> Request:
        """The problem's request at ``batch``."""
        problem = self.problem
        known = capability_of(self.limits) if problem.request.target else None
        return replace(
            problem.request, example=example_for(problem, batch), made_last=self._made_last, capability=known
        )

    def captured(self, batch: int) -> Captured:
        """The program at ``batch``, with the admitted variants."""
        if batch not in self._captured:
            request = self.request(batch)
            self._captured[batch] = captured_for(request, request.example)
        return self._captured[batch]

    def estimated(self, batch: int) -> dict[str, Cost]:
        """Costs estimated from datasheet rates, before anything is measured."""
        captured = self.captured(batch)
        return roofline(captured, self.limits or DEVICES["cpu"])

    def measure(self, most: int, progress: Progress) -> None:
        """Measure at two batches: one of at most ``most`` that does not take too long, and half of that."""
        if self.limits is not None:
            return
        problem = self.problem
        # The same at all batches, so that each tells what another's operators cost.
        self._made_last = self.captured(most).made_last
        cap = problem.request.profile_batch or profile_batch(self.request(most), self.captured(most), problem.device)
        far = min(most, cap)
        if far < 4:  # so few batches are each measured themselves
            return
        known_profile = self.source.known if isinstance(self.source.known, Profile) else None
        base = usable(known_profile, problem.device) or to_profile({}, problem.device, "")
        known, found = dict(base.costs), []

        def keep(costs: dict[str, Cost], _: str) -> None:
            note = f"measured at batches {far // 2} and {far}"
            self.source.save(extended(base, {**known, **costs}, problem.device, note))

        for batch in (far, far // 2):
            request = replace(self.request(batch), profile_batch=batch)
            captured = self.captured(batch)
            costs, _ = measured_costs(request, captured, problem.device, known=known, progress=progress, keep=keep)
            known.update(costs)
            found.append(Measured(batch, captured, costs))
        self.measured = tuple(found)

    def prepared(self, batch: int) -> Prepared:
        """Program and costs at ``batch``, prepared for planning."""
        if batch not in self._prepared:
            captured = self.captured(batch)
            costs, note = self._costs(batch, captured)
            device = f"roofline:{self.limits.name}" if self.limits else device_name(self.problem.device)
            profile = Profile(device, costs, note, {"torch": torch.__version__}, cublas_bytes=self._cublas_bytes)
            self._prepared[batch] = prepared(self.problem.request, captured, profile, costs, {})
        return self._prepared[batch]

    def _costs(self, batch: int, captured: Captured) -> tuple[dict[str, Cost], str]:
        if self.limits is not None:
            return self.estimated(batch), "estimated from datasheet rates"
        if not self.measured:
            return self._measured(batch, captured)
        far, near = self.measured
        try:
            pairs = [list(matched(captured, other.captured)) for other in (far, near)]
        except ProfileError:  # at this batch the model computes something else: a batch of 1, mostly
            return self._measured(batch, captured)
        costs = {
            mine.cost: on_line(batch, (near.batch, near.costs[small.cost]), (far.batch, far.costs[large.cost]))
            for (mine, large), (_, small) in zip(*pairs, strict=True)
            if mine.cost
        }
        return costs, f"on the line through batches {near.batch} and {far.batch}"

    def _measured(self, batch: int, captured: Captured) -> tuple[dict[str, Cost], str]:
        request = replace(self.request(batch), profile_batch=batch)
        return measured_costs(request, captured, self.problem.device)


def largest_fitting(fitting: Callable[[int], bool], budget_bytes: int, *, powers: bool = False) -> int:
    """As `monet_like.plan.budgets.largest_size`.

    Raises:
        UsageError: not even a batch of 1 fits.
    """
    if not (most := largest_size(fitting, powers=powers)):
        raise UsageError(f"not even a batch of 1 fits into {format_bytes(budget_bytes)}")
    return most


@dataclass(frozen=True)
class Trial:
    """Reports at one batch: plain PyTorch's, and that of the schedule found (None: no schedule fits)."""

    batch: int
    plain: Report
    report: Report | None

    @property
    def throughput(self) -> float:
        """Samples per second of the schedule; 0 without one."""
        return self.batch / self.report.seconds if self.report is not None and self.report.seconds else 0.0

    def plain_throughput(self, budget_bytes: int) -> float:
        """Samples per second of plain PyTorch; 0 where it does not fit."""
        fitting = self.plain.peak_bytes <= budget_bytes and self.plain.seconds
        return self.batch / self.plain.seconds if fitting else 0.0


class Tuner:
    """Searches for the batch of highest throughput with quick plans."""

    def __init__(self, batches: Batches, say: Callable[[str], None]) -> None:
        self.batches, self.budget_bytes, self.say = batches, batches.problem.budget_bytes, say
        self.trials: dict[int, Trial] = {}

    def trial(self, batch: int) -> Trial:
        """Plan one batch by the local search."""
        if batch not in self.trials:
            self.say(f"batch {batch}: plan")
            ready = self.batches.prepared(batch)
            program, costs, extra = ready.captured.program, ready.costs, ready.extra_bytes
            found = fits(program, costs, self.budget_bytes, extra_bytes=extra)
            report = simulate(program, found, costs, extra_bytes=extra) if found is not None else None
            self.trials[batch] = Trial(batch, ready.plain, report)
        return self.trials[batch]

    def most(self) -> int:
        """The largest power of two that fits if workspaces are not counted."""

        def fitting(batch: int) -> bool:
            self.say(f"batch {batch}: does it fit")
            program, costs = self.batches.captured(batch).program, self.batches.estimated(batch)
            return fits(program, costs, self.budget_bytes, extra_bytes=self.batches.extra_bytes(batch)) is not None

        return largest_fitting(fitting, self.budget_bytes, powers=True)

    def search(self, most: int) -> None:
        """Try powers of two up to ``most`` and one beyond, then batches around the best, repeatedly."""
        batch = 2 * most
        while batch >= max(1, most // SPAN):
            self.trial(batch)
            batch //= 2
        for _ in range(REFINEMENTS):
            best = self.ranked()[0].batch if self.ranked() else 1
            below = max((b for b in self.trials if b < best), default=0)
            above = min((b for b in self.trials if b > best), default=best)
            for batch in {_between(below, best), _between(best, above)} - {0}:
                self.trial(batch)

    def try_plain(self) -> None:
        """Try the largest batch that plain PyTorch can train; its peak grows in proportion to the batch."""
        known = sorted(self.trials.values(), key=lambda trial: trial.batch)
        if len(known) > 1:
            near, far = known[0], known[-1]
            slope = (far.plain.peak_bytes - near.plain.peak_bytes) / (far.batch - near.batch)
            largest = int(near.batch + (self.budget_bytes - near.plain.peak_bytes) / slope) if slope > 0 else 0
            if largest >= 1:
                self.trial(largest)

    def plain_best(self) -> Trial | None:
        """The trial with plain PyTorch's highest throughput; None if plain PyTorch fits at no batch."""
        best = max(self.trials.values(), key=lambda trial: trial.plain_throughput(self.budget_bytes))
        return best if best.plain_throughput(self.budget_bytes) else None

    def ranked(self) -> list[Trial]:
        """Trials with a schedule that fits, the highest throughput first."""
        return sorted((t for t in self.trials.values() if t.throughput), key=lambda t: -t.throughput)


def _between(low: int, high: int) -> int:
    """A batch between two others, a multiple of eight where possible; 0 if there is none."""
    middle = (low + high) // 2
    middle -= middle % 8 if high - low >= 16 else 0
    return middle if low < middle < high else 0
