"""What a forward does beside computing, and what it reads beside tensors.

A schedule does not do the first again, so it is refused, or undone and told of. The second is baked into the trace: a call
for which it differs needs another.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from .errors import CaptureError


@contextlib.contextmanager
def without_side_effects(model: nn.Module, told: MutableMapping[str, None]) -> Iterator[None]:
    """For tracing: what the forward sets in the modules is as it was before; names of attributes are added to ``told``.

    Raises:
        CaptureError: it puts other tensors in the place of parameters or buffers; or it seeds PyTorch's random generator,
            or draws from another: then every step of a schedule would have the numbers of the trace.
    """
    before = [(name, module, dict(module.__dict__), _tensors(module)) for name, module in model.named_modules()]
    generators = [(what, state, state()) for what, state in _generators()]
    try:
        with _generator_unset(model):
            yield
        for what, state, then in generators:
            if state() != then:
                raise _refused(model, what)
        for name, module, _, tensors in before:
            now = _tensors(module)
            for member in {**tensors, **now}:
                if tensors.get(member) is not now.get(member):
                    raise CaptureError(
                        f"{type(model).__name__}.forward assigns {f'{name}.{member}'.lstrip('.')}, and a schedule cannot; "
                        f"write into the tensor that is there: self.{member}.copy_(...)"
                    )
    finally:
        for name, module, attributes, tensors in before:
            for attribute in _changed(module.__dict__, attributes):
                if attribute not in _set_by_pytorch(module):
                    told[f"{name}.{attribute}".lstrip(".")] = None
                _put_back(module.__dict__, attribute, attributes)
            for members in (module._parameters, module._buffers):
                for member in [m for m, tensor in members.items() if tensor is not tensors.get(m)]:
                    _put_back(members, member, tensors)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {**module._parameters, **module._buffers}


def _changed(now: dict[str, Any], then: dict[str, Any]) -> list[str]:
    missing = object()
    return [name for name in {**then, **now} if now.get(name, missing) is not then.get(name, missing)]


def _put_back(members: dict[str, Any], name: str, then: dict[str, Any]) -> None:
    if name in then:
        members[name] = then[name]
    else:
        del members[name]


def _set_by_pytorch(module: nn.Module) -> set[str]:
    """What weight norm, spectral norm and pruning compute before every call; and recurrent nets' lists of weights."""
    hooks = module._forward_pre_hooks.values()
    found = {getattr(hook, "name", None) or getattr(hook, "_tensor_name", None) or "" for hook in hooks}
    return found | ({"_flat_weights", "_flat_weight_refs"} if isinstance(module, nn.RNNBase) else set())


def _refused(model: nn.Module, what: str) -> CaptureError:
    return CaptureError(
        f"{type(model).__name__}.forward {what}, and a schedule would not; draw random numbers with PyTorch's functions and "
        "as its generator stands, or outside the model, and pass them as arguments"
    )


@contextlib.contextmanager
def _generator_unset(model: nn.Module) -> Iterator[None]:
    """Without ``set_rng_state``, which ``fork_rng`` calls, too."""

    def refuse(*_: Any, **__: Any) -> None:
        raise _refused(model, "sets the state of PyTorch's random generator")

    own = torch.random.set_rng_state
    torch.random.set_rng_state = torch.set_rng_state = refuse
    try:
        yield
    finally:
        torch.random.set_rng_state = torch.set_rng_state = own


def _generators() -> Iterator[tuple[str, Callable[[], object]]]:
    """What changes the state of each generator, and how to read it."""
    yield "seeds PyTorch's random generator", _torch_state
    yield "draws Python's random numbers", random.getstate
    if "numpy" in sys.modules:
        yield "draws NumPy's random numbers", lambda: repr(sys.modules["numpy"].random.get_state())


def _torch_state() -> bytes:
    with _disable_current_modes():
        return torch.get_rng_state().numpy().tobytes()


_PLAIN = frozenset({bool, int, float, complex, str, type(None)})


def _is_plain(value: object) -> bool:
    """Whether it is a number, a word or a tuple of these: what can be compared before every step."""
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


@contextlib.contextmanager
def reads_of(model: nn.Module, found: MutableMapping[str, set[str]]) -> Iterator[None]:
    """For tracing: the attributes that the forward reads and that are numbers, such as a dropout's ``p``, by module."""
    names = {id(module): name for name, module in model.named_modules()}

    def read(module: object, attribute: str) -> Any:
        value = object.__getattribute__(module, attribute)
        name = names.get(id(module)) if _is_plain(value) and attribute != "training" else None
        if name is not None and attribute in object.__getattribute__(module, "__dict__"):
            found.setdefault(name, set()).add(attribute)
        return value

    nn.Module.__getattribute__ = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        del nn.Module.__getattribute__
