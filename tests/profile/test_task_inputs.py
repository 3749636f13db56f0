"""What operators are given while they are profiled: nothing that a GPU's assertions refuse."""

from __future__ import annotations

import torch
import torchvision
from torch import nn

from monet_like.capture.lower.step import capture
from monet_like.profile.task_inputs import Inputs

CPU = torch.device("cpu")


class Drawing(nn.Module):
    """Draws by probabilities and rates, and looks words up by what was a floating number."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        drawn = torch.bernoulli(x.detach().sigmoid()) + torch.poisson(x.detach().abs())
        drawn = drawn + torch.multinomial(x.detach().softmax(-1), 4)
        loss = nn.functional.binary_cross_entropy(x.sigmoid(), x.detach().clamp(0, 1))
        return self.words((6 * x.detach().sigmoid()).long()).sum(-1) + drawn * x + loss


def test_probabilities_and_indices_lie_where_operators_want_them() -> None:
    captured = capture(Drawing(), (torch.randn(64, 4),))
    maker, seen = Inputs(captured, CPU), set()
    for task in captured.every_task():
        names = {call.op.split(".")[1] for call in task.calls}
        inputs = [t for t in maker.of(task).values() if isinstance(t, torch.Tensor)]
        if names & {"bernoulli", "poisson", "multinomial", "binary_cross_entropy"}:
            seen |= names
            assert all(float(t.min()) >= 0 and float(t.max()) <= 1 for t in inputs if t.is_floating_point())
        if names & {"embedding", "embedding_dense_backward"}:
            seen |= names
            assert all(int(t.min()) >= 0 and int(t.max()) < 7 for t in inputs if t.dtype == torch.int64)
    drawn = {"bernoulli", "poisson", "multinomial", "binary_cross_entropy"}
    assert seen >= drawn | {"embedding", "embedding_dense_backward"}


class Pooling(nn.Module):
    """Pools boxes of images; each box has its image's number in floating point, which no kernel checks."""

    def forward(self, images: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        return torchvision.ops.roi_align(images, boxes, 3)


def test_operators_of_other_libraries_read_no_number_below_0_or_above_1() -> None:
    captured = capture(Pooling(), (torch.randn(2, 3, 8, 8, requires_grad=True), torch.rand(40, 5)))
    maker = Inputs(captured, CPU)
    of_others = [task for task in captured.every_task() if any("roi_align" in call.op for call in task.calls)]
    assert len(of_others) == 2  # of the forward and of the backward
    for task in of_others:
        assert all(float(t.min()) >= 0 and float(t.max()) < 1 for t in maker.of(task).values())
