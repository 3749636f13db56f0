"""`auto_schedule`: plans a model when it is first called, and keeps the schedules in a cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..capture.captured import Captured
from ..capture.example_inputs import device_of, with_length
from ..capture.guards.reads import Change
from ..capture.precision import autocast_name
from ..capture.trees import flattened
from ..compiler.request import Request, captured_for
from ..errors import CaptureError, UsageError, warn_caller
from ..ir.defaults import MODE, SOLVER
from ..ir.schedule_file import ScheduleRecord
from ..ir.units import Budget, parse_budget
from ..replay.checks.compatibility import OTHER_STEP, call_difference
from ..replay.wrapper import NewInput, ScheduleWrapper, is_empty
from . import parts
from .block_menus import BlockSettings
from .blocks import BlockNames, schedule_blocks
from .whole_plan import WholeSettings, captured_as, is_of, plan_or_load

#: Everything that is exact.
ALL_VARIANTS = MODE
#: How much time a plan may take; see `auto_schedule`.
EFFORTS = ("auto", "quick", "full")
#: What a call does that no plan serves; see `auto_schedule`.
ON_NEW_INPUT = ("plan", "plain", "error")
#: Of the integer program.
TIME_LIMIT_SECONDS = 60.0


def auto_schedule(
    model: nn.Module,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory_budget: str | int = "8 GB",
    mode: str = ALL_VARIANTS,
    solver: str = SOLVER,
    time_limit_seconds: float | None = None,
    gap: float = 0.01,
    optimizer: str = "none",
    optimizer_in_backward: bool = False,
    backend: str = "eager",
    verbose: bool | None = None,
    effort: str = "auto",
    lengths: Sequence[int] = (),
    blocks: BlockNames | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    keeps_result: bool = True,
    same_plan: bool = True,
    on_new_input: str = "plan",
) -> nn.Module:
    """Capture, profile, plan and wrap ``model`` so that its training step fits ``memory_budget``.

    Args:
        model: on the device it will train on; in training mode, if there are example inputs.
        args, kwargs: example inputs; a tensor, or a tuple of arguments. Without any, the first training call is planned
            for, which takes longer for that.
        memory_budget: of the whole step: ``"8 GB"``, bytes as an int, or ``"60%"`` of plain PyTorch's peak for the
            inputs that are planned first; later plans have as many bytes.
        mode: which variants may be used; see `monet_like.ir.mode`.
        solver, time_limit_seconds, gap: for the integer program; None: 60 seconds. With ``blocks`` the limit is for the
            menu of each kind of block; the choice among menus, mostly a second, may take the limit or 20 seconds,
            whichever is more, up to three times. Where it is quick, all of that has 20 seconds together.
        optimizer: whose state to count; a key of `monet_like.compiler.request.OPTIMIZERS`, such as adamw.
        optimizer_in_backward: hooks of your training loop (``register_post_accumulate_grad_hook``) step and free each
            gradient in the backward, so the plan need not have room for all gradients at once. Without such hooks the
            step needs more memory than planned.
        backend: eager or inductor; see `ScheduleWrapper`.
        verbose: show progress and a line at the end on stderr; None: if that is a terminal or a notebook. The logger
            ``monet_like`` gets that line in any case (level INFO).
        effort: ``full``: measure every operator and solve the integer program, in minutes. ``quick``: in about ten
            seconds, times that are partly estimated and the local search; memory is as exact. ``auto``: ``full`` if a
            time limit is given; else quick the first time, and full at the next start, in one process of each machine.
        lengths: plan at the first call for inputs of each of these lengths (second dimension), such as ``[512, 1024,
            2048]``. Later inputs follow the plan for the next larger length, so nothing is planned in between. A share
            of plain PyTorch's peak is of that at the largest length.
        blocks: give each of these modules of ``model`` a schedule of its own, all under the one budget, and run the
            rest of the model as it is: ``model.layers``, a list of modules, or a pattern of their names such as
            ``"layers.*"``.
        loss: with ``blocks``: from the model's result to the scalar whose backward runs, so that its memory counts.
            Default: the result's own ``loss``, or one that takes no memory.
        keeps_result: with ``blocks``: your loop holds the model's result until the backward has ended, as in ``out =
            model(x)``. False: it holds the loss alone, as in ``model(x).loss.backward()``, and logits are free by then.
        same_plan: with ``blocks``: the processes of the default group have equal models and inputs, the first plans for
            all, and all must call this. False: each plans for itself.
        on_new_input: what a call does that no plan serves, once there is one: larger inputs, another dtype, frozen
            layers. ``plan``: it is planned within the first plan's bytes, and runs as plain PyTorch with one warning if
            that fails after training has begun. ``plain``: it runs as plain PyTorch with one warning. ``error``: it
            raises.

    Returns:
        The wrapped module, with the same arguments, results and gradients. Plans and profiles are cached, so a
        second call with the same model, inputs and budget solves nothing. With ``blocks``: ``model`` itself, whose
        blocks are wrapped.

    Raises:
        UsageError: an argument is wrong.
        InfeasibleError: no schedule fits; the message says what would.
        CaptureError: the model cannot be captured.
    """
    if effort not in EFFORTS:
        raise UsageError(f"effort {effort!r} is unknown; choose one of {', '.join(EFFORTS)}")
    if on_new_input not in ON_NEW_INPUT:
        raise UsageError(f"on_new_input {on_new_input!r} is unknown; choose one of {', '.join(ON_NEW_INPUT)}")
    if effort == "auto" and time_limit_seconds is not None:
        effort = "full"
    seconds = TIME_LIMIT_SECONDS if time_limit_seconds is None else time_limit_seconds
    if any(not isinstance(length, int) or length < 1 for length in lengths):
        raise UsageError(f"lengths {list(lengths)!r} must be whole numbers of at least 1")
    if blocks is not None:
        chosen = BlockSettings(
            parse_budget(memory_budget, "memory_budget"), mode, solver, seconds, gap, optimizer, loss, effort != "full",
            "same" if same_plan else "alone", verbose, effort == "auto", keeps_result, tuple(lengths),
            on_new_input,
        )  # fmt: skip
        return schedule_blocks(model, args, kwargs, blocks, chosen, backend)
    if loss is not None or not keeps_result:
        named = "loss" if loss is not None else "keeps_result"
        raise UsageError(
            f"{named} is for blocks; a schedule of the whole model counts what the model's forward computes"
        )
    settings = WholeSettings(
        parse_budget(memory_budget, "memory_budget"), mode, solver, seconds, gap, optimizer, effort, tuple(lengths),
        optimizer_in_backward, on_new_input,
    )  # fmt: skip
    wrapped = AutoSchedule(model, settings, backend, verbose=verbose)
    if args is not None or kwargs is not None:
        if not model.training:
            raise UsageError("the model is in eval mode; call model.train() before auto_schedule")
        wrapped.prepare(*(args if isinstance(args, tuple) else () if args is None else (args,)), **(kwargs or {}))
    return wrapped


class AutoSchedule(ScheduleWrapper):
    """A `ScheduleWrapper` that plans when it is called with inputs for which it has no schedule.

    Attributes:
        record: the schedule of the latest plan; None before the first one.
        records: all of them.
    """

    record: ScheduleRecord | None  # type: ignore[assignment]
    _OWN = ScheduleWrapper._OWN | {"records", "settings", "verbose"}

    def __init__(
        self, model: nn.Module, settings: WholeSettings, backend: str = "eager", *, verbose: bool | None = None
    ) -> None:
        nn.Module.__init__(self)
        self._share(model, backend)
        self.settings, self.verbose = settings, verbose
        self._on_new_input = settings.on_new_input
        self.record = None
        self.records: list[ScheduleRecord] = []

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        return super().extra_repr() if self.record else "schedule: made at the first training call"

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Plan for calls with such arguments, now instead of at the first of them; not for a batch of no elements."""
        kwargs = self._without_cache(args, kwargs)
        leaves, spec = flattened((args, kwargs))
        if is_empty(leaves):
            return
        self._new_step(self._key(leaves, spec), args, kwargs)
        self._begun = True

    def _planned(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], captured: Captured | None, change: Change | None
    ) -> tuple[ScheduleRecord, Captured]:
        settings, device = self.settings, device_of(self, (args, kwargs))
        request = Request(
            self._model, (args, kwargs), settings.mode, type(self._model).__qualname__, False, settings.optimizer,
            "milp", settings.solver, settings.time_limit_seconds, settings.gap, autocast=autocast_name(device),
            optimizer_in_backward=settings.optimizer_in_backward,
        )  # fmt: skip
        if settings.lengths and not self.records:
            self._plan_lengths(request, device)
        try:
            captured = captured_for(request, request.example)
        except CaptureError as error:
            if not error.of_values or self._begun:
                raise
            raise CaptureError(f"{error}{parts.in_words(self._model, args, kwargs)}") from error
        reason = ""
        for record in sorted(self.records, key=_elements):  # the next larger one
            if differs := call_difference(record, self._model, args, kwargs):
                reason = f"planned {differs[0]}, called {differs[1]}"
                continue
            reason = ""
            found = captured_as(record, request, captured)  # what pays at its own, larger batch
            if is_of(record, found, device):
                return record, found
        if self.records:
            reason = reason or (str(change) if change else OTHER_STEP)
            if self._on_new_input != "plan":
                raise NewInput(f"no plan of {type(self._model).__name__} serves this call: {reason}")
            warn_caller(f"planning {type(self._model).__name__} anew: {reason}")
        record = self._plan(request, device, captured)
        return record, captured_as(record, request, captured)

    def _plan_lengths(self, request: Request, device: torch.device) -> None:
        """Plan for every length that is expected, the largest first: a share is of the peak at that."""
        for length in sorted(self.settings.lengths, reverse=True):
            there = replace(request, example=with_length(request.example, length))
            self._plan(there, device, captured_for(there, there.example))

    def _plan(self, request: Request, device: torch.device, captured: Captured) -> ScheduleRecord:
        """Plan within the budget, which is that of the first plan in bytes."""
        settings = self.settings
        if self.records:
            settings = replace(settings, budget=Budget(self.records[0].budget_bytes))
        record = plan_or_load(request, settings, device, captured, self.verbose)
        self.records.append(record)
        self.record = record
        return record


def _elements(record: ScheduleRecord) -> int:
    """How many elements the inputs of a plan have."""
    return sum(math.prod(spec.shape) for spec in record.inputs)
