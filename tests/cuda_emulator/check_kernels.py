"""Every operator with random arguments: CUDA kernels against their plain-torch twins, ATen and float64.

Emulated by tests/without_gpu/test_cuda_emulator.py and by ``python -m tests.cuda_emulator``, in a process of its own.
Every call runs three times, with other orders of threads and blocks, other contents of new memory and other sizes of
the grids that stride: the results must have the same bits. On a GPU tests/gpu/test_kernels_cuda.py has them, where
every call runs twice.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from kernel_inputs import FLOATS, assert_bits, exact_backward
from torch import Tensor

import monet_like.ops
from monet_like.ops import batch_norm, caches, masks, max_pool, memory_layout, rms_norm, swiglu

EMULATED = "MONET_LIKE_EMULATED" in os.environ
if EMULATED:
    from . import control
    from .control import configure

monet_like.ops.load()
registered = torch.ops.monet_like
aten = torch.ops.aten

ROUNDS = int(os.environ.get("MONET_LIKE_EMULATED_ROUNDS", "2"))
INF = math.inf
emulated = pytest.mark.skipif(not EMULATED, reason="only the emulator counts launches")
seeds = pytest.mark.parametrize("seed", range(ROUNDS))
#: Operators whose sums depend on the number of blocks in their last bits: it stays the same within a test.
SUMMING = ("batch_norm_train", "batch_norm_activation_backward", "rms_norm_backward")
_blocks_of_sums = 0


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> Iterator[None]:
    start(request.node.callspec.params.get("seed", 0) if hasattr(request.node, "callspec") else 0)
    yield
    if EMULATED:
        configure()


def start(seed: int) -> None:
    """Sets all that a test draws from."""
    global _blocks_of_sums
    random.seed(seed)
    torch.manual_seed(seed)
    _blocks_of_sums = random.choice([0, 1, 2, 3])


def run(name: str, *arguments: Any, changed: tuple[int, ...] = ()) -> list[Any]:
    """The operator's results, and what it has made of copies of the arguments at these positions.

    On a GPU they are brought back from there, and the arguments lie there as they do here.
    """
    mine = [a.clone(memory_format=torch.preserve_format) if i in changed else a for i, a in enumerate(arguments)]
    if not EMULATED:
        mine = pytree.tree_map_only(Tensor, to_gpu, mine)
    made = getattr(registered, name)(*mine)
    found = [*(made if isinstance(made, (tuple, list)) else [made]), *(mine[i] for i in changed)]
    return found if EMULATED else pytree.tree_map_only(Tensor, Tensor.cpu, found)


def to_gpu(tensor: Tensor) -> Tensor:
    """A copy with all of the storage, gaps included."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return whole.cuda().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def call(name: str, *arguments: Any, changed: tuple[int, ...] = ()) -> Any:
    """The operator's result, which no order of threads, no grid and no content of new memory changes.

    Args:
        name: of the operator.
        arguments: its arguments.
        changed: positions of those that it writes into; each run has copies, the result is followed by the first's.
    """
    found = [run(name, *arguments, changed=changed) for _ in settings(name)]
    for again in found[1:]:
        for a, b in zip(found[0], again, strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert_bits(b, a)
                assert a.stride() == b.stride()
    return found[0] if len(found[0]) > 1 else found[0][0]


def settings(name: str) -> Iterator[None]:
    """The emulator's, for calls of an operator; on a GPU two calls as it is."""
    if not EMULATED:
        yield from (None, None)
        return
    few = (
        [_blocks_of_sums] * 3
        if name.startswith(SUMMING)
        else [0, random.choice([1, 2, 3]), random.choice([0, 1, 5, 7])]
    )
    orders = ("forward", "reverse", f"random:{random.randrange(1 << 30)}")
    for order, fill, blocks in zip(orders, (control.UNWRITTEN, 0xFF, 0x00), few, strict=True):
        configure(order, fill, blocks)
        yield
    configure()


#: Around the widths of vectors, warps and blocks.
SIZES = tuple(sorted({0, 1, 2, 3, 5, 300, 1000, *(2**k + more for k in range(3, 10) for more in (-1, 0, 1))}))


def any_shape(most: int = 3000) -> tuple[int, ...]:
    while True:
        shape = tuple(random.choice(SIZES if d == 0 else SIZES[1:12]) for d in range(random.randint(0, 4)))
        if math.prod(shape) <= most:
            return tuple(random.sample(shape, len(shape)))


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape, dtype=torch.float64).mul(random.choice([0.1, 3, 50])).to(dtype)
    if random.random() < 0.5:
        strange = torch.tensor([0.0, -0.0, INF, -INF, math.nan, 6.0], dtype=dtype)
        pick = torch.randint(0, 30, shape)
        x = torch.where(pick < 6, strange[pick.clamp(max=5)], x)
    return x


def laid_out(x: Tensor) -> Tensor:
    """The same elements in any layout."""
    ways: list[Callable[[], Tensor]] = [lambda: x]
    if x.dim() > 0:
        order = random.sample(range(x.dim()), x.dim())
        back = [order.index(d) for d in range(x.dim())]
        ways.append(lambda: x.permute(order).contiguous().permute(back))
        wide = torch.zeros((*x.shape[:-1], 2 * x.shape[-1] + 1), dtype=x.dtype)
        wide[..., 1::2] = x
        ways.append(lambda: wide[..., 1::2])
        longer = torch.cat((x[:1], x)) if x.shape[0] else x
        ways.append(lambda: longer[min(1, x.shape[0]) :] if x.shape[0] else x)
    if x.dim() == 4:
        ways.append(lambda: x.to(memory_format=torch.channels_last))
    made = random.choice(ways)()
    assert made.shape == x.shape
    return made


@seeds
def test_masks(seed: int) -> None:
    for dtype in FLOATS:
        check_masks(any_shape(), dtype)


def test_masks_of_all_sizes() -> None:
    for size in SIZES:
        check_masks((size,), random.choice(FLOATS))
    for dtype in FLOATS:  # more than the threads of a few blocks take at once
        check_masks((10007,), dtype)
        check_masks((2, 3, 5, 7), dtype)


def check_masks(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """All operators of masks and of half bytes, for one shape."""
    x, grad = laid_out(values(shape, dtype)), laid_out(values(shape, dtype))
    mask = call("pack_sign", x)
    assert_bits(mask, masks.pack_sign(x))
    for packed in (mask, call("pack_range", x, -1.0, 2.0)):
        kept = call("keep_where", grad, packed, x.stride())
        assert_bits(kept, masks.keep_where(grad, packed, x.stride()))
        assert_bits(call("keep_where_", grad, packed, x.stride(), changed=(0,))[0], kept)
        scaled = call("masked_scale", grad, packed, 1.25, x.stride(), 0.1)
        assert_bits(scaled, masks.masked_scale(grad, packed, 1.25, x.stride(), 0.1))
    flat = memory_layout.flat_view(memory_layout.to_packing_order(x)).to(torch.float64)
    assert_bits(call("pack_range", x, -1.0, 2.0), masks.pack_bits(~((flat <= -1) | (flat >= 2))))
    flags = laid_out(torch.rand(shape) < 0.4)
    packed = call("pack_bool", flags)
    assert_bits(packed, masks.pack_bool(flags))
    assert_bits(call("unpack_bool", packed, flags.shape, flags.stride()), flags)
    assert_bits(call("unpack_bool", packed, [flags.numel()]), masks.unpack_bool(packed, [flags.numel()]))
    small = laid_out(torch.randint(0, 16, shape, dtype=torch.uint8))
    packed = call("pack_nibbles", small)
    assert_bits(packed, masks.pack_nibbles(small))
    assert_bits(call("unpack_nibbles", packed, small.shape, small.stride()), small)


@seeds
def test_caches(seed: int) -> None:
    for dtype in FLOATS:
        shape = any_shape(2000) if seed % 3 else (random.choice([16383, 16384, 16385, 33000, 40001]),)
        # Sometimes many of one magnitude.
        x = values(shape, dtype) if seed % 5 else torch.randint(-2, 3, shape).to(dtype)
        keeps = random.choice([1, 2, 100, 1000, 1023]), random.choice([1024, 1639, 8192, 16383, 16384])
        check_caches(laid_out(x), keeps)


def test_caches_of_all_sizes() -> None:
    for size in SIZES:
        check_caches(values((size,), random.choice(FLOATS)), (1, 16384))


def check_caches(x: Tensor, keeps: tuple[int, ...]) -> None:
    """Both lossy caches of one tensor, packed and unpacked."""
    for keep in keeps:
        packed = call("pack_largest", x, keep)
        assert_bits(packed, caches.pack_largest(x, keep))
        back = call("unpack_largest", packed, keep, x.shape, x.dtype, x.stride())
        assert_bits(back, caches.unpack_largest(packed, keep, x.shape, x.dtype, x.stride()))
    packed = call("pack_int8", x)
    assert_bits(packed, caches.pack_int8(x))
    back = call("unpack_int8", packed, x.shape, x.dtype, x.stride())
    assert_bits(back, caches.unpack_int8(packed, x.shape, x.dtype, x.stride()))


def test_quotients_near_a_half() -> None:
    """Eight-bit caches round as a division does: elements are within two bits of where their byte changes."""
    scale = 2.0 ** torch.randint(-126, 120, (400, 1)).double() * (1 + torch.rand(400, 1).double())
    x = ((torch.randint(0, 127, (400, 256)) + 0.5) * scale).float()
    x[:, 0] = (127 * scale[:, 0]).float()
    for _ in range(2):
        towards = torch.randint(-1, 2, x.shape) * math.inf
        x = torch.where(towards.isnan(), x, torch.nextafter(x, towards))
    assert_bits(call("pack_int8", x), caches.pack_int8(x))
    assert_bits(call("pack_int8", -x), caches.pack_int8(-x))


@pytest.mark.parametrize("dtype", FLOATS)
def test_damaged_caches(dtype: torch.dtype) -> None:
    """Whatever a cache holds, nothing but the result is touched."""
    for size in (300, 20000):
        for keep in (900, 5000):
            noise = torch.randint(0, 256, (caches.largest_bytes(size, keep, dtype.itemsize),), dtype=torch.uint8)
            if EMULATED:
                configure("random:7", 0, races=0)  # one place twice: either value may stay
            run("unpack_largest", noise, keep, [size], dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_caches_at_odd_offsets(dtype: torch.dtype) -> None:
    """They are refused in a sentence, or work."""
    x = torch.randn(300).to(dtype)
    for keep in (100, 2000):
        packed = call("pack_largest", x, keep)
        check_at_odd_offset(packed, lambda odd, keep=keep: run("unpack_largest", odd, keep, x.shape, dtype)[0])
    check_at_odd_offset(call("pack_int8", x), lambda odd: run("unpack_int8", odd, x.shape, dtype)[0])
    mask = call("pack_sign", x)
    check_at_odd_offset(mask, lambda odd: run("keep_where", x, odd)[0])


def check_at_odd_offset(packed: Tensor, unpack: Callable[[Tensor], Tensor]) -> None:
    """What is unpacked from a view that starts one byte into its storage equals what is unpacked from a tensor."""
    odd = torch.empty(packed.numel() + 1, dtype=torch.uint8)[1:].copy_(packed)
    assert odd.storage_offset() == 1
    try:
        made = unpack(odd)
    except (RuntimeError, ValueError) as error:
        assert "emulated" not in str(error), error  # noqa: PT017 - another message than the emulator's
    else:
        assert_bits(made, unpack(packed))


@seeds
def test_products(seed: int) -> None:
    shape = [random.choice([0, 1, 3, 33, 130, 300]) for _ in range(3)]
    check_products(*shape, random.choice([1, 1000, 1639, 16384]), random.choice(FLOATS), transposed=seed % 2 == 0)


def check_products(rows: int, columns: int, outs: int, keep: int, dtype: torch.dtype, *, transposed: bool) -> None:
    """The product of a gradient in any layout and what is kept of the largest."""
    x, wide = torch.randn(rows, columns).to(dtype), torch.randn(rows, 2 * outs).to(dtype)
    packed = call("pack_largest", x, keep)
    left = caches.unpack_largest(packed, keep, x.shape, dtype).double()
    grad = random.choice([wide[:, :outs], wide[:, ::2], wide[:, outs:].t().contiguous().t()])
    got = call("mm_largest", grad, packed, keep, columns, transposed)
    exact = left.t() @ grad.double() if transposed else grad.double().t() @ left
    assert got.shape == exact.shape and got.dtype == dtype
    if exact.numel() and rows:
        most = 4 * torch.finfo(dtype).eps * math.sqrt(rows + 1) * exact.abs().max()
        assert (got.double() - exact).abs().max() <= most


@seeds
def test_max_pool(seed: int) -> None:
    while True:
        kernel = [random.choice([1, 2, 3, 5, 16]) for _ in range(2)]
        stride = random.choice([[], [random.randint(1, 4), random.randint(1, 4)]])
        dilation = [random.randint(1, 3) for _ in range(2)]
        padding = [random.randint(0, k // 2) for k in kernel]
        size = [random.randint(1, 30), random.randint(1, 30)]
        pool, ceil_mode = (kernel, stride, padding, dilation), random.random() < 0.5
        step = stride or kernel
        extents = [
            max_pool.pooled_extent(size[a], kernel[a], step[a], padding[a], dilation[a], ceil_mode) for a in (0, 1)
        ]
        # A window wholly in the padding has an index outside of its window; test_windows_without_a_cell.
        cells = [
            any(0 <= o * step[a] - padding[a] + k * dilation[a] < size[a] for k in range(kernel[a]))
            for a in (0, 1)
            for o in range(extents[a])
        ]
        if min(extents) > 0 and all(cells):
            break
    for dtype in FLOATS:
        shape = (*random.choice([(3,), (2, 5), (1, 33), (4, 1), (0, 3)]), *size)
        check_max_pool(laid_out(pooled(shape, dtype)), *pool, ceil_mode=ceil_mode)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("extent", "padding"), [(3, 1), (3, 0), (2, 0), (2, 1)])
def test_common_max_pool(extent: int, padding: int, dtype: torch.dtype) -> None:
    """Windows that move by two, for which there may be kernels of their own: planes of several tiles, rows and channels
    that are and are no multiples of a vector.
    """
    pool = ([extent] * 2, [2, 2], [padding] * 2, [1, 1])
    for shape in (
        (1, 8, 9, 16),
        (2, 16, 5, 10),
        (1, 3, 7, 7),
        (1, 1, 70, 72),
        (3, 5, 2, 3),
        (1, 1, 3, 2100),
        *([(1, 1, 1, 1)] if padding else []),
    ):
        x = pooled(shape, dtype)
        check_max_pool(x, *pool, ceil_mode=random.random() < 0.5)
        if shape[1] > 1:
            check_max_pool(x.to(memory_format=torch.channels_last), *pool, ceil_mode=random.random() < 0.5)


def pooled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Few different numbers, NaNs and a corner of infinities."""
    x = torch.randint(-2, 3, shape).to(dtype)
    x[torch.rand(shape) < 0.05] = math.nan
    x[..., : shape[-2] // 3, : shape[-1] // 3] = -INF
    return x


def check_max_pool(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], *, ceil_mode: bool
) -> None:
    """All operators of max pooling, for one input."""
    pool, dtype = (kernel, stride, padding, dilation), x.dtype
    if x.numel() == 0:
        assert call("max_pool2d_with_offsets", x, *pool, ceil_mode)[0].numel() == 0
        return
    y, indices = aten.max_pool2d_with_indices(x, *pool, ceil_mode)
    got, offsets = call("max_pool2d_with_offsets", x, *pool, ceil_mode)
    assert_bits(got, y)
    assert got.stride() == y.stride() == offsets.stride()
    assert_bits(call("max_pool2d_offsets", laid_out(indices), x.shape, *pool), offsets)
    assert_bits(call("max_pool2d_offsets_to_indices", laid_out(offsets), x.shape, *pool), indices)
    wide = torch.randn(y.shape).to(dtype)
    for grad in (laid_out(wide), torch.empty_like(y).copy_(wide)):
        of_x = call("max_pool2d_offsets_backward", grad, offsets, x.shape, *pool)
        exact = aten.max_pool2d_with_indices_backward(grad.double(), x.double(), *pool, ceil_mode, indices)
        single = 0 if dtype == torch.float64 else 2.0**-23  # summed in float32 and rounded once
        bound = 0.51 * torch.finfo(dtype).eps * exact.abs() + 16 * single * max(1, float(grad.double().abs().max()))
        assert ((of_x.double() - exact).abs() <= bound + 1e-14 * max(1, float(grad.double().abs().max()))).all()
    noise = torch.randint(0, 256, tuple(offsets.shape), dtype=torch.uint8)
    call("max_pool2d_offsets_backward", grad, noise, x.shape, *pool)


def test_windows_without_a_cell() -> None:
    x, pool = torch.arange(11.0).view(1, 1, 11, 1), ([3, 2], [3, 2], [0, 1], [3, 2])
    y, indices = aten.max_pool2d_with_indices(x, *pool, True)
    _, offsets = run("max_pool2d_with_offsets", x, *pool, True)
    assert_bits(run("max_pool2d_offsets_to_indices", offsets, x.shape, *pool)[0], indices)
    expected = aten.max_pool2d_with_indices_backward(torch.ones_like(y), x, *pool, True, indices)
    assert_bits(run("max_pool2d_offsets_backward", torch.ones_like(y), offsets, x.shape, *pool)[0], expected)


def norm_input(dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """An input of a batch norm in any layout; weight, bias, mean and reciprocal root of its channels."""
    batch, channels = random.choice([1, 2, 3, 9]), random.choice([1, 3, 31, 32, 33, 64, 70])
    image = random.choice([(), (1,), (7,), (5, 7), (1, 1), (16, 16), (9, 31), (2, 3, 4), (33, 40)])
    if batch * channels * math.prod(image) > 30000:
        batch = 1
    x = torch.randn(batch, channels, *image, dtype=torch.float64).mul(3).add(random.choice([0, 1, 100]))
    if x.dim() == 5 and random.random() < 0.5:
        x = x.to(memory_format=torch.channels_last_3d)
    return laid_out(x.to(dtype)), norm_rows(x, dtype, own=random.random() < 0.3)


def norm_rows(x: Tensor, dtype: torch.dtype, *, own: bool) -> list[Tensor]:
    """Weight, bias, mean and reciprocal root, in the type of x itself or in that of usual parameters."""
    parameter = dtype if own else torch.float64 if dtype == torch.float64 else torch.float32
    mean = x.mean([d for d in range(x.dim()) if d != 1])
    rows = [torch.randn(x.shape[1]), torch.randn(x.shape[1]), mean, torch.rand(x.shape[1]) + 0.2]
    return [t.to(parameter) for t in rows]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_common_batch_norm(channels_last: bool, dtype: torch.dtype) -> None:
    """Dense inputs that are and are no multiples of a vector, with more rows and images than blocks.

    Many channels only where they are last: else each has blocks of its own, which are emulated thread by thread.
    """
    many = (2, 64, 4, 8) if channels_last else (2, 9, 4, 8)
    for shape in ((2, 3, 16, 16), (3, 5, 7, 9), many, (41, 3, 4, 4), (33, 16, 1, 1), (1, 2, 50, 60)):
        wide = torch.randn(shape, dtype=torch.float64).mul(3).add(1)
        x = wide.to(dtype)
        x = x.to(memory_format=torch.channels_last) if channels_last else x
        rows = norm_rows(wide, dtype, own=False)
        check_batch_norm_apply(x, rows)
        check_batch_norm_backward(x, rows)
        check_batch_norm_train(x, rows, exact_statistics=False)


def follower() -> tuple[str, float, float]:
    bounds = ((-INF, INF), (0.0, INF), (0.0, 6.0), (-0.25, 0.75))
    others = (("leaky_relu", 0.1, 0.0), ("hardswish", 0.0, 0.0), ("silu", 0.0, 0.0))
    return random.choice([*(("clamp", *each) for each in bounds), *others])


def normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor) -> Tensor:
    """ATen's formula on a GPU, weight * (x - mean) * invstd + bias, as nvcc compiles it: the last sum is not rounded
    apart.

    Of 16 and 32 bits it has ATen's bits, as the product of two float32 is exact in float64.
    """
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    channels = (1, -1) + (1,) * (x.dim() - 2)
    m, s = mean.to(compute).view(channels), invstd.double().view(channels)
    y = x.to(compute) - m
    y = (y if weight is None else y * weight.to(compute).view(channels)).double() * s
    return (y + (0.0 if bias is None else bias.double().view(channels))).to(compute).to(x.dtype)


def finished(y: Tensor, name: str, lo: float, hi: float) -> Tensor:
    """Activated as by ATen on a GPU; its hardswish multiplies by a sixth, on a CPU it divides by six."""
    if name != "hardswish":
        return batch_norm._finished(y, None, name, lo, hi)
    wide = y if y.dtype == torch.float64 else y.float()
    return (wide * (wide + 3).clamp(0, 6) * torch.tensor(1 / 6, dtype=torch.float32).to(wide.dtype)).to(y.dtype)


def test_batch_norm_has_the_bits_of_aten() -> None:
    for shape, dtype in itertools.product(((3, 5, 7, 9), (4, 33), (2, 16, 8, 8), (2, 3, 50)), FLOATS):
        x = torch.randn(shape).mul(3).add(1).to(dtype)
        for formed in (x, x.to(memory_format=torch.channels_last) if x.dim() == 4 else x):
            rows = [torch.randn(shape[1]), torch.randn(shape[1]), torch.rand(shape[1]), torch.rand(shape[1]) + 0.2]
            rows = [t.double() if dtype == torch.float64 else t for t in rows]
            y = call("batch_norm_apply", formed, *rows, None, "clamp", -INF, INF)
            if dtype == torch.float64:
                assert (y - normalised(formed, *rows)).abs().max() <= 1e-13
            else:
                assert_bits(y, normalised(formed, *rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bounds_are_not_rounded(dtype: torch.dtype) -> None:
    """hardtanh(-0.9, 0.7) lets the gradient of the largest bfloat16 below 0.7 through, as ATen does."""
    x = torch.arange(1 << 15).to(torch.int16).view(dtype)  # all that are positive
    x = torch.cat((x[x <= 1], -x[x <= 1])).view(1, 1, -1)
    grad, one = torch.ones_like(x), torch.ones(1)
    identity = (one, 0 * one, 0 * one, one)
    expected = aten.hardtanh_backward(grad, x, -0.9, 0.7)
    made = call("batch_norm_activation_backward", grad, x, *identity, "clamp", -0.9, 0.7, [False, True, True])
    assert made[2] == expected.sum(dtype=torch.float32)
    assert_bits(call("keep_where", grad, call("pack_range", x, -0.9, 0.7), x.stride()), expected)


@seeds
def test_batch_norm_apply(seed: int) -> None:
    for dtype in FLOATS:
        check_batch_norm_apply(*norm_input(dtype))


def check_batch_norm_apply(x: Tensor, rows: list[Tensor]) -> None:
    """Any of the activations behind it, with a residual or without, of one tensor or of two joined."""
    dtype = x.dtype
    mean, invstd = rows[2:]
    weight, bias = random.choice([(rows[0], rows[1]), (None, None), (rows[0], None)])
    residual = random.choice([None, laid_out(torch.randn(x.shape).to(dtype))])
    name, lo, hi = follower()
    got = call("batch_norm_apply", x, weight, bias, mean, invstd, residual, name, lo, hi)
    y = normalised(x, weight, bias, mean, invstd)
    plain = call("batch_norm_apply", x, weight, bias, mean, invstd, None, "clamp", -INF, INF)
    eps = max(torch.finfo(dtype).eps, 2.0**-23 if dtype != torch.float64 else 0)
    if dtype != torch.float64:
        assert_bits(plain, y)
    elif x.numel():
        size = 1 + float((weight.abs().max() if weight is not None else 1) * invstd.max())
        size *= 1 + float(x.abs().max() + mean.abs().max())
        assert float((plain - y).abs().max()) <= 2 * eps * size
    y = plain if residual is None else plain + residual
    if name == "silu":
        exact = finished(y.double(), name, lo, hi)
        assert (got.double() - exact).abs().max() <= 4 * eps * max(1.0, float(exact.abs().max()))
    else:
        assert_bits(got, finished(y.clone(), name, lo, hi))
    assert got.stride() == torch.empty_like(x, memory_format=memory_layout.norm_format(x)).stride() or x.numel() == 0
    split = random.randint(1, x.shape[1])
    parts = [p.contiguous() for p in x.split([split, x.shape[1] - split], 1) if p.shape[1]]
    if residual is None:
        joined = call("batch_norm_apply_joined", parts, weight, bias, mean, invstd, name, lo, hi)
        assert_bits(joined, got)


@pytest.mark.parametrize("dtype", FLOATS)
def test_batch_norm_of_nothing_and_of_one(dtype: torch.dtype) -> None:
    for shape in ((0, 5, 3, 3), (2, 5, 0), (1, 1, 1, 1), (1, 1)):
        x, grad = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        rows = norm_rows(torch.randn(3, shape[1], dtype=torch.float64), dtype, own=False)
        for name, reads in (
            ("batch_norm_apply", (x, *rows, None)),
            ("batch_norm_activation_backward", (grad, x, *rows)),
        ):
            some = ([True] * 3,) if name.endswith("backward") else ()
            made = call(name, *reads, "clamp", 0.0, INF, *some)
            expected = monet_like.ops.operators()[name].reference(*reads, "clamp", 0.0, INF, *some)
            for a, b in zip(made, expected, strict=True) if some else ((made, expected),):
                torch.testing.assert_close(a, b, equal_nan=True)


@seeds
def test_batch_norm_backward(seed: int) -> None:
    for dtype in FLOATS:
        check_batch_norm_backward(*norm_input(dtype))


def check_batch_norm_backward(x: Tensor, rows: list[Tensor]) -> None:
    """The gradients through any of the activations, some of them, added to another one, of tensors joined."""
    dtype = x.dtype
    mean, invstd = rows[2:]
    weight, bias = random.choice([(rows[0], rows[1]), (None, None), (rows[0], None)])
    name, lo, hi = follower()
    # As the forward stores it: at a kink another rounding changes the gradient.
    y = call("batch_norm_apply", x, weight, bias, mean, invstd, None, "clamp", -INF, INF)
    grad = laid_out(torch.randn(x.shape).to(dtype))
    arguments = (grad, x, weight, bias, mean, invstd, name, lo, hi)
    made = call("batch_norm_activation_backward", *arguments, [True, True, True])
    exact = exact_backward(grad, x, y, weight, mean, invstd, name, lo, hi)
    eps = torch.finfo(dtype).eps
    centred = (x.double() - mean.double().view((1, -1) + (1,) * (x.dim() - 2))).abs()
    for actual, expected in zip(made, exact, strict=True):
        scale = float(expected.abs().max())
        if expected.dim() == 1:
            scale = max(scale, float((grad.double() * centred.clamp(min=1)).norm()) * float(invstd.double().max()))
            eps = max(eps, torch.finfo(torch.float32).eps if actual.dtype != torch.float64 else 0)
        scale = max(scale, float(grad.double().abs().max()) * 0.1)
        assert float((actual.double() - expected).abs().max()) <= 16 * eps * scale, (name, dtype)
    assert made[0].dtype == dtype
    mask = [random.random() < 0.5 for _ in range(3)]
    some = call("batch_norm_activation_backward", *arguments, mask)
    for wanted, actual, expected in zip(mask, some, made, strict=True):
        assert (actual is not None) == wanted
        if wanted:
            assert_bits(actual, expected)
    larger = torch.randn(x.shape[0], x.shape[1] + 5, *x.shape[2:]).to(dtype)
    if not made[0].is_contiguous() and made[0].dim() == 4:
        larger = larger.to(memory_format=torch.channels_last)
    for other in (laid_out(torch.randn(x.shape).to(dtype)), larger[:, 2:-3], larger[:1, 1:2].expand(x.shape)):
        added = call("batch_norm_activation_backward", *arguments, [True, True, True], other)
        assert_bits(added[0], made[0] + other)
        assert_bits(added[1], made[1])
    if x.is_contiguous() and x.shape[1] > 1:
        split = random.randint(1, x.shape[1] - 1)
        parts = [p.contiguous() for p in x.split([split, x.shape[1] - split], 1)]
        for extra in (None, larger[:, 2:-3]):
            apart = call("batch_norm_activation_backward_joined", grad, parts, *arguments[2:], [True] * 3, extra)
            together = call("batch_norm_activation_backward", *arguments, [True] * 3, extra)
            for actual, expected in zip(apart, together, strict=True):
                error = (actual.double() - expected.double()).abs().max()
                assert error <= 16 * eps * max(1.0, float(expected.abs().max()), float(grad.double().norm()))


@seeds
def test_batch_norm_train(seed: int) -> None:
    for dtype in FLOATS:
        x, rows = norm_input(dtype)
        if x.numel() // x.shape[1] >= 2:
            check_batch_norm_train(x, rows, exact_statistics=random.random() < 0.3)


def check_batch_norm_train(x: Tensor, rows: list[Tensor], *, exact_statistics: bool) -> None:
    """Statistics, ATen's or the kernels' own, running averages and results, of one tensor or of two joined."""
    dtype, weight, bias = x.dtype, rows[0], rows[1]
    running = [torch.randn(x.shape[1]).to(weight.dtype), torch.rand(x.shape[1]).to(weight.dtype)]
    moved, wanted = [t.clone() for t in running], [t.double().clone() for t in running]
    name, lo, hi = follower()
    residual = random.choice([None, laid_out(torch.randn(x.shape).to(dtype))])
    arguments = (x, weight, bias, *moved, 0.2, 1e-3, residual, name, lo, hi, exact_statistics)
    y, mean, invstd, *moved = call("batch_norm_train", *arguments, changed=(3, 4))
    exact = aten.native_batch_norm(x.double(), weight.double(), bias.double(), *wanted, True, 0.2, 1e-3)
    if exact_statistics and EMULATED:  # on the CPU they may be of 16 bits
        known = aten.batch_norm_update_stats(x, *(t.clone() for t in running), 0.2)
        exact = (exact[0], known[0].double(), (known[1].double() + 1e-3).rsqrt())
    for actual, expected in zip((mean, invstd, *moved), (*exact[1:], *wanted), strict=True):
        eps = torch.finfo(actual.dtype).eps
        torch.testing.assert_close(actual.double(), expected, rtol=64 * eps, atol=64 * eps)
    assert_bits(call("batch_norm_apply", x, weight, bias, mean, invstd, residual, name, lo, hi), y)
    if x.is_contiguous() and x.shape[1] > 1 and residual is None:
        split = random.randint(1, x.shape[1] - 1)
        parts = [p.contiguous() for p in x.split([split, x.shape[1] - split], 1)]
        joined = call(
            "batch_norm_train_joined",
            parts,
            *arguments[1:3],
            *running,
            *arguments[5:7],
            *arguments[8:],
            changed=(3, 4),
        )
        statistics = [t.double() for t in (mean, invstd, *moved)]
        for actual, expected in zip(joined[1:], statistics, strict=True):
            eps = torch.finfo(actual.dtype).eps
            torch.testing.assert_close(actual.double(), expected, rtol=64 * eps, atol=64 * eps)
        assert_bits(call("batch_norm_apply_joined", parts, weight, bias, *joined[1:3], name, lo, hi), joined[0])


@pytest.mark.parametrize("shape", [(16, 8, 4, 4), (3, 4, 30, 30)])
@pytest.mark.parametrize("channels_last", [False, True])
def test_own_statistics_far_from_zero(channels_last: bool, shape: tuple[int, ...]) -> None:
    """Their mean is large beside their deviation, one element is far from all others, and one channel is constant."""
    x = torch.randn(shape).add(10_000)
    x[0, 1, 0, 0] = 20_000
    x[:, 2] = 1234.567
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    _, mean, invstd = call("batch_norm_train", x, None, None, None, None, 0.1, 1e-5, None, "clamp", 0.0, INF, False)
    exact = aten.native_batch_norm(x.double(), None, None, None, None, True, 0.1, 1e-5)
    torch.testing.assert_close(mean.double(), exact[1], rtol=4 * torch.finfo(torch.float32).eps, atol=0)
    torch.testing.assert_close(invstd.double(), exact[2], rtol=1e-5, atol=0)
    assert mean[2] == x[0, 2, 0, 0]


@emulated
@pytest.mark.parametrize("dtype", FLOATS)
def test_batch_norm_takes_two_launches(dtype: torch.dtype) -> None:
    """Forward and backward, in any layout; one if the statistics are known, and one beside ATen's own."""
    for shape in ((16, 8, 4, 4), (3, 5, 30, 30), (4, 33)):
        x = torch.randn(shape).to(dtype)
        for formed in (x, x.to(memory_format=torch.channels_last) if x.dim() == 4 else x):
            rows = norm_rows(torch.randn(shape, dtype=torch.float64), dtype, own=False)
            running = [t.clone() for t in rows[2:]]
            train = (formed, *rows[:2], *running, 0.1, 1e-5, x, "clamp", 0.0, INF)
            backward = (x, formed, *rows, "clamp", 0.0, INF)
            for name, arguments, expected in (
                ("batch_norm_train", (*train, False), 2),
                ("batch_norm_train", (*train, True), 1),
                ("batch_norm_apply", (formed, *rows, x, "clamp", 0.0, INF), 1),
                ("batch_norm_activation_backward", (*backward, [True] * 3, x), 2),
                ("batch_norm_activation_backward", (*backward, [False, True, True]), 2),
                ("batch_norm_activation_backward", (*backward, [False] * 3), 0),
            ):
                before = sum(control.launches().values())
                getattr(registered, name)(*arguments)
                assert sum(control.launches().values()) - before == expected, (name, shape)


@seeds
def test_rms_norm(seed: int) -> None:
    for dtype in FLOATS:
        rows = random.choice([(1,), (3, 5), (33,), (70,), (0,), (600,)])
        width = random.choice([(1,), (7,), (32,), (33,), (3, 4), (255,), (257,), (300,), (1000,), (4099,)])
        if math.prod(rows) * math.prod(width) > 70000:
            rows = rows[:1] if rows[0] < 40 else (9,)
        x, grad, residual = (laid_out(torch.randn((*rows, *width), dtype=torch.float64)) for _ in range(3))
        x, grad = x.mul(random.choice([0.1, 2, 30])).to(dtype), grad.to(random.choice(FLOATS))
        weight = random.choice([None, torch.randn(width).to(random.choice(FLOATS))])
        out = random.choice([t for t in FLOATS if (t == torch.float64) <= (dtype == torch.float64)])
        extra = random.choice([None, residual.to(random.choice(FLOATS))])
        check_rms_norm(x, weight, grad, extra, out, len(width), rounded=random.random() < 0.5)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("parameter", ["own", "wide", "none"])
def test_common_rms_norm(parameter: str, dtype: torch.dtype) -> None:
    """Rows of one vector to many, more of them than blocks, all of one type but the weight; one that no block holds."""
    held = ((1, 1), (41, 8), (13, 64), (5, 3, 264), (9, 1000), (2, 4096), (3, 8200), (0, 16))
    for shape in (*held, (1, 33000)) if parameter == "own" else held:
        x, grad, residual = (torch.randn(shape).to(dtype) for _ in range(3))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        weight = None if parameter == "none" else torch.randn(shape[-1]).to(dtype if parameter == "own" else wide)
        for out, extra, rounded in ((dtype, None, True), (wide, residual, False)):
            check_rms_norm(x, weight, grad.to(out), extra, out, 1, rounded=rounded)


def check_rms_norm(
    x: Tensor,
    weight: Tensor | None,
    grad: Tensor,
    residual: Tensor | None,
    out: torch.dtype,
    dims: int,
    *,
    rounded: bool,
) -> None:
    """The norm over the last dimensions, the same from its roots, and the gradients."""
    dtype, shape, width = x.dtype, x.shape, x.shape[x.dim() - dims :]
    rows = shape[: x.dim() - dims]
    wide = rms_norm.row_statistic(x)
    y, rstd = call("rms_norm", x, weight, dims, 1e-5, rounded, out)
    assert y.dtype == out and rstd.dtype == wide and y.is_contiguous()
    assert_bits(call("rms_norm_apply", x, weight, rstd, dims, rounded, out), y)
    over = tuple(range(-dims, 0))
    exact = (x.double().square().mean(over, keepdim=True) + 1e-5).rsqrt()
    if x.numel():
        torch.testing.assert_close(rstd.double(), exact, rtol=16 * torch.finfo(wide).eps, atol=0)
        known = rms_norm.rms_norm_apply(x, weight, rstd, dims, rounded, out)
        error = (y.double() - known.double()).abs().max()
        assert error <= 1e-9 * torch.finfo(out).eps * max(1.0, float(known.double().abs().max()))
    of_x, of_weight = call("rms_norm_backward", grad, x, weight, rstd, residual, dims)
    g, r = grad.double(), rstd.double()
    through = g if weight is None else g * weight.double()
    slope = (through * x.double()).sum(over, keepdim=True) / math.prod(width) * r**3
    wanted = through * r - x.double() * slope + (0 if residual is None else residual.double())
    eps = max(torch.finfo(dtype).eps, torch.finfo(wide).eps * 64)
    if x.numel():
        scale = max(float(wanted.abs().max()), float((through * r).abs().max()))
        assert (of_x.double() - wanted).abs().max() <= eps * scale
    assert (of_weight is None) == (weight is None)
    if weight is not None:
        sums = (g * x.double() * r).sum(tuple(range(len(rows))))
        eps = max(torch.finfo(weight.dtype).eps, torch.finfo(wide).eps * 64)
        scale = (
            max(float(sums.abs().max()), float((g * x.double() * r).square().sum().sqrt()) * 0.1) if x.numel() else 1.0
        )
        assert of_weight.dtype == weight.dtype and (of_weight.double() - sums).abs().max() <= eps * scale


@seeds
def test_swiglu(seed: int) -> None:
    """No element, one, fewer than a vector, more than a block's, views at odd addresses."""
    for dtype, size in itertools.product(FLOATS, (0, 1, 7, 33, 1024, random.randint(1025, 9000))):
        shape = (size,) if size % 3 else (3, size // 3)
        grad, gate, up = (laid_out(torch.randn(shape, dtype=torch.float64) * random.choice([1, 30])) for _ in range(3))
        check_swiglu(grad.to(dtype), gate.to(dtype), up.to(dtype))


def check_swiglu(grad: Tensor, gate: Tensor, up: Tensor) -> None:
    """The products and both gradients, to the rounding of the exponential function, which differs between devices."""
    wide = torch.float64 if gate.dtype == torch.float64 else torch.float32
    for found, known in (
        ((call("swiglu", gate, up),), (swiglu.swiglu(gate, up),)),
        (call("swiglu_backward", grad, gate, up), swiglu.swiglu_backward(grad, gate, up)),
    ):
        for mine, other in zip(found, known, strict=True):
            assert mine.dtype == gate.dtype and mine.is_contiguous()
            within = max(2 * torch.finfo(gate.dtype).eps, 16 * torch.finfo(wide).eps)
            largest = float(other.abs().max()) if other.numel() else 0.0  # 1 + x (1 - s) may cancel
            torch.testing.assert_close(mine, other, rtol=within, atol=within * max(1.0, largest))


@emulated
def test_every_kernel_was_launched() -> None:
    """The last one: each `__global__` function of csrc/cuda has run in some test above."""
    defined = {name for _, name in control.sources()["kernels"]}
    missed = defined - control.launches().keys()
    assert defined and not missed, f"no test above calls an operator that launches {', '.join(sorted(missed))}"
