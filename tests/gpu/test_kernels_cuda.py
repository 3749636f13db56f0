"""The CUDA kernels on a GPU: the checks that are emulated elsewhere, and shapes that an emulator would take minutes
for.

Their results are compared with those of ATen and of the twins on the CPU.
"""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from cuda_emulator import check_kernels
from cuda_emulator.check_kernels import *  # noqa: F403  # its tests and their fixture
from kernel_inputs import FLOATS

from monet_like import ops
from monet_like.ops import masks

ops.load()
registered = torch.ops.monet_like


def test_the_cuda_kernels_are_compiled() -> None:
    assert ops.available("cuda"), ops.status()


@pytest.mark.parametrize("dtype", FLOATS)
def test_large_shapes(dtype: torch.dtype) -> None:
    check_kernels.check_masks((100_003,), dtype)
    check_kernels.check_caches(check_kernels.values((100_003,), dtype), (1000, 1639))
    for rows, columns, outs in ((9000, 1024, 70), (300, 1000, 64)):  # rows made dense in several turns
        for transposed in (False, True):
            check_kernels.check_products(rows, columns, outs, 1639, dtype, transposed=transposed)
    for shape in ((4, 64, 32, 32), (64, 5, 70, 71)):
        wide = torch.randn(shape, dtype=torch.float64).mul(3).add(1)
        rows_of_norm = check_kernels.norm_rows(wide, dtype, own=False)
        for x in (wide.to(dtype), wide.to(dtype, memory_format=torch.channels_last)):
            check_kernels.check_batch_norm_apply(x, rows_of_norm)
            check_kernels.check_batch_norm_backward(x, rows_of_norm)
            check_kernels.check_batch_norm_train(x, rows_of_norm, exact_statistics=True)
    check_kernels.check_swiglu(*(torch.randn(4096, 1376).mul(3).to(dtype) for _ in range(3)))


def test_other_streams_and_opcheck() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.randn(1_000_003, device="cuda")
        mask = registered.pack_sign(x)
    stream.synchronize()
    assert torch.equal(mask.cpu(), masks.pack_sign(x.cpu()))
    torch.library.opcheck(registered.pack_sign.default, (x[:100],))
