"""A back end is a way to run a piece: what it takes is a point of the piece's menu, and the choice among menus is the
planner's own. Here two that are three lines each, without a schedule of ours.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from block_models import CPU, Short
from torch import nn
from torch.utils.checkpoint import checkpoint

from monet_like.ir.schedule import Schedule
from monet_like.ir.step import Moment, Piece, Point, Step, peak_of, seconds_of
from monet_like.plan.step.choice import fastest, smallest
from monet_like.profile.measure import allocated_stretches

#: From a piece to what is called in its place.
BackEnd = Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]
PIECES = 4


def plain(piece: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Plain PyTorch."""
    return piece


def checkpointed(piece: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """PyTorch's own checkpointing."""
    return partial(checkpoint, piece, use_reentrant=False)


#: With the seconds that they are taken to need for a piece.
BACK_ENDS: dict[BackEnd, float] = {plain: 3.0, checkpointed: 4.0}


def size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def trained(
    model: nn.Module, runs: list[BackEnd], x: torch.Tensor, mark: Callable[[], None] = lambda: None
) -> list[torch.Tensor]:
    """A step piece by piece, in which all results of pieces are kept; marked after each forward and backward."""
    ends: list[tuple[torch.Tensor, torch.Tensor]] = []
    for piece, back_end in zip(model.children(), runs, strict=True):
        begin = (ends[-1][1] if ends else x).detach().requires_grad_()
        ends.append((begin, back_end(piece)(begin)))
        mark()
    gradient: torch.Tensor | None = torch.ones_like(x)
    for begin, end in reversed(ends):
        end.backward(gradient)
        gradient, begin.grad = begin.grad, None
        mark()
    return [end for _, end in ends]


def measured(piece: nn.Module, back_end: BackEnd, x: torch.Tensor) -> Point:
    """What a piece takes by a back end, from a run of it alone."""
    alone = nn.Sequential(copy.deepcopy(piece))
    forward, backward, *_ = allocated_stretches(partial(trained, alone, [back_end], x), CPU)
    carried = forward.end_bytes - size(x)  # the result counts apart
    peak = backward.peak_bytes - 2 * size(x)  # and the incoming gradient
    nothing = Schedule((), (), ())
    return Point(nothing, BACK_ENDS[back_end], carried, forward.peak_bytes, peak, peak)


def step_of(model: nn.Module, x: torch.Tensor) -> Step:
    """Pieces with a point for each back end; moments with results, the incoming gradient and gradients so far."""
    menus = [tuple(measured(piece, back_end, x) for back_end in BACK_ENDS) for piece in model.children()]
    pieces = tuple(Piece(str(place), menu=menu) for place, menu in enumerate(menus))
    gradients = [sum(map(size, piece.parameters())) for piece in model.children()]
    forwards = [
        Moment(f"forward of {place}", place * size(x), tuple((p, 1) for p in range(place)), place, "forward")
        for place in range(PIECES)
    ]
    backwards = [
        Moment(
            f"backward of {place}", (PIECES + 1) * size(x) + sum(gradients[place + 1 :]),
            tuple((p, 1) for p in range(place + 1)), place, "backward",
        )
        for place in reversed(range(PIECES))
    ]  # fmt: skip
    return Step(pieces, (*forwards, *backwards))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_pieces_run_by_other_back_ends_under_a_budget(share: float) -> None:
    """The step has the peak that was predicted, to the byte, and plain PyTorch's gradients."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Short(24) for _ in range(PIECES))), torch.randn(512, 24)
    step = step_of(model, x)
    all_plain = peak_of(step, [menu[0] for menu in step.menus])[0]
    least = smallest(step).peak_bytes
    assert least < 0.8 * all_plain
    found = fastest(step, least + int(share * (all_plain - least)))
    runs = [list(BACK_ENDS)[menu.index(point)] for menu, point in zip(step.menus, found.points, strict=True)]
    wanted = {0.0: {checkpointed}, 0.5: {plain, checkpointed}, 1.0: {plain}}[share]
    assert {*runs} - {plain} == wanted - {plain} and found.seconds == seconds_of(step, found.points)

    mine, theirs = copy.deepcopy(model), copy.deepcopy(model)
    torch.manual_seed(1)
    stretches = allocated_stretches(partial(trained, mine, runs, x), CPU)
    assert max(stretch.peak_bytes for stretch in stretches) == found.peak_bytes
    torch.manual_seed(1)
    trained(theirs, [plain] * PIECES, x)
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
