"""What no schedules of a model's blocks can beat, and the schedules that their menus lack (`monet_like.plan.bound.prices`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..compiler.prepared import Prepared
from ..ir.schedule import Schedule
from ..ir.step import Point, Step, seconds_of
from ..plan.bound.pieces import BlockRelaxation, block_relaxation
from ..plan.bound.prices import Bound, step_bound
from ..plan.step.proof import BOUND_SECONDS, NEAR, longer_menus
from .block_menus import BlockSettings, Kind, content_of, own_point
from .rehearsal.memory import Blocks

#: Wall seconds for each of the two bounds of a quick plan.
QUICK_BOUND_SECONDS = 2.0


@dataclass(frozen=True)
class BoundedBlocks:
    """The step of a model, bounded by the process that plans.

    Attributes:
        of, kinds, settings: as of the plan.
        step: with bases that no schedules make smaller.
        budget_bytes: of the step, without cuBLAS's workspaces.
        found: programs with their costs; empty in processes that do not plan.
    """

    of: Blocks
    kinds: Sequence[Kind | None]
    step: Step
    budget_bytes: int
    settings: BlockSettings
    found: Mapping[str, Prepared]

    def longer_menus(self, menus: Sequence[Sequence[Point]]) -> dict[str, Any]:
        """The menus with the schedules that a bound found them to lack, and that bound, as plain data.

        Returns:
            ``menus``: distinct ones; ``of``: for every block, the number of its menu; ``bound``: in seconds, 0: nothing is known.
        """
        step, found = self.step.with_menus(menus), self._bound(menus, None)
        longer = longer_menus(step, self._relaxations, found.schedules, self._point)
        contents = [[*map(content_of, menu)] for menu in longer.menus]
        distinct = [content for number, content in enumerate(contents) if contents.index(content) == number]
        return {"menus": distinct, "of": [distinct.index(content) for content in contents], "bound": found.seconds}

    def bound(self, menus: Sequence[Sequence[Point]], points: Sequence[Point], proven: float) -> float:
        """The bound, raised where the plan is not near it.

        Args:
            points: of the plan.
            proven: the bound that is known.
        """
        seconds = seconds_of(self.step, points)
        if proven < (1 - NEAR) * seconds:
            proven = max(proven, self._bound(menus, points).seconds)
        return min(proven, seconds)

    def _bound(self, menus: Sequence[Sequence[Point]], known: Sequence[Point] | None) -> Bound:
        limit = min(QUICK_BOUND_SECONDS if self.settings.quick else BOUND_SECONDS / 2, self.settings.time_limit_seconds)
        step = self.step.with_menus(menus)
        return step_bound(step, self._relaxations, self.budget_bytes, known=known, gap=NEAR, time_limit_seconds=limit)

    @cached_property
    def _relaxations(self) -> list[BlockRelaxation | None]:
        made = {key: block_relaxation(ready.captured.program, ready.costs) for key, ready in self.found.items()}
        return [kind and made[kind.program] for kind in self.kinds]

    def _point(self, block: int, schedule: Schedule) -> Point:
        kind = self.kinds[block]
        assert kind is not None
        return own_point(self.found[kind.program], schedule, kind)
