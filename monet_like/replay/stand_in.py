"""Lets a wrapper stand in for its model where libraries look: at the class, at the signature of the forward, at
pickling.

A model of Hugging Face's libraries is told by its class: ``isinstance(model, PreTrainedModel)`` decides how it is
saved. A wrapper of such a model says that it is one. Methods such as ``save_pretrained`` are the model's own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..errors import warn_caller

REASON = "a monet_like schedule runs as it is; to have it compiled within its plan give backend='inductor'"


class SignedAsModel:
    """A forward with the model's signature, from which Hugging Face's Trainer learns the columns of a batch.

    `torch.compile` leaves it alone: it breaks the graph there, and the schedule runs.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    @torch.compiler.disable(reason=REASON)  # what it compiles of this fails for another wrapper
    def __get__(self, wrapper: StandIn | None, owner: type) -> Any:
        if wrapper is None:
            return self.function
        own = wrapper.__dict__.get("_signed_forward")
        if own is None:
            own = torch.compiler.disable(self.function, reason=REASON)
            with contextlib.suppress(ValueError):  # functions in C have none, as of a traced module
                signature = inspect.signature(wrapper._model.forward)
                bound = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
                own.__signature__ = signature.replace(parameters=[bound, *signature.parameters.values()])
            wrapper.__dict__["_signed_forward"] = own
        return MethodType(own, wrapper)


class StandIn(nn.Module):
    """A module that shows the class of ``_model``, where that is a class with ``save_pretrained``."""

    _model: nn.Module

    def _shown_class(self) -> type:
        model = self.__dict__.get("_model")
        return type(model) if hasattr(type(model), "save_pretrained") else type(self)

    def _become(self, new: type) -> None:
        """Take another class; one derived from the shown class, as ``fully_shard``'s, is derived from our own."""
        bases = tuple(type(self) if base is self._shown_class() else base for base in new.__bases__)
        if bases != new.__bases__:
            content = {key: value for key, value in vars(new).items() if key not in ("__dict__", "__weakref__")}
            new = type(new)(new.__name__, bases, content)
        _CLASS.__set__(self, new)

    __class__ = property(lambda self: self._shown_class(), _become)

    def _without_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """``kwargs`` with ``use_cache=False`` where the model takes it: a training step has no use for a cache."""
        place = self.__dict__.get("_use_cache")
        if place is None:
            place = self.__dict__["_use_cache"] = _place_of_use_cache(self._model)
        return kwargs if place < len(args) or "use_cache" in kwargs else {**kwargs, "use_cache": False}

    def _get_name(self) -> str:
        return type(self).__name__

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_signed_forward", "_use_cache")}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (type(self),), self.__getstate__()  # the default compares the class with the one shown


_CLASS: Any = object.__dict__["__class__"]


#: Methods that every module has, and of which a model may have its own: `zero_grad` of Opacus clears more than
#: gradients, an LSTM's `_apply` makes its list of weights again.
_METHODS = (
    "zero_grad", "state_dict", "load_state_dict", "parameters", "named_parameters", "buffers", "named_buffers",
    "requires_grad_", "eval", "apply", "_apply", "to", "to_empty", "cuda", "cpu", "type", "half", "float", "double",
    "bfloat16",
)  # fmt: skip


def _of_model(name: str) -> Callable[..., Any]:
    """A method that is the model's own if it has one; where that returns the model, the wrapper is returned."""
    plain = getattr(nn.Module, name)

    @functools.wraps(plain)
    def method(self: StandIn, *args: Any, **options: Any) -> Any:
        model = self.__dict__.get("_model")
        if model is None or (getattr(type(model), name) is plain and name not in vars(model)):
            return plain(self, *args, **options)
        result = getattr(model, name)(*args, **options)
        self.__dict__["training"] = model.training
        return self if result is model else result

    return method


for _name in _METHODS:
    setattr(StandIn, _name, _of_model(_name))


def _blank(kind: type[nn.Module]) -> nn.Module:
    return kind.__new__(kind)


def _place_of_use_cache(model: nn.Module) -> int:
    """The place of ``use_cache`` among the arguments of a Hugging Face model's forward; -1: it takes none."""
    if not hasattr(model, "save_pretrained"):
        return -1
    base: Any = getattr(model, "get_base_model", lambda: model)()  # of an adapter
    parameters = inspect.signature(base.forward).parameters
    if "use_cache" in parameters:
        return list(parameters).index("use_cache")
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return sys.maxsize if takes_any and caching_config(base) else -1


def caching_config(model: nn.Module) -> str:
    """The path of the config by which a Hugging Face model gives its decoder a cache; "" if it gives none.

    That of a model with a decoder among other parts, such as one of images and text, has a config of its own for it.
    """
    config = getattr(model, "config", None)
    if not hasattr(model, "save_pretrained") or config is None:
        return ""
    if getattr(config, "use_cache", False) is True:
        return "config"
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    if text is config or getattr(text, "use_cache", False) is not True:
        return ""
    name = next((name for name, part in vars(config).items() if part is text), "get_text_config(decoder=True)")
    return f"config.{name}"


def warn_of_checkpointing(model: nn.Module) -> None:
    """Warn if gradient checkpointing is on in a Hugging Face model: it changes nothing about the step."""
    if any(getattr(module, "gradient_checkpointing", None) is True for module in model.modules()):
        warn_caller(
            f"gradient checkpointing is on in {type(model).__name__} and does not count: what a training step runs "
            "again is what the schedule says; leave gradient_checkpointing=True out"
        )
