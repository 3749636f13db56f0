"""Records the forward of a training step on fake tensors: the calls of PyTorch's functions up to the loss.

A recording is a list of calls, so any range of it is a module of its own (`Part`), with the tensors that it takes from
earlier ranges and those that later ones read. The calls are those that Python code makes, such as
``torch.nn.functional.layer_norm``, so that a range has the nodes of autograd that the model has.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import Function
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from ...capture.absent_gpu.autocast import cuda_autocast, cuda_regions
from ...capture.replaced import replaced
from ...capture.trace.known_values import KnownValues
from ...errors import CaptureError
from ...models.adapters import EightBit, FourBit
from ..rehearsal.fake import hidden


class Ended(BaseException):
    """Leaves code of the user's at its first backward; no ``except Exception`` of theirs stops it."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a function.

    Attributes:
        function: that is called.
        args: arguments and keyword arguments, with `Ref` for tensors.
        results: where tensors among the flattened results go; None for anything else.
        modes: of gradients and of autocast, as they were.
        writes: tensors that it changes in place.
    """

    function: Callable[..., Any]
    args: tuple[tuple[Any, ...], dict[str, Any]]
    results: tuple[int | None, ...]
    modes: tuple[Any, ...]
    writes: tuple[int, ...] = ()

    @property
    def reads(self) -> list[int]:
        """The tensors among the arguments."""
        return [leaf.tensor for leaf in pytree.tree_leaves(self.args) if isinstance(leaf, Ref)]

    @property
    def makes(self) -> list[int]:
        """The tensors among the results."""
        return [number for number in self.results if number is not None]


@dataclass(frozen=True)
class Ref:
    """A tensor among the arguments of a call, by its number in the recording."""

    tensor: int


@dataclass(frozen=True)
class Span:
    """The calls ``start`` to ``end`` (exclusive) that one call of a module makes."""

    module: nn.Module
    start: int
    end: int


@dataclass(eq=False)
class Recording:
    """The forward of a step.

    Attributes:
        tensors: by number: fake ones.
        calls: in order.
        spans: of calls of modules; those of parts of a module come before its own.
        ends: numbers of the loss, or of the results that somebody computes one of: they have gradients from outside.
        models: that are called by nobody else's forward.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    ends: tuple[int, ...] = ()
    models: list[nn.Module] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._meta: dict[int, torch.Tensor] = {}

    @functools.cached_property
    def residents(self) -> dict[int, str]:
        """Parameters and buffers of the models, with their names."""
        found: dict[int, str] = {}
        for model in self.models:
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if id(tensor) in self._numbers:
                    found.setdefault(self._numbers[id(tensor)], name)
        return found

    @functools.cached_property
    def frozen_weights(self) -> set[int]:
        """Parameters that need no gradient, and what quantised layers have instead of them."""
        found = {id(p) for model in self.models for p in model.parameters() if not p.requires_grad}
        for model in self.models:
            for module in model.modules():
                found |= {id(b) for b in module.buffers() if isinstance(module, FourBit | EightBit)}
        return {self._numbers[tensor] for tensor in found if tensor in self._numbers}

    @functools.cached_property
    def names(self) -> dict[nn.Module, str]:
        """Of the modules that are called."""
        found = {span.module: type(span.module).__name__ for span in self.spans}
        for model in reversed(self.models):
            found.update((module, name) for name, module in reversed([*model.named_modules()]) if name)
        return found

    @functools.cached_property
    def resident_storages(self) -> set[int]:
        """Of parameters and buffers."""
        return {self.tensors[number].untyped_storage()._cdata for number in self.residents}

    @functools.cached_property
    def written_later(self) -> set[int]:
        """Places between calls where a tensor waits that a later call changes in place: no part ends there."""
        made: dict[int, int] = {}
        found: set[int] = set()
        for place, call in enumerate(self.calls):
            for number in call.writes:
                start = made.get(self.tensors[number].untyped_storage()._cdata)
                found.update(() if start is None else range(start + 1, place + 1))
            for number in call.makes:
                made.setdefault(self.tensors[number].untyped_storage()._cdata, place)
        return found

    def number(self, tensor: torch.Tensor) -> int:
        """Of a tensor, the same for the same object."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)  # alive, so that no other one gets its id
        return self._numbers[id(tensor)]

    def meta(self, number: int) -> torch.Tensor:
        """A tensor like this one on the meta device, the same for the same number."""
        if number not in self._meta:
            self._meta[number] = as_meta(self.tensors[number])
        return self._meta[number]


def as_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf like a tensor, on the meta device and in no mode."""
    with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
        made = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")
    wants = tensor.requires_grad
    return nn.Parameter(made, wants) if isinstance(tensor, nn.Parameter) else made.requires_grad_(wants)


def recorded(run: Callable[[], Any]) -> Recording:
    """Record a step.

    Args:
        run: computes the loss, or results of which one is computed, and returns them, or calls ``backward``, which ends
            the recording; in a mode of fake tensors.

    Raises:
        CaptureError: nothing of this requires a gradient.
    """
    found = Recording()
    mode = _Mode(found)
    with warnings.catch_warnings(), torch.enable_grad(), _as_on_gpu(), _followed(mode), mode, KnownValues():
        warnings.simplefilter("ignore")
        with contextlib.suppress(Ended):
            mode.end(run())
    _ = found.residents, found.frozen_weights  # while the models have these tensors
    if not found.ends:
        raise CaptureError(
            "the training step has no result that requires a gradient, and calls no backward: nothing that it computes "
            "is trained"
        )
    return found


@contextlib.contextmanager
def _as_on_gpu() -> Iterator[None]:
    """Have code see real tensors of a GPU, as far as it asks: regions of autocast for it are followed, and modules are
    converted.
    """
    with hidden(), cuda_autocast(), cuda_regions(), replaced(torch.utils, swap_tensors=_convert):
        yield


def _convert(parameter: Any, other: Any) -> None:
    """What ``module.to`` does to a parameter: one that is fake has a weak reference, and PyTorch would not swap it."""
    parameter.data = other.data
    if isinstance(parameter, FakeTensor):
        parameter.fake_device = other.fake_device


class _Mode(TorchFunctionMode):
    """Records calls, while it is not paused."""

    def __init__(self, found: Recording) -> None:
        super().__init__()
        self.found, self.paused, self.depth = found, False, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self.call(func, args, dict(kwargs or {}))

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function, and record it if it makes or changes tensors."""
        if self.paused:
            return func(*args, **kwargs)
        if func is torch.Tensor.backward:
            self.end(args[0])
            raise Ended
        if func is torch.autograd.backward or func is torch.autograd.grad:
            raise CaptureError(f"the step calls torch.autograd.{func.__name__}, and loss.backward() is known alone")
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        versions = [tensor._version for tensor in given]
        modes = _modes()
        self.paused = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.paused = False
        written = [t for t, version in zip(given, versions, strict=True) if t._version != version]
        made = pytree.tree_leaves(result)
        if not written and not any(isinstance(leaf, torch.Tensor) for leaf in made):
            return result
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, (*given, *filter(_is_tensor, made)))):
            return result  # what a transform makes in the end is a constant of the step
        number = self.found.number
        held = pytree.tree_map(lambda leaf: Ref(number(leaf)) if _is_tensor(leaf) else leaf, (args, kwargs))
        results = tuple(number(leaf) if _is_tensor(leaf) else None for leaf in made)
        self.found.calls.append(Call(_home(func), held, results, modes, tuple(map(number, written))))
        return result

    def end(self, results: Any) -> None:
        """Take these for the step's results."""
        tensors = [leaf for leaf in pytree.tree_leaves(results) if _is_tensor(leaf) and leaf.requires_grad]
        self.found.ends = tuple(dict.fromkeys(map(self.found.number, tensors)))


def _home(function: Any) -> Any:
    """A function by its place in PyTorch, where a capture may find another one for a GPU that is not here."""
    name = getattr(function, "__name__", "")
    home = next((module for module in (nn.functional, torch) if getattr(module, name, None) is function), None)
    return function if home is None else Named(home, name)


@dataclass(frozen=True)
class Named:
    """A function of a module, as it is when it is called."""

    module: ModuleType
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, self.name)(*args, **kwargs)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


@contextlib.contextmanager
def _followed(mode: _Mode) -> Iterator[None]:
    """Record calls of modules as spans, and those of custom functions, whose gradients are their own, as one call."""
    call, apply = nn.Module.__call__, Function.__dict__["apply"]

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if mode.paused:
            return call(module, *args, **kwargs)
        if mode.depth == 0:
            if not mode.found.models:  # what a function has done before is no part of its step, such as initial values
                mode.found.calls.clear()
            mode.found.models.append(module)
        start, mode.depth = len(mode.found.calls), mode.depth + 1
        try:
            return call(module, *args, **kwargs)
        finally:
            mode.depth -= 1
            mode.found.spans.append(Span(module, start, len(mode.found.calls)))

    def applied(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            _refuse_checkpoint()
        bound = apply.__get__(None, cls)
        return bound(*args, **kwargs) if mode.paused else mode.call(bound, args, kwargs)

    with (
        replaced(nn.Module, __call__=called),
        replaced(Function, apply=classmethod(applied)),
        replaced(torch.autograd.graph.saved_tensors_hooks, __enter__=_refuse_checkpoint),
    ):
        yield


def _refuse_checkpoint(*_: Any) -> Any:
    raise CaptureError(
        "the step checkpoints parts of itself, or has hooks on saved tensors, and fits chooses what is kept; turn that "
        "off (model.gradient_checkpointing_disable()): a column says what a checkpoint around each layer costs"
    )


_DEVICES = ("cpu", "cuda")


def _modes() -> tuple[Any, ...]:
    """Whether gradients are recorded, and how autocast is set."""
    casts = ((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES)
    return torch.is_grad_enabled(), *casts


@contextlib.contextmanager
def in_modes(modes: tuple[Any, ...]) -> Iterator[None]:
    """Set what `_modes` has told, where it is set otherwise."""
    grads, *casts = modes
    with contextlib.ExitStack() as stack:
        if torch.is_grad_enabled() != grads:
            stack.enter_context(torch.set_grad_enabled(grads))
        for device, (enabled, dtype), now in zip(_DEVICES, casts, _modes()[1:], strict=True):
            if (enabled, enabled and dtype) != (now[0], now[0] and now[1]):
                stack.enter_context(torch.autocast(device, dtype, enabled))
        yield
