"""The plan for a call of a whole model: from the cache, or made now; plain PyTorch's own step where only that fits."""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial

import torch

from ..capture.captured import Captured
from ..capture.example_inputs import input_specs, specs_in_words
from ..capture.precision import weights_layout
from ..compiler.layouts import in_faster_layout
from ..compiler.offloading import offloading, planned
from ..compiler.pipeline import QUICK_SECONDS, compile_prepared, make_record, prepare
from ..compiler.prepared import Prepared, plain_seconds
from ..compiler.progress import Progress, announce
from ..compiler.request import Request, captured_for, in_autograd_order, readmitted
from ..compiler.sources import Cached
from ..errors import CaptureError, InfeasibleError, OutOfMemory, ProfileError, ScheduleFileError, SolverError
from ..ir.mode import NHWC, OFFLOAD, parse_mode
from ..ir.schedule import Schedule
from ..ir.schedule_file import PLAIN, ScheduleRecord
from ..ir.simulate import simulate
from ..ir.units import format_apart, format_bytes, format_seconds
from ..plan import Plan, store_all
from ..plan.step.menus import point_of
from ..plan.subprogram import has_overlap
from ..profile.cublas import schedule_multiplies
from ..profile.devices import device_name
from ..replay.checks.compatibility import exceeds, has_liger
from .kept_pieces import KeptPiece, keep_costs
from .kept_plans import KeptPlan, StepKey, digest_of, found_or_planned, here
from .offloaded import adds_copies, has_room, host_of, on_host
from .planning import Settings
from .promise import BlockPlan
from .rehearsal.plain import plain_peak


def is_of(record: ScheduleRecord, captured: Captured, device: torch.device) -> bool:
    """Whether a schedule fits this program at its sizes."""
    if record.fingerprint != captured.program.fingerprint:
        return False
    return record.is_plain or not exceeds(record, captured, record.model, device)


def plan_or_load(request: Request, settings: Settings, device: torch.device, captured: Captured) -> ScheduleRecord:
    """Load the schedule from the cache, or plan it.

    On each machine only one process replaces a quick plan of an earlier start by a full one. The others take what is
    there: where they wait for the first, as in ``examples/dist_training.py``, its plan.
    """
    if _local_rank() and settings.refines:
        settings = replace(settings, effort="quick")
    piece = digest_of(captured, request.autocast, weights_layout(request.model), input_specs(*request.example))
    plain = cache(partial(plain_peak, request, captured))
    only = False

    def key(settings: Settings) -> StepKey:
        """That of a step of one piece, which is all of it. Models with one program may have other peaks."""
        more = request.optimizer_in_backward, plain() if settings.budget.share else None, adds_copies(device, settings)
        return StepKey(((piece, ""),), (1,), (), 0, (*settings.key, *more), here(device))

    def kept(key: StepKey, settings: Settings) -> tuple[KeptPlan, str] | None:
        def fits(plan: KeptPlan) -> bool:
            (record,) = plan.records if len(plan.records) == 1 else (None,)
            if record is None or not is_of(record, found := captured_as(record, request, captured), device):
                raise ScheduleFileError(f"the file has no schedule that fits the program of {request.expression}")
            return has_room(record, found, device, settings)

        return key.find(settings, fits, f"{request.expression} is")

    def planned(settings: Settings) -> KeptPlan:
        nonlocal only
        try:
            plan, only = _compiled(request, settings, device, captured, piece, plain)
            return plan
        except (InfeasibleError, SolverError) as error:
            error.plain_peak_bytes = plain() or error.plain_peak_bytes
            told = _in_words(error, request, settings)
            told.smallest = _named(request, error)
            raise told from None

    plan, how = found_or_planned(key, settings, kept, planned)
    (record,) = plan.records
    assert record is not None
    _tell(record, how, settings.verbose, only)
    return record


def _alone(ready: Prepared, record: ScheduleRecord) -> KeptPlan:
    """The plan of a step whose only piece follows this schedule."""
    point = point_of(ready.captured.program, record.schedule, ready.costs)
    promise = BlockPlan(
        record.peak_bytes, "", record.budget_bytes, record.plain_peak_bytes, record.seconds, record.plain_seconds, 1,
        (point,), "optimal" if record.status == "optimal" else "feasible", bound_seconds=record.bound_seconds or 0.0,
    )  # fmt: skip
    return KeptPlan(promise, datetime.date.today().isoformat(), record.cublas_bytes, 0, (record,))


def captured_as(record: ScheduleRecord, request: Request, captured: Captured) -> Captured:
    """The captured step with those gradients delayed that a schedule delays, with convolutions in its layout, and with
    copies on the host if it may have some.

    As it is if it cannot be captured so: then the schedule is of another program.
    """
    words, asked = parse_mode(record.mode), request
    if OFFLOAD in words and OFFLOAD not in parse_mode(request.mode):
        asked = offloading(request)
    if (NHWC in words) == (NHWC in parse_mode(request.mode)):
        if record.made_last == captured.made_last:
            return captured if asked is request else readmitted(asked, captured)
        if not record.made_last:
            return in_autograd_order(asked, captured)
    else:
        asked = replace(request, mode=record.mode)
    with suppress(CaptureError):
        return captured_for(
            replace(asked, made_last=record.made_last, liger=has_liger(record)), request.example
        )  # fmt: skip
    return captured


def _local_rank() -> int:
    """The rank among the processes on this machine, by ``torchrun``; else that in the group; 0 without either."""
    for name in ("LOCAL_RANK", "RANK"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _compiled(
    request: Request,
    settings: Settings,
    device: torch.device,
    captured: Captured,
    piece: str,
    counted: Callable[[], int | None],
) -> tuple[KeptPlan, bool]:
    """Plan, with what the store of this device knows; what is measured completely is kept there.

    Plain PyTorch's own step is the plan where it fits and no schedule does. Schedules need a little more than it at
    some moments: of a convolution they make the weight's gradient first, PyTorch the input's.

    Args:
        counted: plain PyTorch's peak, see `plain_peak`; where it is None the program tells.

    Returns:
        The plan, and whether nothing fits without copies on the host (`Found.only`).

    Raises:
        InfeasibleError, SolverError: nothing fits.
        ProfileError: an operator could not be measured.
    """
    source, budget, quick = Cached.of(device), settings.budget, settings.quick
    eager = counted()
    limit = budget.limit if eager is None else budget.of(eager)
    earlier = settings.earlier.alike(captured) if quick else None
    known = KeptPiece.of(piece, device).profile(device, source.known) if quick else source.known
    try:
        with Progress(quiet=settings.verbose is False) as progress:
            prepared = partial(
                prepare, device=device, save_profile=source.save, progress=progress.profiling, quick=quick
            )
            ready = prepared(
                request, profile=known, captured=captured, budget=None if budget.share >= 1 else limit,
                earlier=earlier.ready if earlier else None,
            )  # fmt: skip
            limit = budget.of(eager or ready.plain.peak_bytes)
            compiled = partial(
                compile_prepared, budget=limit, device=device, quick=quick, save_profile=source.save,
                progress=progress.profiling, plan_progress=progress.planning,
            )  # fmt: skip
            plain_fits = (eager or ready.plain.peak_bytes) <= limit  # then there is no need of copies
            host = partial(host_of, device) if adds_copies(device, settings) and not plain_fits else None
            found_for = partial(planned, budget_bytes=limit, host=host, compiled=compiled)

            priced = partial(prepared, profile=known if quick else ready.profile)
            faster = in_faster_layout(request, ready, device, lambda other, captured: priced(other, captured=captured))
            progress.at("plan", most=QUICK_SECONDS if quick else settings.time_limit_seconds)
            if faster is not None:
                with suppress(InfeasibleError, SolverError, ProfileError):  # then as it is given
                    found = found_for(*faster)
                    plain, seconds = eager or ready.plain.peak_bytes, plain_seconds(ready)
                    record = replace(found.compiled.record, plain_peak_bytes=plain, plain_seconds=seconds)
                    return _alone(found.ready, record), found.only
            try:
                found = found_for(request, ready)
                schedules: tuple[Schedule, ...] = ()
                if found.request is request:
                    ready, schedules = found.ready, (found.compiled.record.schedule,)
                if quick and earlier is None:
                    keep_costs(piece, device, ready)
                    if ready.captured is not captured:  # it has the costs of both orders of gradients
                        settings.earlier.add(replace(ready, captured=captured), ())
                    settings.earlier.add(ready, schedules)
                record = replace(found.compiled.record, plain_peak_bytes=eager or ready.plain.peak_bytes)
                return _alone(found.ready, record), found.only
            except (InfeasibleError, SolverError) as error:
                plain = error.plain_peak_bytes = eager or ready.plain.peak_bytes
                if budget.of(plain) < plain:
                    raise
                return _alone(ready, _plain_record(request, ready, budget.of(plain), plain)), False
    except OutOfMemory as error:
        tried = re.search(r"[Tt]ried to allocate ([\d.]+ ?\w+)", error.told)
        raise ProfileError(
            f"{request.expression} for {specs_in_words(input_specs(*request.example))} cannot be planned on "
            f"{device_name(device)}: {error.task} ran out of memory when it was measured by "
            f"itself{f' (it wanted {tried[1]})' if tried else ''}; give smaller inputs, or a machine with more memory"
        ) from error


def _named(request: Request, error: InfeasibleError | SolverError) -> KeptPlan | None:
    """The plan for the memory that an error names; None if it has none."""
    ready, peak = error.found_for, error.smallest_bytes
    if ready is None or peak is None or error.smallest is None or error.plain_peak_bytes is None:
        return None
    program, extra = ready.captured.program, ready.extra_bytes
    if schedule_multiplies(program, error.smallest):
        extra += ready.variants_cublas_bytes
    report = simulate(program, error.smallest, ready.costs, extra_bytes=extra)
    if report.peak_bytes > peak:
        return None
    if has_overlap(program) and OFFLOAD not in parse_mode(request.mode):
        request = offloading(request)
    record = make_record(request, ready, Plan(error.smallest, report, "feasible"), peak)
    return _alone(ready, replace(record, plain_peak_bytes=error.plain_peak_bytes))


def _plain_record(request: Request, ready: Prepared, limit: int, peak_bytes: int) -> ScheduleRecord:
    """The record of plain PyTorch's own step, whose peak is given."""
    schedule = store_all(ready.captured.program)
    report = simulate(ready.captured.program, schedule, ready.costs, extra_bytes=ready.extra_bytes)
    record = make_record(request, ready, Plan(schedule, report, "feasible"), limit)
    return replace(
        record,
        peak_bytes=peak_bytes,
        plain_peak_bytes=peak_bytes,
        seconds=record.plain_seconds,
        solver=PLAIN,
        run_bytes=(),
    )


def _in_words(error: InfeasibleError | SolverError, request: Request, settings: Settings) -> InfeasibleError:
    """An error that nothing fits, of the call and of `monet_like.auto_schedule`'s arguments.

    Args:
        error: as the planner raises it.
    """
    step, smallest, least, budget = "", error.smallest_bytes, None, settings.budget
    if isinstance(error, InfeasibleError):
        step, least = error.step, error.least_bytes
    plain = error.plain_peak_bytes
    smallest = min((each for each in (smallest, plain) if each is not None), default=None)
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
    proven = isinstance(error, InfeasibleError) and error.proven
    searched = "" if proven or not settings.quick else ", effort='full', which searches for longer,"
    enough = "a larger memory_budget"
    if smallest is not None:
        enough = f"memory_budget={smallest} ({format_bytes(smallest)}), for which a plan was found"
        enough += "" if searched else ","
    said.append(f"give auto_schedule {enough}{searched} or smaller inputs")
    found = InfeasibleError("; ".join(said), smallest, step, proven=proven, least_bytes=least)
    found.plain_peak_bytes = plain
    return found


#: What is said of a plan that saves no memory.
_NO_LESS = "; plain PyTorch would do: it needs no more memory"
_MORE = "; that is more than plain PyTorch takes: memory_budget='100%' plans within its memory"


def _tell(record: ScheduleRecord, source: str, verbose: bool | None, only: bool) -> None:
    """Log in one line what a schedule promises and where it is from; also on stderr, if that is wanted.

    Args:
        only: nothing fits without copies on the host.
    """
    gap = "" if record.gap is None else f", within {100 * record.gap:.1f} % of the best possible"
    peak, plain = format_apart(record.peak_bytes, record.plain_peak_bytes)
    would_do = ""
    if record.is_plain:
        would_do = "; no schedule fits, so the step is plain PyTorch's own"
    elif record.peak_bytes >= record.plain_peak_bytes:
        would_do = _MORE if record.peak_bytes > record.plain_peak_bytes else _NO_LESS
    there = on_host(record.counts.get("host_bytes", 0)) + (", without which nothing fits" if only else "")
    announce(
        f"{record.model}: peak {peak} instead of {plain}, step {format_seconds(record.seconds)} instead of "
        f"{format_seconds(record.plain_seconds)} (predicted){gap}{would_do}{there}; {source}; costs: {record.note}",
        verbose,
    )
