"""Costs at one batch size from costs measured at others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..capture.captured import Captured
from ..errors import ProfileError
from ..ir.program import REFUSED, Cost, Task


@dataclass(frozen=True)
class Scaling:
    """How costs at a small batch become costs at the wanted one.

    Attributes:
        wanted, measured: batch sizes; ``second`` (twice ``measured``) gives the workspace's slope.
    """

    wanted: int
    measured: int
    second: int

    def scale(self, small: Cost, large: Cost) -> Cost:
        """The cost at the wanted batch, from costs at ``measured`` and (workspace only) at ``second``."""
        if REFUSED in (small, large):
            return REFUSED
        slope = (large.workspace_bytes - small.workspace_bytes) / (self.second - self.measured)
        workspace = small.workspace_bytes + max(0.0, slope) * (self.wanted - self.measured)
        return Cost(small.seconds * self.wanted / self.measured, int(workspace))


def matched(wanted: Captured, measured: Captured) -> Iterable[tuple[Task, Task]]:
    """Pairs of the same task in two captures of one model at different batch sizes.

    Raises:
        ProfileError: the captures differ in more than sizes.
    """
    if wanted.program.fingerprint != measured.program.fingerprint:
        raise ProfileError(
            "this model computes something else at the batch it would be profiled at; "
            "profile at the full batch: give --profile-batch the same number as the batch"
        )
    return zip(wanted.every_task(), measured.every_task(), strict=True)


def on_line(batch: int, low: tuple[int, Cost], high: tuple[int, Cost]) -> Cost:
    """The cost at ``batch`` from the costs at two others, (batch, cost) each."""
    (near, small), (far, large) = low, high
    if REFUSED in (small, large):
        return REFUSED

    def at(least: float, most: float) -> float:
        slope = (most - least) / (far - near)
        return most + min(max(slope, 0.0), most / far) * (batch - far)

    return Cost(at(small.seconds, large.seconds), int(at(small.workspace_bytes, large.workspace_bytes)))
