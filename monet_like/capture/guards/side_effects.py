"""Refuses models whose forward or backward reassigns parameters, or seeds or draws from a generator that is not
PyTorch's, and those that change buffers where PyTorch's own checkpointing would change them again. Restores generators.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import checkpoint

from ...errors import CaptureError
from ..annotations import node_of
from ..held_tensors import is_outside, memory_of
from ..replaced import replaced
from ..trace.alone import in_this_thread, is_only_thread
from .holders import Cache, Entries, Holder
from .objects import default_generators, holders_of

#: The generator around a checkpointed function, by its name in PyTorch 2.14 and in earlier ones.
_CHECKPOINTING = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")


@contextlib.contextmanager
def keeping_tensors(model: nn.Module) -> Iterator[None]:
    """Refuse a forward that assigns other tensors to parameters or buffers, and restore them.

    Raises:
        CaptureError: the forward puts others in their place.
    """
    modules = dict(model.named_modules())
    before = {name: _tensors(module) for name, module in modules.items()}
    holders = [Entries(held) for module in modules.values() for held in (module._parameters, module._buffers)]
    copies = [(holder, holder.copy()) for holder in holders]
    try:
        yield
        for name, tensors in before.items():
            now = _tensors(modules[name])
            for member in {**tensors, **now}:
                if not is_again(tensors.get(member), now.get(member)):
                    who, what = f"{type(model).__name__}.forward", f"{name}.{member}".lstrip(".")
                    if member not in tensors:
                        raise CaptureError(f"{who} registers {what}, and a schedule cannot; register it in __init__")
                    raise CaptureError(
                        f"{who} assigns {what}, and a schedule cannot; write into the tensor that is there "
                        f"(self.{member}.copy_(...)), or plan the parts that do not assign it: auto_schedule(model, "
                        "blocks=[...])"
                    )
    finally:
        for holder, copy in copies:
            holder.put_back(copy)


def is_again(own: torch.Tensor | None, now: torch.Tensor | None) -> bool:
    """Whether a parameter or buffer is what it was: the same object, or, of a frozen one, another with its memory."""
    if own is None or now is None or own is now or own.requires_grad or now.requires_grad:
        return own is now
    return type(own) is type(now) and is_outside(now) and memory_of(own) == memory_of(now)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {**module._parameters, **module._buffers}


@contextlib.contextmanager
def checkpoints_checked(model: nn.Module) -> Iterator[None]:
    """Refuse ``torch.utils.checkpoint`` around what changes buffers: plain PyTorch does it again in the backward, a
    schedule not.

    A trace runs the function once: hooks on saved tensors, which run it again, are off there.

    Raises:
        CaptureError: a checkpointed function changes a buffer, such as the running statistics of a batch norm.
    """
    name = next(name for name in _CHECKPOINTING if hasattr(checkpoint, name))
    own = getattr(checkpoint, name)
    traced = [(name, buffer) for name, buffer in model.named_buffers() if isinstance(buffer, FunctionalTensor)]

    def checked(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
        before, calls = _changes_of(traced), _calls()
        yield from own(function, *args, **kwargs)
        keeps = kwargs.get("preserve_rng_state", args[:1] != (False,))  # by position before PyTorch 2.14
        if not keeps and any(map(_draws, _calls()[len(calls) :])):
            raise CaptureError(
                "a function under torch.utils.checkpoint(preserve_rng_state=False) draws random numbers; plain PyTorch "
                f"draws others when the function runs again in the backward, and a schedule does not. Leave "
                f"checkpointing out of {type(model).__name__}"
            )
        now = _changes_of(traced)
        changed = [buffer for buffer, count in now.items() if count != before.get(buffer)]
        if changed:
            raise CaptureError(
                f"a function under torch.utils.checkpoint changes {changed[0]}; plain PyTorch changes it once more "
                f"when the function runs again in the backward, and a schedule does not. Leave checkpointing out of "
                f"{type(model).__name__}: what runs again is what the schedule says"
            )

    reentrant = in_this_thread(_without_reentrance, checkpoint.CheckpointFunction.apply)
    with (
        replaced(checkpoint, **{name: in_this_thread(checked, own)}),
        replaced(checkpoint.CheckpointFunction, apply=reentrant),
    ):
        yield


def saved_as_they_are() -> contextlib.AbstractContextManager[None]:
    """Refuse a forward with hooks of its own on saved tensors, which a trace does not call.

    PyTorch's own, as of checkpoints and ``save_on_cpu``, return what they are given, and a schedule decides what is
    kept and where.

    Raises:
        CaptureError: such hooks are entered.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks
    own = hooks.__enter__

    def checked(entered: torch.autograd.graph.saved_tensors_hooks) -> None:
        if not str(getattr(entered.pack_hook, "__module__", None)).startswith("torch."):
            raise CaptureError(
                "the forward has hooks of its own on saved tensors (torch.autograd.graph.saved_tensors_hooks), and a "
                "schedule, which decides what is saved, would not call them; enter them around the call of the model, "
                "or take them off"
            )
        own(entered)

    return replaced(hooks, __enter__=in_this_thread(checked, own))


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


def check_cached(holder: Holder, then: Any, who: str) -> None:
    """Refuse a function with an ``lru_cache`` that keeps random numbers: a schedule would draw others in each step.

    Args:
        holder: of such a function, or of anything else, while a forward is traced.
        then: its copy before that forward.
        who: has called it, for the message.

    Raises:
        CaptureError: the forward has added to the cache what is made from random numbers of the trace.
    """
    if not isinstance(holder, Cache) or holder.copy() == then:
        return
    waiting = [node for node in map(node_of, holder.results()) if node is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if _draws(node):
            raise CaptureError(
                f"{who} calls {holder.held.__qualname__}, whose functools.lru_cache keeps random numbers of the first "
                "call; a schedule would draw others in each step. Keep them in a buffer or an attribute of a module"
            )
        new = set(node.all_input_nodes) - seen
        seen |= new
        waiting += new


def _changes_of(buffers: Sequence[tuple[str, FunctionalTensor]]) -> dict[str, int]:
    """How often each buffer has been written in this trace."""
    return {name: torch._functionalize_mutation_counter(buffer.elem) for name, buffer in buffers}


class OthersMayDraw(BaseException):
    """Ends a trace in which a random generator has changed while other threads run: it is made again, watched.

    No ``Exception``, because a forward may catch these.
    """


class Generators:
    """The random generators of Python, NumPy and PyTorch, while a model is traced.

    Their states tell whether code seeds one, or draws from the first two; or another thread does. So where others run,
    a change counts from a second trace on, in which Python tells which functions this thread calls. It does not tell of
    NumPy's, whose changes count if they come in each of some traces.
    """

    def __init__(self) -> None:
        self._states = {name: each.copy() for name, each in _generators().items()}  # before the first trace
        self._traces = 0  # that were ended

    @contextlib.contextmanager
    def kept(self, who: str) -> Iterator[None]:
        """Refuse code that seeds a generator, or draws from Python's or NumPy's; that is restored.

        Args:
            who: does it, for the message.

        Raises:
            CaptureError: it does: then every step of a schedule would have the numbers of the trace.
            OthersMayDraw: it is to be traced again.
        """
        generators = _generators()
        then = {name: each.copy() for name, each in generators.items()}
        called, profiler, ended = set[str](), sys.getprofile(), False
        if self._traces:
            sys.setprofile(_noting_draws(called))
        try:
            with _generator_unset(who):
                yield
        except OthersMayDraw:
            ended = True
            raise
        finally:
            if self._traces:
                sys.setprofile(profiler)
            changed = [name for name, copy in then.items() if not ended and generators[name].changed("", copy)]
            certain = [name for name in then if name in called]
            if changed and not certain and not is_only_thread():
                if self._traces < (_MOST_TRACES if "numpy" in changed else 1):
                    self._traces += 1
                    raise OthersMayDraw
                changed = [name for name in changed if name == "numpy"]
            changed = certain or changed  # where a seed is set again, the state is the same
            for name in changed:
                generators[name].put_back(self._states.get(name, generators[name].copy()))
        for name in changed:
            raise _refused(who, _CHANGES[name])


def _noting_draws(called: set[str]) -> Callable[[Any, str, Any], None]:
    """A function for ``sys.setprofile``: notes which generators its thread changes by their own methods."""
    names = {id(each.held): name for name, each in _generators().items()}

    def noting(frame: Any, event: str, function: Any) -> None:
        name = names.get(id(getattr(function, "__self__", None))) if event == "c_call" else None
        if name is not None and not function.__name__.startswith(("getstate", "get_state", "initial", "clone")):
            called.add(name)

    return noting


@contextlib.contextmanager
def generators_restored(device: torch.device, *, if_alone: bool = False) -> Iterator[None]:
    """Context after which the random generators of Python, NumPy and PyTorch are as they were, whatever is raised.

    Args:
        device: whose generator of PyTorch is meant, beside the CPU's.
        if_alone: what other threads draw meanwhile is not undone, unless an error is raised: for code whose parts
            restore the generators from which they draw.
    """
    on_gpu = (holders_of(each, frozenset())[0] for each in default_generators(device)[1:])
    before = [(each, each.copy()) for each in (*_generators().values(), *on_gpu)]
    ended = False
    try:
        yield
        ended = True
    finally:
        if not (ended and if_alone) or is_only_thread():
            for each, state in before:
                each.put_back(state)


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

    refusing = in_this_thread(refuse, torch.random.set_rng_state)
    with replaced(torch.random, set_rng_state=refusing), replaced(torch, set_rng_state=refusing):
        yield


#: What code does that changes the generator of a library.
_CHANGES = {
    "torch": "seeds PyTorch's random generator",
    "python": "draws Python's random numbers",
    "numpy": "draws NumPy's random numbers",
}
#: Traces that are ended because NumPy's generator has changed.
_MOST_TRACES = 3


def _generators() -> dict[str, Holder]:
    """The generators that there are, by the names in `_CHANGES`."""
    held: dict[str, Any] = {"torch": torch.default_generator, "python": vars(random)["_inst"]}
    if "numpy" in sys.modules:
        held["numpy"] = sys.modules["numpy"].random.get_state.__self__
    return {name: holders_of(generator, frozenset())[0] for name, generator in held.items()}
