"""Gradients whose formulas look at values: of a product, whether a factor is zero; of ``index_fill``, which rows are
named twice.

A trace has no values: PyTorch takes another formula there, which rounds otherwise, or none. Here each formula is one
operator, which looks when it runs, as plain PyTorch does. The size of its result depends on no value. Its layout may:
it is plain PyTorch's, which the operators that read it take as they find it. A gradient that the forward itself makes,
and that has a gradient (``create_graph=True``), is not one operator: there the formula asks as a forward does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .registry import fake, operator

_aten = torch.ops.aten


@operator("(Tensor grad, Tensor x, Tensor result, int? dim, bool keepdim) -> Tensor", compiled=False)
def prod_backward(grad: Tensor, x: Tensor, result: Tensor, dim: int | None, keepdim: bool) -> Tensor:
    """The gradient of ``x`` from that of its product, or of its products along ``dim``: PyTorch's formula, with its
    questions.
    """
    if x.dim() == 0:
        return grad.clone()
    if dim is None:
        zeros = (x == 0).nonzero().shape[0]
    else:
        grad, result = (grad, result) if keepdim else (grad.unsqueeze(dim), result.unsqueeze(dim))
        zeros = int((x == 0).sum(dim, keepdim=True).sum())
    if not zeros:
        return grad * (result / x).conj()
    if dim is not None:
        return _without_division(grad, x, dim)
    return torch.zeros_like(x) if zeros > 1 else _without_division(grad, x.reshape(-1), 0).view_as(x)


def _without_division(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    """The product of the factors before each one, times that of those after it."""
    if x.shape[dim] == 1:
        return grad.clone()
    one = x.new_ones([1 if at == dim % x.dim() else extent for at, extent in enumerate(x.shape)])
    before = torch.cat([one, x.narrow(dim, 0, x.shape[dim] - 1)], dim).cumprod(dim)
    after = torch.cat([one, x.narrow(dim, 1, x.shape[dim] - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return grad * (before * after).conj()


@fake(prod_backward)
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@operator("(Tensor grad, int dim, Tensor index) -> Tensor", compiled=False)
def index_fill_value_backward(grad: Tensor, dim: int, index: Tensor) -> Tensor:
    """The gradient of the number that ``index_fill`` writes, from that of its result: each row counts once."""
    return grad.index_select(dim, torch._unique(index, sorted=False)[0]).sum()


@fake(index_fill_value_backward)
def _(grad: Tensor) -> Tensor:
    return grad.new_empty(())


class _Prod(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, x: Tensor, dim: int | None, keepdim: bool, dtype: torch.dtype | None) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result: Tensor = op(x, dtype=dtype) if dim is None else op(x, dim, keepdim, dtype=dtype)
        ctx.save_for_backward(x, result)
        ctx.settings = dim, keepdim
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, result = ctx.saved_tensors
        of_x = prod_backward if torch.is_grad_enabled() else torch.ops.monet_like.prod_backward
        gradient = of_x(grad, x.to(grad.dtype), result, *ctx.settings)
        return None, gradient.to(x.dtype), None, None, None


class _IndexFill(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Any, x: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result: Tensor = op(x, dim, index, value)
        if result is x:
            ctx.mark_dirty(x)
        ctx.save_for_backward(index)
        ctx.dim = dim
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        of_x = grad.index_fill(ctx.dim, index, 0) if ctx.needs_input_grad[1] else None
        one_operator = torch.ops.monet_like.index_fill_value_backward
        backward = index_fill_value_backward if torch.is_grad_enabled() else one_operator
        return None, of_x, None, None, backward(grad, ctx.dim, index) if ctx.needs_input_grad[4] else None


def _prod(op: Any) -> Callable[..., Tensor]:
    def prod(x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        return _Prod.apply(op, x, dim, keepdim, dtype)

    return prod


def _index_fill(op: Any) -> Callable[..., Tensor]:
    return lambda *args: _IndexFill.apply(op, *args)


#: What has such a gradient in a trace.
_FORWARDS = {
    _aten.prod.default: _prod,
    _aten.prod.dim_int: _prod,
    _aten.index_fill.int_Tensor: _index_fill,
    _aten.index_fill_.int_Tensor: _index_fill,
}


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Have a trace call the operators here, which must be loaded, for the gradients of `_FORWARDS`."""
    key = torch._C.DispatchKey.Autograd
    before = {op: op.py_kernels.get(key) for op in _FORWARDS}
    for op, function in _FORWARDS.items():
        op.py_kernels[key] = function(op)
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernel in before.items():
            op.py_kernels.pop(key) if kernel is None else op.py_kernels.update({key: kernel})
            op._dispatch_cache.clear()
