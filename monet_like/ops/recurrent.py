"""Recurrent layers by oneDNN, whose workspace for the backward has a size that only the library knows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

#: How a trace calls an LSTM in float32 on a CPU, layer by layer and direction by direction.
ONEDNN_LAYER = torch.ops.aten.mkldnn_rnn_layer.default


def with_workspace(args: Sequence[Any], results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The operator's results, of which the last, the workspace, has the size that the library gives it.

    That is found by running the layer once for real, on zeros of the shapes of ``args``.

    Args:
        args: as of `ONEDNN_LAYER`, fake.
        results: as traced: of the workspace PyTorch tells no size.
    """
    described = tuple(
        (tuple(a.shape), a.stride(), a.dtype) if isinstance(a, torch.Tensor) else tuple(a) if isinstance(a, list) else a
        for a in args
    )
    *outputs, workspace = results
    return *outputs, workspace.new_empty(_workspace_elements(described))


def onednn_layer(*args: Any) -> tuple[torch.Tensor, ...]:
    """Call `ONEDNN_LAYER` with gradients enabled, so that it returns its workspace, but unrecorded by autograd."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        results: tuple[torch.Tensor, ...] = ONEDNN_LAYER(*args)
    return results


@lru_cache(maxsize=256)
def _workspace_elements(described: tuple[Any, ...]) -> int:
    tensors = 7  # input, four of weights and biases, hidden and cell state
    with _disable_current_modes():
        real = [torch.empty_strided(d[0], d[1], dtype=d[2]).zero_() for d in described[:tensors]]
        others = (list(d) if isinstance(d, tuple) else d for d in described[tensors:])
        return int(onednn_layer(*real, *others)[3].numel())
