"""Plain PyTorch's program calls in place what the model calls in place."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monet_like.capture.captured import Captured
from monet_like.capture.lowering import capture
from monet_like.compiler.pipeline import prepare
from monet_like.compiler.request import Request
from monet_like.ir.program import Task
from monet_like.replay.verify import step_peak
from monet_like.variants import with_variants

CPU = torch.device("cpu")


class Block(nn.Module):
    """A convolution whose result an activation or more change in place, or do not."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.first, self.second, self.change = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        match self.change:
            case "none":
                y = ~(torch.relu(y) > 0) * y
            case "module":
                y = nn.ReLU(inplace=True)(y)
            case "function":
                y = F.leaky_relu(y, 0.1, True)
            case "method":
                y = y.clamp_(-1, 1).sigmoid_()
            case "operator":
                y += x
                y *= 2
            case "copied":
                y = F.relu6(y, inplace=True)
            case "view":
                y[:, 0] = 0
            case "read before":
                z = y.detach().exp()
                y = y + (z + 1) + z.relu_()
            case "random":
                y = F.dropout(y, 0.5, inplace=True)
        return self.second(y).mean()


def changed(captured: Captured) -> list[Task]:
    return [task for task in captured.plain.tasks if task not in captured.program.tasks]


@pytest.mark.parametrize(
    ("change", "operators"),
    [
        ("none", []),
        ("module", [["relu_"]]),
        ("function", [["leaky_relu_"]]),
        ("method", [["clone", "clamp_"], ["sigmoid_"]]),
        ("operator", [["add_"], ["mul_"]]),
        ("copied", [["clone", "hardtanh_"]]),
        ("view", []),
        ("read before", []),
        ("random", [["div_"]]),  # the mask is made in the likeness of what it multiplies, so that counts as read
    ],
)
def test_operators_of_plain_pytorch(change: str, operators: list[list[str]]) -> None:
    captured = capture(Block(change), (torch.randn(2, 3, 8, 8),))
    found = changed(captured)
    assert [[call.op.split(".")[1] for call in task.calls] for task in found] == operators
    assert all((task.overwrites is None) == (len(task.calls) > 1) for task in found)
    captured.plain.check()
    assert with_variants(captured).plain == captured.plain


class Large(nn.Module):
    """What it makes beside its layer decides the peak of its step."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.layer, self.in_place = nn.Linear(8, 8), in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = torch.cat([x] * 512)
        if self.in_place:
            large += 1
            large.relu_()
        else:
            large = large + 1
            large = torch.relu(large)
        return self.layer(x) * large.mean()


@pytest.mark.parametrize(("in_place", "copies"), [(True, 1), (False, 2)])
def test_plain_peak_is_that_of_calls_in_place(in_place: bool, copies: int) -> None:
    model, x = Large(in_place=in_place).train(), torch.randn(64, 8)
    ready = prepare(Request(model, ((x,), {}), "normal", profile_batch=64), CPU)
    peak = step_peak(model, ((x,), {}), CPU)
    assert ready.plain.peak_bytes == pytest.approx(peak, abs=16 * 1024)
    assert round(peak / (4 * 512 * 64 * 8)) == copies
