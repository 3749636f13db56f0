"""Tensors for tests of the operators: dtypes, shapes, memory layouts, special numbers; and equality of bits.

"Bits" means equal bit for bit, except that any NaN equals any NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

FULL = (torch.float32, torch.float64)
FLOATS = (*FULL, torch.bfloat16, torch.float16)
INTEGER = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def assert_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if actual.dtype.is_floating_point:
        nan = actual.isnan() & expected.isnan()
        view = INTEGER[actual.element_size()]
        differ = (actual.contiguous().view(view) != expected.contiguous().view(view)) & ~nan
    else:
        differ = actual != expected
    assert not differ.any(), f"{int(differ.sum())} of {differ.numel()} elements differ"


def strides(t: Tensor) -> list[int]:
    """Those that say anything: of the dimensions longer than one."""
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def special(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Normal numbers with zeros of both signs, infinities and NaN strewn in."""
    x = torch.randn(shape, dtype=torch.float64).mul(3).to(dtype)
    strange = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 6.0], dtype=dtype)
    pick = torch.randint(0, 30, shape)
    return torch.where(pick < 6, strange[pick.clamp(max=5)], x)


def layouts(shape: tuple[int, ...], dtype: torch.dtype, make: Callable[..., Tensor] = special) -> dict[str, Tensor]:
    """The same kind of data in several memory layouts."""
    x = make(shape, dtype)
    found = {"contiguous": x, "reversed": x.permute(tuple(reversed(range(x.dim()))))}
    if x.dim() == 4:
        found["channels_last"] = x.to(memory_format=torch.channels_last)
        wide = make((*shape[:-1], 2 * shape[-1] + 1), dtype)
        found["strided"] = wide[..., 1::2]
        found["offset"] = make((shape[0] + 1, *shape[1:]), dtype)[1:]
        found["expanded"] = x[:1].expand(shape)
    return found


SHAPES = [(), (0,), (7,), (8,), (9,), (129,), (2053,), (3, 0, 2), (2, 3, 5, 7), (2, 16, 8, 8)]


def exact_backward(
    grad: Tensor,
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    name: str = "clamp",
    lo: float = 0.0,
    hi: float = math.inf,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of an activated batch norm for x, weight and bias in float64, activated at the y that was stored."""
    channels, over = (1, -1) + (1,) * (x.dim() - 2), [d for d in range(x.dim()) if d != 1]
    at = y.double().requires_grad_()
    activate: dict[str, Callable[[Tensor], Tensor]] = {
        "clamp": lambda t: torch.where((t <= lo) & (lo > -math.inf) | (t >= hi) & (hi < math.inf), 0.0, t),
        "leaky_relu": lambda t: torch.nn.functional.leaky_relu(t, lo),
        "hardswish": torch.nn.functional.hardswish,
        "silu": torch.nn.functional.silu,
    }
    (g,) = torch.autograd.grad(activate[name](at), at, grad.double())
    s = invstd.double().view(channels)
    centred = x.double() - mean.double().view(channels)
    w = torch.ones_like(s) if weight is None else weight.double().view(channels)
    count = x.numel() // x.shape[1]
    sum_g, dot = g.sum(over, keepdim=True), (centred * g).sum(over, keepdim=True)
    return (g - sum_g / count - centred * s * s * dot / count) * s * w, (dot * s).flatten(), sum_g.flatten()
