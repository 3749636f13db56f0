"""Traces a model as on a GPU that this machine does not have: makes the choices that PyTorch would make there.

Such a trace runs on fake tensors of the CPU, since autograd's engine asks every other device for its streams. What
PyTorch chooses by device while it traces is chosen here as on a GPU:

* what autocast casts, by the lists for ``AutocastCUDA`` in ``ATen/autocast_mode.h`` of PyTorch;
* how the results of convolutions lie, by the kernels that PyTorch takes on CUDA (``Convolution.cpp``, ``ConvUtils.h``);
* what batch norm copies first, where cuDNN computes it, and what group norm copies;
* the operator for attention (`absent_gpu_attention`), and the one for RMS norm.

Models whose program depends on answers of the GPU itself are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import _meta_registrations
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from ...errors import CaptureError
from ...runtime.batch_norm import as_cudnn_takes, by_cudnn
from ..replaced import replaced
from .attention import Absent, attention
from .autocast import cuda_autocast, cuda_regions


@contextlib.contextmanager
def as_on(target: Absent | None) -> Iterator[None]:
    """Have PyTorch's choices while tracing be those for ``target``; None: for the device of the tensors."""
    if target is None or target.device.type != "cuda":
        yield
        return
    with contextlib.ExitStack() as stack:
        for context in (
            attention(target),
            cuda_autocast(),
            cuda_regions(),
            convolutions(target.device),
            _batch_norms(target.device),
            _group_norms(),
            # PyTorch's meta functions tell for example the layout of a pixel shuffle by this.
            replaced(_meta_registrations, device_hint=lambda tensor: "cuda"),
            _fused_rms_norm(),
            _Refusals(),
        ):
            stack.enter_context(context)
        yield


# Convolutions -------------------------------------------------------------------------------------------------------


def convolutions(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Give the results of fake convolutions the memory layout that a GPU's kernels give them, if ``device`` is a GPU.

    Without a GPU PyTorch takes cuDNN to be unable to compute in bfloat16. Every GPU since the A100 can, by the kernels
    that it has for float16.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    own = torch._C._select_conv_backend

    def select(*args: Any, **kwargs: Any) -> Any:
        # PyTorch 2.14 passes the input and the weight by place, 2.11 by name.
        x, weight = (*args, *(kwargs[name] for name in ("input", "weight") if name in kwargs))[:2]
        if not torch._C._has_cudnn and not (_in_rows(x) and _in_rows(weight)):
            raise CaptureError(
                "how a GPU lays out the results of convolutions in channels-last is known only to a PyTorch that is "
                "built for CUDA; install that one, which needs no GPU, or capture this model on the GPU"
            )
        mode = x.fake_mode if isinstance(x, FakeTensor) else FakeTensorMode()
        with mode:
            there = [_twin(t, device) if isinstance(t, torch.Tensor) else t for t in args]
            named = {n: _twin(t, device) if isinstance(t, torch.Tensor) else t for n, t in kwargs.items()}
        return own(*there, **named)

    return replaced(torch._C, _select_conv_backend=select)


def _twin(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    dtype = tensor.dtype
    if dtype == torch.bfloat16 and not torch.cuda.is_available():
        dtype = torch.float16
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)


def _in_rows(tensor: torch.Tensor) -> bool:
    return bool(torch._prims_common.suggest_memory_format(tensor) == torch.contiguous_format)


# Batch norm ---------------------------------------------------------------------------------------------------------


def _batch_norms(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Copy the input of a batch norm by cuDNN to rows or channels-last if it lies otherwise; the gradient reads it."""
    own = torch.batch_norm

    def batch_norm(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor | None,
        var: torch.Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> torch.Tensor:
        if by_cudnn(device, x, weight, bias, mean, var, training, eps):
            x = as_cudnn_takes(x)
        return own(x, weight, bias, mean, var, training, momentum, eps, cudnn_enabled)

    return replaced(torch, batch_norm=batch_norm)


# Group norm ---------------------------------------------------------------------------------------------------------


def _group_norms() -> contextlib.AbstractContextManager[None]:
    """Copy the input of a group norm to row-major layout if it has another; a CPU computes it channels-last, too."""
    own = torch.group_norm

    def group_norm(x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        return own(x.contiguous(), *others, **named)

    return replaced(torch, group_norm=group_norm)


# RMS norm -----------------------------------------------------------------------------------------------------------


class _FusedRmsNorm(torch.autograd.Function):
    """``aten._fused_rms_norm`` and its gradient as two operators, as ``derivatives.yaml`` of PyTorch has them."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shape: list[int], weight: torch.Tensor | None, eps: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            result, rstd = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.shape = shape
        ctx.mark_non_differentiable(rstd)
        return result, rstd

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
        x, rstd, weight = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        gradients = torch.ops.aten._fused_rms_norm_backward(grad, x, ctx.shape, rstd, weight, wanted)
        of_x, of_weight = (gradient if needed else None for gradient, needed in zip(gradients, wanted, strict=True))
        return of_x, None, of_weight, None


@contextlib.contextmanager
def _fused_rms_norm() -> Iterator[None]:
    """Trace RMS norm as the single operator that a GPU has for it; on a CPU PyTorch writes it out in several."""
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", "CPU"):
        yield
        return

    def never_run(*_: Any) -> Any:
        raise AssertionError("tensors of a trace are fake")

    op = torch.ops.aten._fused_rms_norm.default
    library = torch.library.Library("aten", "IMPL")
    library.impl(op, never_run, "CPU")
    library.impl(op, _FusedRmsNorm.apply, "AutogradCPU")
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        library._destroy()
        op._dispatch_cache.clear()


# What is refused ----------------------------------------------------------------------------------------------------


class _Refusals(TorchFunctionMode):
    """Refuses functions that a GPU computes by cuDNN or by fused kernels, which a trace on the CPU does not show."""

    _RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell"})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in self._RECURRENT:
            raise CaptureError(
                f"a GPU computes {name} by cuDNN or by fused kernels, which are known only there; capture this model "
                "on the GPU"
            )
        if name == "ctc_loss":
            raise CaptureError(
                "on a GPU PyTorch asks cuDNN whether it computes a CTC loss, which no trace can; compute the loss "
                "outside the model"
            )
        if name == "grid_sample" and _by_cudnn(*args, **(kwargs or {})):
            raise CaptureError(
                "a GPU samples this grid by cuDNN, in an operator that no trace knows; call grid_sample with "
                "align_corners=False, or inside `with torch.backends.cudnn.flags(enabled=False):`"
            )
        return func(*args, **(kwargs or {}))


def _by_cudnn(
    x: torch.Tensor,
    grid: torch.Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> bool:
    """Whether cuDNN samples a grid (``cond_cudnn_grid_sampler`` in PyTorch), arguments as of ``grid_sample``."""
    fits = x.dim() == 4 and x.shape[1] <= 1024 and (mode, padding_mode) == ("bilinear", "zeros")
    single = all(t.dtype == torch.float32 for t in (x, grid)) or torch.is_autocast_enabled("cpu")
    return bool(fits and single and align_corners and torch.backends.cudnn.enabled)
