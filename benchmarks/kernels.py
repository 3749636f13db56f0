"""Our CPU kernels against the ATen operators they replace: python -m benchmarks.kernels

A row per kernel, shape, layout and dtype: median milliseconds of both, taken in turns in one process, and their ratio.
malloc keeps what is freed (`benchmarks.malloc`). In-place ATen operators are used where eager PyTorch would use them.
What packs and unpacks replaces no operator; it is compared with a copy of what is kept otherwise, and not counted among
those that are slower.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.malloc import keep_freed
from monet_like import ops
from monet_like.ops.caches import kept_of_block

aten = torch.ops.aten
registered = torch.ops.monet_like
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
    yield "BN + ReLU", lambda: registered.batch_norm_train(*train, None, *relu, True), lambda: forward().relu_()
    yield (
        "BN + add + ReLU",
        lambda: registered.batch_norm_train(*train, residual, *relu, True),
        lambda: forward().add_(residual).relu_(),
    )
    yield (
        "BN + ReLU, statistics in vectors",
        lambda: registered.batch_norm_train(*train, None, *relu, False),
        lambda: forward().relu_(),
    )
    yield (
        "BN + SiLU, statistics in vectors",
        lambda: registered.batch_norm_train(*train, None, "silu", 0.0, 0.0, False),
        lambda: aten.silu_(forward()),
    )
    yield "BN again", lambda: registered.batch_norm_apply(*saved, None, *nothing), again
    yield (
        "BN + add + ReLU again",
        lambda: registered.batch_norm_apply(*saved, residual, *relu),
        lambda: again().add_(residual).relu_(),
    )
    yield (
        "gradient of BN + ReLU",
        lambda: registered.batch_norm_activation_backward(grad, *saved, *relu, [True, True, True]),
        lambda: backward(aten.threshold_backward(grad, y, 0)),
    )
    yield (
        "gradient of BN + SiLU",
        lambda: registered.batch_norm_activation_backward(grad, *saved, "silu", 0.0, 0.0, [True, True, True]),
        lambda: backward(aten.silu_backward(grad, y)),
    )
    larger = aten.cat([grad, residual], 1)[:, : x.shape[1]]
    yield (
        "gradient of BN + ReLU, added to another",
        lambda: registered.batch_norm_activation_backward(grad, *saved, *relu, [True, True, True], larger),
        lambda: backward(aten.threshold_backward(grad, y, 0))[0].add_(larger),
    )
    if x.is_contiguous():
        parts = [part.contiguous() for part in x.chunk(4, 1)]

        def joined() -> Tensor:
            result: Tensor = aten.cat(parts, 1)
            return result

        yield (
            "BN + ReLU of what is joined",
            lambda: registered.batch_norm_train_joined(parts, *train[1:], *relu, True),
            lambda: aten.native_batch_norm(joined(), *train[1:3], *running, True, 0.1, 1e-5)[0].relu_(),
        )
        yield (
            "BN + ReLU again of what is joined",
            lambda: registered.batch_norm_apply_joined(parts, *saved[1:], *relu),
            lambda: aten._native_batch_norm_legit.no_stats(joined(), c, c, True, 0.1, 1e-5)[0].relu_(),
        )
        yield (
            "gradient of BN + ReLU of what is joined",
            lambda: registered.batch_norm_activation_backward_joined(
                grad, parts, *saved[1:], *relu, [True, True, True]
            ),
            lambda: aten.native_batch_norm_backward(
                aten.threshold_backward(grad, y, 0), joined(), c, None, None, mean, invstd, True, 1e-5, [True] * 3
            ),
        )
    mask, stride = registered.pack_sign(x), x.stride()
    yield "ReLU's signs packed", lambda: registered.pack_sign(x), lambda: x > 0
    yield (
        "ReLU's gradient, packed",
        lambda: registered.keep_where(grad, mask, stride),
        lambda: aten.threshold_backward(grad, y, 0),
    )
    yield (
        "leaky ReLU's gradient, packed",
        lambda: registered.masked_scale(grad, mask, 1.0, stride, 0.1),
        lambda: aten.leaky_relu_backward(grad, x, 0.1, False),
    )
    yield "range packed", lambda: registered.pack_range(x, 0.0, 6.0), lambda: (x > 0) & (x < 6)
    pooled, indices = aten.max_pool2d_with_indices(x, *POOL, False)
    _, offsets = registered.max_pool2d_with_offsets(x, *POOL, False)
    yield (
        "max pool",
        lambda: registered.max_pool2d_with_offsets(x, *POOL, False),
        lambda: aten.max_pool2d_with_indices(x, *POOL, False),
    )
    yield (
        "max pool's gradient",
        lambda: registered.max_pool2d_offsets_backward(pooled, offsets, x.shape, *POOL),
        lambda: aten.max_pool2d_with_indices_backward(pooled, x, *POOL, False, indices),
    )


#: Ends the names of those that PyTorch has nothing for: what it keeps instead, copied.
A_COPY = ", against a copy"


def caches(x: Tensor) -> Iterator[Pair]:
    """What is packed and unpacked beside PyTorch's own operators, on tensors like ``x``."""
    _, indices = aten.max_pool2d_with_indices(x, *POOL, False)
    offsets = registered.max_pool2d_offsets(indices, x.shape, *POOL)
    nibbles, flags, stride = registered.pack_nibbles(offsets), x > 0, x.stride()
    keep, bits, mask = kept_of_block(0.9), registered.pack_bool(flags), registered.pack_sign(x)
    largest, eighths, grad = registered.pack_largest(x, keep), registered.pack_int8(x), torch.randn_like(x)
    yield (
        "ReLU's gradient, packed, in place",
        lambda: registered.keep_where_(grad, mask, stride),
        lambda: aten.threshold_backward.grad_input(grad, x, 0, grad_input=grad),
    )
    packed: tuple[Pair, ...] = (
        ("dropout's bits", lambda: registered.pack_bool(flags), flags.clone),
        ("dropout's bits unpacked", lambda: registered.unpack_bool(bits, flags.shape, stride), flags.clone),
        ("pool positions in a byte", lambda: registered.max_pool2d_offsets(indices, x.shape, *POOL), indices.clone),
        (
            "pool positions in full",
            lambda: registered.max_pool2d_offsets_to_indices(offsets, x.shape, *POOL),
            indices.clone,
        ),
        ("pool positions in half a byte", lambda: registered.pack_nibbles(offsets), offsets.clone),
        (
            "pool positions in a byte again",
            lambda: registered.unpack_nibbles(nibbles, offsets.shape, offsets.stride()),
            offsets.clone,
        ),
        ("a tenth kept", lambda: registered.pack_largest(x, keep), x.clone),
        ("a tenth unpacked", lambda: registered.unpack_largest(largest, keep, x.shape, x.dtype, stride), x.clone),
        ("8 bits kept", lambda: registered.pack_int8(x), x.clone),
        ("8 bits unpacked", lambda: registered.unpack_int8(eighths, x.shape, x.dtype, stride), x.clone),
    )
    for what, ours, theirs in packed:
        yield what + A_COPY, ours, theirs


#: Rows, columns and outs of a linear layer's weight gradient.
PRODUCTS = ((2048, 1024, 1024), (2048, 768, 3072), (2048, 3072, 768), (512, 256, 1024))


def product_pairs(x: Tensor, grad: Tensor) -> Iterator[Pair]:
    """Weight gradients from dropped inputs, against the product with all of the input."""
    for share in (0.9, 0.97):
        keep = kept_of_block(share)
        dropped = (registered.pack_largest(x, keep), keep, x.shape[1])
        ours = partial(registered.mm_largest, grad, *dropped)
        yield f"weight gradient, {share} dropped", ours, lambda: grad.t() @ x


#: Rows and columns of RMS norms and gates: batch times tokens, and the width.
ROWS = ((4096, 512), (2048, 2048), (512, 4096), (64, 256))


def norm_pairs(x: Tensor, grad: Tensor) -> Iterator[Pair]:
    """RMS norm as Llama has it, against the operators that PyTorch traces, one after the other."""
    half, w = x.dtype in (torch.bfloat16, torch.float16), torch.rand(x.shape[1]).to(x.dtype) + 0.5
    rstd = registered.rms_norm(x, w, 1, 1e-6, half, x.dtype)[1]
    normal = (x.float() * rstd).to(x.dtype)

    def again(x: Tensor, rstd: Tensor) -> Tensor:
        return w * (x.float() * rstd).to(x.dtype)

    def forward() -> Tensor:
        wide = x.float()
        return again(wide, (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)

    def backward() -> Any:
        wide, through = x.float(), (grad * w).float()
        dot = (through * wide).sum(-1, keepdim=True) * -0.5 * rstd.pow(3)
        of_x = (through * rstd).add_(dot.expand_as(wide) / wide.shape[-1] * (wide.pow(1.0) * 2.0))
        return of_x.to(x.dtype), (grad * normal).sum(0)

    fused = partial(registered.rms_norm, x, w, 1, 1e-6, half, x.dtype)
    fused_backward = partial(registered.rms_norm_backward, grad, x, w, rstd, None, 1)
    yield "RMS norm", fused, forward
    yield ("RMS norm again", lambda: registered.rms_norm_apply(x, w, rstd, 1, half, x.dtype), lambda: again(x, rstd))
    yield "gradient of RMS norm", fused_backward, backward
    yield "RMS norm and its gradient", lambda: (fused(), fused_backward()), lambda: (forward(), backward())


def gate_pairs(gate: Tensor, grad: Tensor) -> Iterator[Pair]:
    """SwiGLU, against PyTorch's operators one after the other."""
    up, silu = torch.randn_like(gate), torch.nn.functional.silu
    kept = silu(gate)
    yield "SwiGLU", lambda: registered.swiglu(gate, up), lambda: silu(gate) * up
    yield (
        "gradients of SwiGLU",
        lambda: registered.swiglu_backward(grad, gate, up),
        lambda: (grad * kept, aten.silu_backward(grad * up, gate)),
    )


def every_pair(dtypes: Iterable[str]) -> Iterator[tuple[str, Pair]]:
    """(dtype, shape and layout; pair) of all rows of the table."""
    for name in dtypes:
        dtype = getattr(torch, name)
        for rows, columns, outs in PRODUCTS:
            for pair in product_pairs(torch.randn(rows, columns).to(dtype), torch.randn(rows, outs).to(dtype)):
                yield f"{name}{[rows, columns]} by {outs}", pair
        for rows, width in ROWS:
            for pairs_of in (norm_pairs, gate_pairs):
                for pair in pairs_of(torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)):
                    yield f"{name}{[rows, width]}", pair
        for shape in SHAPES:
            for layout, memory_format in (("", torch.contiguous_format), (" channels last", torch.channels_last)):
                x = torch.randn(shape).to(dtype).to(memory_format=memory_format)
                for pair in chain(pairs(x), caches(x)):
                    yield f"{name}{list(shape)}{layout}", pair


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
@click.option("--only", default="", help="Only kernels in whose name this is, such as 'max pool'.")
def main(turns: int, dtypes: str, only: str) -> None:
    """Print the table."""
    ops.load()
    keep_freed()
    print(f"{ops.status()}; {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| kernel | tensor | ours | ATen | ratio |\n|---|---|---|---|---|")
    slower = rows = 0
    for what, (kernel, ours, theirs) in every_pair(dtypes.split(",")):
        if only in kernel:
            mine, other = medians(ours, theirs, turns)
            rows, slower = rows + 1, slower + (mine > 1.05 * other and not kernel.endswith(A_COPY))
            print(f"| {kernel} | {what} | {mine:.3g} ms | {other:.3g} ms | {mine / other:.2f} |", flush=True)
    print(f"\nMore than 5 % slower in {slower} of {rows} rows.")


if __name__ == "__main__":
    main()
