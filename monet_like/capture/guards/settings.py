"""PyTorch's settings by which it chooses operators: a program has the operators of the settings that it was captured under."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Functions that read each setting before every step, by the name used in messages. Settings that only the kernels read, such
#: as those for TF32, are not among them: they act on a schedule's operators as on PyTorch's own.
SETTINGS: dict[str, Callable[[], Any]] = {
    # batch norm by cuDNN or by ATen's kernels, recurrent layers, grid_sample
    "torch.backends.cudnn.enabled": torch._C._get_cudnn_enabled,
    # recurrent layers by oneDNN
    "torch.backends.mkldnn.enabled": torch._C._get_mkldnn_enabled,
    # the operator for scaled_dot_product_attention
    "torch.backends.cuda.flash_sdp_enabled()": torch._C._get_flash_sdp_enabled,
    "torch.backends.cuda.mem_efficient_sdp_enabled()": torch._C._get_mem_efficient_sdp_enabled,
    "torch.backends.cuda.cudnn_sdp_enabled()": torch._C._get_cudnn_sdp_enabled,
    "torch.backends.cuda.math_sdp_enabled()": torch._C._get_math_sdp_enabled,
    # interpolate on a GPU
    "torch.are_deterministic_algorithms_enabled()": torch._C._get_deterministic_algorithms,
    # tensors that the forward makes
    "torch.get_default_dtype()": torch.get_default_dtype,
}
_ASKED = tuple(SETTINGS.values())


def settings_now() -> tuple[Any, ...]:
    """The value of every setting."""
    return tuple([ask() for ask in _ASKED])
