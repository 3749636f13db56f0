"""Objects that are given to custom functions and hold tensors, such as the scales of quantised weights.

A custom function keeps them for its backward (``ctx.state = state``), where no mode replaces the user's tensors by the
tracer's. So it gets a copy of the object that holds the tracer's tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...errors import CaptureError
from ..guards.holders import Attributes

#: Objects within objects are copied to this depth.
_DEPTH = 4


class StateObjects:
    """Copies of the objects that one traced forward gives to custom functions.

    Args:
        replacement: from any tensor to the tracer's.
        watch: told of an object before something is set in it, and its path, so that it is restored when the trace
            ends; whether it can be.
    """

    def __init__(self, replacement: Callable[[torch.Tensor], torch.Tensor], watch: Callable[[Any, str], bool]) -> None:
        self._replacement, self._watch = replacement, watch
        #: By identity, an object, the attributes of its copy, and these as the copy was made with.
        self._known: dict[int, tuple[Any, Attributes, dict[str, Any]]] = {}

    def replaced(self, tree: Any) -> Any:
        """``tree`` with copies of the objects in it that hold the user's tensors."""
        return pytree.tree_map(lambda leaf: self._copied(leaf, _DEPTH), tree)

    def _copied(self, held: Any, depth: int) -> Any:
        if isinstance(held, torch.Tensor):
            return self._replacement(held)
        if isinstance(held, tuple | list | dict):
            return pytree.tree_map(lambda leaf: self._copied(leaf, depth - 1), held) if depth else held
        if not depth or isinstance(held, nn.Module | type) or not isinstance(getattr(held, "__dict__", None), dict):
            return held
        if id(held) in self._known:
            return self._known[id(held)][1].held
        attributes = {name: self._copied(member, depth - 1) for name, member in held.__dict__.items()}
        twin = held
        if any(map(_holds_others, attributes.values(), held.__dict__.values())):
            try:
                twin = object.__new__(type(held))
            except TypeError:  # it is written in C
                return held
            twin.__dict__.update(attributes)
        self._known[id(held)] = held, Attributes(twin, twin.__dict__), dict(twin.__dict__)
        return twin

    def set_since(self) -> list[str]:
        """What custom functions have set in the copies since they were made or handed over: ``State.count``."""
        copies = (each for each in self._known.values() if each[1].held is not each[0])
        return [path for held, twin, then in copies for path in twin.changed(type(held).__name__, then)]

    def hand_over(self) -> None:
        """Set in the user's objects what custom functions have set in the copies.

        Raises:
            CaptureError: an object that cannot be restored.
        """
        originals = {id(twin.held): held for held, twin, _ in self._known.values()}
        for held, twin, then in self._known.values():
            name, new = type(held).__name__, {} if twin.held is held else twin.difference(then)
            if new and not self._watch(held, name):
                raise CaptureError(
                    f"a custom function sets {name}.{next(iter(new))}, and a schedule would not; have the function "
                    "return it"
                )
            now = {each: originals.get(id(value), value) for each, value in new.items()}
            Attributes(held, held.__dict__).repeat(now)
        self._known = {key: (held, twin, twin.copy()) for key, (held, twin, _) in self._known.items()}


def _holds_others(new: Any, old: Any) -> bool:
    """Whether a copied attribute holds other objects than before; a container is always a new one."""
    if not isinstance(old, tuple | list | dict):
        return new is not old
    pairs = zip(pytree.tree_leaves(new), pytree.tree_leaves(old), strict=True)
    return any(mine is not before for mine, before in pairs)


def keep_attributes(traced: torch.Tensor, own: torch.Tensor) -> None:
    """Give the tracer's tensor the Python attributes that a library keeps on a parameter (``weight.quant_state``)."""
    if traced is own or isinstance(own, FakeTensor) or is_traceable_wrapper_subclass(own):
        return
    traced.__dict__.update(own.__dict__)
