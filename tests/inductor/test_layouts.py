"""Gradients with other strides than their parameters: a plan converts them, so that autograd does not copy them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compiled import SCALARS, peaks
from torch import nn


class Patches(nn.Module):
    """A convolution of permuted images, as in ConvNeXt.

    Weights outweigh all else: the peak is when all gradients are there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Sequential(
            nn.Linear(8, 1024), *(nn.Linear(1024, 1024) for _ in range(2)), nn.Linear(1024, 256)
        )
        self.patches = nn.Conv2d(256, 512, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.patches(self.tokens(x).permute(0, 3, 1, 2)).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_step_with_permuted_images_needs_what_its_plan_says(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    model: Any = Patches().to(memory_format=layout)
    found, graph = peaks(model, (torch.randn(2, 4, 4, 8),), "100%", True)
    assert model.patches.weight.grad.stride() == model.patches.weight.stride()
    conversions = sum("force_stride" in ways[0].name for ways in graph.program.slots)
    assert conversions == (layout == torch.contiguous_format)
    assert 0.99 * graph.peak_bytes <= found <= graph.peak_bytes + SCALARS
