"""Refuses models whose forward or backward reassigns parameters, or seeds or draws from a generator that is not
PyTorch's, and those that change buffers where PyTorch's own checkpointing would change them again. Restores generators.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import CaptureError
from ..trace.alone import in_this_thread

#: The generator around a checkpointed function, by its name in PyTorch 2.14 and in earlier ones.
_CHECKPOINTING = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")


@contextlib.contextmanager
def keeping_tensors(model: nn.Module) -> Iterator[None]:
    """Refuse a forward that assigns other tensors to parameters or buffers, and restore them.

    Raises:
        CaptureError: the forward puts others in their place.
    """
    before = [(name, module, _tensors(module)) for name, module in model.named_modules()]
    try:
        yield
        for name, module, tensors in before:
            now = _tensors(module)
            for member in {**tensors, **now}:
                if tensors.get(member) is not now.get(member):
                    raise CaptureError(
                        f"{type(model).__name__}.forward assigns {f'{name}.{member}'.lstrip('.')}, and a schedule "
                        f"cannot; write into the tensor that is there (self.{member}.copy_(...)), or plan the parts "
                        "that do not assign it: auto_schedule(model, blocks=[...])"
                    )
    finally:
        for _, module, tensors in before:
            for members in (module._parameters, module._buffers):
                for member in [m for m, tensor in members.items() if tensor is not tensors.get(m)]:
                    if member in tensors:
                        members[member] = tensors[member]
                    else:
                        del members[member]


def _tensors(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {**module._parameters, **module._buffers}


@contextlib.contextmanager
def checkpoints_checked(model: nn.Module, again: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
    """Refuse ``torch.utils.checkpoint`` around what changes buffers: plain PyTorch does it again in the backward, a
    schedule not.

    Args:
        again: from a checkpointed function to what calls it in the backward, and to what is to be called after the
            forward.

    Raises:
        CaptureError: a checkpointed function changes a buffer, such as the running statistics of a batch norm.
    """
    name = next(name for name in _CHECKPOINTING if hasattr(checkpoint, name))
    own = getattr(checkpoint, name)

    def checked(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
        before, calls = _changes_of_buffers(model), _calls()
        function, ended = again(function)
        yield from own(function, *args, **kwargs)
        ended()
        keeps = kwargs.get("preserve_rng_state", args[:1] != (False,))  # by position before PyTorch 2.14
        if not keeps and any(map(_draws, _calls()[len(calls) :])):
            raise CaptureError(
                "a function under torch.utils.checkpoint(preserve_rng_state=False) draws random numbers; plain PyTorch "
                f"draws others when the function runs again in the backward, and a schedule does not. Leave "
                f"checkpointing out of {type(model).__name__}"
            )
        now = _changes_of_buffers(model)
        changed = [buffer for buffer, count in now.items() if count != before.get(buffer)]
        if changed:
            raise CaptureError(
                f"a function under torch.utils.checkpoint changes {changed[0]}; plain PyTorch changes it once more "
                f"when the function runs again in the backward, and a schedule does not. Leave checkpointing out of "
                f"{type(model).__name__}: what runs again is what the schedule says"
            )

    setattr(checkpoint, name, in_this_thread(checked, own))
    reentrant = checkpoint.CheckpointFunction.apply
    checkpoint.CheckpointFunction.apply = in_this_thread(_without_reentrance, reentrant)
    try:
        yield
    finally:
        setattr(checkpoint, name, own)
        checkpoint.CheckpointFunction.apply = reentrant


def _without_reentrance(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """The same computation as by ``use_reentrant=True``, whose backward cannot be traced.

    There a function's result has a gradient if one of its arguments has.
    """
    if any(isinstance(argument, torch.Tensor) and argument.requires_grad for argument in args):
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
    with torch.no_grad():
        return function(*args)


def _calls() -> list[fx.Node]:
    """The calls that were traced so far."""
    mode = get_proxy_mode()
    return [] if mode is None else [*mode.tracer.graph.nodes]


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _changes_of_buffers(model: nn.Module) -> dict[str, int]:
    """How often each buffer has been written in this trace."""
    traced = [(name, buffer) for name, buffer in model.named_buffers() if isinstance(buffer, FunctionalTensor)]
    return {name: torch._functionalize_mutation_counter(buffer.elem) for name, buffer in traced}


@contextlib.contextmanager
def keeping_generators(who: str) -> Iterator[None]:
    """Refuse code that seeds a random generator of Python, NumPy or PyTorch, or draws from one of the first two.

    Args:
        who: does it, for the message.

    Raises:
        CaptureError: they are: then every step of a schedule would have the numbers of the trace.
    """
    before = [(what, state, state()) for what, state in _generators()]
    with _generator_unset(who):
        yield
    for what, state, then in before:
        if state() != then:
            raise _refused(who, what)


@contextlib.contextmanager
def generators_restored(device: torch.device) -> Iterator[None]:
    """Context after which the random generators of Python, NumPy and PyTorch are as they were, whatever is raised.

    Args:
        device: whose generator of PyTorch is meant, beside the CPU's.
    """
    python, of_numpy = random.getstate(), sys.modules.get("numpy.random")
    numpy: Any = None if of_numpy is None else of_numpy.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        if of_numpy is not None:
            of_numpy.set_state(numpy)


def _refused(who: str, what: str) -> CaptureError:
    return CaptureError(
        f"{who} {what}, and a schedule would not; draw random numbers with PyTorch's functions and "
        "as its generator stands, or outside the model, and pass them as arguments; or give the parts of the model "
        "that draw none schedules of their own (monet_like.auto_schedule(model, blocks=...))"
    )


@contextlib.contextmanager
def _generator_unset(who: str) -> Iterator[None]:
    """Without ``set_rng_state``, which ``fork_rng`` calls, too."""

    def refuse(*_: Any, **__: Any) -> None:
        raise _refused(who, "sets the state of PyTorch's random generator")

    own = torch.random.set_rng_state
    torch.random.set_rng_state = torch.set_rng_state = in_this_thread(refuse, own)
    try:
        yield
    finally:
        torch.random.set_rng_state = torch.set_rng_state = own


def _generators() -> Iterator[tuple[str, Callable[[], object]]]:
    """The methods that change the state of each kind of generator, and how to read that state."""
    yield "seeds PyTorch's random generator", _torch_state
    yield "draws Python's random numbers", random.getstate
    if "numpy" in sys.modules:
        yield "draws NumPy's random numbers", _numpy_state


def _numpy_state() -> object:
    state: Any = sys.modules["numpy"].random.get_state()
    # The words of the Mersenne twister as bytes: as text they would take milliseconds. Other generators' states are
    # dicts.
    return (state[0], state[1].tobytes(), *state[2:]) if isinstance(state, tuple) else repr(state)


def _torch_state() -> bytes:
    with _disable_current_modes():
        return torch.get_rng_state().numpy().tobytes()
