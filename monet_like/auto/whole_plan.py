"""The plan for a call of a whole model: from the cache, or made now; plain PyTorch's own step where only that fits."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ..capture.captured import Captured
from ..capture.example_inputs import input_specs, specs_in_words
from ..capture.trees import flattened
from ..compiler.pipeline import compile_prepared, make_record, prepare
from ..compiler.prepared import Prepared
from ..compiler.progress import Progress, announce
from ..compiler.request import Request, captured_for, in_autograd_order
from ..compiler.sources import Cached, keep
from ..errors import InfeasibleError, OutOfMemory, ProfileError, ScheduleFileError, SolverError
from ..files import cache_folder
from ..ir.schedule_file import PLAIN, ScheduleRecord
from ..ir.simulate import simulate
from ..ir.units import Budget, format_apart, format_seconds
from ..plan import Plan, store_all
from ..profile.devices import device_name
from ..profile.settings import settings_digest
from ..replay.checks.compatibility import exceeds, has_liger
from .earlier_menus import EarlierMenus


@dataclass(frozen=True)
class WholeSettings:
    """The arguments of `monet_like.auto_schedule` for a whole model."""

    budget: Budget
    mode: str
    solver: str
    time_limit_seconds: float
    gap: float
    optimizer: str
    effort: str = "full"
    lengths: tuple[int, ...] = ()
    optimizer_in_backward: bool = False
    on_new_input: str = "plan"
    earlier: EarlierMenus = field(default_factory=EarlierMenus, compare=False, repr=False)


def is_of(record: ScheduleRecord, captured: Captured, device: torch.device) -> bool:
    """Whether a schedule fits this program at its sizes."""
    if record.fingerprint != captured.program.fingerprint:
        return False
    return record.is_plain or not exceeds(record, captured, record.model, device)


def plan_or_load(
    request: Request, settings: WholeSettings, device: torch.device, captured: Captured, verbose: bool | None
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
    record = _compiled(request, settings, device, captured, verbose, quick=quick)
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
        return record if is_of(record, captured_as(record, request, captured), device) else None
    return None


def captured_as(record: ScheduleRecord, request: Request, captured: Captured) -> Captured:
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


def _refines(first: Path, settings: WholeSettings) -> bool:
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
    settings: WholeSettings,
    device: torch.device,
    captured: Captured,
    verbose: bool | None,
    *,
    quick: bool,
) -> ScheduleRecord:
    """Plan, with what the store of this device knows; what is measured completely is kept there.

    Plain PyTorch's own step is the plan where it fits and no schedule does. Schedules need a little more than it at
    some moments: of a convolution they make the weight's gradient first, PyTorch the input's.

    Raises:
        InfeasibleError: nothing fits.
        ProfileError: an operator could not be measured.
    """
    source, budget = Cached.of(device), settings.budget
    earlier = settings.earlier.alike(captured) if quick else None
    try:
        with Progress(quiet=verbose is False) as progress:
            ready = prepare(
                request, device, profile=source.known, save_profile=source.save, progress=progress.profiling,
                captured=captured, budget=None if budget.share >= 1 else budget.limit, quick=quick,
                earlier=earlier.ready if earlier else None,
            )  # fmt: skip
            try:
                ready, found = compile_prepared(
                    request, ready, budget.limit, device, quick=quick, save_profile=source.save,
                    progress=progress.profiling,
                    plan_progress=progress.planning,
                )  # fmt: skip
                if quick:
                    settings.earlier.add(ready, (found.record.schedule,))
                return found.record
            except (InfeasibleError, SolverError) as error:
                error.plain_peak_bytes = ready.plain.peak_bytes
                limit = budget.of(ready.plain.peak_bytes)
                if limit < ready.plain.peak_bytes:
                    raise
                return _plain_record(request, ready, limit)
    except (InfeasibleError, SolverError) as error:
        raise _in_words(error, request, budget, quick=quick) from None
    except OutOfMemory as error:
        tried = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", error.told)
        raise ProfileError(
            f"{request.expression} for {specs_in_words(input_specs(*request.example))} cannot be planned on "
            f"{device_name(device)}: {error.task} ran out of memory when it was measured by "
            f"itself{f' (it wanted {tried[1]})' if tried else ''}; give smaller inputs, or a machine with more memory"
        ) from error


def _plain_record(request: Request, ready: Prepared, limit: int) -> ScheduleRecord:
    """The record of plain PyTorch's own step."""
    schedule = store_all(ready.captured.program)
    report = simulate(ready.captured.program, schedule, ready.costs, extra_bytes=ready.extra_bytes)
    record = make_record(request, ready, Plan(schedule, report, "feasible"), limit)
    plain = ready.plain
    return replace(record, peak_bytes=plain.peak_bytes, seconds=plain.seconds, solver=PLAIN)


def _in_words(
    error: InfeasibleError | SolverError, request: Request, budget: Budget, *, quick: bool
) -> InfeasibleError:
    """An error that nothing fits, of the call and of `monet_like.auto_schedule`'s arguments.

    Args:
        error: as the planner raises it.
        quick: the plan was to be quick.
    """
    step, smallest, least = "", None, None
    if isinstance(error, InfeasibleError):
        step, smallest, least = error.step, error.smallest_bytes, error.least_bytes
    plain = error.plain_peak_bytes
    given = budget.bytes if plain is None else budget.of(plain)
    counts = {"given": given, "plain": plain, "least": least, "smallest": smallest}
    known = {name: count for name, count in counts.items() if count is not None}
    shown = dict(zip(known, format_apart(*known.values()), strict=True))
    asked = f" ({100 * budget.share:.4g} % of plain PyTorch's peak)" if budget.share else ""
    inputs = specs_in_words(input_specs(*request.example))
    said = [f"no plan of {request.expression} for {inputs} fits into {shown.get('given', 'the budget')}{asked}"]
    if plain is not None:
        said.append(f"plain PyTorch needs {shown['plain']}")
    if least is not None:
        said.append(
            f"{step or 'what is resident'} alone needs {shown['least']}, parameters, inputs and results included"
        )
    if smallest is not None:
        said.append(f"the least that was found is {shown['smallest']}{f', which {step} needs' if step else ''}")
    proven = isinstance(error, InfeasibleError) and error.proven
    searched = "" if proven or not quick else ", effort='full', which searches for longer,"
    said.append(f"give auto_schedule a larger memory_budget{searched} or smaller inputs")
    found = InfeasibleError("; ".join(said), smallest, step, proven=proven, least_bytes=least)
    found.plain_peak_bytes = plain
    return found


def _tell(record: ScheduleRecord, source: str, verbose: bool | None) -> None:
    """Log in one line what a schedule promises and where it is from; also on stderr, if that is wanted."""
    gap = "" if record.gap is None else f", within {100 * record.gap:.1f} % of the best possible"
    peak, plain = format_apart(record.peak_bytes, record.plain_peak_bytes)
    would_do = ""
    if record.is_plain:
        would_do = "; no schedule fits, so the step is plain PyTorch's own"
    elif record.peak_bytes >= record.plain_peak_bytes:
        would_do = "; plain PyTorch would do: it needs no more memory"
    announce(
        f"{record.model}: peak {peak} instead of {plain}, step {format_seconds(record.seconds)} instead of "
        f"{format_seconds(record.plain_seconds)} (predicted){gap}{would_do}; {source}; costs: {record.note}",
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
    for leaf in flattened(request.example)[0]:
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
