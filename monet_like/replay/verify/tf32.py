"""Finds out whether a step computes in TF32, whose inputs have 11 significant bits instead of float32's 24.

PyTorch's default is that convolutions and recurrent layers of float32 do on GPUs that can, and matrix products do not.
Two steps that are alike then differ by far more than float32's rounding, because inputs that differ in their last place
may be rounded to other neighbours.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...capture.example_inputs import Example

#: `torch.finfo.eps` of TF32, if PyTorch had it as a dtype. Its unit roundoff is half of that, 2**-11.
EPS = 2.0**-10
#: The least compute capability of GPUs with TF32: Ampere's.
CAPABILITY = (8, 0)

_BACKENDS: Any = torch.backends
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._addmm_activation", "aten._grouped_mm")
_RECURRENT = ("aten._cudnn_rnn", "aten._thnn", "aten.mkldnn_rnn_layer", "aten.lstm", "aten.gru", "aten.rnn_")


def runs_in_tf32(model: nn.Module, example: Example, device: torch.device) -> bool:
    """Whether float32 products of a step may run in TF32; depends on the settings, the GPU and the operators.

    Args:
        example: arguments of the model, which is copied and called once if the settings and the GPU leave it open.
    """
    admitted = admitted_kinds()
    if device.type != "cuda" or not admitted or torch.cuda.get_device_capability(device) < CAPABILITY:
        return False
    return bool(admitted & float32_kinds(model, example))


def admitted_kinds() -> frozenset[str]:
    """The kinds of operators (convolution, recurrent, product) that PyTorch's settings let run in TF32."""
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return frozenset()
    asked = {"convolution": _BACKENDS.cudnn.conv, "recurrent": _BACKENDS.cudnn.rnn, "product": _BACKENDS.cuda.matmul}
    return frozenset(kind for kind, settings in asked.items() if settings.fp32_precision == "tf32")


def float32_kinds(model: nn.Module, example: Example) -> frozenset[str]:
    """The kinds of operators among these that a model calls with float32 tensors."""
    seen = _Kinds()
    args, kwargs = example
    with torch.no_grad(), seen:
        copy.deepcopy(model)(*args, **kwargs)
    return frozenset(seen.kinds)


class _Kinds(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kinds = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 for leaf in tree_leaves(args)):
            if "convolution" in name or "conv_depthwise" in name:
                self.kinds.add("convolution")
            elif name.startswith(_RECURRENT):
                self.kinds.add("recurrent")
            elif name.startswith(_PRODUCTS):
                self.kinds.add("product")
        return func(*args, **(kwargs or {}))
