"""Instance norm with what follows it, and gradients through activations that change a view in place."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from replays import replayed
from torch import nn
from training import run, twin

from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.plan.random_schedules import random_schedule
from monet_like.variants import admitted


def net(dimensions: int, dtype: torch.dtype) -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    kinds = {1: (nn.Conv1d, nn.InstanceNorm1d), 2: (nn.Conv2d, nn.InstanceNorm2d), 3: (nn.Conv3d, nn.InstanceNorm3d)}
    convolution, norm = kinds[dimensions]
    layers = [
        convolution(2, 6, 3, padding=1, bias=False), norm(6, affine=True), nn.LeakyReLU(0.1, inplace=True),
        convolution(6, 4, 3, padding=1, bias=False), norm(4), nn.ReLU(inplace=True), convolution(4, 3, 1),
    ]  # fmt: skip
    x = torch.randn(3, 2, *(9,) * dimensions, generator=torch.Generator().manual_seed(1)).to(dtype)
    return nn.Sequential(*layers).to(dtype).train(), (x,), {}


def calls_of(captured: Captured) -> Counter[str]:
    """How often the first way of each slot calls each operator."""
    return Counter(call.op for ways in captured.program.slots for call in ways[0].calls)


@pytest.mark.parametrize(
    ("dimensions", "dtype"), [(1, torch.float64), (2, torch.float32), (2, torch.bfloat16), (3, torch.float32)]
)
def test_exact_ways_are_plain_pytorchs_bits(dimensions: int, dtype: torch.dtype) -> None:
    example = net(dimensions, dtype)
    captured = admitted(capture(*example), "inplace_multiway_newnode")
    variants = Counter(task.variant for task in captured.program.tasks)
    assert variants["instance_norm_leaky_relu.train"] == variants["instance_norm_leaky_relu.apply"] == 1
    assert variants["instance_norm_clamp.train"] == 1 and variants["instance_norm.apply"] == 2
    plain = run(twin(example[0]), *example[1:])
    for seed in range(3):
        schedule = random_schedule(captured.program, seed=seed, drop=0.7)
        found = replayed(example, captured, schedule, "inplace_multiway_newnode", measured=False)
        differences = plain.differences(found)
        assert {name: d for name, d in differences.items() if d} == {}


def test_with_conv_norm_and_activation_have_one_gradient() -> None:
    """It reads the norm's input alone, and agrees in float64."""
    example = net(3, torch.float64)
    mode = "inplace_conv_multiway_newnode"
    captured = admitted(capture(*example), mode)
    ways = [way for slot in captured.program.slots for way in slot if way.variant.startswith("instance_norm")]
    assert [way.variant for way in ways] == ["instance_norm_clamp.backward", "instance_norm_leaky_relu.backward"]
    makers = {value: task.calls[-1].op for task in captured.program.tasks for value in task.writes}
    assert all(makers.get(v) != "aten.leaky_relu.default" for way in ways for v in way.reads)
    plain = run(twin(example[0]), *example[1:])
    found = replayed(example, captured, random_schedule(captured.program, seed=2, drop=0.5), mode, measured=False)
    assert max(plain.differences(found).values()) < 1e-12


def test_autograds_copies_for_a_whole_view_are_left_out() -> None:
    """Plain PyTorch's program has them, since it makes them."""
    raw = capture(*net(3, torch.float32))
    assert calls_of(raw)["aten.new_empty_strided.default"] == 2
    assert calls_of(raw)["aten.copy.default"] == 4
    found = admitted(raw, "normal")
    assert not calls_of(found).keys() & {"aten.new_empty_strided.default", "aten.copy.default", "aten.clone.default"}
    assert len(raw.program.slots) - len(found.program.slots) == 2 * 4
    assert calls_of(found)["aten.leaky_relu_backward.default"] == 1


class InPart(nn.Module):
    """An activation in place of a part of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(4, affine=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        torch.relu_(y[:, :2])
        return y * y


def test_copies_for_a_part_of_a_view_stay() -> None:
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(2), requires_grad=True)
    example = (InPart().train(), (x,), {})
    captured = admitted(capture(*example), "normal")
    assert calls_of(captured)["aten.copy.default"] + calls_of(captured)["aten.slice_scatter.default"] > 0
    schedule = random_schedule(captured.program, seed=1, drop=0.5)
    plain = run(twin(example[0]), *example[1:])
    differences = plain.differences(replayed(example, captured, schedule, "normal", measured=False))
    assert {name: d for name, d in differences.items() if d} == {}
