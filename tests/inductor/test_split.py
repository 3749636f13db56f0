"""Convolutions whose two gradients are made one after the other: same bits, and less memory at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled import planned
from torch import nn

from monet_like.capture.lower.step import capture
from monet_like.inductor import handed, joint, prices, rewrites
from monet_like.inductor.planned_graph import PlannedGraph
from monet_like.ir.program import Cost
from monet_like.profile.devices import DEVICES
from monet_like.profile.roofline import roofline
from monet_like.variants import admitted

#: Bytes of a layer's input, of its gradient, of a weight.
IMAGE, WEIGHT = 4 * 8 * 16 * 32 * 32, 4 * 16 * 16 * 9


def net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Conv2d(16, 16, 3, stride=2, groups=16)), torch.randn(8, 16, 32, 32)


def test_both_gradients_of_a_convolution_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net()
    graph, found = planned(model, (x,))
    calls = [ways[0] for ways in graph.program.slots if "convolution_backward" in ways[0].name]
    assert len(calls) == 7  # the first layer's input has no gradient
    sizes = [{graph.program.values[v].bytes for v in way.writes} & {IMAGE, WEIGHT} for way in calls[2:6]]
    assert sizes == [{WEIGHT}, {IMAGE}] * 2
    monkeypatch.setattr(joint, "split_convolutions", lambda graph: None)
    other, wanted = planned(model, (x,))
    assert len(other.program.slots) == len(graph.program.slots) - 3
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert graph.peak_bytes <= other.peak_bytes


def test_a_small_convolution_keeps_its_one_call_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it reads, input and weight, among all convolutions."""
    model, x = net()
    model = nn.Sequential(model, nn.AvgPool2d(5), nn.Conv2d(16, 4, 1), nn.Tanh())

    def calls(graph: PlannedGraph) -> int:
        return sum("convolution_backward" in ways[0].name for ways in graph.program.slots)

    graph, found = planned(model, (x,))
    monkeypatch.setattr(rewrites, "LARGE", 0.0)
    every, wanted = planned(model, (x,))
    assert (calls(graph), calls(every)) == (8, 9)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_estimates_for_a_gpu_are_those_of_eager_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net()
    found: list[tuple[str, float]] = []

    def noted(kernels: Any, device: prices.Device) -> dict[str, Cost]:
        costs = prices.prices(kernels, device)
        ways = (*kernels.program.tasks, *(ways[0] for ways in kernels.program.slots))
        found.extend((way.name, costs[way.cost].seconds) for way in ways if way.cost)
        return costs

    monkeypatch.setattr(handed, "prices", noted)
    monkeypatch.setattr(handed, "device_of", lambda device, _: prices.Device(device, DEVICES["h100"], False))
    planned(model, (x,))
    captured = admitted(capture(model, (x,), {}), "normal")
    costs = roofline(captured, DEVICES["h100"])
    wanted = [
        (way.name, costs[way.cost].seconds) for way in captured.program.every_task() if "shape_only" not in way.name
    ]
    convolutions = [sorted(s for name, s in each if name.startswith("convolution")) for each in (found, wanted)]
    assert len(convolutions[0]) == 11
    assert convolutions[0] == pytest.approx(convolutions[1])
