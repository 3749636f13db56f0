"""Finds the parts of a Python object that can change, each as a `Holder`.

`holders_of` looks into containers, functions, small NumPy arrays, and objects and classes that are defined outside of
libraries. Everything else, tensors and modules among it, is told apart by identity.
"""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import itertools
import operator
import pickle
import queue
import random
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from .holders import (
    Attributes,
    Cache,
    Context,
    Drawn,
    Elements,
    Entries,
    Function,
    Holder,
    Items,
    Members,
    Parts,
    Queued,
    ReadOnlyEntries,
    Slots,
    Variable,
    Variables,
)

#: Larger NumPy arrays are told apart by identity.
ARRAY_BYTES = 2**20
_LIBRARIES = frozenset((
    "torch", "torchgen", "functorch", "triton", "numpy", "sympy", "mpmath", "monet_like", "_pytest", "pluggy",
    "coverage", "pydevd", "_pydevd_bundle",
))  # fmt: skip


@functools.cache
def is_library(module: str | None) -> bool:
    """Whether a Python module is of PyTorch, NumPy, the standard library or this package, by its name.

    Code without a module, such as what ``exec`` runs, is nobody's but the user's.
    """
    if module is None:
        return False
    top = module.partition(".")[0]
    if top in _LIBRARIES or top.startswith("namedtuple_"):
        return True
    if top not in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(top), "__file__", None)  # a user's own module may have such a name, too
    return file is None or Path(file).is_relative_to(sysconfig.get_paths()["stdlib"])


def holders_of(value: Any, names: Set[str], *, hooks: bool = False) -> list[Holder]:
    """Holders of the parts of an object that can change; none for objects that are compared by identity.

    Args:
        names: that occur in the code that may read it.
        hooks: it is a dict of a module's hooks.
    """
    if isinstance(value, torch.Tensor | nn.Module | enum.Enum):
        return []
    if isinstance(value, types.FunctionType):
        own = not is_library(value.__globals__.get("__name__")) or hasattr(value, "__wrapped__")
        return [Function(value), *([Attributes(value, value.__dict__)] if value.__dict__ else [])] if own else []
    for kind, make in _KINDS:
        if isinstance(value, kind):
            return [make(value)]
    if (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.random.Generator | numpy.random.RandomState):
        return [Drawn(value, lambda: _numpy_state(value), lambda state: _set_numpy_state(value, state))]
    found: list[Holder] = list(_container(value, hooks=hooks))
    if isinstance(value, type):
        return class_holders(value, names)
    if isinstance(value, types.ModuleType):
        if not is_library(value.__name__):
            found.append(Variables(value, vars(value), value.__name__, names))
    elif not is_library(type(value).__module__) or isinstance(value, _OPEN):
        found += _instance(value, names)
    return found


#: Objects of the standard library's classes that are looked into as those of a user's.
_OPEN = (types.SimpleNamespace, collections.UserDict, collections.UserList, collections.ChainMap)


def _container(value: Any, *, hooks: bool) -> Iterator[Holder]:
    if isinstance(value, dict):
        yield Entries(value, hooks=hooks)
    elif isinstance(value, list | collections.deque):
        yield Items(value)
    elif isinstance(value, set):
        yield Members(value)
    elif isinstance(value, bytearray) or is_small_array(value):
        yield Elements(value)


def is_small_array(value: Any) -> bool:
    """Whether a value is a NumPy array of numbers that is compared by its elements."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return False
    return bool(value.nbytes <= ARRAY_BYTES and not value.dtype.hasobject)


def _instance(value: Any, names: Set[str]) -> Iterator[Holder]:
    """The attributes of an object and of its class."""
    with_dict = getattr(type(value), "__dictoffset__", 0) != 0
    if with_dict:
        only = None if not isinstance(value, _OPEN[1:]) else frozenset({"data", "maps"}) | names
        yield Attributes(value, object.__getattribute__(value, "__dict__"), only=only)
    slots = [name for base in type(value).__mro__ for name in slots_of(base)]
    if slots:
        yield Slots(value, slots)
    if with_dict or slots:
        yield from class_holders(type(value), names)


def slots_of(base: type) -> list[str]:
    return [name for name, member in vars(base).items() if isinstance(member, types.MemberDescriptorType)]


def class_holders(value: type, names: Set[str]) -> list[Holder]:
    """The attributes of a class and of its bases, as far as they are no library's."""
    own = [base for base in value.__mro__ if not is_library(base.__module__)]
    return [Variables(base, vars(base), f"{base.__module__}.{base.__qualname__}", names) for base in own]


def set_by_pytorch(module: Any) -> set[str]:
    """Attributes that PyTorch sets before every call: by weight norm, spectral norm, pruning and recurrent layers."""
    if not isinstance(module, nn.Module):
        return set()
    hooks = vars(module)["_forward_pre_hooks"].values()
    found = {getattr(hook, "name", None) or getattr(hook, "_tensor_name", None) or "" for hook in hooks}
    return found | ({"_flat_weights", "_flat_weight_refs"} if isinstance(module, nn.RNNBase) else set())


def holders_of_tensor(tensor: torch.Tensor, names: Set[str]) -> list[Holder]:
    """The attributes of a parameter or buffer, and of its class; none of a fake one, or one that consists of others."""
    if isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor):
        return []
    return [Attributes(tensor, vars(tensor)), *class_holders(type(tensor), names)]


def has_gradient(buffer: torch.Tensor) -> bool:
    """Whether a buffer has a ``.grad``, or may get one from autograd."""
    return buffer.requires_grad or buffer.grad is not None


class BufferGradients(Holder):
    """Which buffers of a module have a gradient or may get one; libraries gather in ``.grad`` what they add later."""

    def contents(self, names: Set[str]) -> Mapping[Any, Any]:
        return {}

    def flat(self) -> tuple[Any, ...]:
        return tuple(has_gradient(buffer) for buffer in self.held.values() if buffer is not None)


def _generator_state(generator: Any) -> Any:
    frame = generator.gi_frame
    return None if frame is None else (frame.f_lasti, {name: repr(value) for name, value in frame.f_locals.items()})


def default_generators(device: torch.device) -> list[torch.Generator]:
    """PyTorch's default generators that a step on ``device`` may draw from."""
    on_gpu = device.type == "cuda" and torch.cuda.is_initialized()
    return [torch.default_generator, *([torch.cuda.default_generators[device.index or 0]] if on_gpu else [])]


def torch_state(generator: torch.Generator) -> bytes:
    """The state of a generator of PyTorch's, also while a model is traced."""
    with _disable_current_modes():
        return generator.get_state().numpy().tobytes()


def set_torch_state(generator: torch.Generator, state: bytes) -> None:
    """Give a generator of PyTorch's a state of `torch_state`."""
    with _disable_current_modes():
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _numpy_state(generator: Any) -> bytes:
    return pickle.dumps(generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state)


def _set_numpy_state(generator: Any, state: bytes) -> None:
    if hasattr(generator, "set_state"):
        generator.set_state(pickle.loads(state))
    else:
        generator.bit_generator.state = pickle.loads(state)


_KINDS: list[tuple[Any, Callable[[Any], Holder]]] = [
    (types.MethodType, lambda it: Parts(it, it.__func__, it.__self__)),
    (functools.partial, lambda it: Parts(it, it.func, it.args, it.keywords)),
    ((staticmethod, classmethod), lambda it: Parts(it, it.__func__)),
    (property, lambda it: Parts(it, it.fget)),
    (functools.cached_property, lambda it: Parts(it, it.func)),
    (functools._lru_cache_wrapper, lambda it: Cache(it, it.__wrapped__)),
    (types.CellType, Variable),
    (types.MappingProxyType, ReadOnlyEntries),
    ((weakref.WeakKeyDictionary, weakref.WeakValueDictionary), lambda it: Entries(it.data)),
    (weakref.WeakSet, lambda it: Members(it.data)),
    (queue.Queue, lambda it: Queued(it.queue)),
    (threading.local, lambda it: Attributes(it, it.__dict__)),  # of the thread that captures
    (contextvars.ContextVar, Context),
    (itertools.count, lambda it: Drawn(it, lambda: repr(it))),
    (types.GeneratorType, lambda it: Drawn(it, lambda: _generator_state(it))),
    (random.Random, lambda it: Drawn(it, it.getstate, it.setstate)),
    (torch.Generator, lambda it: Drawn(it, lambda: torch_state(it), lambda state: set_torch_state(it, state))),
    (
        (type(iter([])), type(iter(())), type(iter(range(0))), type(reversed([])), type(iter("")), type(iter({}))),
        lambda it: Drawn(it, lambda: operator.length_hint(it)),
    ),
]
