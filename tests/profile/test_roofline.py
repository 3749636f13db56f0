"""Costs from datasheet rates: which rate an operator has, and the workspaces that convolutions are
estimated to need.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from monet_like.capture.captured import Captured, fake_mode
from monet_like.capture.lower.step import capture
from monet_like.compiler.pipeline import prepare
from monet_like.compiler.request import Request
from monet_like.ir.program import Task
from monet_like.profile.devices import DEVICES
from monet_like.profile.gpu_paces import PACES
from monet_like.profile.roofline import WORKSPACE_LIMIT_BYTES, operation_seconds, roofline
from monet_like.profile.work import flops, works_of
from monet_like.profile.workspaces import TILE
from monet_like.variants import admitted

A100, CPU = DEVICES["a100"], DEVICES["cpu"]
CUDA = torch.device("cuda", 0)
#: Large enough that arithmetic, not memory, is what takes time.
CHANNELS, SIDE, BATCH = 512, 56, 8


def captured(layer: nn.Module, *, dtype: torch.dtype = torch.float32, channels_last: bool = False) -> Captured:
    layer = layer.to(dtype)
    if channels_last:
        layer = layer.to(memory_format=torch.channels_last)
    shape = (BATCH, CHANNELS, SIDE, SIDE) if not isinstance(layer, nn.Linear) else (BATCH * SIDE, CHANNELS)
    laid_out = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.empty(shape, dtype=dtype, memory_format=laid_out, device="meta", requires_grad=True)
    return admitted(capture(layer, (x,), target=CUDA), "normal")


def heavy(program: Captured) -> list[Task]:
    """The forward, and a way for either gradient: all that multiplies."""
    found = [task for task in program.every_task() if flops(program, task)]
    assert len(found) >= 3
    return found


def rate(program: Captured, task: Task) -> float:
    """The datasheet's rate that a task's products are priced at, without launches, traffic and its kind's pace."""
    operations = works_of(program)[task.cost].operations
    (operation,) = [one for one in operations if one.flops + one.convolution_flops]
    pace = PACES[operation.kind]
    others = sum(operation_seconds(one, A100) for one in operations if one is not operation)
    seconds = roofline(program, A100)[task.cost].seconds - others - pace.launch_seconds
    return (
        pace.arithmetic
        * flops(program, task)
        / (seconds - pace.traffic * operation.touched_bytes / A100.bytes_per_second)
    )


@pytest.mark.parametrize(
    ("layer", "dtype", "expected"),
    [
        (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False, device="meta"), torch.float32, 156e12),
        (nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, padding=1, bias=False, device="meta"), torch.float32, 156e12),
        (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False, device="meta"), torch.bfloat16, 312e12),
        (nn.Linear(CHANNELS, 64 * CHANNELS, bias=False, device="meta"), torch.float32, 19.5e12),
        (nn.Linear(CHANNELS, 64 * CHANNELS, bias=False, device="meta"), torch.float16, 312e12),
    ],
)
def test_convolutions_of_float32_have_tf32s_rate_and_products_have_not(
    layer: nn.Module, dtype: torch.dtype, expected: float
) -> None:
    program = captured(layer, dtype=dtype)
    assert max(rate(program, task) for task in heavy(program)) == pytest.approx(expected)
    assert all(rate(program, task) <= expected * 1.0001 for task in heavy(program))


@pytest.mark.parametrize(
    ("groups", "expected"),
    [(CHANNELS // TILE, 156e12), (CHANNELS // 16, 78e12), (CHANNELS // 2, 19.5e12), (CHANNELS, 19.5e12)],
)
def test_narrow_groups_fill_a_part_of_tensor_cores(groups: int, expected: float) -> None:
    """With filters so large that arithmetic is what takes time."""
    layer = nn.Conv2d(CHANNELS, CHANNELS, 25, padding=12, groups=groups, bias=False, device="meta")
    program = captured(layer)
    assert [rate(program, task) for task in heavy(program)] == pytest.approx([expected] * len(heavy(program)))


def test_a_card_without_tf32_and_a_cpu_have_one_rate_for_float32() -> None:
    for name in ("cpu", "p100", "rtx2080ti"):
        assert DEVICES[name].convolution_flops_per_second == DEVICES[name].flops_per_second
    for name in ("a100", "h100", "h100-pcie", "h100-nvl", "h200", "h200-nvl", "gh200"):
        assert 5 < DEVICES[name].convolution_flops_per_second / DEVICES[name].flops_per_second < 9, name


DATA = 4 * BATCH * CHANNELS * SIDE * SIDE


@pytest.mark.parametrize(
    ("options", "forward", "for_input", "for_weight"),
    [
        # read and written, all of it once more with channels last
        ({}, 2 * DATA + 4 * CHANNELS**2 * 9, 2 * DATA + 4 * CHANNELS**2 * 9, 2 * DATA + 4 * CHANNELS**2 * 9),
        ({"stride": 2}, DATA * 5 // 4 + 4 * CHANNELS**2 * 9, DATA * 5 // 4 + 4 * CHANNELS**2 * 9,
        DATA * 5 // 4 + 4 * CHANNELS**2 * 9),
        ({"groups": 4}, 2 * DATA + CHANNELS**2 * 9, 2 * DATA + CHANNELS**2 * 9, 2 * DATA + CHANNELS**2 * 9),
        ({"groups": CHANNELS}, 0, 0, 0),
        ({"channels_last": True}, 0, 0, 4 * CHANNELS**2 * 9),
    ],
)  # fmt: skip
def test_workspaces_of_convolutions(options: dict[str, Any], forward: int, for_input: int, for_weight: int) -> None:
    channels_last = options.pop("channels_last", False)
    layer = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False, device="meta", **options)
    program = captured(layer, channels_last=channels_last)
    costs, on_a_cpu = roofline(program, A100), roofline(program, CPU)
    found = {"aten": {}, "other": {}}
    for task in heavy(program):
        call = task.calls[-1]
        what = str(call.args[-1]) if "backward" in call.op else "forward"
        found["aten" if task.variant == "aten" else "other"][what] = costs[task.cost].workspace_bytes
        assert on_a_cpu[task.cost].workspace_bytes == 0
    assert found["aten"] == {
        "forward": forward,
        str([True, False, False]): for_input,
        str([False, True, False]): for_weight,
    }


def test_no_workspace_is_taken_to_be_larger_than_the_limit() -> None:
    with fake_mode():
        x = torch.empty(64 * BATCH, CHANNELS, SIDE, SIDE, requires_grad=True)
    program = admitted(capture(nn.Conv2d(CHANNELS, CHANNELS, 3, bias=False), (x,), target=CUDA), "normal")
    convolutions = [task for task in heavy(program) if "convolution" in task.calls[-1].op]
    assert {roofline(program, A100)[task.cost].workspace_bytes for task in convolutions} == {WORKSPACE_LIMIT_BYTES}
    assert WORKSPACE_LIMIT_BYTES == 512 * 2**20  # the documentation names it, with the variable that makes it hold


def test_16_bit_weights_gradients_are_summed_in_32() -> None:
    program = captured(
        nn.Conv2d(CHANNELS, CHANNELS, 3, bias=False, device="meta"), dtype=torch.bfloat16, channels_last=True
    )
    of_weight = [t for t in heavy(program) if t.calls[-1].args[-1] == [False, True, False]]
    assert {roofline(program, A100)[t.cost].workspace_bytes for t in of_weight} == {4 * CHANNELS**2 * 9}


def test_the_settings_stand_in_the_profile() -> None:
    request = Request(nn.Sequential(nn.Conv2d(3, 8, 3)).train(), ((torch.randn(2, 3, 8, 8),), {}), "normal")
    profile = prepare(request, torch.device("cpu"), profile=A100).profile
    assert profile.note == (
        "estimated from datasheet rates (NVIDIA A100 40 GB PCIe datasheet: PyTorch's default precisions: float32 "
        "convolutions at 156 TFLOP/s (TF32 where there is one), matrix products at 19.5 (no TF32); workspaces of "
        "convolutions estimated)"
    )
    profile = prepare(request, torch.device("cpu"), profile=CPU).profile
    assert profile.note == f"estimated from datasheet rates ({CPU.source})"
