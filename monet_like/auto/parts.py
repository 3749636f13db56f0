"""Finds the largest parts of a model that can be captured, where the whole cannot because sizes depend on values.

The model is called once, as plain PyTorch without autograd. Where it calls a part, that part is captured with the
arguments of the call; if it is refused, its own parts are tried in turn. A second call on other values of the same
shapes drops the parts whose own inputs had other shapes then: each of their calls would need a capture.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..capture.checks import check_arguments
from ..capture.lower.step import capture
from ..capture.trace.undone import Undone

#: Limits of a search: parts that are tried, and seconds.
MOST_TRIED, MOST_SECONDS = 24, 60.0
#: A part has at least this share of the model's parameters.
LEAST_SHARE = 0.01


def in_words(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The end of an error message that names the parts of a model that can be captured; empty if none is found.

    Args:
        args, kwargs: real inputs of a training call.
    """
    try:
        found = capturable_parts(model, args, kwargs)
    except Exception:  # the model's own, with these inputs
        return ""
    return f"; these parts can be captured: auto_schedule(model, blocks={found!r})" if found else ""


def capturable_parts(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Names of the largest submodules whose training step can be captured, none within another, in the order of their
    calls.
    """
    search = _Search(model)
    with _quietly(model, args, kwargs), search.calls(search.tried):
        model(*args, **kwargs)
    other: dict[str, Any] = {}
    with _quietly(model, args, kwargs), search.calls(lambda name, *call: other.setdefault(name, _look(call)) and None):
        model(*pytree.tree_map(_other_values, args), **pytree.tree_map(_other_values, dict(kwargs)))
    return [name for name, look in search.found.items() if other.get(name) == look]


class _Search:
    """The parts of a model that were tried.

    Attributes:
        found: those that can be captured: how their arguments look, by name; None where two calls differed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {module: name for name, module in reversed([*model.named_modules()]) if name}
        total = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.large = {
            name
            for module, name in self.names.items()
            if any(True for _ in module.children())
            and sum(p.numel() for p in module.parameters() if p.requires_grad) >= LEAST_SHARE * total > 0
        }
        self.found: dict[str, Any] = {}
        self._refused: set[str] = set()
        self._started = time.monotonic()

    def tried(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Try to capture a part that is called, unless a part around it can be."""
        if name in self.found:
            if self.found[name] != _look((module, args, kwargs)):
                del self.found[name]
                self._refused.add(name)
            return
        around = any(name.startswith(f"{other}.") for other in self.found)
        late = len(self._refused) + len(self.found) >= MOST_TRIED or time.monotonic() - self._started > MOST_SECONDS
        if around or late or name not in self.large or name in self._refused:
            return
        try:
            with torch.enable_grad(), _disable_current_modes():
                args, kwargs = pytree.tree_map(_trained, (args, kwargs))
                check_arguments(module, pytree.tree_leaves((args, kwargs)))
                captured = capture(module, args, kwargs)
                if captured.written:
                    raise ValueError("it changes its inputs")
                if any(answer.is_size for answer in captured.answers):
                    raise ValueError("its sizes depend on numbers that the model may have computed")
        except Exception:  # whatever stops it: its own parts are tried
            self._refused.add(name)
        else:
            self.found[name] = _look((module, args, kwargs))

    @contextlib.contextmanager
    def calls(self, of_part: Callable[[str, nn.Module, Any, Any], None]) -> Iterator[None]:
        """Call ``of_part`` before each call of a part of the model."""
        own = nn.Module.__call__

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = self.names.get(module)
            if name is not None:
                nn.Module.__call__ = own  # type: ignore[method-assign]
                try:
                    of_part(name, module, args, kwargs)
                finally:
                    nn.Module.__call__ = called  # type: ignore[method-assign]
            return own(module, *args, **kwargs)

        nn.Module.__call__ = called  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = own  # type: ignore[method-assign]


@contextlib.contextmanager
def _quietly(model: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
    """A call without autograd that changes nothing."""
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    device = next((tensor.device for tensor in (*model.parameters(), *inputs)), torch.device("cpu"))
    with warnings.catch_warnings(), torch.no_grad(), Undone(device, inputs):
        warnings.simplefilter("ignore")
        yield


def _trained(leaf: Any) -> Any:
    """An argument of a part as in training: what the model has computed has a gradient, if it can."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.is_floating_point() or leaf.is_complex())


def _look(call: Any) -> Any:
    _, args, kwargs = call
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return str(spec), [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in leaves]


def _other_values(leaf: Any) -> Any:
    """Another tensor of the same shape: floating ones are turned around in their last dimension."""
    if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim() > 2:
        return leaf.flip(-1)
    return leaf
