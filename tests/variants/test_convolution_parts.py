"""Convolutions for a part of the batch at a time: captured as on a GPU, and run on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from algorithm_cases import FORMATS, captured
from replays import FULL
from taking import outcome, random_inputs
from torch import nn

from monet_like.capture.captured import Captured
from monet_like.ir.program import Task
from monet_like.profile.devices import DEVICES
from monet_like.profile.roofline import roofline
from monet_like.variants.convolution_parts import PARTS

APART = {f"conv.batch{parts}" for parts in PARTS}
IN_PLACE = {f"{name}_in_place" for name in APART}
CASES: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()), (9, 4, 12, 10)),
    (nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 6, (3, 5), 2, groups=2, bias=False)), (9, 4, 12, 10)),
    (nn.Sequential(nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 3, 3, 2, output_padding=1)), (3, 4, 7, 6)),
    (nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.Conv3d(4, 4, 3, 2)), (2, 2, 6, 6, 8)),
    (nn.Sequential(nn.Conv1d(2, 4, 3), nn.Conv1d(4, 4, 3)), (1, 2, 16)),
]


def ways(of: Captured) -> list[tuple[Task, Task]]:
    """What is made in parts, beside PyTorch's own."""
    found = [(slot[0], way) for slot in of.program.slots for way in slot if way.variant in APART | IN_PLACE]
    producers = of.program.producers
    forward = [task for task in of.program.tasks if task.variant in APART | IN_PLACE]
    return [(of.program.tasks[producers[task.writes[0]][0]], task) for task in forward] + found


ROWS, LAST = FORMATS


@pytest.mark.parametrize(
    ("case", "layout", "dtype"),
    [
        *((case, ROWS, torch.float32) for case in range(len(CASES))),
        *((case, LAST, torch.float32) for case in range(3)),  # a layout of images
        (0, LAST, torch.bfloat16),
        (1, ROWS, torch.bfloat16),
    ],
)
def test_parts_make_what_the_whole_batch_makes(case: int, layout: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, shape = CASES[case]

    of = captured(model, *shape, dtype=dtype, layout=layout, mode=FULL)
    found, rounding = ways(of), {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert len(found) >= 4
    assert {way.variant for _, way in found} == (APART | IN_PLACE if case == 0 else APART)
    for own, way in found:
        inputs = random_inputs(of, own, way)
        for value, expected, made in zip(own.writes, outcome(own, inputs), outcome(way, inputs), strict=True):
            meta = of.metas[value]
            assert (made.dtype, made.shape, made.stride()) == (meta.dtype, meta.shape, meta.stride)
            assert float((made - expected).abs().max()) <= rounding * float(expected.abs().max())


def test_only_the_largest_convolutions_are_cut_on_a_gpu_and_where_rounding_is_allowed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, 4), nn.Conv2d(16, 4, 3, 2))
    of = captured(model, 8, 3, 32, 32, mode=FULL)
    cut = {value for _, way in ways(of) for value in way.reads if of.program.values[value].kind == "parameter"}
    assert {of.program.values[value].name for value in cut} <= {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert not any("convolution_2" in way.name for _, way in ways(of))
    assert not ways(captured(model, 8, 3, 32, 32, mode="inplace_multiway_newnode"))
    depthwise = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 3, groups=8))
    assert not ways(captured(depthwise, 8, 8, 32, 32, mode=FULL))


def test_a_part_needs_a_part_of_the_workspace_and_a_result_of_its_own() -> None:
    size = (16, 4, 16, 16)
    of = captured(nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))), *size, mode=FULL)
    costs = roofline(of, DEVICES["h100"])
    filters, images = 4 * 4 * 4 * 9, 4 * 16 * 4 * 16 * 16
    for own, way in ways(of):
        whole, part = costs[own.cost].workspace_bytes, costs[way.cost].workspace_bytes
        assert whole == 2 * images + filters
        parts = 16 if "batch16" in way.variant else 4
        made = filters if own.writes[0] in of.program.gradients else images // parts
        assert part == 2 * images // parts + filters + made
