"""Layouts and memory of operators' results, as the trace is told of them, against the operators themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from monet_like.capture.lower.step import capture
from monet_like.ops.meta_functions import bags, convolved, elementwise_result, group_norm_layout, register, unfolded
from monet_like.profile.work import flops

aten = torch.ops.aten
#: With extents of 1 in each place.
SHAPES = [
    (2, 1, 4, 2),
    (2, 3, 1, 1),
    (2, 3, 1, 4),
    (1, 3, 4, 4),
    (1, 1, 4, 4),
    (2, 3, 4, 4),
    (2, 1, 3, 1, 2),
    (2, 3, 4),
]
UNARY = [
    aten.tanh.default,
    aten.relu.default,
    aten.gelu.default,
    aten.silu.default,
    aten.hardswish.default,
    aten.sqrt.default,
]
WITH_NUMBERS = [
    (aten.clamp.default, (0, 1)),
    (aten.pow.Tensor_Scalar, (2,)),
    (aten.mul.Tensor, (0.5,)),
    (aten.add.Scalar, (0.5,)),
    (aten.rsub.Scalar, (1,)),
    (aten.gt.Scalar, (0,)),
    (aten.leaky_relu.default, (0.1,)),
    (aten.hardtanh.default, (-1.0, 1.0)),
    (aten.elu.default, ()),
    (aten.clone.default, ()),
]
BINARY = [
    (aten.mul.Tensor, ()),
    (aten.tanh_backward.default, ()),
    (aten.sigmoid_backward.default, ()),
    (aten.threshold_backward.default, (0.0,)),
    (aten.hardtanh_backward.default, (-1.0, 1.0)),
    (aten.silu_backward.default, ()),
    (aten.gelu_backward.default, ()),
    (aten.hardswish_backward.default, ()),
    (aten.hardsigmoid_backward.default, ()),
    (aten.leaky_relu_backward.default, (0.1, False)),
    (aten.softplus_backward.default, (1.0, 20.0)),
    (aten.mish_backward.default, ()),
    (aten.div.Tensor, ()),
    (aten.maximum.default, ()),
]
CASES = [*((op, 1, ()) for op in UNARY), *((op, 1, n) for op, n in WITH_NUMBERS), *((op, 2, n) for op, n in BINARY)]


def _laid_out(shape: tuple[int, ...], layout: str) -> Tensor:
    x = torch.rand(shape)
    if layout == "last" and len(shape) > 3:
        return x.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    if layout == "expanded":
        return x[..., :1].expand(shape)
    return x.transpose(0, 1).contiguous().transpose(0, 1) if layout == "turned" else x


@pytest.mark.slow(every=4)
@pytest.mark.parametrize(("op", "tensors", "numbers"), CASES, ids=[f"{op}{n}" for op, _, n in CASES])
def test_a_result_is_laid_out_as_the_operator_does(
    op: Callable[..., Tensor], tensors: int, numbers: tuple[float, ...]
) -> None:
    layouts = ("rows", "last", "turned") + ("expanded",) * (tensors == 1)
    for shape in SHAPES:
        for first in layouts:
            for second in layouts[: 3 if tensors == 2 else 1]:
                args = [_laid_out(shape, layout) for layout in (first, second)][:tensors]
                with FakeTensorMode() as fake:
                    told = [fake.from_tensor(arg) for arg in args]
                    result = elementwise_result(op, (*told, *numbers), op(*told, *numbers))
                assert result.stride() == op(*args, *numbers).stride(), (shape, first, second)


def test_unfolding_and_folding_keep_the_memory_of_their_input() -> None:
    x = torch.rand(2, 4, 6, 6)
    columns = aten.im2col(x, [2, 2], [1, 1], [0, 0], [1, 1])
    for call, read in (
        (lambda t: aten.im2col(t, [1, 1], [1, 1], [0, 0], [2, 2]), x),
        (lambda t: aten.im2col(t, [3, 3], [1, 1], [0, 0], [1, 1]), x),
        (lambda t: aten.col2im(t, [6, 6], [2, 2], [1, 1], [0, 0], [1, 1]), columns),
    ):
        with FakeTensorMode() as fake:
            told = fake.from_tensor(read)
            result = unfolded(told, call(told))
        real = call(read)
        assert result.untyped_storage().nbytes() == real.untyped_storage().nbytes()
        assert (result.shape, result.stride()) == (real.shape, real.stride())


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_embedding_bags_keep_one_index_more(mode: int) -> None:
    weight, indices, offsets = torch.rand(5, 4), torch.tensor([1, 2, 4]), torch.tensor([0, 2])
    with FakeTensorMode() as fake:
        told = bags(aten._embedding_bag(*(fake.from_tensor(t) for t in (weight, indices, offsets)), False, mode))
    for result, real in zip(told, aten._embedding_bag(weight, indices, offsets, False, mode), strict=True):
        assert (result.shape, result.untyped_storage().nbytes()) == (real.shape, real.untyped_storage().nbytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("batch", "channels", "extent"), [(1, 6, 1), (2, 16, 4), (4, 32, 8)])
def test_transposed_convolutions_keep_the_memory_of_their_input(
    dtype: torch.dtype, batch: int, channels: int, extent: int
) -> None:
    x, weight = torch.rand(batch, channels, *[extent] * 3, dtype=dtype), torch.rand(channels, 1, 1, 1, 1, dtype=dtype)
    settings = (None, [1, 1, 1], [0, 0, 0], [1, 1, 1], True, [0, 0, 0], 1)
    real = aten.convolution(x, weight, *settings)
    with FakeTensorMode() as fake:
        args = (fake.from_tensor(x), fake.from_tensor(weight), *settings)
        told = convolved(args, aten.convolution(*args))
    assert told.untyped_storage().nbytes() == real.untyped_storage().nbytes()


class Folded(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.fold(torch.tanh(x), (6, 6), 2)


def test_a_program_counts_what_folding_keeps() -> None:
    columns = torch.rand(2, 4 * 4, 25, requires_grad=True)
    captured = capture(Folded(), (columns,))
    (folded,) = (value for value in captured.program.values if value.name.startswith("col2im"))
    assert folded.bytes == columns.untyped_storage().nbytes()


@pytest.mark.parametrize("driver", [None, "gelsy", "gels", "gelsd", "gelss"])
@pytest.mark.parametrize(("matrices", "right"), [((5, 3), (5, 2)), ((3, 5), (3, 2)), ((2, 3, 3), (2, 3))], ids=str)
def test_least_squares_are_laid_out_as_the_operator_does(
    matrices: tuple[int, ...], right: tuple[int, ...], driver: str | None
) -> None:
    """With two of LAPACK's drivers it depends on the matrices' ranks whether there are residuals, if rows outnumber
    columns.
    """
    register()
    args = torch.rand(matrices), torch.rand(right)
    with FakeTensorMode() as fake:
        given = [fake.from_tensor(t) for t in args]
        if driver in ("gelsd", "gelss") and matrices == (5, 3):
            with pytest.raises(DynamicOutputShapeException):
                aten.linalg_lstsq(*given, driver=driver)
            return
        told = aten.linalg_lstsq(*given, driver=driver)
    for result, real in zip(told, aten.linalg_lstsq(*args, driver=driver), strict=True):
        assert (result.shape, result.stride(), result.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("shape", [(2, 8, 4, 4), (2, 8, 4, 4, 4), (2, 8, 16), (2, 8, 1, 1), (2, 8)])
@pytest.mark.parametrize("layout", ["rows", "last"])
def test_group_norm_is_laid_out_as_the_operator_does(shape: tuple[int, ...], layout: str) -> None:
    register()
    x, weight = torch.rand(shape), torch.rand(8)
    if layout == "last" and len(shape) > 3:
        x = x.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)
    sizes = (2, 8, x[0, 0].numel(), 4)
    real, mean, rstd = aten.native_group_norm(x, weight, weight, *sizes, 1e-5)
    grad, *_ = aten.native_group_norm_backward(torch.rand_like(x), x, mean, rstd, weight, *sizes, [True] * 3)
    with FakeTensorMode() as fake:
        given = [fake.from_tensor(t) for t in (x, weight, weight)]
        told, *statistics = aten.native_group_norm(*given, *sizes, 1e-5)
        of_input = torch.empty_like(given[0], memory_format=group_norm_layout(given[0]))
    assert (told.stride(), of_input.stride()) == (real.stride(), grad.stride())
    assert [t.shape for t in statistics] == [mean.shape, rstd.shape]


#: For each kind: shapes of the matrices before they are turned, which ones are turned, and where groups end.
GROUPS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[bool, bool], list[int] | None]] = {
    "rows": ((10, 16), (3, 32, 16), (False, True), [2, 2, 10]),  # of the first, each with a matrix of its own
    "columns": ((10, 16), (10, 32), (True, False), [2, 2, 10]),  # the gradient of these matrices
    "batch": ((3, 16, 16), (3, 32, 16), (False, True), None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("columns", [24, 23])
def test_products_of_groups_are_laid_out_as_the_operator_does(dtype: torch.dtype, kind: str, columns: int) -> None:
    """PyTorch's own fake refuses float32 and, without a GPU, float16; the operator takes both."""
    register()
    *shapes, turned, bounds = GROUPS[kind]
    matrices = [torch.rand(shape, dtype=dtype) for shape in shapes]
    one, other = (matrix.mT if turns else matrix for matrix, turns in zip(matrices, turned, strict=True))
    args = [one, other[..., :columns]]  # rows must begin at multiples of 16 bytes
    args += [] if bounds is None else [torch.tensor(bounds, dtype=torch.int32)]
    real = aten._grouped_mm(*args)
    with FakeTensorMode() as fake:
        told = aten._grouped_mm(*(fake.from_tensor(arg) for arg in args))
    assert (told.shape, told.stride(), told.dtype) == (real.shape, real.stride(), real.dtype)
    assert told.untyped_storage().nbytes() == real.untyped_storage().nbytes()


class Experts(torch.nn.Module):
    """Every token goes through one of three matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(3, 16, 24))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        expert, order = torch.sort(expert)
        bounds = torch.searchsorted(expert, torch.arange(1, 4)).to(torch.int32)
        return torch.nn.functional.grouped_mm(torch.tanh(x)[order], self.weight, offs=bounds)


def test_products_of_groups_are_counted() -> None:
    """Each token meets one matrix: forward, and the gradients of tokens and of matrices."""
    captured = capture(Experts(), (torch.rand(10, 16, requires_grad=True), torch.randint(0, 3, (10,))))
    counted = [count for task in captured.every_task() if (count := flops(captured, task))]
    assert counted == [2 * 10 * 16 * 24] * 3


@pytest.mark.parametrize("lies", [(60, 20, 5, 1), (60, 1, 15, 3), (120, 40, 10, 2)], ids=str)
def test_fake_quantisation_is_laid_out_as_the_operators_do(lies: tuple[int, ...]) -> None:
    """With given and with learned scales, one for all or one for each channel."""
    register()
    x = torch.rand(240).as_strided((2, 3, 4, 5), lies)
    one, each, on = torch.ones(1), torch.ones(3), torch.ones(1, dtype=torch.long)
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams, (x, one, one.int(), on, 0, 255)),
        (aten.fake_quantize_per_channel_affine_cachemask, (x, each, each.int(), 1, 0, 255)),
        (aten._fake_quantize_learnable_per_tensor_affine, (x, one, one, 0, 255)),
        (aten._fake_quantize_learnable_per_tensor_affine_backward, (x, x, one, one, 0, 255)),
        (aten._fake_quantize_learnable_per_channel_affine, (x, each, each, 1, 0, 255)),
        (aten._fake_quantize_learnable_per_channel_affine_backward, (x, x, each, each, 1, 0, 255)),
    ]
    for op, args in calls:
        with FakeTensorMode(allow_fallback_kernels=False) as fake:
            told = op(*(fake.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
        every = zip(*(r if isinstance(r, tuple) else (r,) for r in (told, op(*args))), strict=True)
        assert all((t.shape, t.stride(), t.dtype) == (r.shape, r.stride(), r.dtype) for t, r in every), op


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_grus_cell_on_a_gpu(has_bias: bool) -> None:
    """Shapes as in PyTorch's ``RNN.cu``; `benchmarks.small_models` compares whole steps on a GPU."""
    register()
    with FakeTensorMode():
        gates, state = (torch.empty(4, extent, device="cuda") for extent in (18, 6))
        biases = [torch.empty(18, device="cuda")] * 2 if has_bias else [None] * 2
        new, workspace = aten._thnn_fused_gru_cell(gates, gates, state, *biases)
        found = aten._thnn_fused_gru_cell_backward(new, workspace, has_bias)
    assert new.shape == (4, 6) and workspace.shape == (4, 30)
    shapes = [None if one is None else tuple(one.shape) for one in found]
    assert shapes == [(4, 18), (4, 18), (4, 6), *([(18,)] * 2 if has_bias else [None] * 2)]
