"""Operators are measured on inputs that lie as the device's own operators make them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_gpu import build
from torch import nn

from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.compiler.costs import inputs_on
from monet_like.ir.program import Call
from monet_like.profile.made_layouts import as_made

CPU = torch.device("cpu")


@pytest.mark.slow
def test_the_profiler_sees_the_layouts_of_a_step(fake_gpu_library: Path) -> None:
    """As ``fake_gpu/layouts.py`` says of ConvNeXt and Swin."""
    command = [sys.executable, str(build.HERE / "layouts.py"), "convnext", "swin"]
    done = build.run(fake_gpu_library, command)
    assert done.returncode == 0, done.stderr[-4000:]
    convnext, swin = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    for found in (convnext, swin):
        assert found["values"] > 100
        assert found["trace"] > 0, "the trace is right here: nothing is shown"
        assert found["measured"] == 0


class Layers(nn.Module):
    """Layers one after the other, then what depends on how they lie, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.drop(self.conv(x).relu()) * 2).exp()


def wrong(captured: Captured, op: str) -> tuple[Captured, int]:
    """A trace that takes what one operator makes to lie in channels-last; and that value."""
    (value,) = next(task.writes for task in captured.program.tasks if task.calls[-1].op == op)
    metas = list(captured.metas)
    like = torch.empty(metas[value].shape, memory_format=torch.channels_last)
    metas[value] = replace(metas[value], stride=like.stride())
    return replace(captured, metas=tuple(metas)), value


def test_what_operators_make_lies_as_they_make_it() -> None:
    captured = capture(Layers().train(), (torch.randn(2, 3, 6, 6),))
    other, value = wrong(captured, "aten.relu.default")
    assert other.metas[value] != captured.metas[value]
    state = torch.get_rng_state()
    assert as_made(other, CPU).metas == captured.metas
    assert torch.equal(torch.get_rng_state(), state)
    assert as_made(other, CPU).program is captured.program
    assert as_made(captured, CPU) is captured
    assert inputs_on(other, CPU).captured is other  # traces are exact there


def test_what_an_operator_makes_of_it_lies_as_it_makes_that() -> None:
    """An elementwise operator follows its input, which lies otherwise than the trace says."""
    captured = capture(Layers().train(), (torch.randn(2, 3, 6, 6),))
    weight = next(v for v, value in enumerate(captured.program.values) if value.name == "conv.weight")
    metas = list(captured.metas)
    like = torch.empty(metas[weight].shape, memory_format=torch.channels_last)
    metas[weight] = replace(metas[weight], stride=like.stride())
    found = as_made(replace(captured, metas=tuple(metas)), CPU)
    changed = [v for v, (one, two) in enumerate(zip(captured.metas, found.metas, strict=True)) if one != two]
    made = {v for task in captured.program.tasks for v in task.writes if task.calls[-1].op == "aten.exp.default"}
    assert made <= set(changed)


def test_a_task_that_fails_leaves_the_layout_of_the_trace() -> None:
    captured = capture(Layers().train(), (torch.randn(2, 3, 6, 6),))
    other, value = wrong(captured, "aten.relu.default")

    def failing(call: Call) -> Call:
        if call.op != "aten.relu.default":
            return call
        return replace(call, op="aten.view.dtype", args=(call.args[0], torch.complex64))

    tasks = tuple(replace(t, calls=tuple(map(failing, t.calls))) for t in other.program.tasks)
    broken = replace(other, program=replace(other.program, tasks=tasks))
    assert as_made(broken, CPU).metas[value] == other.metas[value]
