"""Tensors whose values are known while a model is traced, so that conditions on them can be decided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from ..annotations import changes_its_first

#: Integer and boolean constants up to this size are followed, so that conditions on them can be decided.
_CONSTANT_ELEMENTS = 2**20


class KnownValues(TorchFunctionMode):
    """Follows small integer and boolean tensors that depend on no input, and answers questions about their values.

    ``if (positions == 0).all()`` on a tensor made by ``arange`` is no data dependence: its answer is always the
    same. Only what is made from literals is followed, and from what is given; anything that another input or a
    parameter went into is not.

    Args:
        given: tensors whose values are known, too; their copies on the CPU are followed.
    """

    _FACTORIES = frozenset({torch.arange, torch.ones, torch.zeros, torch.full, torch.tensor, torch.eye})
    _QUESTIONS = frozenset({"__bool__", "item", "__int__", "tolist", "__index__"})

    def __init__(self, given: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.values: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        given = [tensor for tensor in given if tensor.layout is torch.strided and not tensor.is_nested]
        uses = Counter(tensor.untyped_storage()._cdata for tensor in given)
        for tensor in given:
            if _is_small(tensor) and uses[tensor.untyped_storage()._cdata] == 1:  # or a change of one is of several
                self.values[tensor] = tensor.detach().to("cpu", copy=True)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = bool(tensors or func in self._FACTORIES) and all(t in self.values for t in tensors)
        if known and getattr(func, "__name__", "") in self._QUESTIONS:
            with _disable_current_modes():
                return func(*self._real(args), **kwargs)
        result = func(*args, **kwargs)
        changes = changes_its_first(func, kwargs)
        changed = [kwargs["out"]] if "out" in kwargs else args[:1] if changes else ()
        if known and "out" not in kwargs:
            self._follow(func, args, kwargs, result, changes=bool(changed))
        else:
            for leaf in pytree.tree_leaves(changed):
                self._forget(leaf)
        return result

    def _forget(self, changed: Any) -> None:
        """Forget a tensor that was changed, and all that share its memory."""
        if isinstance(changed, torch.Tensor) and (real := self.values.get(changed)) is not None:
            storage = real.untyped_storage()._cdata
            for tensor in [t for t, other in self.values.items() if other.untyped_storage()._cdata == storage]:
                self.values.pop(tensor)

    def _real(self, tree: Any) -> Any:
        return pytree.tree_map(lambda leaf: self.values[leaf] if isinstance(leaf, torch.Tensor) else leaf, tree)

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any, *, changes: bool) -> None:
        """Compute the real result, outside the trace, of a call on tensors whose values are known."""
        small = isinstance(result, torch.Tensor) and _is_small(result)
        if not small and not changes:
            return
        with _disable_current_modes():
            try:
                real = func(
                    *self._real(args), **{**self._real(kwargs), **({"device": "cpu"} if "device" in kwargs else {})}
                )
            except RuntimeError:  # then it is simply not known
                if changes:
                    self._forget(args[0])
                return
        if small:
            self.values[result] = real


def _is_small(tensor: torch.Tensor) -> bool:
    return not tensor.dtype.is_floating_point and tensor.numel() <= _CONSTANT_ELEMENTS
