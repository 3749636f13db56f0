"""Measured times beside those of a datasheet, by kind of operator."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.datasheet_error import rows
from monet_like.capture.lower.step import capture
from monet_like.ir.program import Cost


def test_times_are_summed_by_kind_of_operator() -> None:
    net = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU()
    )
    plain = capture(net, (torch.randn(2, 4, 12, 12),)).plain
    costs = {task.cost: Cost(2.0, 0) for task in plain.tasks}
    halves = {name: Cost(1.0, 0) for name in costs}
    found = {row.kind: row for row in rows(plain.tasks, costs, halves)}
    counts = {kind: row.count for kind, row in found.items()}
    assert counts == {"convolution": 2, "convolution, depthwise": 1, "convolution, 1x1": 1, "relu": 2}
    assert [found["convolution"].measured, found["convolution"].predicted] == [4.0, 2.0]
    del costs[plain.tasks[0].cost]
    assert {row.kind: row.count for row in rows(plain.tasks, costs, halves)}["convolution"] == 1
