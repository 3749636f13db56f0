"""Rows of matrices, followed through operators: which row of a matrix each row of a result is computed from.

The rows of a tensor are an integer tensor of its shape, whose elements are the numbers of rows in the matrix; along
dimensions inside of a row it has a stride of 0, so it takes no memory there. Views of a tensor are views of its rows.
-1: a row of zeros, such as the gradient of a row that a slice leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.operators import overload

#: Operators of one dimension that keep the shape, and the place of the dimension among their arguments.
ALONG: dict[str, int] = {
    "_log_softmax": 1, "_softmax": 1, "_log_softmax_backward_data": 2, "_softmax_backward_data": 2, "cumsum": 1,
}  # fmt: skip
REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "logsumexp", "argmax", "argmin", "any", "all", "max", "min"})
FACTORIES = frozenset({"zeros", "full", "empty", "ones", "new_zeros", "new_full", "new_empty", "new_ones"})
#: (…, dimension, index, …): tensors that agree in all other dimensions.
INDEXED: dict[str, int] = {"gather": 1, "scatter": 1, "scatter_add": 1, "slice_scatter": 2}
JOINS = frozenset({"cat", "stack"})
PRODUCTS = frozenset({"mm", "addmm"})
#: Gradients of a slice, a row or a column: zeros elsewhere.
PADDINGS = frozenset({"slice_backward", "select_backward"})
_LINEAR = frozenset({"mul", "div", "neg", "_to_copy", "clone", "sum"})
_POINTWISE = frozenset(
    {"_to_copy", "clone", "copy", "where", "masked_fill", "zeros_like", "full_like", "threshold_backward"}
)


class NotByRows(Exception):
    """An operator that does not compute every row from the same row of its operands."""


def name_of(op: str) -> str:
    """An operator's name without overload and without the mark of the in-place form."""
    name = op.split(".")[1]
    return name if name.endswith("__") else name.rstrip("_") or name


def is_view(op: str) -> bool:
    """Whether an operator makes a view of its first operand, or takes a list of views apart."""
    return op == "operator.getitem" or bool(getattr(overload(op), "is_view", False))


def is_pointwise(op: str) -> bool:
    """Whether an operator computes each element from the elements in its place."""
    tags = overload(op).tags
    return name_of(op) in _POINTWISE or (torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags)


def depth(rows: Tensor) -> int:
    """How many dimensions, from the first, number the rows; those behind are inside of a row."""
    return max((d + 1 for d in range(rows.ndim) if rows.shape[d] > 1 and rows.stride(d)), default=0)


def compressed(rows: Tensor) -> Tensor:
    """The rows with an extent of 1 along every dimension inside of a row."""
    for dim in range(rows.ndim):
        if not rows.stride(dim) and rows.shape[dim] > 1:
            rows = rows.narrow(dim, 0, 1)
    return rows


def flat(rows: Tensor) -> Tensor:
    """The numbers of the rows, in order.

    Raises:
        NotByRows: the tensor does not have its rows one after the other, in ascending order.
    """
    inside = math.prod(rows.shape[depth(rows) :])
    numbers = compressed(rows).flatten()
    known = numbers[numbers >= 0]
    if len(numbers) * inside != rows.numel() or bool((known.diff() <= 0).any()):
        raise NotByRows
    return numbers


def agree(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have the same rows."""
    return torch.equal(*torch.broadcast_tensors(compressed(one), compressed(other)))


def combined(op: str, shape: Sequence[int], several: Sequence[Tensor]) -> Tensor:
    """The rows of an elementwise result."""
    first, *others = (compressed(rows.expand(shape)) for rows in several)
    for rows in others:
        one, other = torch.broadcast_tensors(first, rows)
        same = one == other
        if name_of(op) in ("mul", "div"):
            same |= (one < 0) | (other < 0)  # zero times anything
        if not bool(same.all()):
            raise NotByRows
        first = torch.minimum(one, other) if one.shape != first.shape or bool((one != other).any()) else first
    if name_of(op) not in (*_LINEAR, "add", "sub", "view") and bool((first < 0).any()):
        raise NotByRows
    return first.contiguous().expand(shape)


def padded(call_name: str, args: Sequence[Any], rows: Tensor, shape: Sequence[int]) -> Tensor:
    """The rows of the gradient of a slice or a selection along a dimension that numbers rows."""
    dim = args[2] % len(shape)
    small = compressed(rows)
    extents = [*small.shape]
    if call_name == "select_backward":
        extents.insert(dim, 1)
        small = small.reshape(extents)
    extents[dim] = shape[dim]
    result = torch.full(extents, -1)
    if call_name == "select_backward":
        result.select(dim, args[3]).copy_(small.select(dim, 0))
    else:
        torch.ops.aten.slice.Tensor(result, dim, *args[3:]).copy_(small)
    return result.expand(*shape)


def inside_dims(dims: Any, rank: int, first: int) -> list[int]:
    """Dimensions inside of a row, from 0 on, as an argument of a call names them.

    Raises:
        NotByRows: one of them numbers rows.
    """
    several = [*range(rank)] if dims is None or dims == [] else dims if isinstance(dims, list | tuple) else [dims]
    normal = [d % rank for d in several]
    if any(d < first for d in normal):
        raise NotByRows
    return normal
