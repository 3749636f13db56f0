"""How long operators take on a GPU: which kind each is of, and what was measured on a card."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import algorithm_cases
import pandas as pd
import pytest
import torch
from torch import nn

from benchmarks.operator_paces import HERE, Timed, fitted, from_frame, logs, table, timed_alone, to_frame
from monet_like.capture.captured import Captured
from monet_like.ir.profile_file import Profile
from monet_like.ir.program import Cost, Task
from monet_like.profile.devices import DEVICES
from monet_like.profile.gpu_paces import PACES, Pace
from monet_like.profile.roofline import operation_seconds, roofline
from monet_like.profile.work import Operation, flops, works_of

H200 = DEVICES["h200"]
captured = partial(algorithm_cases.captured, mode="normal", grad=True)


def plain_kinds(program: Captured) -> list[str]:
    """Kinds of what plain PyTorch runs, in its order, but for elementwise operators."""
    plain, works = program.plain, works_of(program)
    tasks = [*plain.tasks, *(slot[0] for slot in plain.slots)]
    found = [one.kind for task in tasks if task.runs != "again" for one in works[task.cost].operations]
    return [kind for kind in dict.fromkeys(found) if kind != "elementwise"]


class _Pool(nn.Module):
    """Max pooling by a function, to which only a window is given."""

    def __init__(self, window: int | list[int]) -> None:
        super().__init__()
        self.window = window

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.max_pool2d(x, self.window)


@pytest.mark.parametrize(
    ("layer", "shape", "kinds"),
    [
        (lambda: nn.Conv2d(8, 6, 3, bias=False), (2, 8, 9, 9), ["convolution", "convolution for the weight",
        "convolution for the input"]),
        (lambda: nn.ConvTranspose2d(8, 6, 3, bias=False), (2, 8, 9, 9), ["convolution for the input",
        "convolution for the weight", "convolution"]),
        (lambda: nn.Conv2d(8, 6, 1, bias=False), (2, 8, 9, 9), ["convolution 1x1", "convolution 1x1 for the weight"]),
        (lambda: nn.Conv2d(8, 6, 1, 2, bias=False), (2, 8, 9, 9), ["convolution", "convolution for the weight",
        "convolution for the input"]),
        (lambda: nn.Conv2d(8, 8, 3, groups=8, bias=False), (2, 8, 9, 9), ["depthwise convolution",
        "depthwise convolution for the weight", "depthwise convolution for the input"]),
        (lambda: nn.Conv2d(8, 8, 3, 2, groups=8, bias=False), (2, 8, 9, 9), ["depthwise convolution, strided",
        "depthwise convolution for the weight", "depthwise convolution for the input, strided"]),
        (lambda: nn.Conv3d(8, 6, 3, bias=False), (2, 8, 9, 9, 9), ["convolution of volumes",
        "convolution of volumes for the weight", "convolution of volumes for the input"]),
        (lambda: nn.BatchNorm2d(8), (2, 8, 9, 9), ["batch norm", "batch norm's backward"]),
        (lambda: nn.MaxPool2d(2), (2, 8, 8, 8), ["max pooling, 2x2/2", "max pooling's backward"]),
        (lambda: nn.MaxPool2d(3, 2), (2, 8, 9, 9), ["max pooling, 3x3/2", "max pooling's backward"]),
        (lambda: nn.MaxPool2d(3, 1), (2, 8, 9, 9), ["max pooling, other", "max pooling's backward"]),
        (lambda: _Pool([2, 2]), (2, 8, 8, 8), ["max pooling, 2x2/2", "max pooling's backward"]),
        (lambda: _Pool([2]), (2, 8, 8, 8), ["max pooling, 2x2/2", "max pooling's backward"]),
        (lambda: _Pool(3), (2, 8, 9, 9), ["max pooling, other", "max pooling's backward"]),
        (lambda: nn.Linear(8, 6, bias=False), (4, 8), ["product"]),
        (lambda: nn.Softmax(1), (4, 8), ["softmax"]),
        (lambda: nn.LayerNorm(8), (4, 8), ["layer norm", "layer norm's backward"]),
    ],
)  # fmt: skip
def test_kinds_of_operators(layer: Callable[[], nn.Module], shape: tuple[int, ...], kinds: list[str]) -> None:
    assert sorted(plain_kinds(captured(layer(), *shape))) == sorted(kinds)


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(-1)


def test_layout_and_widths_decide_too() -> None:
    convolution, narrow, odd = (
        nn.Conv2d(8, 8, 3, bias=False),
        nn.Linear(64, 16, bias=False),
        nn.Linear(64, 15, bias=False),
    )
    assert plain_kinds(captured(convolution, 2, 8, 9, 9, layout=torch.channels_last)) == ["convolution, channels last"]
    assert plain_kinds(captured(narrow, 8, 64, dtype=torch.bfloat16)) == ["product, 16 bits"]
    assert "product, 16 bits, odd rows" in plain_kinds(captured(odd, 8, 64, dtype=torch.bfloat16))
    assert plain_kinds(captured(_Mean(), 8, 49)) == ["mean of planes"]
    assert plain_kinds(captured(_Mean(), 8, 2048)) == ["reduction"]


def test_a_batch_norm_of_few_channels_leaves_a_part_of_the_card_idle() -> None:
    pace = PACES["batch norm"]
    wide, narrow = (Operation("batch norm", touched_bytes=10**9, channels=channels) for channels in (1024, 16))
    alone = pace.traffic * 10**9 / H200.bytes_per_second
    assert operation_seconds(wide, H200) == pytest.approx(pace.launch_seconds + alone)
    idle = pace.blocks * H200.multiprocessors / 16
    assert idle > 9
    assert operation_seconds(narrow, H200) == pytest.approx(pace.launch_seconds + idle * alone)


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d])
def test_each_gradient_of_a_grouped_convolution_multiplies_as_often_as_the_forward(layer: type[nn.Module]) -> None:
    program = captured(layer(12, 24, 3, groups=4, bias=False), 2, 12, 9, 9)
    counts = {flops(program, task) for task in program.every_task() if flops(program, task)}
    meetings = 7 * 7 * 24 * 3 if layer is nn.Conv2d else 9 * 9 * 12 * 6
    assert counts == {2 * 2 * meetings * 9}


def test_a_task_of_several_operators_takes_as_long_as_all_of_them() -> None:
    program = captured(
        nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)),
        4,
        8,
        16,
        16,
        mode="inplace_conv_multiway_newnode",
    )
    costs, works = roofline(program, H200), works_of(program)

    def several(task: Task) -> bool:
        return len(works[task.cost].operations) > 1 and task.cost in costs

    tasks = [task for task in program.every_task() if several(task)]
    assert tasks
    for task in tasks:
        parts = sum(operation_seconds(one, H200) for one in works[task.cost].operations)
        assert costs[task.cost].seconds == pytest.approx(parts)


def test_paces_are_those_of_the_card_that_was_measured() -> None:
    """By net, all operators together; and no kind that was measured is far off."""
    frame = pd.read_csv(HERE)
    assert set(frame.kind) <= set(PACES)
    seconds = [operation_seconds(one.operation, H200) for one in from_frame(frame)]
    sums = frame.assign(predicted=seconds).groupby("net")[["seconds", "predicted"]].sum()
    assert len(sums) == 8
    assert (sums.seconds / sums.predicted).between(0.85, 1.2).all(), sums
    by_kind = frame.assign(predicted=seconds).groupby("kind")[["seconds", "predicted"]].sum()
    assert (by_kind.seconds / by_kind.predicted).between(0.75, 1.25).all(), by_kind


def test_factors_are_found_again() -> None:
    true = Pace(3.0, 2.0, 30e-6)
    operations = [Operation("convolution", 0, 10**10 * a, 10**7 * b) for a in (0, 1, 30) for b in (0, 1, 30, 100)]
    timed = [Timed("net", one, operation_seconds(one, H200, true)) for one in operations]
    assert abs(logs(timed, true, H200)).max() < 1e-9
    found = fitted(timed, PACES["convolution"], H200)
    assert (found.traffic, found.arithmetic, found.launch_seconds) == pytest.approx((3.0, 2.0, 30e-6), rel=0.02)
    assert list(table(timed, H200).kind) == ["convolution"]


def test_operators_of_a_profile_are_written_and_read() -> None:
    program = captured(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)), 2, 4, 9, 9)
    costs = {task.cost: Cost(1e-3, 0) for task in program.every_task()}
    frame = to_frame(list(timed_alone(program, Profile("cuda: NVIDIA H200", costs), "net")))
    assert {"convolution", "batch norm", "elementwise"} <= set(frame.kind)
    assert to_frame(from_frame(frame)).equals(frame)
