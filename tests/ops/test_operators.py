"""What holds for every operator: opcheck, schemas, messages, loading; and a row in the benchmark."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import monet_like.ops
from benchmarks import kernels as benchmark
from monet_like import build
from monet_like.ops import available, caches, convolution, masks, max_pool, operators, rms_norm, status
from monet_like.ops.registry import CUDNN, NAMESPACE

monet_like.ops.load()
registered = torch.ops.monet_like
aten = torch.ops.aten
ROOT = Path(__file__).resolve().parents[2]


def sample_arguments() -> dict[str, tuple[Any, ...]]:
    """Arguments with which opcheck exercises each operator."""
    x = torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last)
    c = torch.rand(3) + 0.5
    pool = ([3, 3], [2, 2], [1, 1], [1, 1])
    y, indices = aten.max_pool2d_with_indices(x, *pool, False)
    offsets = max_pool.max_pool2d_offsets(indices, x.shape, *pool)
    mask, flags = masks.pack_sign(x), torch.rand(2, 3, 6, 6) < 0.5
    norm = (x, c, c, c, c)
    joined = tuple(torch.rand(5) + 0.5 for _ in range(4))
    whole, parts = torch.randn(2, 5, 6, 6), [x.contiguous(), x[:, :2].contiguous()]
    rows, w = torch.randn(4, 6).to(torch.bfloat16), torch.randn(6)
    rstd = rms_norm.rms_norm(rows, w, 1, 1e-6, True, torch.float32)[1]
    filters, options = torch.randn(4, 3, 3, 3), ([2, 1], [1, 1], [1, 2], 1, True)
    convolved = convolution.cudnn_convolution(x, filters, None, *options, "gemm")
    return {
        "pack_sign": (x,),
        "keep_where": (torch.randn(2, 3, 6, 6), mask, x.stride()),
        "keep_where_": (x.clone(), mask),
        "pack_range": (x, 0.0, 6.0),
        "pack_bool": (flags,),
        "unpack_bool": (masks.pack_bool(flags), [2, 3, 6, 6]),
        "masked_scale": (x, masks.pack_bool(flags), 2.0, flags.stride()),
        "pack_largest": (x, 8192),
        "unpack_largest": (caches.pack_largest(x, 8192), 8192, x.shape, x.dtype, x.stride()),
        "mm_largest": (torch.randn(6, 5).t(), caches.pack_largest(torch.randn(5, 7), 8192), 8192, 7),
        "pack_int8": (x,),
        "unpack_int8": (caches.pack_int8(x), x.shape, x.dtype, x.stride()),
        "max_pool2d_with_offsets": (x, *pool, False),
        "max_pool2d_offsets": (indices, x.shape, *pool),
        "max_pool2d_offsets_to_indices": (offsets, x.shape, *pool),
        "max_pool2d_offsets_backward": (y, offsets, x.shape, *pool),
        "pack_nibbles": (offsets,),
        "unpack_nibbles": (masks.pack_nibbles(offsets), offsets.shape, offsets.stride()),
        "batch_norm_apply": (*norm, x, "clamp", 0.0, 6.0),
        "batch_norm_train": (x, c, c, c.clone(), c.clone(), 0.1, 1e-5, x, "silu", 0.0, 0.0, False),
        "batch_norm_activation_backward": (x, *norm, "clamp", 0.0, 6.0, [True, True, True], x.clone()),
        "batch_norm_apply_joined": (parts, *joined, "clamp", 0.0, 6.0),
        "batch_norm_train_joined": (parts, *[t.clone() for t in joined], 0.1, 1e-5, "silu", 0.0, 0.0, True),
        "batch_norm_activation_backward_joined": (whole, parts, *joined, "clamp", 0.0, 6.0, [True, True, True]),
        "rms_norm": (rows, w, 1, 1e-6, True, torch.float32),
        "rms_norm_apply": (rows, w, rstd, 1, True, torch.float32),
        "rms_norm_backward": (rows, rows, w, rstd, rows.clone(), 1),
        "swiglu": (rows, rows.clone()),
        "swiglu_backward": (rows.clone(), rows, rows.clone()),
        "cudnn_convolution": (x, filters, torch.randn(4), *options, "winograd"),
        "cudnn_convolution_backward_input": (convolved, filters, x.shape, *options, "1"),
        "cudnn_convolution_backward_weight": (convolved, x, filters.shape, *options, "3"),
    }


@pytest.mark.parametrize("name", list(operators()))
def test_opcheck(name: str) -> None:
    parts = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if name.endswith("_"):
        # PyTorch does not functionalise a custom operator that returns its argument. The in-place operators are for
        # code that is already functionalised; everything else about them is checked.
        parts.remove("test_aot_dispatch_dynamic")
    torch.library.opcheck(getattr(registered, name).default, sample_arguments()[name], test_utils=parts)


class _Called(TorchDispatchMode):
    """Notes the names of our operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NAMESPACE:
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def test_the_benchmark_has_a_row_for_every_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in (("SHAPES", ((2, 3, 8, 8),)), ("PRODUCTS", ((6, 5, 4),)), ("ROWS", ((3, 8),))):
        monkeypatch.setattr(benchmark, name, small)
    timed = _Called()
    for _, (_, ours, theirs) in benchmark.every_pair(["float32", "bfloat16"]):
        with timed:
            ours()
        others = _Called()
        with others:
            theirs()
        assert not others.names
    assert timed.names == set(operators()) - CUDNN  # these are for CUDA alone


def test_wrong_arguments_are_named() -> None:
    if not available("cpu"):
        pytest.skip(status())
    x, c = torch.randn(2, 3, 4, 4), torch.ones(3)
    with pytest.raises(RuntimeError, match="pack_sign: x must be float32, float64, float16 or bfloat16, got Int"):
        registered.pack_sign(torch.zeros(3, dtype=torch.int32))
    with pytest.raises(RuntimeError, match=r"a mask of 96 bits has shape \[12\] and is contiguous, got shape \[3\]"):
        registered.keep_where(x, torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match=r"weight must have shape \[3\], got \[4\]"):
        registered.batch_norm_apply(x, torch.ones(4), None, c, c, None, "clamp", -math.inf, math.inf)
    with pytest.raises(RuntimeError, match="activation must be clamp, leaky_relu, hardswish or silu, got gelu"):
        registered.batch_norm_apply(x, c, c, c, c, None, "gelu", 0.0, 0.0)
    with pytest.raises(RuntimeError, match=r"9 half bytes have shape \[5\] and are contiguous, got shape \[4\]"):
        registered.unpack_nibbles(torch.zeros(4, dtype=torch.uint8), [9])
    with pytest.raises(
        RuntimeError, match=r"the cache of such a tensor has shape \[10\] and is contiguous, got shape \[9\]"
    ):
        registered.unpack_int8(torch.zeros(9, dtype=torch.uint8), [6], torch.float32)
    with pytest.raises(RuntimeError, match="keep is of 16384 elements and between 1 and that, got 0"):
        registered.pack_largest(x, 0)
    with pytest.raises(RuntimeError, match=r"mm_largest: grad must have two dimensions, got shape \[2, 3, 4, 4\]"):
        registered.mm_largest(x, torch.zeros(9, dtype=torch.uint8), 1, 4)
    with pytest.raises(RuntimeError, match=r"rms_norm: weight must have shape \[4\] on cpu, got \[3\] on cpu"):
        registered.rms_norm(x, c, 1, 1e-6, False, torch.float32)
    with pytest.raises(RuntimeError, match="rms_norm: dims is between 1 and those of x, 4, got 5"):
        registered.rms_norm(x, None, 5, 1e-6, False, torch.float32)
    with pytest.raises(
        RuntimeError, match=r"rstd must be Float of shape \[2, 3, 4, 1\] on cpu, got Float \[3\] on cpu"
    ):
        registered.rms_norm_apply(x, None, c, 1, False, torch.float32)
    with pytest.raises(RuntimeError, match="this window does not turn"):
        registered.max_pool2d_offsets(
            torch.zeros(1, 1, 4, 4, dtype=torch.int64), [1, 1, 80, 80], [2, 2], [], [0, 0], [1, 1]
        )


def run_python(code: str, **environment: str) -> str:
    env = {**os.environ, **environment, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout


def test_importing_loads_neither_torch_nor_kernels() -> None:
    print(run_python("import sys, monet_like.ops, monet_like.build; assert 'torch' not in sys.modules"))


BITS_CODE = """
import torch
from math import inf
import monet_like.ops
monet_like.ops.load()
for dtype in (torch.float32, torch.float64):
    for fmt in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(3, 37, 6, 7, dtype=dtype).contiguous(memory_format=fmt)
        w, b = torch.randn(37, dtype=dtype), torch.randn(37, dtype=dtype)
        y, m, s = torch.native_batch_norm(x, w, b, None, None, True, .1, 1e-5)
        assert torch.equal(torch.ops.monet_like.batch_norm_apply(x, w, b, m, s, None, "clamp", -inf, inf), y)
        trained = torch.ops.monet_like.batch_norm_train(x, w, b, None, None, 0.1, 1e-5, x, "clamp", 0.0, inf, True)
        assert torch.equal(trained[0], (y + x).relu())
        mask = torch.ops.monet_like.pack_sign(y)
        expected = torch.ops.aten.threshold_backward(x, y, 0)
        assert torch.equal(torch.ops.monet_like.keep_where(x, mask, y.stride()), expected)
print(monet_like.ops.status())
"""


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_bits_hold_at_every_vector_width(capability: str) -> None:
    """ATen fuses the multiplication with the addition only from AVX2 on; the kernels follow."""
    run_python(BITS_CODE, ATEN_CPU_CAPABILITY=capability)


@pytest.mark.slow
def test_without_the_library_the_twins_serve_under_the_same_names() -> None:
    assert "plain-torch twins in use" in run_python(BITS_CODE, MONET_LIKE_KERNELS="reference")


def test_status_says_what_runs() -> None:
    text = status()
    if available("cpu"):
        assert text.startswith("compiled kernels in use for cpu")
    else:
        assert "python -m monet_like.build" in text


@pytest.mark.slow
def test_cuda_libraries_have_every_operator_for_both_architectures() -> None:
    library, cudnn = build.library_path("kernels_cuda"), build.library_path("kernels_cudnn")
    if not library.exists():
        pytest.skip("no nvcc, so no CUDA kernels")
    paths = [str(path) for path in (build.library_path(), library, cudnn) if path.exists()]
    code = f"""
import torch
for path in {paths}:
    torch.ops.load_library(path)
from monet_like.ops import operators
has = torch._C._dispatch_has_kernel_for_dispatch_key
print(*sorted(name for name in operators() if not has(f"monet_like::{{name}}", "CUDA")))
"""
    assert run_python(code).split() == ([] if cudnn.exists() else sorted(CUDNN))
    if not torch.cuda.is_available() and "TORCH_CUDA_ARCH_LIST" not in os.environ:
        binary = library.read_bytes()
        assert b"sm_80" in binary and b"sm_90" in binary
