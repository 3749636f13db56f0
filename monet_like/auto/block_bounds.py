"""What no schedules of a model's blocks can beat, and the schedules that their menus lack (`monet_like.plan.block_bound`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..compiler.prepared import Prepared
from ..ir.schedule import Schedule
from ..plan.block_bound import Asked, step_bound
from ..plan.block_points import Point
from ..plan.block_relaxation import BlockRelaxation, block_relaxation
from ..plan.blocks import Moment, seconds_of
from ..plan.proven_choice import BOUND_SECONDS, NEAR, longer_menus
from .block_menus import BlockSettings, Kind, content_of, own_point
from .step_memory import Blocks, Rehearsed

#: Wall seconds for each of the two bounds of a quick plan.
QUICK_BOUND_SECONDS = 2.0


@dataclass(frozen=True)
class BoundedBlocks:
    """The step of a model, bounded by the process that plans.

    Attributes:
        of, kinds, settings: as of the plan.
        first: the first rehearsal.
        least: its moments with bases that no schedules make smaller.
        budget_bytes: of the step, without cuBLAS's workspaces.
        found: programs with their costs; empty in processes that do not plan.
    """

    of: Blocks
    kinds: Sequence[Kind | None]
    first: Rehearsed
    least: Sequence[Moment]
    budget_bytes: int
    settings: BlockSettings
    found: Mapping[str, Prepared]
    _relaxations: dict[str, BlockRelaxation] = field(default_factory=dict)

    def longer_menus(self, menus: Sequence[Sequence[Point]]) -> dict[str, Any]:
        """The menus with the schedules that a bound found them to lack, and that bound, as plain data.

        Returns:
            ``menus``: distinct ones; ``of``: for every block, the number of its menu; ``bound``: in seconds, 0: nothing is known.
        """
        asked = self._asked(menus)
        found = step_bound(asked, known=None, gap=NEAR, time_limit_seconds=self._seconds)
        contents = [[*map(content_of, menu)] for menu in longer_menus(asked, found.schedules, self._point)]
        distinct = [content for number, content in enumerate(contents) if contents.index(content) == number]
        return {"menus": distinct, "of": [distinct.index(content) for content in contents], "bound": found.seconds}

    def bound(self, menus: Sequence[Sequence[Point]], points: Sequence[Point], proven: float) -> float:
        """The bound, raised where the plan is not near it.

        Args:
            points: of the plan.
            proven: the bound that is known.
        """
        seconds = seconds_of(points, self.first.calls)
        if proven < (1 - NEAR) * seconds:
            found = step_bound(self._asked(menus), known=points, gap=NEAR, time_limit_seconds=self._seconds)
            proven = max(proven, found.seconds)
        return min(proven, seconds)

    @property
    def _seconds(self) -> float:
        limit = QUICK_BOUND_SECONDS if self.settings.quick else BOUND_SECONDS / 2
        return min(limit, self.settings.time_limit_seconds)

    def _asked(self, menus: Sequence[Sequence[Point]]) -> Asked:
        relaxations = [None if kind is None else self._relaxation(kind) for kind in self.kinds]
        return Asked(relaxations, menus, self.least, self.budget_bytes, self.first.calls)

    def _relaxation(self, kind: Kind) -> BlockRelaxation:
        if kind.program not in self._relaxations:
            ready = self.found[kind.program]
            self._relaxations[kind.program] = block_relaxation(ready.captured.program, ready.costs)
        return self._relaxations[kind.program]

    def _point(self, block: int, schedule: Schedule) -> Point:
        kind = self.kinds[block]
        assert kind is not None
        return own_point(self.found[kind.program], schedule, kind)
