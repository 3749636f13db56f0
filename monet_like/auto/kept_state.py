"""Everything that a training step may change and that can be reached from a model, kept to be put back after a
rehearsal.

The walk begins at the model, its step and its inputs, and follows modules, hooks, tensors, gradients, containers,
attributes of objects, closures, and of the user's own code also classes and global variables. State of libraries is in
objects: of PyTorch's such as those of ``fully_shard``, optimizers and gradient scalers are followed, code is not.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..capture.guards.holders import Attributes, Drawn, Function, Holder, Parts, Slots, Variables
from ..capture.guards.objects import holders_of, is_library, slots_of
from ..capture.guards.traversal import form_of_plain
from ..replay.wrapper import ScheduleWrapper

#: Objects of these Python modules are not looked into: they hold code, data sets or our own plans.
_LEFT_ALONE = (
    "monet_like", "torch._dynamo", "torch._inductor", "torch.fx", "torch.jit", "torch.utils.data", "torch.testing",
    "logging",
    "threading", "importlib", "_pytest", "unittest",
)  # fmt: skip
#: Attributes that every module has: those of a block's wrapper that are not ours.
_OF_MODULES = frozenset(vars(nn.Module()))
_NONE: frozenset[str] = frozenset()
#: Members of classes that PyTorch calls; Python calls those with two underscores.
_CALLED = frozenset({"forward", "backward", "setup_context"})
#: Hooks of all modules.
_GLOBAL_HOOKS = [
    held for name, held in vars(torch_module).items() if name.startswith("_global_") and isinstance(held, dict)
]


class State:
    """All that can be reached from some objects, as it is now.

    Args:
        roots: a model, its step, its inputs.
        like: another state, of which nothing was changed since: what both have is copied once.
        memory: with the contents of tensors, which nothing changes that runs on fake tensors.
    """

    def __init__(self, roots: Iterable[Any], like: State | None = None, *, memory: bool = True) -> None:
        self._with_memory = memory
        self._copies: list[tuple[Holder, Any]] = []
        self._memory: dict[int, _Memory] = {}
        self._known = like._memory if like else {}
        self._names: set[str] = set()  # that occur in the user's own code
        self._shared: list[Variables] = []  # classes and global variables
        self._seen: dict[Any, Any] = {}
        waiting = [*roots, *_GLOBAL_HOOKS]
        while waiting:
            while waiting:
                waiting += self._parts(waiting.pop())
            waiting = [
                value for held in self._shared for value in held.contents(self._names).values() if self._new(value)
            ]

    def put_back(self) -> str:
        """Restore everything, also where Ctrl-C comes meanwhile.

        Returns:
            The class of an iterator that was advanced and cannot go back; "" if there is none.
        """
        try:
            self._put_all_back()
        except KeyboardInterrupt:
            self._put_all_back()
            raise
        advanced = (held for held, copy in self._copies if held.drawn and held.changed("", copy))
        return next((type(holder.held).__name__ for holder in advanced), "")

    def _put_all_back(self) -> None:
        with torch.no_grad():
            for holder, copy in self._copies:
                holder.put_back(copy)
            for memory in self._memory.values():
                memory.put_back()

    def _new(self, value: Any) -> bool:
        return id(value) not in self._seen and form_of_plain(value) is None

    def _parts(self, value: Any) -> Iterator[Any]:
        """What is directly behind a value, if it is new."""
        if not self._new(value):
            return
        self._seen[id(value)] = value
        if isinstance(value, tuple | frozenset):
            yield from value
            return
        for holder in self._holders(value):
            copy = holder.copy()
            self._copies.append((holder, copy))
            if isinstance(holder, Attributes):
                yield from holder.now().values()
            else:
                yield from holder.contents(_NONE).values() if isinstance(holder, Function) else holder.flat()
        if isinstance(value, torch.Tensor):
            yield from _of_tensor(value)
            self._keep_memory(value)

    def _holders(self, value: Any) -> Iterator[Holder]:
        if isinstance(value, ScheduleWrapper):
            yield _Hooks(value)
        elif isinstance(value, torch.Tensor):
            yield _Tensor(value)
            yield from _attributes(value)
        elif isinstance(value, nn.Module):
            yield Attributes(value, value.__dict__)
            if isinstance(value, torch.jit.ScriptModule):
                yield _Scripted(value, None)
            self._keep_class(type(value))
        elif isinstance(value, types.FunctionType):
            self._keep_globals(value)
            yield Function(value)
            yield Attributes(value, value.__dict__)
        elif isinstance(value, type):
            self._keep_class(value)
        elif isinstance(value, types.ModuleType):
            if _is_users(value.__name__, getattr(value, "__file__", None)):
                self._keep_variables(value, vars(value))
        elif isinstance(value, _BaseDataLoaderIter):
            yield Drawn(value, lambda: value._num_yielded)
        elif (
            isinstance(value, Iterator)
            and type(value).__module__ in ("builtins", "itertools")
            and not holders_of(value, _NONE)
        ):
            yield Parts(value, *gc.get_referents(value))  # of zip and the like: the iterators behind it
        elif not str(type(value).__module__).startswith(_LEFT_ALONE):
            yield from (held for held in holders_of(value, _NONE) if not isinstance(held, Attributes))
            yield from _attributes(value)
            self._keep_class(type(value))

    def _keep_class(self, of: type) -> None:
        for base in of.__mro__:
            if _is_users(base.__module__, getattr(sys.modules.get(base.__module__), "__file__", None)):
                self._names.update(name for name, member in vars(base).items() if _is_called(name, member))
                self._keep_variables(base, vars(base))

    def _keep_globals(self, function: types.FunctionType) -> None:
        variables = function.__globals__
        if _is_users(variables.get("__name__"), variables.get("__file__")):
            self._names.update(_names(function.__code__))
            self._keep_variables(variables, variables)

    def _keep_variables(self, held: Any, mapping: Any) -> None:
        if ("variables", id(held)) not in self._seen:
            self._seen["variables", id(held)] = held
            variables = Variables(held, mapping, only=self._names)
            self._shared.append(variables)
            self._copies.append((variables, variables.copy()))

    def _keep_memory(self, tensor: torch.Tensor) -> None:
        """Keep the bytes of a tensor's storage; tensors that share it have it once."""
        plain = _plain_alias(tensor)
        if plain is not None and self._with_memory:
            storage = plain.untyped_storage()
            key = storage._cdata
            if key not in self._memory:
                self._memory[key] = self._known.get(key) or _Memory(storage)


def _is_users(module: str | None, file: str | None) -> bool:
    """Whether code is of the program that is run, and of no library that is installed."""
    return not is_library(module) and not any(folder in str(file) for folder in ("site-packages", "dist-packages"))


def _is_called(name: str, member: Any) -> bool:
    """Whether a member of a class is a function that runs without being named in the user's code."""
    called = name in _CALLED or (name.startswith("__") and name.endswith("__"))
    return called and isinstance(member, types.FunctionType | staticmethod | classmethod)


def _names(code: types.CodeType) -> Iterator[str]:
    """Names of variables and attributes in a function and in those that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _attributes(value: Any) -> Iterator[Holder]:
    """The attributes of an object, whoever defines its class."""
    if getattr(type(value), "__dictoffset__", 0):
        yield Attributes(value, object.__getattribute__(value, "__dict__"))
    if slots := [name for base in type(value).__mro__ if "__slots__" in vars(base) for name in slots_of(base)]:
        yield Slots(value, slots)


class _Hooks(Attributes):
    """What libraries register on a block's wrapper, and the block itself; the rest of the wrapper is ours."""

    def __init__(self, held: ScheduleWrapper) -> None:
        super().__init__(held, held.__dict__)

    def now(self) -> dict[str, Any]:
        return {name: value for name, value in self.mapping.items() if name in _OF_MODULES or name == "_model"}


class _Scripted(Attributes):
    """What a module in TorchScript holds outside of Python: tensors, numbers and lists; and its parts."""

    def now(self) -> dict[str, Any]:
        module = self.held._c
        kind: Any = torch._C.ConcreteModuleType.from_jit_type(module._type())
        return dict(self.held.named_children()) | {name: module.getattr(name) for name in kind.get_attributes()}

    def _set(self, name: str, value: Any) -> None:
        self.held._c.setattr(name, value)


def _of_tensor(tensor: torch.Tensor) -> Iterator[Any]:
    """Its gradient, its hooks, and the tensors that it is made of."""
    yield _grad_of(tensor)
    yield tensor._backward_hooks
    yield getattr(tensor, "_post_accumulate_grad_hooks", None)
    if hasattr(tensor, "__tensor_flatten__"):
        yield from (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])


def _grad_of(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def _plain_alias(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor with the same memory, outside of autograd; None if it has none of its own."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or hasattr(tensor, "__tensor_flatten__"):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.data


class _Tensor(Holder):
    """A tensor's memory, its gradient, and what autograd knows of it."""

    def copy(self) -> Any:
        tensor = self.held
        hooks = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)
        return _plain_alias(tensor), _grad_of(tensor), tensor.requires_grad, hooks

    def put_back(self, then: Any) -> None:
        tensor, (data, grad, requires_grad, hooks) = self.held, then
        if data is not None and _place(tensor.data) != _place(data):
            tensor.data = data
        if tensor.is_leaf and tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        if _grad_of(tensor) is not grad:
            tensor.grad = grad
        if tensor._backward_hooks is not hooks[0]:
            tensor._backward_hooks = hooks[0]
        if getattr(tensor, "_post_accumulate_grad_hooks", None) is not hooks[1]:
            tensor._post_accumulate_grad_hooks = hooks[1]


def _place(tensor: torch.Tensor) -> Any:
    lies = None if tensor.is_nested else (tensor.storage_offset(), tensor.shape, tensor.stride())
    return tensor.untyped_storage()._cdata, lies, tensor.dtype


class _Memory:
    """The bytes of a storage; their copy is in the host's memory."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage, self.size = storage, storage.nbytes()
        self.bytes = self._all().to("cpu", copy=True) if self.size else None

    def put_back(self) -> None:
        if self.storage.nbytes() != self.size:
            self.storage.resize_(self.size)
        if self.bytes is not None and not (self.storage.device.type == "cpu" and torch.equal(self._all(), self.bytes)):
            self._all().copy_(self.bytes)

    def _all(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
