"""The operators of SyncBatchNorm against batch norm over the batches of all processes, without other processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from training import tensors

from monet_like.capture.captured import TensorMeta, fake_mode
from monet_like.nn.sync_batch_norm import convert_sync_batchnorm
from monet_like.ops.sync_batch_norm import COMMUNICATING

REDUCE = "monet_like.sync_batch_norm_all_reduce.default"


class Alone(TorchDispatchMode):
    """What communicates does without, as if both processes had the same; results look as they do without storage."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = {**COMMUNICATING, REDUCE: lambda sums, group: 2 * sums}.get(str(func), func)
        result = found(*args, **(kwargs or {}))
        if str(func).startswith("monet_like.sync"):
            with fake_mode() as mode:
                expected = func(*tree_map_only(torch.Tensor, mode.from_tensor, args))
            assert list(map(TensorMeta.of, tensors(result))) == list(map(TensorMeta.of, tensors(expected))), func
        return result


LAYOUTS = [
    ((6, 3), torch.contiguous_format),
    ((2, 3, 5), torch.contiguous_format),
    ((2, 3, 5, 4), torch.channels_last),
    ((2, 3, 2, 5, 4), torch.channels_last_3d),
]


#: Of inputs, of parameters, and the relative error that a sum of few numbers may have.
DTYPES = [
    (torch.float64, torch.float64, 1e-12),
    (torch.float32, torch.float32, 1e-5),
    (torch.bfloat16, torch.bfloat16, 4e-2),
    (torch.float16, torch.float32, 4e-3),
]


@pytest.mark.parametrize(("dtype", "parameters", "error"), DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "layout"), LAYOUTS, ids=str)
def test_operators(
    shape: tuple[int, ...],
    layout: torch.memory_format,
    dtype: torch.dtype,
    parameters: torch.dtype,
    error: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two processes with the same batch, and batch norm over that batch twice."""
    torch.manual_seed(0)
    ours: Any = convert_sync_batchnorm(nn.BatchNorm3d(3))  # which asks for no number of dimensions
    nn.init.uniform_(ours.weight, 0.5, 1.5)
    ours.to(parameters)
    plain: Any = nn.BatchNorm3d(3).double()
    plain.load_state_dict(ours.state_dict())
    x, grad = (t.to(memory_format=layout) for t in torch.randn(2, *shape).to(dtype).unbind())
    x.requires_grad_()
    monkeypatch.setattr("monet_like.nn.sync_batch_norm._imagined", 2)
    with Alone():
        y = ours(x)
        y.backward(grad)
    assert x.grad is not None and y.dtype == x.dtype and y.stride() == x.grad.stride() == x.stride()
    deep = (*shape, *(1,) * (5 - len(shape)))
    wide = x.detach().double().reshape(deep).requires_grad_()
    expected = plain(torch.cat([wide, wide.detach()]))
    expected.backward(torch.cat([grad.double().reshape(deep)] * 2))
    assert wide.grad is not None
    pairs = [(y, expected.chunk(2)[0].reshape(shape)), (x.grad, wide.grad.reshape(shape))]
    pairs += [(p.grad, 0.5 * q.grad) for p, q in zip(ours.parameters(), plain.parameters(), strict=True)]
    pairs += zip(ours.buffers(), plain.buffers(), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=error, atol=error)
