"""How fast the CUDA kernels move memory, beside copy_ of the same bytes: python -m benchmarks.kernel_bandwidth

A row per kernel, layout and dtype: GB/s, which is the bytes that the operator must read and write divided by the time
that it takes, and the same for ``copy_`` of as many bytes. The command fails when a kernel is below `LEAST` of the
copy; of those that are bound by something else than memory the rows say so, and nothing is asked of them. Needs a GPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.rows import markdown_table
from monet_like import ops

#: Share of the copy's GB/s.
LEAST = 0.85
#: GB/s between which a copy may be: beyond them the device's clock shows no times (a stand-in for a GPU).
PLAUSIBLE = (20.0, 20_000.0)
SHAPE = (96, 64, 112, 112)
ROWS = (16384, 4096)
REPEATS, BATCHES = 10, 7
registered = torch.ops.monet_like


@dataclass(frozen=True)
class Work:
    """A call to be timed: what it is called, bytes that it must move, and why memory is not what bounds it, if so."""

    name: str
    bytes_moved: int
    call: Callable[[], Any]
    bound_by: str = ""


@dataclass(frozen=True)
class Row:
    """A kernel's GB/s beside the copy's."""

    name: str
    tensor: str
    gigabytes: float
    copied: float
    bound_by: str

    @property
    def share(self) -> float:
        return self.gigabytes / self.copied

    @property
    def fails(self) -> bool:
        return not self.bound_by and self.share < LEAST


def size(*tensors: Tensor) -> int:
    """Their bytes."""
    return sum(t.numel() * t.element_size() for t in tensors)


def works(x: Tensor) -> Iterator[Work]:
    """The operators on a tensor of images."""
    grad, flags = torch.randn_like(x), x > 0
    mask = registered.pack_sign(x)
    yield Work("pack_sign", size(x, mask), lambda: registered.pack_sign(x))
    yield Work("pack_range", size(x, mask), lambda: registered.pack_range(x, 0.0, 6.0))
    yield Work("keep_where", size(x, x, mask), lambda: registered.keep_where(grad, mask, x.stride()))
    yield Work("masked_scale", size(x, x, mask), lambda: registered.masked_scale(grad, mask, 2.0, x.stride()))
    yield Work("pack_bool", size(flags, mask), lambda: registered.pack_bool(flags))
    yield Work("unpack_bool", size(flags, mask), lambda: registered.unpack_bool(mask, flags.shape, flags.stride()))
    halves = flags.to(torch.uint8)
    joined = registered.pack_nibbles(halves)
    yield Work("pack_nibbles", size(halves, joined), lambda: registered.pack_nibbles(halves))
    yield Work(
        "unpack_nibbles", size(halves, joined), lambda: registered.unpack_nibbles(joined, halves.shape, halves.stride())
    )
    small = registered.pack_int8(x)
    yield Work("pack_int8", size(x, small), lambda: registered.pack_int8(x))
    yield Work("unpack_int8", size(x, small), lambda: registered.unpack_int8(small, x.shape, x.dtype, x.stride()))
    largest = registered.pack_largest(x, 1639)
    searches = "the search for the smallest magnitude that is kept"
    yield Work("pack_largest", size(x, largest), lambda: registered.pack_largest(x, 1639), searches)
    gathers = "single elements that are read"
    unpack = (largest, 1639, x.shape, x.dtype, x.stride())
    yield Work("unpack_largest", size(x, largest), lambda: registered.unpack_largest(*unpack), gathers)
    compares = "nine comparisons for each output" if x.element_size() == 2 and x.is_contiguous() else ""
    for name, window, bound_by in (
        ("3x3/2", ([3, 3], [2, 2], [1, 1], [1, 1]), compares),
        ("2x2/2", ([2, 2], [2, 2], [0, 0], [1, 1]), ""),
    ):
        y, cells = registered.max_pool2d_with_offsets(x, *window, False)
        forward, backward = (x, *window, False), (torch.randn_like(y), cells, x.shape, *window)
        yield Work(
            f"max_pool {name}", size(x, y, cells), lambda a=forward: registered.max_pool2d_with_offsets(*a), bound_by
        )
        yield Work(
            f"max_pool {name} backward",
            size(x, y, cells),
            lambda a=backward: registered.max_pool2d_offsets_backward(*a),
        )
    parameter = torch.ones(x.shape[1], device=x.device)
    relu = ("clamp", 0.0, math.inf)
    train = (x, parameter, parameter, None, None, 0.1, 1e-5, None, *relu)
    _, mean, invstd = registered.batch_norm_train(*train, False)
    known = (parameter, parameter, mean, invstd)
    yield Work("batch_norm_apply", size(x, x), lambda: registered.batch_norm_apply(x, *known, None, *relu))
    yield Work("batch_norm_apply, added", size(x, x, x), lambda: registered.batch_norm_apply(x, *known, grad, *relu))
    yield Work("batch_norm_train", size(x, x, x), lambda: registered.batch_norm_train(*train, False))
    yield Work(
        "batch_norm_train, exact", size(x, x, x), lambda: registered.batch_norm_train(*train, True), "ATen's statistics"
    )
    backward = (grad, x, *known, *relu, [True, True, True])
    yield Work("batch_norm backward", 5 * size(x), lambda: registered.batch_norm_activation_backward(*backward))


def row_works(x: Tensor) -> Iterator[Work]:
    """The operators on rows."""
    weight, grad = torch.ones(x.shape[-1], device=x.device, dtype=x.dtype), torch.randn_like(x)
    norm = (weight, 1, 1e-6, False, x.dtype)
    _, rstd = registered.rms_norm(x, *norm)
    yield Work("rms_norm", size(x, x), lambda: registered.rms_norm(x, *norm))
    backward = (grad, x, weight, rstd, None, 1)
    yield Work("rms_norm backward", size(x, x, x), lambda: registered.rms_norm_backward(*backward))
    yield Work("swiglu", size(x, x, x), lambda: registered.swiglu(x, grad))
    up = torch.randn_like(x)
    yield Work("swiglu backward", 5 * size(x), lambda: registered.swiglu_backward(grad, x, up))


def seconds(call: Callable[[], Any]) -> float:
    """Median time of a call; the calls of a batch wait in the stream's queue, so that no launch is in it."""
    for _ in range(3):
        call()
    times = []
    for _ in range(BATCHES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2_000_000)  # cycles
        start.record()
        for _ in range(REPEATS):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / REPEATS)
    return median(times)


def copy_rate(bytes_moved: int) -> float:
    """GB/s of a copy that reads and writes so many bytes together."""
    source = torch.empty(bytes_moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / max(seconds(lambda: target.copy_(source)), 1e-9) / 1e9


def measured() -> Iterator[Row]:
    """A row per kernel, layout and dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        for channels_last in (False, True):
            x = torch.randn(SHAPE, device="cuda", dtype=dtype)
            if channels_last:
                x = x.to(memory_format=torch.channels_last)
            what = f"{str(dtype).removeprefix('torch.')}{list(SHAPE)}{', channels last' if channels_last else ''}"
            yield from (rated(work, what) for work in works(x))
        x = torch.randn(ROWS, device="cuda", dtype=dtype)
        yield from (rated(work, f"{str(dtype).removeprefix('torch.')}{list(ROWS)}") for work in row_works(x))


def rated(work: Work, tensor: str) -> Row:
    """One of them, timed."""
    took = max(seconds(work.call), 1e-9)
    return Row(work.name, tensor, work.bytes_moved / took / 1e9, copy_rate(work.bytes_moved), work.bound_by)


def markdown(rows: list[Row]) -> str:
    """The rows as a table."""
    title = f"# `python -m benchmarks.kernel_bandwidth`\n\n{torch.cuda.get_device_name()}, torch {torch.__version__}"
    lines = []
    for row in rows:
        share = f"**{row.share:.2f}**" if row.fails else f"{row.share:.2f}"
        rates = f"{row.gigabytes:.0f}", f"{row.copied:.0f}"
        lines.append((row.name, row.tensor, *rates, share, row.bound_by or "memory"))
    heads = ("kernel", "tensor", "GB/s", "copy_ GB/s", "share", "bound by")
    return f"{title}\n\n{markdown_table(heads, lines)}\n"


@click.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the table into this file too.")
def main(out: Path | None) -> None:
    """GB/s of every CUDA kernel beside copy_ of the same bytes; fails below 85 % of it."""
    if not torch.cuda.is_available():
        raise click.ClickException("there is no GPU: the kernels' speed can only be measured on one")
    ops.load()
    if not ops.available("cuda"):
        raise click.ClickException(f"the CUDA kernels are not compiled: {ops.status()}")
    if not PLAUSIBLE[0] < (rate := copy_rate(2**28)) < PLAUSIBLE[1]:
        print(f"not measured: copy_ seems to move {rate:.0f} GB/s, so this device's clock shows no times")
        return
    rows = list(measured())
    text = markdown(rows)
    print(text)
    if out:
        out.write_text(text)
    if slow := [row for row in rows if row.fails]:
        names = ", ".join(sorted({row.name for row in slow}))
        print(f"error: {len(slow)} of {len(rows)} rows are below {LEAST:.0%} of copy_: {names}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
