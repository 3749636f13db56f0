"""SwiGLU, silu(gate) * up (Shazeer, "GLU Variants Improve Transformer", 2020), and both of its gradients, in one pass
each.

F is float32, float64, float16 or bfloat16; all tensors have one dtype and one shape.

| operator | reads | returns |
|---|---|---|
| swiglu | gate, up: F | like gate, contiguous |
| swiglu_backward | grad, gate, up: F | gradients of gate and of up, like gate, contiguous |
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from .registry import fake, operator


@operator("(Tensor gate, Tensor up) -> Tensor")
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; silu(gate) is rounded to the dtype of the tensors, as where PyTorch writes it to memory."""
    return silu(gate.contiguous()) * up.contiguous()


@fake(swiglu)
def _(gate: Tensor) -> Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)


@operator("(Tensor grad, Tensor gate, Tensor up) -> (Tensor, Tensor)")
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up; what PyTorch writes to memory on the way is rounded as there."""
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    return torch.ops.aten.silu_backward(grad * up, gate), grad * silu(gate)


@fake(swiglu_backward)
def _(gate: Tensor) -> tuple[Tensor, Tensor]:
    made = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    return made, torch.empty_like(made)
