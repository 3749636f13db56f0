"""What runs in a forward: names that a function's code may read, and PyTorch's own functions, which are not traced."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_GRAD_FN: Any = vars(torch._C.TensorBase)["grad_fn"].__get__
#: The modules that call the model in a trace. They import this one, so it knows them by name.
TRACING = frozenset({f"monet_like.capture.trace.{name}" for name in ("flat_module", "joint", "answers")})
#: The modules of the classes that PyTorch's tracer makes modules of.
_TRACERS = frozenset({"torch.fx.graph_module", "torch.nn.modules.module"})
_STORES = frozenset({"STORE_ATTR", "STORE_GLOBAL", "STORE_NAME"})


def is_tracers(module: nn.Module, read: Set[str]) -> bool:
    """Whether PyTorch's tracer has made a module for itself, which would keep all of the trace alive.

    Args:
        read: attributes that were read of it, among them those that its creation reads.
    """
    return type(module).__module__ in _TRACERS and "call_super_init" in read


@functools.cache
def names_read(code: types.CodeType) -> frozenset[str]:
    """Names of attributes and global variables in a function, without those that it only sets."""
    stores = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname in _STORES}
    others = {each.argval for each in dis.get_instructions(code) if each.opname not in _STORES} if stores else set()
    return frozenset(name for name in code.co_names if name not in stores or name in others)


def words(constants: tuple[Any, ...]) -> Iterator[str]:
    """Strings among a function's constants that may be names of attributes."""
    for constant in constants:
        if isinstance(constant, str):
            if constant.isidentifier():
                yield constant
        elif isinstance(constant, tuple):
            yield from words(constant)


def calls_trace(frame: types.FrameType) -> bool:
    """Whether it is the function of no module that PyTorch's tracer writes around what it traces."""
    before = None if "__name__" in frame.f_globals else frame.f_back
    return before is not None and before.f_globals.get("__name__") == "torch.fx.experimental.proxy_tensor"


def importing(frame: types.FrameType | None) -> bool:
    """Whether a Python module or a class is being made, which happens once and is not undone."""
    while frame is not None and frame.f_globals.get("__name__") not in TRACING:
        if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # no function's
            return True
        frame = frame.f_back
    return False


class Untraced(TorchFunctionMode):
    """Switches tracing off inside PyTorch's own functions, because Python traces slowly.

    Attributes:
        hooked: whether a hook may have been registered, which runs in the backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.hooked = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.hooked |= getattr(func, "__name__", "") == "register_hook" or func == _GRAD_FN
        tracer = sys.gettrace()
        sys.settrace(None)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            sys.settrace(tracer)
