"""Constants: tensors that a forward reads although they are not parameters, buffers or arguments of the model.

Some live in the user's objects; the tracer takes these for parameters and buffers of the model (`HeldTensors`). Others
are made in the forward from numbers (``torch.tensor([0.485, 0.456])``): they stay in the graph as attributes.
`Constants` keeps both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..ir.display import short_repr

#: Containers nested deeper than this are not searched for constants.
_DEPTH = 4
#: A container, a key or position in it, and what was there.
Place = tuple[Any, Any, Any]
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})


def constant_name(number: int) -> str:
    """The name of a constant in a program, which no parameter or buffer can have."""
    return f"<constant {number}>"


@dataclass(frozen=True, repr=False)
class Constants:
    """The constants that a program reads, by name.

    Attributes:
        tensors: by the name that the program has for them.
        places: (container, key, what was there) on the way from the model's attributes to tensors among them.
        described: layout, dtype, device and whether it requires a gradient, of every tensor at capture.
    """

    __repr__ = short_repr

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    places: tuple[Place, ...] = ()
    described: tuple[Any, ...] = ()

    @staticmethod
    def of(
        tensors: Mapping[str, torch.Tensor],
        model: nn.Module,
        arguments: Iterable[Any],
        aliases: Sequence[torch.Tensor] = (),
    ) -> Constants:
        """The constants of a program that was just captured from ``model``, called with ``arguments``.

        Args:
            aliases: frozen parameters as other objects hold them.
        """
        if not tensors:
            return Constants()
        places = tuple(_places(model, arguments, (*tensors.values(), *aliases)))
        return Constants(dict(tensors), places, _described(tensors.values()))

    @property
    def bytes(self) -> int:
        """Bytes of the storages of all constants."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())

    def hold(self) -> bool:
        """Whether the model's attributes still hold the tensors that the program was captured with."""
        if not self.tensors:
            return True
        try:
            return (
                all(container[key] is then for container, key, then in self.places)
                and _described(self.tensors.values()) == self.described
            )
        except (LookupError, TypeError):  # one was removed
            return False


def _described(tensors: Any) -> tuple[Any, ...]:
    return tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors)


def members_of(member: Any) -> Any:
    """The members of an object: itself if it is a dict, list or tuple, else its attributes; None for opaque objects."""
    if isinstance(member, dict | list | tuple):
        return member
    if isinstance(member, torch.Tensor | type | ModuleType | FunctionType | MethodType):
        return None
    attributes = getattr(member, "__dict__", None)
    return attributes if isinstance(attributes, dict) else None


def _places(model: nn.Module, arguments: Iterable[Any], tensors: Iterable[torch.Tensor]) -> list[Place]:
    """Where attributes of the model's modules, and of other objects that it is given, hold one of ``tensors``."""
    wanted = WeakTensorKeyDictionary(dict.fromkeys(tensors, True))
    places: list[Place] = []
    known: dict[int, bool] = {}  # whether a container, which is alive until the search ends, holds any

    def search(container: Any, depth: int = _DEPTH, without: frozenset[str] = frozenset()) -> bool:
        """Whether a container holds any, itself or in what it holds; the places are listed."""
        if id(container) in known or not depth:
            return known.get(id(container), False)
        known[id(container)] = False
        members = container.items() if isinstance(container, dict) else enumerate(container)
        for key, member in list(members):
            if key in without:
                continue
            if isinstance(member, torch.Tensor):
                holds = member in wanted
            else:
                holds = bool(inner := members_of(member)) and search(inner, depth - 1)
            if holds:
                places.append((container, key, member))
                known[id(container)] = True
        return known[id(container)]

    for module in model.modules():
        search(module.__dict__, without=_REGISTERED)
        for name, parameter in module._parameters.items():  # the scales of a quantised one
            if parameter is not None and search(vars(parameter)):
                places.append((module._parameters, name, parameter))
    for argument in arguments:
        if (inner := members_of(argument)) is not None:
            search(inner)
    return places
