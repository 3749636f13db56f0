"""Batch norm by cuDNN or by ATen: which of the two PyTorch chooses, and the operators with their arguments.

``torch.batch_norm`` asks the device. A GPU computes most by cuDNN, which also writes a reserve that the gradient reads;
bfloat16, parameters in float16 and tensors [N, C] it computes by ATen's own kernels, as a CPU does. A trace has ATen's
own operators always.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from ..ir.program import Call

NATIVE = "aten.native_batch_norm.default"
NATIVE_BACKWARD = "aten.native_batch_norm_backward.default"
#: Its results are those of `NATIVE` and the reserve. It takes the same arguments.
CUDNN = "aten.cudnn_batch_norm.default"
CUDNN_BACKWARD = "aten.cudnn_batch_norm_backward.default"

#: The most samples that PyTorch gives to cuDNN in training and without, and the first number of elements too many.
_SAMPLES, _SAMPLES_OF_INFERENCE, _ELEMENTS = 880_801, 65_535, 2**31 - 1


# The choice ---------------------------------------------------------------------------------------------------------


def by_cudnn(
    device: torch.device,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    eps: float,
) -> bool:
    """Whether PyTorch computes this batch norm by cuDNN on ``device``; neither it nor the tensors need be there."""
    if device.type != "cuda" or torch.version.hip or weight is None or bias is None or (mean is None) != (var is None):
        return False
    if mean is None and not training:
        return False
    if not torch._C._has_cudnn:
        return _rule(x, weight, training)
    with _disable_current_modes(), FakeTensorMode():
        # The choice looks at dtypes and extents, and for statistics at whether they are there.
        like = torch.empty(weight.shape, dtype=weight.dtype, device=device)
        there = torch.empty(x.shape, dtype=x.dtype, device=device)
        chosen = torch._C._select_batch_norm_backend(there, like, like, like, like, training, eps)
    return str(chosen.name) == "Cudnn"


def _rule(x: Tensor, weight: Tensor, training: bool) -> bool:
    """``_select_batch_norm_backend`` (``Normalization.cpp`` in PyTorch), which a PyTorch without CUDA does not ask."""
    narrow = torch.bfloat16 in (x.dtype, weight.dtype) or (x.dtype == torch.float16 and weight.dtype != torch.float32)
    samples = _SAMPLES if training else _SAMPLES_OF_INFERENCE
    fits = x.dim() >= 3 and x.shape[0] <= samples and x.numel() < _ELEMENTS
    return fits and not narrow and torch.backends.cudnn.enabled


def reserve_bytes(x: Tensor) -> int:
    """Bytes of what cuDNN keeps of a training step's batch norm of ``x`` for its gradient; 0 without a GPU to ask."""
    if not torch.cuda.is_available():
        return 0
    return int(torch._C._get_cudnn_batch_norm_reserve_space_size(x, True))  # type: ignore[attr-defined]


def as_cudnn_takes(x: Tensor) -> Tensor:
    """``x`` in row-major or channels-last layout: itself, or a copy."""
    return x if x.is_contiguous() else x.contiguous(memory_format=suggest_memory_format(x))


# The operators ------------------------------------------------------------------------------------------------------


def cudnn_batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor | None, var: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    """`CUDNN` of tensors in any layout, as ``torch.batch_norm`` calls it."""
    if mean is not None and var is not None:
        mean, var = mean.contiguous(), var.contiguous()
    return torch.cudnn_batch_norm(as_cudnn_takes(x), weight.contiguous(), bias.contiguous(), mean, var, *options)


def cudnn_batch_norm_backward(x: Tensor, grad: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`CUDNN_BACKWARD` of tensors in any layout, as autograd calls it."""
    x = as_cudnn_takes(x)
    if grad.stride() != x.stride():
        grad = grad.contiguous(memory_format=suggest_memory_format(x))
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.cudnn_batch_norm_backward.default._op(x, grad, *others)
    return found


# Their calls --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backward:
    """The arguments of batch norm's gradient in training, whichever operator computes it.

    Attributes:
        grad, x, weight, mean, invstd, eps: tensors are `Ref`, the statistics those of the batch.
        mask: which gradients are wanted: of input, weight and bias.
        cudnn: whether it is `CUDNN_BACKWARD`.
    """

    grad: Any
    x: Any
    weight: Any
    mean: Any
    invstd: Any
    eps: float
    mask: tuple[bool, ...]
    cudnn: bool

    @property
    def native(self) -> tuple[Any, ...]:
        """The arguments of `NATIVE_BACKWARD`: without running statistics, which it does not read in training."""
        return (self.grad, self.x, self.weight, None, None, self.mean, self.invstd, True, self.eps, self.mask)

    def cudnn_with(self, reserve: Any) -> tuple[Any, ...]:
        """The arguments of `CUDNN_BACKWARD`, with the reserve that the forward wrote."""
        return (self.x, self.grad, self.weight, None, None, self.mean, self.invstd, self.eps, reserve)


def backward_of(call: Call) -> Backward | None:
    """The arguments of ``call`` if it computes batch norm's gradient in training; else None."""
    if call.op == CUDNN_BACKWARD:
        x, grad, weight, _, _, mean, invstd, eps, _ = call.args
        return Backward(grad, x, weight, mean, invstd, eps, tuple(out is not None for out in call.outs), True)
    if call.op == NATIVE_BACKWARD and call.args[7]:
        grad, x, weight, _, _, mean, invstd, _, eps, mask = call.args
        return Backward(grad, x, weight, mean, invstd, eps, mask, False)
    return None
