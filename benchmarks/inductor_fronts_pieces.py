"""Schedules with ``backend="inductor"`` at the budgets of `benchmarks.inductor_fronts`: their peaks.

They are not priced: what they call are other operators than Inductor's, so the list of prices would be another one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

import monet_like
from monet_like.capture.example_inputs import Example
from monet_like.replay.verify.steps import train_step

#: The variants that schedules choose from.
MODE = "inplace_conv_multiway_newnode"


class Schedules:
    """Schedules of one net; it is profiled once."""

    def __init__(self, model: nn.Module, example: Example) -> None:
        self.example = example
        self.job = monet_like.problem(copy.deepcopy(model), example[0], example[1], mode=MODE, verbose=False)

    def figures(self, budget: int, peak: Callable[[nn.Module], int]) -> dict[str, Any]:
        """What is told of the schedule for a budget; 0: the smallest.

        Args:
            peak: measures it.
        """
        plan = self.job.plan(budget or self.job.smallest(time_limit_seconds=10.0).report.peak_bytes, quick=True)
        module = plan.wrap(backend="inductor")
        train_step(module, self.example)  # compiles the pieces
        found = {"peak_bytes": peak(module), "predicted_bytes": plan.record.peak_bytes}
        return {**found, "budget_bytes": budget or plan.budget_bytes}
