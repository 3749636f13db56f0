"""What a GPU's operator for a GRU's cell makes; PyTorch tells a trace nothing of it."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from monet_like.ops import meta_functions


@pytest.mark.parametrize("has_bias", [False, True])
def test_shapes_are_those_of_the_kernel(has_bias: bool) -> None:
    """As in PyTorch's ``RNN.cu``; on a GPU `benchmarks.small_models` compares whole steps."""
    meta_functions.register()
    with FakeTensorMode():
        gates, state = (torch.empty(4, extent, device="cuda") for extent in (18, 6))
        biases = [torch.empty(18, device="cuda")] * 2 if has_bias else [None] * 2
        new, workspace = torch.ops.aten._thnn_fused_gru_cell(gates, gates, state, *biases)
        found = torch.ops.aten._thnn_fused_gru_cell_backward(new, workspace, has_bias)
    assert new.shape == (4, 6) and workspace.shape == (4, 30)
    shapes = [None if one is None else tuple(one.shape) for one in found]
    assert shapes == [(4, 18), (4, 18), (4, 6), *([(18,)] * 2 if has_bias else [None] * 2)]
