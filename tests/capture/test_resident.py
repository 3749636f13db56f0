"""What exists when a step begins is counted once, as it lies in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from monet_like.capture.resident import resident_parts


def resident_bytes(model: nn.Module, *inputs: torch.Tensor) -> int:
    return sum(part.untyped_storage().nbytes() for part in resident_parts(model, (inputs, {})))


def test_ties_count_once_and_gradients_and_inputs_count() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    own = 4 * (8 * 8 + 8 + 4 * 8) + 8  # a weight, a bias, batch norm's parameters and statistics, its counter
    assert resident_bytes(model) == own
    x = torch.randn(4, 8)
    model(x).sum().backward()
    assert resident_bytes(model, x, x[1:]) == own + 4 * (8 * 8 + 8 + 2 * 8) + 4 * 4 * 8


def test_a_quantised_weight_counts_as_its_numbers_and_scales() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert 64 * 64 < resident_bytes(model) < 2 * 64 * 64  # not the 4 * 64 * 64 that it stands for
