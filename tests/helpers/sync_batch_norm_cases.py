"""A model with batch norms whose statistics several processes share."""

from __future__ import annotations

import torch
from replays import record_for
from torch import nn

from monet_like.capture.lower.step import capture
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.plan.random_schedules import random_schedule
from monet_like.variants import admitted

MODE = "inplace_multiway_newnode"


class Net(nn.Module):
    """Residual blocks of batch norms of every kind: averaged plainly, untracked, flat with a frozen weight."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(
            [
                nn.BatchNorm2d(8),
                nn.BatchNorm2d(8, momentum=None),
                nn.BatchNorm2d(8, affine=False, track_running_stats=False),
            ]
        )
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in self.norms)
        self.dropout = nn.Dropout(dropout)
        self.flat = nn.BatchNorm1d(8)
        self.flat.weight.requires_grad_(False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for turn, (norm, convolution) in enumerate(zip(self.norms, self.convolutions, strict=True)):
            y = norm(convolution(x))
            x = self.dropout((y + x if turn % 2 else y).relu())
        return self.head(self.flat(x.mean((2, 3))))


def images(batch: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(batch, 3, 8, 8, dtype=dtype)


def made(
    model: nn.Module, x: torch.Tensor, processes: int | None = 2, modes: tuple[str, str] = (MODE, MODE)
) -> list[ScheduleRecord]:
    """Two schedules that run much of what they can again, made where there is no group."""
    found = []
    for mode, seed in zip(modes, (3, 5), strict=True):
        captured = admitted(capture(model, (x,), processes=processes), mode)
        schedule = random_schedule(captured.program, seed, drop=0.7)
        found.append(record_for(captured, schedule, mode, (model, (x,), {})))
    assert found[0].schedule != found[1].schedule
    assert (found[0].fingerprint == found[1].fingerprint) == (modes[0] == modes[1])
    return found
