"""Checks at the start of a schedule's backward: what plain PyTorch's graph would do and a schedule's graph cannot.

Results are often made from other results: features, and a loss of them. In plain PyTorch the gradient of the features
contains what the loss sends back, and a hook on them may change it. In a schedule's graph the results stand side by
side.
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...capture.captured import Captured
from ...capture.guards.objects import is_library
from ...errors import UsageError
from ..missing_gradients import gradients_met_by_others

#: Modules of libraries whose hooks on results say when a backward begins, as those of DeepSpeed's engine do.
_TOLD = frozenset({"deepspeed.runtime.utils"})


def inner_results(captured: Captured) -> tuple[int, ...]:
    """Positions of the results from which others are made, with a gradient on the way."""
    met = gradients_met_by_others(captured.plain)
    return tuple(position for position, tangent in enumerate(captured.tangents) if tangent in met)


#: A hook of a tensor.
Hook = Callable[[torch.Tensor], torch.Tensor | None]


class Asked:
    """What a backward asks of results from which others are made, beside the outside part of their gradients.

    Attributes:
        hooks: by position, of the results of whose whole gradients something is asked.
        error: says what.
    """

    def __init__(self) -> None:
        self.hooks: dict[int, list[Hook]] = {}
        self.error: UsageError | None = None

    def taken(self) -> dict[int, list[Hook]]:
        """The hooks, which another backward will not find here."""
        hooks, self.hooks, self.error = self.hooks, {}, None
        return hooks


def watch_results(positions: Sequence[int], results: Sequence[torch.Tensor], asked: Asked | None = None) -> None:
    """Have a backward refuse to give a part of a gradient for the whole, where these results' are asked for.

    Args:
        asked: where such is noted that another backward can give; None: there is none.
    """
    for position in positions:
        result = results[position]
        if result.grad_fn is not None:
            first = _Watch(position, result, asked)
            hooks = _Hooks({-1: first})
            first.hooks = weakref.ref(hooks)
            result._backward_hooks = hooks
            result.grad_fn._register_hook_dict(result)


class _Hooks(OrderedDict[int, Any]):
    """The hooks of one result."""

    def __setitem__(self, key: int, hook: Any) -> None:
        module = getattr(hook, "__module__", None)
        own = isinstance(hook, _Watch | _Later) or is_library(module)
        super().__setitem__(key, _Told(hook) if module in _TOLD else hook if own else _Later(hook))


class _Later:
    """A hook for the whole gradient of a result, which is not known yet when hooks of results run."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __call__(self, gradient: torch.Tensor | None) -> None:
        """The backward calls the hook."""


class _Told:
    """A hook that is to be told that a backward begins, and changes no gradient: also where its part of one is None."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __call__(self, gradient: torch.Tensor | None) -> None:
        """Call the hook.

        Raises:
            UsageError: it changes the gradient.
        """
        given = torch.zeros(()) if gradient is None else gradient
        returned = self.hook(given)
        if returned is not None and returned is not given:
            raise UsageError(
                "DeepSpeed's engine scales the gradient of each result when loss.backward() is called, and other "
                "results are made from one of them; a schedule knows only the part of its gradient that comes from "
                "outside the model. Call engine.backward(loss), which scales the loss, or give auto_schedule blocks="
            )


class _Watch:
    """The first hook of a result that others are made from. It runs before those of the caller.

    Args:
        position: among the results.
    """

    __torch_unserializable__ = True

    def __init__(self, position: int, result: torch.Tensor, asked: Asked | None = None) -> None:
        self.position, self.result, self.by_another = position, weakref.ref(result), asked
        self.next_node: Any = result.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self.hooks: weakref.ref[OrderedDict[int, Any]] | None = None

    def __call__(self, gradient: torch.Tensor | None) -> None:
        """Check what is asked for.

        Raises:
            UsageError: the gradient of the result.
        """
        result, hooks = self.result(), self.hooks() if self.hooks is not None else None
        users = [hook.hook for hook in (hooks or {}).values() if isinstance(hook, _Later)]
        asked = ""
        if users:
            asked = "has a hook"
        elif result is not None and result.retains_grad:
            asked = "has retain_grad()"
        elif gradient is not None and not torch._C._will_engine_execute_node(self.next_node):
            asked = "is in a loss whose gradient with respect to results torch.autograd.grad is asked for"
        if not asked:
            return
        error = UsageError(
            f"result {self.position} of the model {asked}, and other results are made from it; a schedule knows "
            "only the part of its gradient that comes from outside the model. Register a hook in the forward, give "
            "auto_schedule blocks=, or call the model that the schedule wraps"
        )
        if self.by_another is None or not torch._C._will_engine_execute_node(self.next_node):
            raise error
        kept = [_keeping(result)] if result is not None and result.retains_grad else []
        self.by_another.hooks[self.position], self.by_another.error = [*users, *kept], error


def _keeping(result: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """A hook that adds the whole gradient to what a result that retains it has now, before a part is added."""
    before, there = result.grad, weakref.ref(result)

    def keep(gradient: torch.Tensor) -> None:
        if (held := there()) is not None:
            held.grad = gradient.clone() if before is None else before + gradient

    return keep


def check_backward(captured: Captured, gradients: Sequence[torch.Tensor | None] = ()) -> None:
    """Check that a backward which begins is one that a schedule can do. Warns if it is called inside of autocast.

    Raises:
        UsageError: it is to have a graph of its own, or its ``gradients`` are many at once.
    """
    if any(gradient is not None and _is_batched(gradient) for gradient in gradients):
        raise UsageError(
            "a schedule's backward was called for many gradients at once (is_grads_batched=True, "
            "jacobian(vectorize=True), vmap), and it computes one; call it for one after the other, or call the model "
            "that the schedule wraps"
        )
    if torch.is_grad_enabled():
        raise UsageError(
            "a schedule's backward was called with create_graph=True, and second derivatives are not supported; "
            "compute them on the model that the schedule wraps"
        )
    if torch.is_autocast_enabled(captured.device.type):
        warnings.warn(
            "backward() was called inside a region of autocast, where plain PyTorch casts in the backward, too; a "
            "schedule's backward does not, so gradients differ by 16-bit rounding; call backward() outside, as PyTorch "
            "advises",
            stacklevel=3,
        )


def _is_batched(tensor: torch.Tensor) -> bool:
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
