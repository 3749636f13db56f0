"""Our CPU kernels against the ATen operators they replace: python -m benchmarks.kernels

A row per kernel, shape, layout and dtype: median milliseconds of both, taken in turns in one process, and their ratio.
In-place ATen operators are used where eager PyTorch would use them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
import torch
from torch import Tensor

from monet_like import kernels
from monet_like.variants.dropit import kept_of_block

aten = torch.ops.aten
ops = torch.ops.monet_like
SHAPES = ((16, 64, 112, 112), (16, 256, 56, 56), (32, 96, 56, 56), (16, 1024, 14, 14), (16, 512, 7, 7))
POOL: tuple[Any, ...] = ([3, 3], [2, 2], [1, 1], [1, 1])
Pair = tuple[str, Callable[[], Any], Callable[[], Any]]


def pairs(x: Tensor) -> Iterator[Pair]:
    """(what, ours, theirs) on tensors like ``x``."""
    half = x.dtype in (torch.bfloat16, torch.float16)
    c = torch.rand(x.shape[1], dtype=torch.float32 if half else x.dtype) + 0.5
    residual, grad = torch.randn_like(x), torch.randn_like(x)
    y, mean, invstd = aten.native_batch_norm(x, c, c, None, None, True, 0.1, 1e-5)
    running = (c.clone(), c.clone())

    def forward() -> Tensor:
        result: Tensor = aten.native_batch_norm(x, c, c, *running, True, 0.1, 1e-5)[0]
        return result

    def again() -> Tensor:
        result: Tensor = aten._native_batch_norm_legit.no_stats(x, c, c, True, 0.1, 1e-5)[0]
        return result

    def backward(through: Tensor) -> Any:
        return aten.native_batch_norm_backward(
            through, x, c, None, None, mean, invstd, True, 1e-5, [True, True, True]
        )  # fmt: skip

    relu, saved, nothing = ("clamp", 0.0, math.inf), (x, c, c, mean, invstd), ("clamp", -math.inf, math.inf)
    train = (x, c, c, *running, 0.1, 1e-5)
    yield "BN + ReLU", lambda: ops.batch_norm_train(*train, None, *relu, True), lambda: forward().relu_()
    yield (
        "BN + add + ReLU",
        lambda: ops.batch_norm_train(*train, residual, *relu, True),
        lambda: forward().add_(residual).relu_(),
    )
    yield (
        "BN + ReLU, statistics in vectors",
        lambda: ops.batch_norm_train(*train, None, *relu, False),
        lambda: forward().relu_(),
    )
    yield (
        "BN + SiLU, statistics in vectors",
        lambda: ops.batch_norm_train(*train, None, "silu", 0.0, 0.0, False),
        lambda: aten.silu_(forward()),
    )
    yield "BN again", lambda: ops.batch_norm_apply(*saved, None, *nothing), again
    yield (
        "BN + add + ReLU again",
        lambda: ops.batch_norm_apply(*saved, residual, *relu),
        lambda: again().add_(residual).relu_(),
    )
    yield (
        "gradient of BN + ReLU",
        lambda: ops.batch_norm_activation_backward(grad, *saved, *relu, [True, True, True]),
        lambda: backward(aten.threshold_backward(grad, y, 0)),
    )
    yield (
        "gradient of BN + SiLU",
        lambda: ops.batch_norm_activation_backward(grad, *saved, "silu", 0.0, 0.0, [True, True, True]),
        lambda: backward(aten.silu_backward(grad, y)),
    )
    mask, stride = ops.pack_sign(x), x.stride()
    yield "ReLU's signs packed", lambda: ops.pack_sign(x), lambda: x > 0
    yield (
        "ReLU's gradient, packed",
        lambda: ops.keep_where(grad, mask, stride),
        lambda: aten.threshold_backward(grad, y, 0),
    )
    yield (
        "leaky ReLU's gradient, packed",
        lambda: ops.masked_scale(grad, mask, 1.0, stride, 0.1),
        lambda: aten.leaky_relu_backward(grad, x, 0.1, False),
    )
    yield "range packed", lambda: ops.pack_range(x, 0.0, 6.0), lambda: (x > 0) & (x < 6)
    pooled, indices = aten.max_pool2d_with_indices(x, *POOL, False)
    _, offsets = ops.max_pool2d_with_offsets(x, *POOL, False)
    yield (
        "max pool",
        lambda: ops.max_pool2d_with_offsets(x, *POOL, False),
        lambda: aten.max_pool2d_with_indices(x, *POOL, False),
    )
    yield (
        "max pool's gradient",
        lambda: ops.max_pool2d_offsets_backward(pooled, offsets, x.shape, *POOL),
        lambda: aten.max_pool2d_with_indices_backward(pooled, x, *POOL, False, indices),
    )


#: Rows, columns and outs of a linear layer's weight gradient.
PRODUCTS = ((2048, 1024, 1024), (2048, 768, 3072), (2048, 3072, 768), (512, 256, 1024))


def products(dtype: torch.dtype) -> Iterator[tuple[str, Pair]]:
    """(shape, pair) of weight gradients from dropped inputs, against the product with all of the input."""
    for rows, columns, outs in PRODUCTS:
        x, grad = torch.randn(rows, columns).to(dtype), torch.randn(rows, outs).to(dtype)
        for share in (0.9, 0.97):
            keep = kept_of_block(share)
            packed = ops.pack_largest(x, keep)

            def ours(packed: Tensor = packed, keep: int = keep, grad: Tensor = grad, columns: int = columns) -> Any:
                return ops.mm_largest(grad, packed, keep, columns)

            def theirs(x: Tensor = x, grad: Tensor = grad) -> Any:
                return grad.t() @ x

            yield f"{[rows, columns]} by {outs}", (f"weight gradient, {share} dropped", ours, theirs)


def medians(ours: Callable[[], Any], theirs: Callable[[], Any], turns: int) -> tuple[float, float]:
    """Milliseconds, taken in turns after one turn to warm up."""
    found: list[list[float]] = [[], []]
    for turn in range(turns + 1):
        for function, times in zip((ours, theirs), found, strict=True):
            started = time.perf_counter()
            function()
            if turn:
                times.append(1000 * (time.perf_counter() - started))
    return statistics.median(found[0]), statistics.median(found[1])


@click.command()
@click.option("--turns", default=9, show_default=True)
@click.option("--dtypes", default="float32,bfloat16", show_default=True)
def main(turns: int, dtypes: str) -> None:
    """Print the table."""
    kernels.load()
    print(f"{kernels.status()}; {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| kernel | tensor | ours | ATen | ratio |\n|---|---|---|---|---|")
    slower = rows = 0
    for name in dtypes.split(","):
        for what, (kernel, ours, theirs) in products(getattr(torch, name)):
            mine, other = medians(ours, theirs, turns)
            rows, slower = rows + 1, slower + (mine > 1.05 * other)
            print(f"| {kernel} | {name}{what} | {mine:.2f} ms | {other:.2f} ms | {mine / other:.2f} |")
        for shape in SHAPES:
            for layout, memory_format in (("", torch.contiguous_format), (" channels last", torch.channels_last)):
                x = torch.randn(shape).to(getattr(torch, name)).to(memory_format=memory_format)
                for what, ours, theirs in pairs(x):
                    mine, other = medians(ours, theirs, turns)
                    rows, slower = rows + 1, slower + (mine > 1.05 * other)
                    print(
                        f"| {what} | {name}{list(shape)}{layout} | {mine:.2f} ms | {other:.2f} ms | {mine / other:.2f} |"
                    )
    print(f"\nMore than 5 % slower in {slower} of {rows} rows.")


if __name__ == "__main__":
    main()
