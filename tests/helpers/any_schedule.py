"""A wrapper that replays a random schedule of whatever is captured, so that a test of calls needs no plan."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from replays import record_for
from torch import nn
from training import tensors

from monet_like.capture.captured import Captured
from monet_like.capture.guards.reads import Change
from monet_like.capture.lower.step import capture
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.plan.random_schedules import random_schedule
from monet_like.replay.wrapper import ScheduleWrapper
from monet_like.variants import admitted

MODE = "inplace_multiway_newnode"


class AnySchedule(ScheduleWrapper):
    """A model whose step follows a random schedule that recomputes much, for every call that is captured.

    Attributes:
        captures: how often it was captured.
    """

    record: ScheduleRecord | None  # type: ignore[assignment]
    _on_new_input = "error"  # what is refused would run as the plain model, and equal it
    _OWN = ScheduleWrapper._OWN | {"captures", "seed"}

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        nn.Module.__init__(self)
        self._share(model, "eager")
        self.record, self.captures, self.seed = None, 0, seed

    def _planned(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], captured: Captured | None, change: Change | None
    ) -> tuple[ScheduleRecord, Captured]:
        captured = admitted(capture(self._model, args, kwargs), MODE)
        schedule = random_schedule(captured.program, self.seed, drop=0.8, others=0.5)
        self.captures += 1
        self.record = record_for(captured, schedule, MODE, (self._model, args, kwargs))
        return self.record, captured


class OrPlain(AnySchedule):
    """What is refused runs as the plain model, as by default."""

    _on_new_input = "plan"


#: Calls a model, and tells what a user sees: the model or its wrapper, the model itself, and a function that takes
#: notes.
Script = Callable[[nn.Module, nn.Module, Callable[..., None]], None]


def told(
    make: Callable[[], nn.Module], script: Script, wrap: Callable[[nn.Module], nn.Module]
) -> tuple[list[Any], int, list[str]]:
    """Everything that a script notes about a model, its gradients, parameters, buffers and the generator's state at the
    end.

    Returns:
        The notes, how often the model was captured, and what warnings say of calls that run as the plain model.
    """
    torch.manual_seed(0)
    model = make()
    called = wrap(model)
    notes: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        script(called, model, lambda *things: notes.append(copy.deepcopy([_kept(thing) for thing in things])))
    notes.append(dict(model.named_parameters()) | dict(model.named_buffers()))
    notes.append({name: parameter.grad for name, parameter in model.named_parameters()})
    captures = called.captures if isinstance(called, AnySchedule) else 0
    said = [str(each.message) for each in caught if "runs as plain PyTorch" in str(each.message)]
    return [*notes, torch.get_rng_state()], captures, said


def _kept(thing: Any) -> Any:
    return [t.detach().clone() for t in tensors(thing)] if tensors(thing) else thing


def assert_as_plain(
    make: Callable[[], nn.Module], script: Script, captures: int | None = None, seed: int = 0,
    wrap: type[AnySchedule] = AnySchedule,
) -> list[str]:  # fmt: skip
    """Assert that a script sees with a wrapper what it sees with the model, to the bit.

    Args:
        captures: how often the model is to be captured.
        seed: of the schedules.

    Returns:
        What warnings say of calls that run as the plain model, which none but those of `OrPlain` do.
    """
    plain, _, _ = told(make, script, lambda model: model)
    ours, count, said = told(make, script, lambda model: wrap(model, seed))
    torch.testing.assert_close(ours, plain, rtol=0, atol=0, equal_nan=True)
    assert captures in (None, count)
    return said


def step(model: nn.Module, *args: Any) -> Any:
    """One call and its backward; the result."""
    result = model(*args)
    sum(t.square().sum() for t in tensors(result) if t.requires_grad).backward()  # type: ignore[union-attr]
    return result
