"""Shapes and layouts of results of PyTorch's own operators, where PyTorch tells a trace none or wrong ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, _meta_registrations
from torch._prims_common import (
    compute_elementwise_output_strides,
    suggest_memory_format,
)
from torch._subclasses.fake_tensor import DynamicOutputShapeException, unset_fake_temporarily

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _row_major(first: Tensor, *_: Any, **__: Any) -> Tensor:
    return first.new_empty(first.shape)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    steps, batch = (log_probs.shape[0], log_probs.shape[1]) if log_probs.dim() == 3 else (log_probs.shape[0], 1)
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * max(target_lengths, default=0) + 1)


def _like_second(grad: Tensor, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x.new_empty(x.shape)


def _grouped_mm(
    one: Tensor,
    other: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """PyTorch's fake refuses float32, and float16 without a GPU, which its kernels take."""
    if (
        one.dtype not in (torch.float32, torch.float16)
        or other.dtype != one.dtype
        or out_dtype not in (None, one.dtype)
    ):
        own = torch.ops.aten._grouped_mm.default.py_kernels[torch._C.DispatchKey.Meta]
        result: Tensor = own(one, other, offs, bias, out_dtype)
        return result
    shape = [one.shape[-2], other.shape[-1]]
    if one.dim() == other.dim():  # a product for each group; else groups are ranges of rows or of columns
        shape.insert(0, one.shape[0] if offs is None else offs.shape[0])
    if torch.version.hip:
        return one.new_empty(shape)
    row = -(-shape[-1] * one.itemsize // 16) * 16 // one.itemsize  # rows begin at multiples of 16 bytes
    strides = (shape[-2] * row, row, 1)[-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=one.dtype, device=one.device)


def _group_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, samples: int, *sizes: Any) -> tuple[Tensor, ...]:
    """The result lies as the input does on a CPU, where PyTorch's fake has it in rows."""
    _, _, groups, _ = sizes
    statistics = (x.new_empty(samples, groups) for _ in range(2))
    return (torch.empty_like(x, memory_format=group_norm_layout(x)), *statistics)


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """On a GPU; the workspace has all three gates, the state and the new state's share of the hidden gates."""
    return hx.new_empty(hx.shape), hx.new_empty(hx.shape[0], 5 * hx.shape[1])


def _gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    gates = (workspace.shape[0], 3 * (workspace.shape[1] // 5))
    biases = (workspace.new_empty(gates[1]) if has_bias else None for _ in range(2))
    return workspace.new_empty(gates), workspace.new_empty(gates), grad.new_empty(grad.shape), *biases


def _lstsq(x: Tensor, other: Tensor, rcond: float | None = None, *, driver: str | None = None) -> tuple[Tensor, ...]:
    """Two drivers leave residuals only where the matrices have full rank, and only of matrices of more rows than
    columns.

    Found by solving for matrices of ones and zeros on a CPU, since the solution's layout is that of LAPACK's memory.
    """
    driver = driver or ("gelsy" if x.device.type == "cpu" else "gels")
    if driver in ("gelsd", "gelss") and x.shape[-2] > x.shape[-1]:
        raise DynamicOutputShapeException(_aten.linalg_lstsq.default)
    with unset_fake_temporarily():
        matrices, right = (torch.zeros(t.shape, dtype=t.dtype) for t in (x, other))
        matrices.diagonal(dim1=-2, dim2=-1).fill_(1)
        results = _aten.linalg_lstsq(matrices, right, driver=driver)
    return tuple(x.new_empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in results)


def _fake_quantized(x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """The result, and which elements are in the range."""
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _learned_fake_quantized(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x)


def _learned_fake_quantized_backward(grad: Tensor, x: Tensor, scale: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    """Gradients of the input, of the scale and of the zero point."""
    return torch.empty_like(x), *(scale.new_empty(scale.numel()) for _ in range(2))


def group_norm_layout(x: Tensor) -> torch.memory_format:
    """That of group norm's result, and of the gradient of its input ``x``.

    A trace for a GPU that is not here is of the CPU's tensors, and has a hint.
    """
    on_cpu = x.device.type == "cpu" and _meta_registrations.device_hint(x) == "cpu"
    return suggest_memory_format(x) if on_cpu else torch.contiguous_format


@cache
def register() -> None:
    """Register, once, results of Gamma and Dirichlet samplers, CTC loss, margin losses, fractional
    pooling in 3-D, group norm, products of groups, a GRU's cell on a GPU, least squares, and fake quantisation."""
    for name in ("_standard_gamma", "_standard_gamma_grad", "_sample_dirichlet", "_dirichlet_grad"):
        torch.library.register_fake(f"aten::{name}", _row_major, allow_override=True)
    torch.library.register_fake("aten::_ctc_loss", _ctc_loss, allow_override=True)
    for name in ("_ctc_loss_backward", "_ctc_loss_backward.Tensor"):
        torch.library.register_fake(f"aten::{name}", _like_second, allow_override=True)
    for name in ("multi_margin_loss_backward", "multilabel_margin_loss_backward", "fractional_max_pool3d_backward"):
        torch.library.register_fake(f"aten::{name}", _like_second, allow_override=True)
    torch.library.register_fake("aten::_grouped_mm", _grouped_mm, allow_override=True)
    torch.library.register_fake("aten::_thnn_fused_gru_cell", _gru_cell, allow_override=True)
    torch.library.register_fake("aten::_thnn_fused_gru_cell_backward", _gru_cell_backward, allow_override=True)
    torch.library.register_fake("aten::native_group_norm", _group_norm, allow_override=True)
    torch.library.register_fake("aten::linalg_lstsq", _lstsq, allow_override=True)
    for name in (
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
        "fake_quantize_per_channel_affine_cachemask",
    ):
        torch.library.register_fake(f"aten::{name}", _fake_quantized, allow_override=True)
    for name in ("_fake_quantize_learnable_per_tensor_affine", "_fake_quantize_learnable_per_channel_affine"):
        torch.library.register_fake(f"aten::{name}", _learned_fake_quantized, allow_override=True)
        torch.library.register_fake(f"aten::{name}_backward", _learned_fake_quantized_backward, allow_override=True)


@contextlib.contextmanager
def ctc_loss_by_steps() -> Iterator[None]:
    """Trace the mean of CTC losses operator by operator; PyTorch computes it with a tensor that no trace can have."""
    own = torch.ctc_loss

    def ctc_loss(
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Any,
        target_lengths: Any,
        blank: int = 0,
        reduction: int = 1,
        zero_infinity: bool = False,
    ) -> Tensor:
        if reduction != 1 or isinstance(target_lengths, Tensor) or log_probs.dim() != 3:
            return own(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
        losses = own(log_probs, targets, input_lengths, target_lengths, blank, 0, zero_infinity)
        lengths = torch.tensor(target_lengths, dtype=losses.dtype, device=losses.device)
        return (losses / lengths.clamp_min(1)).mean()

    torch.ctc_loss = ctc_loss
    try:
        yield
    finally:
        torch.ctc_loss = own


def rolled(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    """A tensor laid out as ``torch.roll``'s result on a CPU, which joins two parts; traces take it to be row-major."""
    if len(dims) != 1 or len(shifts) != 1:  # one after the other; without dims of the flattened tensor
        for shift, dim in zip(shifts, dims, strict=False):
            x = rolled(x, [shift], [dim])
        return x if dims else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    (dim,), extent = dims, x.shape[dims[0]]
    if not x.numel():
        return x.clone()
    start = (extent - shifts[0]) % extent
    return torch.cat([x.narrow(dim, start, extent - start), x.narrow(dim, 0, start)], dim)


_aten = torch.ops.aten
#: Of these the kernels look at the input first, and then at its gradient.
_INPUT_FIRST = frozenset({_aten.elu_backward.default, _aten.leaky_relu_backward.default})
#: Elementwise operators that PyTorch does not mark as such.
_ELEMENTWISE = _INPUT_FIRST | {
    _aten.leaky_relu.default,  # of PyTorch 2.11
    _aten.hardswish.default,
    _aten.hardswish_backward.default,
    _aten.hardtanh_backward.default,
    _aten.hardsigmoid_backward.default,
    _aten.softplus_backward.default,
    _aten.mish_backward.default,
}
#: Marked, but its result lies as its input does.
_LIKE_INPUT = _aten.hardtanh.default


def elementwise_result(op: torch._ops.OpOverload, args: Sequence[Any], result: Tensor) -> Tensor:
    """A tensor laid out as an elementwise operator's result; of other operators ``result`` itself.

    Tensors with extents of 1 can be in rows and channels-last at once. The operators then take them to be in rows,
    whatever their strides say, unless one is a number; the trace keeps strides by other rules.
    """
    if (torch.Tag.pointwise not in op.tags and op not in _ELEMENTWISE) or op is _aten.clone.default:
        return result
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if not tensors or any(tensor.shape != result.shape for tensor in tensors):
        return result
    declared = (str(argument.type) for argument in op._schema.arguments)
    number = any(type_ == "Tensor" and not isinstance(arg, Tensor) for arg, type_ in zip(args, declared, strict=False))
    layout = next((f for f in _layouts(result) if all(t.is_contiguous(memory_format=f) for t in tensors)), None)
    if op is _LIKE_INPUT or op._overloadname == "Scalar" or number:
        if len(tensors) > 1 or not torch.ops.aten.is_non_overlapping_and_dense(tensors[0]):
            return result
        strides = tensors[0].stride()
    elif layout is not None:
        return torch.empty_like(result, memory_format=layout)
    elif op in _ELEMENTWISE:
        strides = compute_elementwise_output_strides(*(tensors[::-1] if op in _INPUT_FIRST else tensors))
    else:
        return result
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)


def product(x: Tensor, factor: Tensor) -> Tensor:
    """A tensor laid out as ``x * factor``; ``factor`` has the shape of ``x`` or is one number."""
    args = (x, factor) if factor.dim() or not x.dim() else (x, 1.0)
    return elementwise_result(_aten.mul.Tensor, args, torch.empty_like(x))


def unfolded(x: Tensor, result: Tensor) -> Tensor:
    """A tensor in as much memory as the result of ``im2col`` or ``col2im``: the operators begin with an empty one like
    their input ``x``, which keeps its memory where the result is smaller."""
    if x.numel() <= result.numel():
        return result
    return x.new_empty(x.numel())[: result.numel()].view(result.shape)


def convolved(args: Sequence[Any], result: Tensor) -> Tensor:
    """A tensor with the memory of ``convolution``'s result; one of PyTorch's kernels keeps more, as in `unfolded`."""
    x, weight, _, stride, padding, dilation, transposed, output_padding, groups = args
    if not transposed or x.dim() != 5 or x.device.type != "cpu":
        return result
    with unset_fake_temporarily():  # of fake tensors it says nothing
        x_like, weight_like = (torch.empty((), dtype=t.dtype).expand(t.shape) for t in (x, weight))
        backend = torch._C._select_conv_backend(
            x_like, weight_like, None, stride, padding, dilation, transposed, output_padding, groups
        )
    return unfolded(x, result) if backend.name == "SlowTranspose3d" else result


def bags(result: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The results of ``_embedding_bag`` on a CPU, where the bag of each index lies in memory for one index more."""
    output, bag_of, *others = result
    if bag_of.numel():
        bag_of = bag_of.new_empty(bag_of.numel() + 1)[:-1]
    return (output, bag_of, *others)


def batch_norm_result(x: Tensor) -> Tensor:
    """A tensor laid out as batch norm's result on a CPU."""
    return torch.empty_like(x, memory_format=_whole(x) or suggest_memory_format(x))


def batch_norm_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """A tensor laid out as the gradient of batch norm's input ``x`` on a CPU, made from that of its result."""
    own = suggest_memory_format(x)
    layout = _whole(x) if _whole(grad) is not None and own == suggest_memory_format(grad) else None
    return torch.empty_like(x, memory_format=layout or own)


def _whole(tensor: Tensor) -> torch.memory_format | None:
    """In rows or channels-last, the first where extents of 1 make it both; None: neither."""
    return next((layout for layout in _layouts(tensor) if tensor.is_contiguous(memory_format=layout)), None)


def _layouts(tensor: Tensor) -> list[torch.memory_format]:
    return [torch.contiguous_format, *([_CHANNELS_LAST[tensor.dim()]] if tensor.dim() in _CHANNELS_LAST else [])]
