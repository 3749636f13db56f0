"""Plain PyTorch's program calls in place what the model calls in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monet_like.capture.captured import Captured
from monet_like.capture.lower.step import capture
from monet_like.compiler.pipeline import prepare
from monet_like.compiler.request import Request
from monet_like.ir.program import Task
from monet_like.plan.instance import Instance
from monet_like.plan.local_search.searcher import smallest_known
from monet_like.replay.verify.steps import step_peak
from monet_like.testing import check_variant
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
        ("view", [["select", "fill_", "alias"]]),
        ("read before", [["relu_"]]),
        ("random", [["div_"], ["mul_"]]),
    ],
)
def test_operators_of_plain_pytorch(change: str, operators: list[list[str]]) -> None:
    captured = capture(Block(change), (torch.randn(2, 3, 8, 8),))
    found = changed(captured)
    assert [[call.op.split(".")[1] for call in task.calls] for task in found] == operators
    assert all((task.overwrites is None) == ("clone" in task.calls[0].op) for task in found)
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


class InChunks(torch.autograd.Function):
    """A loss whose forward writes its gradient into a buffer, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        gradient, loss = torch.empty_like(x), x.new_zeros(())
        for rows in range(0, len(x), 16):
            chunk = x[rows : rows + 16] @ weight
            loss = loss + chunk.square().sum()
            gradient[rows : rows + 16] = 2 * chunk @ weight.t()
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0] * tangent, None


class InATile(torch.autograd.Function):
    """A loss that computes in a part of a wide buffer, in the backward as well."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        tile = torch.empty(len(x), 1024)[:, :4]
        torch.mm(x, weight, out=tile)
        ctx.save_for_backward(x, weight)
        return tile.exp().sum()

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        tile = torch.empty(len(x), 1024)[:, :4]
        torch.mm(x, weight, out=tile)
        tile.copy_(tile.exp() * tangent)
        return tile @ weight.t(), None


class Lossy(nn.Module):
    """A layer, and a loss of what it makes and of a buffer."""

    def __init__(self, loss: type[torch.autograd.Function], width: int, scale: float) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(8, width), loss
        self.register_buffer("weight", torch.randn(width, 4) * scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss.apply(self.layer(x), self.weight)


def chunked() -> nn.Module:
    return Lossy(InChunks, 1024, 1.0)


def tiled() -> nn.Module:
    return Lossy(InATile, 8, 0.25)


class Rows(nn.Module):
    """Results written into rows and columns of new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found, h = torch.zeros(3, len(x), 8), x
        for row in range(3):
            h = self.layer(h).tanh()
            found[row] = h
        z = self.layer(x)
        z[:, 2:4] = h[:, :2] * 2
        return found, z


class AddedUp(torch.autograd.Function):
    """A gradient that its backward adds up in a buffer, in several ways in place, of which some are of parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        total = torch.zeros(len(x), 1024)
        total[::2] = 1.0
        total[:, :8] += tangent
        total[:, 8:16].sub_(x)
        total[0][2:6] *= 3
        total.index_add_(1, torch.arange(8), x)
        total.clamp_(-1, 1).mul_(2)
        total.diagonal().fill_(0.5)
        return (total[:, :8] * total[:, 8:16]).clone()


class AddsUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(AddedUp.apply(self.first(x))).square().mean()


class Masked(nn.Module):
    """A mask that is filled in place, part by part, and read between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        with torch.no_grad():
            mask = torch.empty(len(x), 1024).fill_(1.0)
            mask[:, :8].mul_(y)
            weight = mask.mean(1, keepdim=True)
            mask.exp_().sub_(weight)
            mask.masked_fill_(mask > 2, 0.0)
        return (y * mask[:, :8]).mean()


@pytest.mark.parametrize("make", [chunked, tiled, AddsUp, Masked])
def test_writes_in_place_copy_nothing(make: Callable[[], nn.Module]) -> None:
    """Neither in plain PyTorch's program nor in a plan, up to what is written into a part of a tensor."""
    model, x = make().train(), torch.randn(256, 8)
    request = Request(model, ((x,), {}), "inplace_multiway_newnode", profile_batch=256)
    ready = prepare(request, CPU)
    peak = step_peak(model, ((x,), {}), CPU)
    assert ready.plain.peak_bytes == pytest.approx(peak, abs=64 * 1024)
    known = smallest_known(Instance(ready.captured.program, ready.costs, ready.extra_bytes))
    assert known is not None and known.report.peak_bytes < peak + 64 * 1024


def test_writes_into_parts_overwrite_what_they_write_into() -> None:
    scatters = [task for task in changed(capture(chunked(), (torch.randn(256, 8),))) if "slice_scatter" in task.name]
    assert len(scatters) == 16
    assert all(task.overwrites is not None for task in scatters)


def test_what_is_written_into_a_part_is_not_copied_with_its_gaps() -> None:
    """In a tile of a buffer in the forward two wide tensors are made, the second in place; in the backward three."""
    program = capture(tiled().train(), (torch.randn(64, 8),)).program
    assert sum(value.bytes > 64 * 1020 * 4 for value in program.values) == 5


@pytest.mark.parametrize("model", [chunked(), tiled(), Rows(), AddsUp(), Masked()])
def test_writes_into_parts_are_exact(model: nn.Module) -> None:
    check = check_variant("in_place", model.train(), torch.randn(64, 8))
    assert check.judgement == "exact"
    assert check.taken["in_place"]
