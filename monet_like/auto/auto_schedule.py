"""`auto_schedule`: plans a model when it is first called, and keeps the schedules in a cache."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from ..capture.captured import Captured
from ..capture.example_inputs import device_of, with_length
from ..capture.guards.reads import Change
from ..capture.precision import autocast_name
from ..compiler.pipeline import compile_schedule
from ..compiler.progress import Progress, announce
from ..compiler.request import Request, captured_for, in_autograd_order
from ..compiler.sources import Cached, keep
from ..errors import ScheduleFileError, SolverError, UsageError, warn_caller
from ..files import cache_folder
from ..ir.defaults import MODE, SOLVER
from ..ir.schedule_file import ScheduleRecord
from ..ir.units import Budget, format_bytes, format_seconds, parse_budget
from ..profile.devices import device_name
from ..profile.settings import settings_digest
from ..replay.compatibility import exceeds, has_liger, mismatch
from ..replay.wrapper import ScheduleWrapper
from .block_menus import BlockSettings
from .blocks import BlockNames, schedule_blocks

#: Everything that is exact.
ALL_VARIANTS = MODE
#: How much time a plan may take; see `auto_schedule`.
EFFORTS = ("auto", "quick", "full")
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
) -> nn.Module:
    """Capture, profile, plan and wrap ``model`` so that its training step fits ``memory_budget``.

    Args:
        model: on the device it will train on; in training mode, if there are example inputs.
        args, kwargs: example inputs; a tensor, or a tuple of arguments. Without any, the first training call is planned
            for, which takes longer for that.
        memory_budget: of the whole step: ``"8 GB"``, bytes as an int, or ``"60%"`` of plain PyTorch's peak.
        mode: which variants may be used; see `monet_like.ir.mode`.
        solver, time_limit_seconds, gap: for the integer program; None: 60 seconds. With ``blocks`` the limit is for the menu of
            each kind of block; the choice among menus, mostly a second, may take the limit or 20 seconds, whichever is more,
            up to three times.
        optimizer: whose state to count; a key of `monet_like.compiler.request.OPTIMIZERS`, such as adamw.
        optimizer_in_backward: hooks of your training loop (``register_post_accumulate_grad_hook``) step and free each
            gradient in the backward, so the plan need not have room for all gradients at once. Without such hooks the step
            needs more memory than planned.
        backend: eager or inductor; see `ScheduleWrapper`.
        verbose: show progress and a line at the end on stderr; None: if that is a terminal or a notebook. The logger
            ``monet_like`` gets that line in any case (level INFO).
        effort: ``full``: measure every operator and solve the integer program, in minutes. ``quick``: in about ten seconds,
            times that are partly estimated and the local search; memory is as exact. ``auto``: ``full`` if a time limit is
            given; else quick the first time, and full at the next start, in one process of each machine.
        lengths: plan at the first call for inputs of each of these lengths (second dimension), such as ``[512, 1024,
            2048]``. Later inputs follow the plan for the next larger length, so nothing is planned in between. A share of
            plain PyTorch's peak is of that at the largest length.
        blocks: give each of these modules of ``model`` a schedule of its own, all under the one budget, and run the rest of
            the model as it is: ``model.layers``, a list of modules, or a pattern of their names such as ``"layers.*"``.
        loss: with ``blocks``: from the model's result to the scalar whose backward runs, so that its memory counts. Default:
            the result's own ``loss``, or one that takes no memory.
        keeps_result: with ``blocks``: your loop holds the model's result until the backward has ended, as in ``out = model(x)``. False:
            it holds the loss alone, as in ``model(x).loss.backward()``, and logits are free by then.
        same_plan: with ``blocks``: the processes of the default group have equal models and inputs, the first plans for all,
            and all must call this. False: each plans for itself.

    Returns:
        The wrapped module, with the same arguments, results and gradients. Plans and profiles are cached, so a
        second call with the same model, inputs and budget solves nothing. With ``blocks``: ``model`` itself, whose blocks
        are wrapped.

    Raises:
        UsageError: an argument is wrong.
        InfeasibleError: no schedule fits; the message says what would.
        CaptureError: the model cannot be captured.
    """
    if effort not in EFFORTS:
        raise UsageError(f"effort {effort!r} is unknown; choose one of {', '.join(EFFORTS)}")
    if effort == "auto" and time_limit_seconds is not None:
        effort = "full"
    seconds = TIME_LIMIT_SECONDS if time_limit_seconds is None else time_limit_seconds
    if any(not isinstance(length, int) or length < 1 for length in lengths):
        raise UsageError(f"lengths {list(lengths)!r} must be whole numbers of at least 1")
    if blocks is not None:
        if lengths:
            raise UsageError(
                "lengths and blocks do not go together; plan with the longest inputs, and shorter ones follow"
            )
        chosen = BlockSettings(
            parse_budget(memory_budget, "memory_budget"), mode, solver, seconds, gap, optimizer, loss, effort != "full",
            "same" if same_plan else "alone", verbose, effort == "auto", keeps_result,
        )  # fmt: skip
        return schedule_blocks(model, args, kwargs, blocks, chosen, backend)
    if loss is not None or not keeps_result:
        named = "loss" if loss is not None else "keeps_result"
        raise UsageError(
            f"{named} is for blocks; a schedule of the whole model counts what the model's forward computes"
        )
    settings = _Settings(
        parse_budget(memory_budget, "memory_budget"), mode, solver, seconds, gap, optimizer, effort, tuple(lengths),
        optimizer_in_backward,
    )  # fmt: skip
    wrapped = AutoSchedule(model, settings, backend, verbose=verbose)
    if args is not None or kwargs is not None:
        if not model.training:
            raise UsageError("the model is in eval mode; call model.train() before auto_schedule")
        wrapped.prepare(*(args if isinstance(args, tuple) else () if args is None else (args,)), **(kwargs or {}))
    return wrapped


@dataclass(frozen=True)
class _Settings:
    """The arguments of `auto_schedule`."""

    budget: Budget
    mode: str
    solver: str
    time_limit_seconds: float
    gap: float
    optimizer: str
    effort: str = "full"
    lengths: tuple[int, ...] = ()
    optimizer_in_backward: bool = False


class AutoSchedule(ScheduleWrapper):
    """A `ScheduleWrapper` that plans when it is called with inputs for which it has no schedule.

    Attributes:
        record: the schedule of the latest plan; None before the first one.
        records: all of them.
    """

    record: ScheduleRecord | None  # type: ignore[assignment]
    _OWN = ScheduleWrapper._OWN | {"records", "settings", "verbose"}

    def __init__(
        self, model: nn.Module, settings: _Settings, backend: str = "eager", *, verbose: bool | None = None
    ) -> None:
        nn.Module.__init__(self)
        self._share(model, backend)
        self.settings, self.verbose = settings, verbose
        self.record = None
        self.records: list[ScheduleRecord] = []

    def extra_repr(self) -> str:
        """Shown by ``print``."""
        return super().extra_repr() if self.record else "schedule: made at the first training call"

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Plan for calls with such arguments, now instead of at the first of them."""
        kwargs = self._without_cache(args, kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        self._new_step(self._key(leaves, spec), args, kwargs)

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
        captured = captured_for(request, request.example)
        reason = ""
        for record in sorted(self.records, key=_elements):  # the next larger one
            reason = mismatch(record, self._model, args, kwargs)
            if reason:
                continue
            found = _captured_as(record, request, captured)  # what pays at its own, larger batch
            if _is_of(record, found, device):
                return record, found
        if self.records:
            reason = reason or (
                str(change) if change else "other parameters are frozen, other parts in eval mode, or results larger"
            )
            warn_caller(f"planning {type(self._model).__name__} anew: {reason}")
        record = self._plan(request, settings, device, captured)
        return record, _captured_as(record, request, captured)

    def _plan_lengths(self, request: Request, device: torch.device) -> None:
        """Plan for every length that is expected, the largest first."""
        settings = self.settings
        for length in sorted(settings.lengths, reverse=True):
            there = replace(request, example=with_length(request.example, length))
            record = self._plan(there, settings, device, captured_for(there, there.example))
            settings = replace(
                settings, budget=Budget(record.budget_bytes)
            )  # a share is of the peak at the largest length

    def _plan(self, request: Request, settings: _Settings, device: torch.device, captured: Captured) -> ScheduleRecord:
        record = _record(request, settings, device, captured, self.verbose)
        self.records.append(record)
        self.record = record
        return record


def _elements(record: ScheduleRecord) -> int:
    """How many elements the inputs of a plan have."""
    return sum(math.prod(spec.shape) for spec in record.inputs)


def _is_of(record: ScheduleRecord, captured: Captured, device: torch.device) -> bool:
    """Whether a schedule fits this program at its sizes."""
    return record.fingerprint == captured.program.fingerprint and not exceeds(record, captured, record.model, device)


def _record(
    request: Request, settings: _Settings, device: torch.device, captured: Captured, verbose: bool | None
) -> ScheduleRecord:
    """Load the schedule from the cache, or plan it."""
    started = time.monotonic()
    digest = _digest(request, settings.budget, device)
    whole, first = (cache_folder() / f"schedule_{digest}{suffix}.pkl" for suffix in ("", "_quick"))
    found, place = _kept(whole, request, captured, device), whole
    began = _kept(first, request, captured, device) if settings.effort != "full" else None
    if found is None and not _refines(first, settings):
        found, place = began, first
    if found is not None:
        _tell(found, f"from {place}", verbose)
        return found
    quick = settings.effort == "quick" or (settings.effort == "auto" and began is None)
    try:
        record = _compiled(request, settings, device, captured, verbose, quick=quick)
    except SolverError:
        if not quick:
            raise
        quick = False  # the local search finds nothing; the integer program may
        record = _compiled(request, settings, device, captured, verbose, quick=False)
    place = first if quick else whole
    keep(record, place)
    if quick:
        _planned_here.add(place)
    how = f"{format_seconds(time.monotonic() - started)}{_REFINED if quick and settings.effort == 'auto' else ''}"
    _tell(record, f"planned in {how}, kept in {place}", verbose)
    return record


def _kept(path: Path, request: Request, captured: Captured, device: torch.device) -> ScheduleRecord | None:
    """The schedule in a file of the cache, if there is one that fits this program."""
    with contextlib.suppress(ScheduleFileError):  # none is there, or a damaged one
        record = ScheduleRecord.load(path)
        return record if _is_of(record, _captured_as(record, request, captured), device) else None
    return None


def _captured_as(record: ScheduleRecord, request: Request, captured: Captured) -> Captured:
    """The captured step with those gradients delayed that a schedule delays."""
    if record.made_last == captured.made_last:
        return captured
    if not record.made_last:
        return in_autograd_order(request, captured)
    return captured_for(replace(request, made_last=record.made_last, liger=has_liger(record)), request.example)


#: What is said of a quick plan.
_REFINED = " (quickly; all is measured and refined at the next start, or now with effort='full')"
#: Quick plans that this process has made: to call again is no new start.
_planned_here: set[Path] = set()


def _refines(first: Path, settings: _Settings) -> bool:
    """Whether this process replaces a quick plan by a full one: at a new start, and on each machine only one process.

    The others take what is there: where they wait for the first, as in ``examples/dist_training.py``, its plan.
    """
    return settings.effort == "auto" and first not in _planned_here and _local_rank() == 0


def _local_rank() -> int:
    """The rank among the processes on this machine, by ``torchrun``; else that in the group; 0 without either."""
    for name in ("LOCAL_RANK", "RANK"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _compiled(
    request: Request,
    settings: _Settings,
    device: torch.device,
    captured: Captured,
    verbose: bool | None,
    *,
    quick: bool,
) -> ScheduleRecord:
    """Plan, with what the store of this device knows; what is measured completely is kept there."""
    source = Cached.of(device)
    with Progress(quiet=verbose is False) as progress:
        return compile_schedule(
            request,
            settings.budget.limit,
            device,
            profile=source.known,
            save_profile=source.save,
            progress=progress.profiling,
            plan_progress=progress.planning,
            captured=captured,
            quick=quick,
        ).record


def _tell(record: ScheduleRecord, source: str, verbose: bool | None) -> None:
    """Log in one line what a schedule promises and where it is from; also on stderr, if that is wanted."""
    gap = "" if record.gap is None else f", within {100 * record.gap:.1f} % of the best possible"
    announce(
        f"{record.model}: peak {format_bytes(record.peak_bytes)} instead of {format_bytes(record.plain_peak_bytes)}, step "
        f"{format_seconds(record.seconds)} instead of {format_seconds(record.plain_seconds)} (predicted){gap}; {source}; "
        f"costs: {record.note}",
        verbose,
    )


def _digest(request: Request, budget: Budget, device: torch.device) -> str:
    """A digest of all that a plan depends on: structure, shapes, budget, settings and versions. Needs no tracing."""
    digest = hashlib.sha256()
    for name, tensor in (*request.model.named_parameters(), *request.model.named_buffers()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.stride()}{tensor.dtype}{tensor.requires_grad}".encode())
    digest.update("".join(f"{type(m).__name__}{m.training}{m.extra_repr()}" for m in request.model.modules()).encode())
    exact = [name for name, module in request.model.named_modules() if getattr(module, "no_dropit", False)]
    digest.update(repr(exact).encode() if exact else b"")
    for leaf in pytree.tree_leaves(request.example):
        is_tensor = isinstance(leaf, torch.Tensor)
        digest.update(
            f"{tuple(leaf.shape)}{leaf.stride()}{leaf.dtype}{leaf.requires_grad}".encode()
            if is_tensor
            else repr(leaf).encode()
        )
    rest = (
        budget.bytes or budget.share,
        request.mode,
        request.optimizer,
        request.optimizer_in_backward,
        request.gap,
        request.solver.upper(),
        request.time_limit_seconds,
        device_name(device),
        request.autocast,
        settings_digest(device),
    )
    digest.update(repr(rest).encode())
    return digest.hexdigest()[:24]
