"""Nets for commands whose subject is not the model: captured and planned in a second."""

from __future__ import annotations

import torch
from torch import nn
from torchvision.models.resnet import BasicBlock


def chain() -> nn.Module:
    """Five convolutions, batch norm and ReLU between them."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(4):
        layers += [nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*layers)


def residual() -> nn.Module:
    """A convolution and two blocks of a ResNet."""
    blocks = [BasicBlock(8, 8) for _ in range(2)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def make_inputs(batch: int) -> torch.Tensor:
    return torch.zeros(batch, 3, 256, 256)
