"""Autocast while a model is traced: active in the forward alone, and casting each parameter once, as in a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..replaced import replaced

#: The function by which autocast casts, and where it is implemented.
_TO, _COMPOSITE = torch.ops.aten.to.dtype, torch._C.DispatchKey.CompositeImplicitAutograd


class TracedAutocast:
    """The caller's autocast while a model is traced: active in the forward, as it is in a call, and not in the
    backward.

    Plain PyTorch runs the backward without autocast, where the loss calls it; a custom function that wants autocast
    there restores it itself (``custom_bwd``). The tracer would run both under the same. It also switches off autocast's
    cache, with which a parameter is cast once however often it is used, so that its gradients are added up in 16 bits.
    """

    def __init__(self) -> None:
        self.active = _active_autocasts()
        self.caches = torch.is_autocast_cache_enabled()

    @contextlib.contextmanager
    def outside_forward(self) -> Iterator[None]:
        """Switch autocast off, on all devices."""
        with contextlib.ExitStack() as stack:
            for device, dtype in self.active:
                stack.enter_context(torch.autocast(device, dtype, enabled=False))
            yield

    @contextlib.contextmanager
    def in_forward(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """Switch the caller's autocast on, with an empty cache.

        Args:
            leaves: the tensors of the trace that are leaves of autograd's graph in a call: their casts are cached.
        """
        with contextlib.ExitStack() as stack:
            if not self.active:
                # Regions inside the forward are outermost ones then, and empty the cache where they end.
                depth = _autocast_depth()
                stack.callback(_nest_autocast, depth)
                _nest_autocast(-depth)
            stack.enter_context(_CachedCasts(leaves).active())
            stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(self.caches)
            for device, dtype in self.active:
                stack.enter_context(torch.autocast(device, dtype))
            yield


class _CachedCasts(TorchFunctionMode):
    """A cache of casts for tensors of a trace, which works as autocast's own (``cached_cast`` in autocast_mode.cpp).

    They are no leaves of autograd's graph, so that PyTorch would cast them anew for every use.
    """

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.casts: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.leaves = WeakTensorKeyDictionary(
            {t: None for t in leaves if t.dtype == torch.float32 and t.requires_grad}  # which autocast casts
        )
        self.autocast_dtypes: dict[str, torch.dtype] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Deeper, where autocast calls operators itself, it is off.
        self.autocast_dtypes = dict(_active_autocasts()) if torch.is_autocast_cache_enabled() else {}
        return func(*args, **(kwargs or {}))

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        """The kernel of ``aten.to.dtype`` while this is active."""
        cached = torch.is_grad_enabled() and tensor in self.leaves and self._is_autocasts_own(tensor.device.type, dtype)
        if cached and tensor in self.casts:
            return self.casts[tensor]
        result = _TO._op_dk(_COMPOSITE, tensor, dtype, *args, **kwargs)
        if cached:
            self.casts[tensor] = result
        return result

    def _is_autocasts_own(self, device: str, dtype: torch.dtype) -> bool:
        key = getattr(torch._C.DispatchKey, f"Autocast{device.upper()}", None)
        switched_off = key is not None and torch._C._dispatch_tls_is_dispatch_key_excluded(key)
        return switched_off and self.autocast_dtypes.get(device) == dtype

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Cache casts until an outermost region of autocast ends."""
        clear, own = torch.clear_autocast_cache, _TO.py_kernels.get(_COMPOSITE)

        def clear_both() -> None:
            clear()
            self.casts.clear()

        _TO.py_kernels[_COMPOSITE] = self.cast
        _TO._dispatch_cache.clear()
        try:
            with replaced(torch, clear_autocast_cache=clear_both), self:
                yield
        finally:
            del _TO.py_kernels[_COMPOSITE]
            if own is not None:
                _TO.py_kernels[_COMPOSITE] = own
            _TO._dispatch_cache.clear()


def _active_autocasts() -> list[tuple[str, torch.dtype]]:
    """The devices for which autocast is active, and to what."""
    devices = [device for device in torch._C._autocast_supported_devices() if torch.is_autocast_enabled(device)]
    return [(device, torch.get_autocast_dtype(device)) for device in devices]


def _autocast_depth() -> int:
    """How many regions of autocast, active or not, this is inside of."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _nest_autocast(levels: int) -> None:
    """Enter as many regions of autocast as ``levels`` says; leave them if it is negative."""
    for _ in range(abs(levels)):
        (torch.autocast_increment_nesting if levels > 0 else torch.autocast_decrement_nesting)()
