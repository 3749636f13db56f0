"""Runs the compiler's stages in order: capture, variants, profile, plan, schedule record."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import torch

from ..capture.captured import Captured
from ..capture.example_inputs import input_spec
from ..capture.precision import weights_layout
from ..capture.trees import tensors_of
from ..errors import InfeasibleError, ProfileError, SolverError
from ..ir.display import short_repr
from ..ir.profile_file import Profile
from ..ir.program import REFUSED, Cost
from ..ir.schedule import Schedule
from ..ir.schedule_file import ScheduleRecord
from ..ir.simulate import Report, Running, running, simulate
from ..ops import liger
from ..plan import Plan, plan
from ..plan.baseline import plain_step
from ..plan.budgets import lowest_quickly
from ..plan.local_search.searcher import quick_evaluations
from ..profile.cublas import multiplies, schedule_multiplies
from ..profile.devices import DeviceLimits
from ..profile.profiler import Progress
from ..profile.settings import versions
from .costs import as_filed
from .floor import check_floor, delays_cost
from .labels import attention_of, summary_counts
from .prepared import Prepared, launches, plain_seconds, prepared
from .quick import Steps, priced, settled
from .request import Request, captured_for, in_autograd_order


@dataclass(frozen=True, repr=False)
class Compiled:
    """Result of `compile_prepared`.

    Attributes:
        ready: the program, with the workspaces that were measured for the plan.
        plan: the schedule, judged, and how it was found.
        record: what a schedule file would hold.
    """

    __repr__ = short_repr

    ready: Prepared
    plan: Plan
    record: ScheduleRecord

    @property
    def stage_seconds(self) -> Mapping[str, float]:
        """Wall seconds of capture, profile and the plan's stages."""
        return {**self.ready.stage_seconds, **self.plan.stage_seconds}


def compile_prepared(
    request: Request,
    ready: Prepared,
    budget: int | Callable[[int], int],
    device: torch.device,
    *,
    quick: bool = False,
    save_profile: Callable[[Profile], None] | None = None,
    progress: Progress | None = None,
    plan_progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Compiled:
    """Plan what is prepared.

    Args:
        budget: bytes, or a function from plain PyTorch's peak to bytes.
        device: to measure on.
        quick: plan in about ten seconds, from costs that are partly estimated (`monet_like.compiler.quick`) and by the
            local search; where that finds nothing also by the integer program, for at most `QUICK_SECONDS` in all.
            Memory is as exact as otherwise. Nothing is saved.
        save_profile: called with the profile when workspaces were measured for the plan.
        options: of the strategy.
    """
    limit = budget if isinstance(budget, int) else budget(ready.plain.peak_bytes)
    before = ready.profile
    if quick:
        ready, found = plan_quickly(ready, request, limit, device, progress, plan_progress, **options)
    else:
        search = partial(plan_for, request=request, budget_bytes=limit, progress=plan_progress, **options)
        ready, found = plan_settled(ready, request, limit, device, search, MOST_FULL_PLANS, progress)
        if save_profile and ready.profile is not before:
            save_profile(as_filed(ready.profile))
    return Compiled(ready, found, make_record(request, ready, found, limit))


def plan_for(
    ready: Prepared,
    request: Request,
    budget_bytes: int,
    *,
    strategy: str | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Plan:
    """Plan a prepared program by the request's strategy, or by ``strategy`` with ``options``.

    Where only variants multiply, cuBLAS's workspaces count if the schedule takes one: then it is planned anew with
    them, or without these variants where that does not fit.
    """
    program = ready.captured.program
    if more := ready.variants_cublas_bytes:

        def found_for(**changed: Any) -> Plan:
            other = replace(ready, variants_cublas_bytes=0, **changed)
            return plan_for(other, request, budget_bytes, strategy=strategy, progress=progress, **options)

        found = found_for()
        if not schedule_multiplies(program, found.schedule):
            return found
        try:
            return found_for(extra_bytes=ready.extra_bytes + more)
        except InfeasibleError:
            refused = {task.cost: REFUSED for task in program.every_task() if multiplies([task])}
            return found_for(costs={**ready.costs, **refused})
    return plan(
        program,
        ready.costs,
        budget_bytes,
        solver=request.solver,
        time_limit_seconds=request.time_limit_seconds,
        gap=request.gap,
        strategy=strategy or request.strategy,
        extra_bytes=ready.extra_bytes,
        progress=progress,
        threads=request.threads,
        **options,
    )


#: How many plans are made at most where workspaces turn out larger than guessed; for the last one all of them are
#: measured.
MOST_QUICK_PLANS, MOST_FULL_PLANS = 4, 2
#: Wall seconds of all searches for a quick plan, if it is hard to find: most take one.
QUICK_SECONDS = 15.0


def plan_quickly(
    ready: Prepared,
    request: Request,
    budget_bytes: int,
    device: torch.device,
    progress: Progress | None = None,
    plan_progress: Callable[[str], None] | None = None,
    **options: Any,
) -> tuple[Prepared, Plan]:
    """`plan_settled` by the local search; where that finds nothing, by the integer program, for all together
    `QUICK_SECONDS`.

    Raises:
        InfeasibleError: proven that nothing fits.
        SolverError: nothing was found.
    """
    ends = time.monotonic() + QUICK_SECONDS
    planned: Callable[..., Plan] = partial(plan_for, budget_bytes=budget_bytes, progress=plan_progress, **options)

    def left() -> float:
        return ends - time.monotonic()

    def search(ready: Prepared) -> Plan:
        try:
            return planned(
                ready, request, strategy="heuristic", evaluations=quick_evaluations(), enough=lambda _: left() <= 0,
                seconds=left(),
            )  # fmt: skip
        except SolverError:
            if left() < 1:
                raise
            # Where nothing fits by a limit, the search goes on for as many seconds again.
            return planned(ready, replace(request, time_limit_seconds=left() / 2), strategy="milp")

    return plan_settled(ready, request, budget_bytes, device, search, MOST_QUICK_PLANS, progress)


def plan_settled(
    ready: Prepared,
    request: Request,
    budget_bytes: int,
    device: torch.device,
    search: Callable[[Prepared], Plan],
    most_plans: int,
    progress: Progress | None = None,
) -> tuple[Prepared, Plan]:
    """Plan with workspaces that are measured at the whole batch where the peak depends on them.

    Returns:
        The program with these workspaces, and the plan, whose peak is exact.
    """
    program = ready.captured.program
    for number in range(1, 1 + most_plans):
        try:
            found = search(ready)
        except (InfeasibleError, SolverError) as error:
            if not ready.guessed:
                error.found_for = ready
                raise
            ready = settled_for(ready, request, device, lambda _: (), progress, everything=True)
            continue
        if not ready.guessed:
            return ready, found
        extra = found.report.peak_bytes - simulate(program, found.schedule, ready.costs).peak_bytes
        steps = partial(running, program, found.schedule, extra_bytes=extra)
        ready = settled_for(ready, request, device, steps, progress)
        report = simulate(program, found.schedule, ready.costs, extra_bytes=extra)
        if report.peak_bytes <= budget_bytes:
            break
        if number >= most_plans - 1:
            ready = settled_for(ready, request, device, steps, progress, everything=True)
    return ready, replace(found, report=report)


def settled_for(
    ready: Prepared,
    request: Request,
    device: torch.device,
    steps: Steps,
    progress: Progress | None = None,
    *,
    everything: bool = False,
) -> Prepared:
    """Measure the workspaces on which a schedule's peak depends, or all that are guessed (`settled`)."""
    if not ready.guessed:
        return ready
    costs, guessed = settled(ready.captured, device, ready.costs, ready.guessed, steps, progress, everything=everything)
    known = ready.guessed.keys() - guessed.keys()
    profile = replace(ready.profile, costs=costs, scaled=ready.profile.scaled - known)
    newer = prepared(request, ready.captured, profile, costs, ready.stage_seconds)
    return replace(newer, guessed=guessed)


def prepare(
    request: Request,
    device: torch.device,
    *,
    profile: Profile | DeviceLimits | None = None,
    save_profile: Callable[[Profile], None] | None = None,
    progress: Progress | None = None,
    captured: Captured | None = None,
    budget: int | Callable[[int], int] | None = None,
    quick: bool = False,
    quick_seconds: float = inf,
    earlier: Prepared | None = None,
) -> Prepared:
    """Capture and profile.

    Args:
        profile: an earlier profile, what it lacks being measured; or a device's rates, nothing being measured.
        save_profile: called with the profile as soon as something was measured.
        captured: `captured_for` this request, if that is at hand.
        budget: if it is known; what is proven not to fit is refused before any time is measured.
        quick: costs as of `quick_costs`; plain PyTorch's peak is exact. Rates of a device are quick anyway.
        quick_seconds: wall seconds for these costs.
        earlier: the same program at other sizes: a quick plan takes its costs from there, and measures only workspaces.

    Raises:
        InfeasibleError: one task and what is resident need more, whatever their workspace.
    """
    started = time.perf_counter()
    if captured is None:
        captured = captured_for(request, request.example)
    seconds = {"capture": time.perf_counter() - started}
    if budget is not None and not isinstance(profile, DeviceLimits):
        check_floor(
            request, captured, budget, device, profile,
            partial(_lowest, request, captured, device, profile, progress),
        )  # fmt: skip
    started = time.perf_counter()
    costs_of = partial(priced, save_profile=save_profile, progress=progress, quick=quick)
    found, guessed = costs_of(request, captured, device, profile, seconds=quick_seconds, earlier=earlier)
    if delays_cost(request, captured, found.costs):
        captured = in_autograd_order(request, captured)
        known = profile if isinstance(profile, DeviceLimits) else found
        left = quick_seconds - (time.perf_counter() - started)
        found, guessed = costs_of(request, captured, device, known, seconds=left)
    ready = prepared(request, captured, found, found.costs, seconds)
    if guessed:
        extra = ready.extra_bytes

        def plain_steps(costs: Mapping[str, Cost]) -> Iterable[Running]:
            return running(
                *plain_step(captured.plain, costs, autograd_nodes=captured.autograd_nodes), extra_bytes=extra
            )

        ready = settled_for(replace(ready, guessed=guessed), request, device, plain_steps, progress)
        if save_profile and not quick and ready.profile.scaled != found.scaled:
            save_profile(as_filed(ready.profile))
    seconds["profile"] = time.perf_counter() - started
    return ready


def _lowest(
    request: Request, captured: Captured, device: torch.device, profile: Profile | None, progress: Progress | None
) -> tuple[Prepared, Schedule, Report] | None:
    """The step of the lowest peak that the strategy finds, every workspace measured; None where that cannot be."""
    try:
        ready = prepare(request, device, profile=profile, progress=progress, captured=captured, quick=True)
        ready = settled_for(ready, request, device, lambda _: (), progress, everything=True)
    except ProfileError:
        return None
    program, extra = ready.captured.program, ready.extra_bytes + ready.variants_cublas_bytes
    if request.strategy in ("milp", "heuristic"):
        found = lowest_quickly(program, ready.costs, extra_bytes=extra)
        return (ready, found.schedule, found.report) if found else None
    try:
        plan_for(ready, request, 1)
    except (InfeasibleError, SolverError) as error:
        if error.smallest is not None:
            return ready, error.smallest, simulate(program, error.smallest, ready.costs, extra_bytes=extra)
    return None


def _versions_of_kernels(captured: Captured) -> dict[str, str]:
    """The version of Liger, if the program has ways by its kernels: a schedule file says by it that they
    are offered.
    """
    ops = {call.op for task in captured.every_task() for call in task.calls}
    return {liger.PACKAGE: liger.version() or "none"} if any(map(liger.is_ours, ops)) else {}


def make_record(request: Request, ready: Prepared, found: Plan, limit: int) -> ScheduleRecord:
    """Make the record that a schedule file holds."""
    captured, profile, plain = ready.captured, ready.profile, ready.plain
    tensors = tensors_of(request.example)
    optimizer = ready.extra_bytes - ready.cublas_bytes
    clock = launches(ready, planned=True)
    alone = simulate(captured.program, found.schedule, ready.costs, launches=clock)
    extra = found.report.peak_bytes - alone.peak_bytes
    bound, gap = found.bound_seconds, found.gap
    if clock is not None:  # every schedule waits for its first launch
        bound += clock.start_seconds
        gap = 1 - bound / alone.seconds
    return ScheduleRecord(
        schedule=found.schedule,
        model=request.expression or type(request.model).__name__,
        inputs=tuple(map(input_spec, tensors)),
        mode=request.mode,
        budget_bytes=limit,
        fingerprint=captured.program.fingerprint,
        device=profile.device,
        versions={**versions(), **_versions_of_kernels(captured)},
        peak_bytes=found.report.peak_bytes,
        seconds=alone.seconds,
        plain_peak_bytes=plain.peak_bytes,
        plain_seconds=plain_seconds(ready),
        solver=found.solver or found.found_by,
        status=found.status,
        bound_seconds=bound if found.bound_kind != "none" else None,
        gap=gap if found.bound_kind != "none" else None,
        bound_kind=found.bound_kind,
        solve_seconds=sum(found.stage_seconds.values()),
        ablation=request.ablation,
        optimizer=request.optimizer,
        optimizer_bytes=optimizer,
        cublas_bytes=extra - optimizer,
        autocast=request.autocast,
        layout=weights_layout(request.model),
        made_last=captured.made_last,
        optimizer_in_backward=captured.optimizer_in_backward,
        attention=request.attention or (attention_of(captured) if request.target else ""),
        note=profile.note + (f"; captured as on {request.target.type}, without one" if request.target else ""),
        counts=summary_counts(captured.program, found),
        run_bytes=tuple(step.bytes for step in found.report.steps),
        device_seconds=0.0 if clock is None else found.report.seconds,
    )
