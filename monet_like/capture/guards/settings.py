"""PyTorch's settings by which it chooses operators: a program has the operators of those that it was captured under."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.backends import opt_einsum
from torch.nn.modules import module as modules
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from .objects import is_library
from .traversal import form_of_plain

_HOOKS_ON_ALL: tuple[dict[int, Any], ...] = (
    modules._global_forward_pre_hooks,
    modules._global_forward_hooks,
    modules._global_backward_pre_hooks,
    modules._global_backward_hooks,
)


def hooks_on_all_modules() -> tuple[Any, ...]:
    """Hooks of users that PyTorch calls for every module (``register_module_forward_hook``)."""
    return tuple(_users_hooks()) if any(_HOOKS_ON_ALL) else ()


def _users_hooks() -> Iterator[Any]:
    for hook in [hook for hooks in _HOOKS_ON_ALL for hook in hooks.values()]:
        own = hook
        while isinstance(own, functools.partial):
            own = own.func
        if not is_library(getattr(own, "__module__", None)):
            yield hook


def _function_modes() -> tuple[Any, ...]:
    """What decides about PyTorch's functions: the default device, and users' modes with the plain values they hold."""
    if not torch._C._len_torch_function_stack():
        return ()
    found: list[Any] = []
    for mode in _get_current_function_mode_stack():
        if isinstance(mode, DeviceContext):
            found.append(mode.device)
        elif not is_library(type(mode).__module__):
            found.append((type(mode), [(name, form_of_plain(value)) for name, value in vars(mode).items()]))
    return tuple(found)


#: Functions that read each setting before every step, by the name used in messages. Settings that only the kernels
#: read, such as those for TF32, are not among them: they act on a schedule's operators as on PyTorch's own.
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
    "the order of sdpa_kernel(..., set_priority=True)": torch._C._get_sdp_priority_order,
    # the order of products in einsum
    "torch.backends.opt_einsum": lambda: (opt_einsum.enabled, opt_einsum.strategy),
    # interpolate on a GPU
    "torch.are_deterministic_algorithms_enabled()": torch._C._get_deterministic_algorithms,
    # tensors that the forward makes
    "torch.get_default_dtype()": torch.get_default_dtype,
    "the default device, or a TorchFunctionMode": _function_modes,
    # weights that are computed: once for each use, or once
    "torch.nn.utils.parametrize.cached()": lambda: parametrize._cache_enabled > 0,
    "hooks on all modules": hooks_on_all_modules,
}
_ASKED = tuple(SETTINGS.values())


def settings_now() -> tuple[Any, ...]:
    """The value of every setting."""
    return tuple([ask() for ask in _ASKED])
