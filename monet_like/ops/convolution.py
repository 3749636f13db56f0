"""Convolutions of images, and their gradients, by a chosen algorithm of cuDNN.

F is float32, float64, float16 or bfloat16; bias may be None.

| operator | reads | returns |
|---|---|---|
| cudnn_convolution | x: F[N,C,H,W]; weight: F[K,C/groups,R,S]; bias: F[K] | F[N,K,OH,OW] |
| cudnn_convolution_backward_input | grad: F[N,K,OH,OW]; weight: F[K,C/groups,R,S] | F[input_size] |
| cudnn_convolution_backward_weight | grad: F[N,K,OH,OW]; x: F[N,C,H,W] | F[weight_size] |

All three end with the same ``settings``: stride, padding and dilation of two extents each; groups; channels_last, the
memory format of the result; the algorithm's name. The references compute all algorithms alike, by ATen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .max_pool import pooled_extents
from .registry import fake, operator

aten = torch.ops.aten


_CONVOLUTION = (
    "int[2] stride, int[2] padding, int[2] dilation, int groups, bool channels_last, str algorithm) -> Tensor"
)


#: cuDNN's names of its algorithms; some algorithms of the gradients have numbers.
_TRANSFORMS = ("fft", "fft_tiling", "winograd", "winograd_nonfused")
FORWARD_ALGORITHMS = ("implicit_gemm", "implicit_precomp_gemm", "gemm", *_TRANSFORMS)
INPUT_ALGORITHMS = ("0", "1", *_TRANSFORMS)
WEIGHT_ALGORITHMS = ("0", "1", "3", "fft", "fft_tiling", "winograd_nonfused")


def _aten_settings(
    op: str,
    known: Sequence[str],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    channels_last: bool,
    algorithm: str,
) -> tuple[tuple[Any, ...], bool]:
    """The arguments that aten.convolution has after its tensors, and ``channels_last``.

    Raises:
        ValueError: there is no such algorithm.
    """
    if algorithm not in known:
        raise ValueError(f"{op}: there is no algorithm {algorithm!r}; choose one of {', '.join(known)}")
    return (list(stride), list(padding), list(dilation), False, [0, 0], groups), channels_last


def _laid_out(t: Tensor, channels_last: bool) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def _empty(like: Tensor, size: Sequence[int], channels_last: bool) -> Tensor:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(tuple(size), dtype=like.dtype, device=like.device, memory_format=memory_format)


@operator(f"(Tensor x, Tensor weight, Tensor? bias, {_CONVOLUTION}")
def cudnn_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """Convolution of images; ``algorithm`` is one of `FORWARD_ALGORITHMS`."""
    plain, channels_last = _aten_settings("cudnn_convolution", FORWARD_ALGORITHMS, *settings)
    return _laid_out(torch.convolution(x, weight, bias, *plain), channels_last)


@fake(cudnn_convolution)
def _(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    channels_last: bool,
) -> Tensor:
    extents = pooled_extents(x.shape, weight.shape[2:], stride, padding, dilation, False)
    return _empty(x, (x.shape[0], weight.shape[0], *extents), channels_last)


@operator(f"(Tensor grad, Tensor weight, SymInt[4] input_size, {_CONVOLUTION}")
def cudnn_convolution_backward_input(grad: Tensor, weight: Tensor, input_size: Sequence[int], *settings: Any) -> Tensor:
    """Gradient of the convolution for its input of ``input_size``; ``algorithm`` is one of `INPUT_ALGORITHMS`."""
    plain, channels_last = _aten_settings("cudnn_convolution_backward_input", INPUT_ALGORITHMS, *settings)
    x = grad.new_empty((1,)).expand(tuple(input_size))  # read for its shape alone
    return _laid_out(aten.convolution_backward(grad, x, weight, None, *plain, [True, False, False])[0], channels_last)


@fake(cudnn_convolution_backward_input)
def _(grad: Tensor, input_size: Sequence[int], channels_last: bool) -> Tensor:
    return _empty(grad, input_size, channels_last)


@operator(f"(Tensor grad, Tensor x, SymInt[4] weight_size, {_CONVOLUTION}")
def cudnn_convolution_backward_weight(grad: Tensor, x: Tensor, weight_size: Sequence[int], *settings: Any) -> Tensor:
    """Gradient of the convolution for its weight of ``weight_size``; ``algorithm`` is one of `WEIGHT_ALGORITHMS`."""
    plain, channels_last = _aten_settings("cudnn_convolution_backward_weight", WEIGHT_ALGORITHMS, *settings)
    weight = grad.new_empty((1,)).expand(tuple(weight_size))  # read for its shape alone
    return _laid_out(aten.convolution_backward(grad, x, weight, None, *plain, [False, True, False])[1], channels_last)


@fake(cudnn_convolution_backward_weight)
def _(grad: Tensor, weight_size: Sequence[int], channels_last: bool) -> Tensor:
    return _empty(grad, weight_size, channels_last)
