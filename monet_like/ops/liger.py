"""Liger's Triton kernels for RMS norm and SwiGLU, where ``liger-kernel`` is installed (Hsu et al., Liger Kernel, 2024).

F is float32, float16 or bfloat16; "any F" may have another dtype than x. Rows are the last dimension, of at most
`LONGEST_ROW` elements; the kernels compute in float32.

| operator | reads | returns |
|---|---|---|
| liger_rms_norm | x: F[..., D]; weight: any F[D] or None | y: like x, contiguous; rstd: float32[..., 1] |
| liger_rms_norm_backward | grad, residual (or None): like x; x, weight, rstd as above | like x; like weight |
| liger_rms_norm_backward_ | the same; grad is contiguous and overwritten | grad; like weight |
| liger_swiglu | gate, up: F, one shape | like gate, contiguous |
| liger_swiglu_backward | grad, gate, up: F, one shape | gradients of gate and of up, like gate, contiguous |
| liger_swiglu_backward_ | the same; gate and up are contiguous and overwritten | gate, up |

The functions below in plain PyTorch are what the kernels compute, and their twins where Liger is missing. A fake has no
memory beside its results; what the kernels need more (`extra_traffic_bytes`, `PARTIAL_SUMS`) is Liger's 0.8.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..errors import MonetError
from .registry import NAMESPACE, fake, kernel_of, operator
from .rms_norm import rms_norm

#: Name of the package in a schedule file's versions: the file's program has ways that run its kernels.
PACKAGE = "liger_kernel"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: The widest row that Liger launches a kernel for, after rounding up to a power of two.
LONGEST_ROW = 65536
_VARIABLE = "MONET_LIKE_LIGER"
_OFF, _ON = ("0", "off", "false", "no"), ("1", "on", "true", "yes")


@functools.cache
def version() -> str:
    """The version of Liger that is installed; "" if there is none that fits, or no Triton."""
    from importlib import metadata

    if find_spec(PACKAGE) is None or find_spec("triton") is None:
        return ""
    try:
        found = metadata.version("liger-kernel")
    except metadata.PackageNotFoundError:
        return ""
    return found if found.split(".")[:2] == ["0", "8"] else ""


def runs_on(device: str) -> bool:
    """Whether Liger's kernels run on this kind of device: where it is installed, on CUDA.

    ``MONET_LIKE_LIGER=0`` leaves them out. ``MONET_LIKE_LIGER=1`` with ``TRITON_INTERPRET=1`` runs them on a CPU, too,
    by Triton's interpreter, which is for tests. Nothing is imported here.
    """
    asked = os.environ.get(_VARIABLE, "").lower()
    if asked in _OFF or not version():
        return False
    interpreted = asked in _ON and os.environ.get("TRITON_INTERPRET", "").lower() in _ON
    return device == "cuda" or (device == "cpu" and interpreted)


def is_ours(op: str) -> bool:
    """Whether an operator, by its qualified name, is one of this module."""
    return op.startswith(f"{NAMESPACE}.liger_")


# ---- what the kernels compute, in plain PyTorch ----


@operator("(Tensor x, Tensor? weight, float eps, bool rounded) -> (Tensor, Tensor)", compiled=False)
def liger_rms_norm(x: Tensor, weight: Tensor | None, eps: float, rounded: bool) -> tuple[Tensor, Tensor]:
    """RMS norm over the last dimension, and its statistic rstd = 1 / sqrt(mean of squares + eps).

    Args:
        rounded: round the normalised rows to the dtype of ``x`` before they are multiplied by the weight: Liger's
            casting mode ``llama``; without it ``gemma``.
    """
    return rms_norm(x, weight, 1, eps, rounded, x.dtype)


@fake(liger_rms_norm)
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = (*x.shape[:-1], 1)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(rows, device=x.device, dtype=torch.float32)


@operator(
    "(Tensor grad, Tensor x, Tensor? weight, Tensor rstd, Tensor? residual, bool rounded) -> (Tensor, Tensor)",
    compiled=False,
)
def liger_rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, residual: Tensor | None, rounded: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients for x, to which ``residual`` is added, and for the weight, summed in float32."""
    value = x.float()
    through = grad.float() if weight is None else grad * weight.float()
    slope = (through * value).sum(-1, keepdim=True) / x.shape[-1] * rstd**3
    of_x = through * rstd - slope * value
    of_x = of_x if residual is None else of_x + residual
    if weight is None:
        return of_x.to(x.dtype).contiguous(), None
    rows = value * rstd
    product = grad * rows.to(x.dtype) if rounded else grad * rows
    of_weight = product.float().reshape(-1, x.shape[-1]).sum(0)
    return of_x.to(x.dtype).contiguous(), of_weight.to(weight.dtype)


@operator(
    "(Tensor(a!) grad, Tensor x, Tensor? weight, Tensor rstd, Tensor? residual, bool rounded) -> (Tensor(a!), Tensor)",
    compiled=False,
)
def liger_rms_norm_backward_(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, residual: Tensor | None, rounded: bool
) -> tuple[Tensor, Tensor | None]:
    """`liger_rms_norm_backward` that overwrites ``grad`` with the gradient for x."""
    of_x, of_weight = liger_rms_norm_backward(grad, x, weight, rstd, residual, rounded)
    return grad.copy_(of_x), of_weight


def _like_weight(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)


@fake(liger_rms_norm_backward)
def _(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), _like_weight(weight)


@fake(liger_rms_norm_backward_)
def _(grad: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return grad, _like_weight(weight)


@operator("(Tensor gate, Tensor up) -> Tensor", compiled=False)
def liger_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; silu(gate) is rounded to the dtype of the tensors."""
    wide = gate.float()
    return ((wide * wide.sigmoid()).to(up.dtype) * up).contiguous()


@fake(liger_swiglu)
def _(gate: Tensor) -> Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@operator("(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)", compiled=False)
def liger_swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, in float32 until they are written."""
    wide = gate.float()
    share = wide.sigmoid()
    silu = wide * share
    of_gate = grad * (silu * (1 - share) + share) * up
    return of_gate.to(gate.dtype).contiguous(), (grad * silu).to(up.dtype).contiguous()


@operator("(Tensor grad, Tensor(a!) gate, Tensor(b!) up) -> (Tensor(a!), Tensor(b!))", compiled=False)
def liger_swiglu_backward_(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """`liger_swiglu_backward` that overwrites ``gate`` and ``up`` with their gradients."""
    of_gate, of_up = liger_swiglu_backward(grad, gate, up)
    return gate.copy_(of_gate), up.copy_(of_up)


@fake(liger_swiglu_backward)
def _(gate: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    return made, torch.empty_like(made)


@fake(liger_swiglu_backward_)
def _(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate, up


# ---- Liger's kernels ----


@functools.cache
def _liger() -> Any:
    """Liger's functions. They are imported at the first call: the package imports much else, which takes seconds.

    Raises:
        MonetError: Liger is installed and cannot be imported.
    """
    from types import SimpleNamespace

    try:
        from liger_kernel.ops import fused_add_rms_norm, rms_norm, swiglu
        from liger_kernel.ops.utils import calculate_settings
    except Exception as error:  # whatever its own imports raise
        raise MonetError(
            f"liger-kernel {version()} is installed, but importing it fails ({type(error).__name__}: {error}); the "
            f"schedule takes its kernels: repair it (pip install 'monet_like[liger]'), or set {_VARIABLE}=0, with "
            "which the plain-torch twins run and plans do without it"
        ) from error
    return SimpleNamespace(norm=rms_norm, added=fused_add_rms_norm, swiglu=swiglu, settings=calculate_settings)


@contextlib.contextmanager
def _on(tensor: Tensor) -> Iterator[Any]:
    """Liger's functions, with the tensor's device as the present one: not all of its launches see to that.

    Raises:
        RuntimeError: Triton cannot compile or launch a kernel here.
    """
    with torch.cuda.device_of(tensor):
        try:
            yield _liger()
        except Exception as error:
            if not type(error).__module__.startswith("triton."):
                raise
            raise RuntimeError(f"Triton cannot run Liger's kernel here ({type(error).__name__}: {error})") from error


def _checked(name: str, alike: tuple[Tensor, ...], dense: tuple[Tensor, ...] = ()) -> None:
    """Refuse tensors that the kernels would read as something else: they look at addresses and at one stride alone.

    Raises:
        TypeError, ValueError: not one dtype and shape, or not contiguous though overwritten.
    """
    first = alike[0]
    if first.dtype not in FLOATS or any(each.dtype != first.dtype for each in alike):
        given = ", ".join(str(each.dtype).removeprefix("torch.") for each in alike)
        raise TypeError(f"{name}: needs tensors of one dtype, float32, float16 or bfloat16, got {given}")
    if any(each.shape != first.shape for each in alike) or not 0 < first.shape[-1] <= LONGEST_ROW:
        given = ", ".join(str(list(each.shape)) for each in alike)
        raise ValueError(f"{name}: needs tensors of one shape with rows of 1 to {LONGEST_ROW} elements, got {given}")
    if not all(each.is_contiguous() for each in dense):
        raise ValueError(f"{name}: what is overwritten must be contiguous, got strides {[t.stride() for t in dense]}")


def _mode(rounded: bool) -> str:
    return "llama" if rounded else "gemma"


@kernel_of(liger_rms_norm, runs_on)
def _(x: Tensor, weight: Tensor | None, eps: float, rounded: bool) -> tuple[Tensor, Tensor]:
    _checked("liger_rms_norm", (x,))
    if not x.numel():
        return liger_rms_norm(x, weight, eps, rounded)
    with _on(x) as liger:
        y, _, rstd, *_ = liger.norm.rms_norm_forward(x.contiguous(), weight, eps, 0.0, _mode(rounded), None)
    return y, rstd.view(*x.shape[:-1], 1)


@kernel_of(liger_rms_norm_backward, runs_on)
def _(*operands: Any) -> tuple[Tensor, Tensor | None]:
    return _of_norm("liger_rms_norm_backward", *operands, in_place=False)


@kernel_of(liger_rms_norm_backward_, runs_on)
def _(grad: Tensor, *operands: Any) -> tuple[Tensor, Tensor | None]:
    _checked("liger_rms_norm_backward_", (grad,), (grad,))
    _, of_weight = _of_norm("liger_rms_norm_backward_", grad, *operands, in_place=True)
    return grad, of_weight


def _of_norm(
    name: str,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    residual: Tensor | None,
    rounded: bool,
    *,
    in_place: bool,
) -> tuple[Tensor, Tensor | None]:
    alike = (grad, x) if residual is None else (grad, x, residual)
    _checked(name, alike)
    if residual is not None and weight is None:
        raise ValueError(f"{name}: Liger adds a residual's gradient only where there is a weight")
    if not x.numel():
        twin = liger_rms_norm_backward_ if in_place else liger_rms_norm_backward
        return twin(grad, x, weight, rstd, residual, rounded)
    with _on(x) as liger:
        block, warps = liger.settings(x.shape[-1])
        rows = x.contiguous().view(-1, x.shape[-1])
        casting = liger.norm._str_to_casting_mode[_mode(rounded)]
        given = (rows, weight, rstd.view(-1), 0.0, casting, block, warps)
        if residual is None:
            of_x, of_weight = liger.norm.rms_norm_backward(grad.contiguous(), *given, in_place, None)
        else:
            of_x, _, of_weight = liger.added.fused_add_rms_norm_backward(
                grad.contiguous(), residual.contiguous(), *given, _STAGES, in_place
            )
    return of_x, of_weight


#: Stages of the pipeline that Liger's forward of the norm with a residual hands to its backward.
_STAGES = 2


@kernel_of(liger_swiglu, runs_on)
def _(gate: Tensor, up: Tensor) -> Tensor:
    _checked("liger_swiglu", (gate, up))
    if not gate.numel():
        return liger_swiglu(gate, up)
    with _on(gate) as liger:
        made: Tensor = liger.swiglu.swiglu_forward(gate.contiguous(), up.contiguous())[2]
    return made


@kernel_of(liger_swiglu_backward, runs_on)
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    _checked("liger_swiglu_backward", (gate, up, grad))
    return _of_swiglu(grad, *(each.clone(memory_format=torch.contiguous_format) for each in (gate, up)))


@kernel_of(liger_swiglu_backward_, runs_on)
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    _checked("liger_swiglu_backward_", (gate, up, grad), (gate, up))
    return _of_swiglu(grad, gate, up)


def _of_swiglu(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Overwrite gate and up with their gradients, as Liger's kernel always does."""
    if gate.numel():
        with _on(gate) as liger:
            rows = (each.view(-1, gate.shape[-1]) for each in (gate, up))
            liger.swiglu.swiglu_backward(*rows, grad.contiguous())
    return gate, up


# ---- what they need beside operands and results ----

#: Operators that add up the weight's gradient in one row of float32 for each multiprocessor.
PARTIAL_SUMS = tuple(f"{NAMESPACE}.liger_rms_norm_backward{form}.default" for form in ("", "_"))


def extra_traffic_bytes(op: str, args: Sequence[Any], results: Sequence[Any]) -> int:
    """Bytes that an operator moves beside reading its operands and writing its results once; 0 for other operators.

    Without a residual, the gradient for x is filled with zeros before the kernel writes it, unless it overwrites
    another. The gradients of SwiGLU overwrite copies of gate and up, which are written and read first.
    """
    if op == PARTIAL_SUMS[0]:
        return int(results[0].nbytes) if args[4] is None else 0
    if op == f"{NAMESPACE}.liger_swiglu_backward.default":
        return 2 * sum(int(each.nbytes) for each in results)
    return 0
