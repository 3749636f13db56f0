"""Refuses operators without an autograd kernel where a gradient should flow through them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode

from ...errors import CaptureError

_KEYS = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
#: PyTorch's own and ours, which have one where they need it.
_KNOWN = frozenset({"aten", "prim", "prims", "monet_like"})


class AutogradKernels(TorchFunctionMode):
    """For such an operator PyTorch warns, and the gradient is that of the operators that its kernel happens to call.

    A trace has the operator, not what it calls.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket) and torch.is_grad_enabled():
            given, made = (
                [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
                for tree in ((args, kwargs), result)
            )
            wanted = any(tensor.requires_grad for tensor in given) and any(map(torch.is_floating_point, made))
            if wanted and not _has_kernel(func):
                raise CaptureError(
                    f"the operator {func} has no autograd kernel, and a gradient should flow through it; register one "
                    "(torch.library.register_autograd), or call it under torch.no_grad"
                )
        return result


@cache
def _has_kernel(func: Any) -> bool:
    packet = isinstance(func, torch._ops.OpOverloadPacket)
    ops = [getattr(func, name) for name in func.overloads()] if packet else [func]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(op.namespace in _KNOWN or any(has(op.name(), key) for key in _KEYS) for op in ops)
