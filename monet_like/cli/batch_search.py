"""One model at many batch sizes: captured at each when it is asked for, measured at two of them.

Seconds and workspace at another batch lie on the line through the two that were measured, kept between staying as
they are and growing in proportion: small batches have costs that do not shrink with them, and throughput is about
just those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..capture.lowering import Captured
from ..compiler.pipeline import (
    Prepared,
    Request,
    captured_for,
    measured_costs,
    optimizer_bytes,
    prepared,
    profile_batch,
)
from ..compiler.problem import Problem, example_for
from ..errors import ProfileError
from ..ir.profile_file import Profile
from ..ir.program import REFUSED, Cost
from ..profile.cublas import measured_bytes, multiplies
from ..profile.profiler import Progress, device_name, matched, to_profile
from ..profile.roofline import DEVICES, DeviceLimits, roofline


@dataclass(frozen=True)
class Measured:
    """What was measured at one batch."""

    batch: int
    captured: Captured
    costs: dict[str, Cost]


def on_line(batch: int, low: tuple[int, Cost], high: tuple[int, Cost]) -> Cost:
    """The cost at ``batch`` from the costs at two others, (batch, cost) each."""
    (near, small), (far, large) = low, high
    if REFUSED in (small, large):
        return REFUSED

    def at(least: float, most: float) -> float:
        slope = (most - least) / (far - near)
        return most + min(max(slope, 0.0), most / far) * (batch - far)

    return Cost(at(small.seconds, large.seconds), int(at(small.workspace_bytes, large.workspace_bytes)))


class Batches:
    """A problem's model at any batch.

    Args:
        problem: its request's batch is not used.
        limits: a device's rates; None: measure on the problem's device.
    """

    def __init__(self, problem: Problem, limits: DeviceLimits | None) -> None:
        self.problem, self.limits = problem, limits
        self.measured: tuple[Measured, ...] = ()
        self._made_last: tuple[str, ...] | None = None
        self._captured: dict[int, Captured] = {}
        self._prepared: dict[int, Prepared] = {}

    def extra_bytes(self, batch: int) -> int:
        """Resident memory beyond the program's: the optimizer's state, and cuBLAS's workspaces."""
        request, plain = self.problem.request, self.captured(batch).plain
        return optimizer_bytes(request.model, request.optimizer) + self._cublas_bytes * multiplies(plain.every_task())

    @cached_property
    def _cublas_bytes(self) -> int:
        return measured_bytes(self.problem.device) if self.limits is None else self.limits.cublas_bytes

    def request(self, batch: int) -> Request:
        """The problem's request at ``batch``."""
        problem = self.problem
        return replace(problem.request, example=example_for(problem, batch), made_last=self._made_last)

    def captured(self, batch: int) -> Captured:
        """The program at ``batch``, with the admitted variants."""
        if batch not in self._captured:
            request = self.request(batch)
            self._captured[batch] = captured_for(request, request.example)
        return self._captured[batch]

    def estimated(self, batch: int) -> dict[str, Cost]:
        """Costs before anything is measured: datasheet rates."""
        captured = self.captured(batch)
        return roofline(captured, self.limits or DEVICES["cpu"])

    def measure(
        self,
        most: int,
        profile: Profile | None,
        save_profile: Callable[[Profile], None],
        progress: Progress | None = None,
    ) -> None:
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
        known = dict(profile.costs) if profile else {}
        found = []
        for batch in (far, far // 2):
            request = replace(self.request(batch), profile_batch=batch)
            captured = self.captured(batch)
            costs, note = measured_costs(request, captured, problem.device, known=known, progress=progress)
            known.update(costs)
            if note:
                save_profile(to_profile(known, problem.device, f"measured at batches {far // 2} and {far}"))
            found.append(Measured(batch, captured, costs))
        self.measured = tuple(found)

    def prepared(self, batch: int) -> Prepared:
        """What planning needs at ``batch``."""
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
