"""ResNet-1001 for CIFAR (He et al.

2016, "Identity mappings"), as MODEL: ``benchmarks/models/resnet1001.py:resnet1001``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

#: Blocks in each of three stages: 9 n + 2 layers with n = 111.
BLOCKS = 111
WIDTHS = (64, 128, 256)


class Block(nn.Module):
    """A bottleneck that is normalised before it is convolved."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        inner = after // 4
        self.norm1, self.norm2, self.norm3 = nn.BatchNorm2d(before), nn.BatchNorm2d(inner), nn.BatchNorm2d(inner)
        self.conv1 = nn.Conv2d(before, inner, 1, stride, bias=False)
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.conv3 = nn.Conv2d(inner, after, 1, bias=False)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 or before != after else None

    def forward(self, x: Tensor) -> Tensor:
        """[batch, before, h, w] to [batch, after, h / stride, w / stride]."""
        y = functional.relu(self.norm1(x))
        kept = x if self.shortcut is None else self.shortcut(y)
        y = functional.relu(self.norm2(self.conv1(y)))
        y = functional.relu(self.norm3(self.conv2(y)))
        return kept + self.conv3(y)


def resnet1001() -> nn.Module:
    """1,001 layers, for 10 classes."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    before = 16
    for stage, width in enumerate(WIDTHS):
        for block in range(BLOCKS):
            layers.append(Block(before, width, 2 if stage and not block else 1))
            before = width
    head = (nn.BatchNorm2d(before), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))
    return nn.Sequential(*layers, *head)


def make_inputs(batch: int) -> tuple[Tensor]:
    """A batch of CIFAR images."""
    return (torch.zeros(batch, 3, 32, 32),)
