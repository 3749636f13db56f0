"""The compiler's stages in a row: capture, variants, profile, plan, schedule record."""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.utils._pytree as pytree
from torch import nn

from ..capture.lowering import Captured, capture
from ..capture.precision import autocast_as, in_layout, layout_of, weights_layout
from ..capture.tracing import fake_mode
from ..errors import InfeasibleError, ProfileError, UsageError
from ..ir.profile_file import Profile
from ..ir.program import REFUSED, Cost, Program, Task
from ..ir.schedule import Schedule
from ..ir.schedule_file import ScheduleRecord
from ..ir.simulate import Report, simulate
from ..nn.sync_batch_norm import among
from ..plan import Plan, plan, store_all
from ..profile.cublas import measured_bytes, multiplies, schedule_multiplies
from ..profile.made_layouts import as_made
from ..profile.profiler import Inputs, Progress, Scaling, device_name, matched, measure, to_profile
from ..profile.roofline import DEVICES, DeviceLimits, roofline
from ..profile.settings import changed_settings, settings_of, versions
from ..replay.wrapper import admitted, described, device_of

#: Optimizer state in units of the trainable parameters' bytes.
OPTIMIZERS: Mapping[str, int] = {"none": 0, "sgd": 0, "momentum": 1, "adam": 2}

#: Measuring every operator should not be estimated to take longer than this (it takes several times that); else it is done at a smaller batch.
PROFILE_SECONDS = 12.0

Example = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Compiled:
    """What the compiler found, stage by stage.

    Attributes:
        captured: the program with the admitted variants.
        costs: of all its tasks.
        plan: the schedule, judged, and how it was found.
        plain: the simulator's report on plain PyTorch's schedule.
        record: what a schedule file would hold.
        stage_seconds: wall seconds of capture, profile and the plan's stages.
    """

    captured: Captured
    costs: Mapping[str, Cost]
    plan: Plan
    plain: Report
    record: ScheduleRecord
    stage_seconds: Mapping[str, float]


@dataclass(frozen=True)
class Prepared:
    """Everything that planning needs.

    Attributes:
        captured: the program with the admitted variants.
        profile: where the costs come from.
        costs: of all tasks of the program.
        extra_bytes: the optimizer's state, and cuBLAS's workspaces where plain PyTorch multiplies.
        cublas_bytes: of them the latter.
        variants_cublas_bytes: the workspaces where only variants multiply: for schedules that take one.
        plain: the simulator's report on plain PyTorch's schedule.
        stage_seconds: wall seconds of capture and profile.
    """

    captured: Captured
    profile: Profile
    costs: Mapping[str, Cost]
    extra_bytes: int
    plain: Report
    stage_seconds: Mapping[str, float]
    cublas_bytes: int = 0
    variants_cublas_bytes: int = 0


@dataclass(frozen=True)
class Request:
    """What is asked of the compiler; see the command line's options of the same names.

    ``target`` is the device to plan for where the model itself is on another; it need not be here, but then nothing can
    be measured. ``processes`` share SyncBatchNorm's statistics; None: those of this process's group. ``made_last`` are
    the parameters whose gradients are made last; None: those with which the step needs less memory.
    """

    model: nn.Module
    example: Example
    mode: str
    expression: str = ""
    ablation: bool = False
    optimizer: str = "none"
    strategy: str = "milp"
    solver: str = "CBC"
    time_limit_seconds: float = 60.0
    gap: float = 0.01
    threads: int = 1
    profile_batch: int | None = None
    autocast: str = ""
    target: torch.device | None = None
    processes: int | None = None
    made_last: tuple[str, ...] | None = None

    @property
    def batch(self) -> int:
        """The leading extent of the first tensor argument."""
        tensors = [t for t in pytree.tree_leaves(self.example) if isinstance(t, torch.Tensor)]
        return int(tensors[0].shape[0]) if tensors and tensors[0].dim() else 1


def captured_for(request: Request, example: Example) -> Captured:
    """The program of a request's model on these inputs, with the variants that its mode admits."""
    with autocast_as(request.autocast, device_of(request.model)):
        captured = capture(
            request.model, *example, target=request.target, processes=request.processes, made_last=request.made_last
        )
        return admitted(captured, request.mode, ablation=request.ablation)


def optimizer_bytes(model: nn.Module, optimizer: str) -> int:
    """Bytes of the optimizer's state for the model's trainable parameters.

    Raises:
        UsageError: an unknown optimizer.
    """
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"optimizer {optimizer!r} is unknown; choose one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[optimizer] * sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def with_batch(example: Example, wanted: int) -> Example:
    """The example with ``wanted`` instead of its leading extent, in every tensor that has that extent."""
    tensors = [t for t in pytree.tree_leaves(example) if isinstance(t, torch.Tensor) and t.dim()]
    batch = tensors[0].shape[0] if tensors else wanted

    def resized(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != batch:
            return leaf
        made = torch.empty((wanted, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device)
        return in_layout(made, layout_of(leaf)).requires_grad_(leaf.requires_grad)

    with fake_mode():
        args, kwargs = pytree.tree_map(resized, example)
    return args, kwargs


def measured_costs(
    request: Request,
    captured: Captured,
    device: torch.device,
    *,
    known: Mapping[str, Cost] | None = None,
    timed: bool = True,
    progress: Progress | None = None,
) -> tuple[dict[str, Cost], str]:
    """Costs of every task of ``captured`` measured on ``device``, and how they were got, in words.

    Args:
        known: costs from an earlier profile; only what is missing is measured.
        timed: measure seconds as well as workspace; else they are 0.
    """
    costs = dict(known or {})
    missing = [t for t in captured.every_task() if t.cost and t.cost not in costs]
    if not missing:
        return costs, ""
    batch, small = request.batch, request.profile_batch or profile_batch(request, captured, device)
    if small >= batch:
        _measure(inputs_on(captured, device), [(t, t) for t in missing], costs, progress, "", timed)
        return costs, f"measured at batch {batch}"
    scaling = Scaling(batch, small, min(2 * small, batch))
    keys = {task.cost for task in missing}
    found: list[dict[str, Cost]] = []
    for count, label in ((scaling.measured, ""), (scaling.second, "workspace at twice the batch: ")):
        example = with_batch(request.example, count)
        other = captured_for(replace(request, made_last=captured.made_last), example)
        pairs = [(mine, theirs) for mine, theirs in matched(captured, other) if mine.cost in keys]
        got: dict[str, Cost] = {}
        _measure(inputs_on(other, device, batch / count), pairs, got, progress, label, timed and not label)
        found.append(got)
    costs.update((key, scaling.scale(found[0][key], found[1][key])) for key in keys)
    return costs, f"measured at batch {small}, scaled to {batch}"


def inputs_on(captured: Captured, device: torch.device, batches: float = 1.0) -> Inputs:
    """What operators are measured on: on a GPU inputs that lie as its operators make them."""
    return Inputs(as_made(captured, device) if device.type == "cuda" else captured, device, batches)


def _measure(
    maker: Inputs,
    pairs: list[tuple[Task, Task]],
    costs: dict[str, Cost],
    progress: Progress | None,
    label: str,
    timed: bool,
) -> None:
    """Measure the second of every pair for the first's key; ``label`` tells people what this is for."""
    whole = (pair for pair in pairs if pair[0].copies != "start")  # what is only begun shows no time
    distinct = {mine.cost: theirs for mine, theirs in whole if mine.cost not in costs}
    labelled = (lambda what, done, total: progress(f"{label}{what}", done, total)) if progress else None
    costs.update(measure(distinct, maker, timed=timed, progress=labelled))


def profile_batch(request: Request, captured: Captured, device: torch.device) -> int:
    """The batch to measure at: the wanted one, unless that would take far too long or too much memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return _fitting(request.batch, _largest_task_bytes(captured), 0.8 * free)
    estimate = roofline(captured, DEVICES["cpu"])
    seconds = 4 * sum(cost.seconds for cost in estimate.values())  # warming up, repeats, making inputs
    by_time = max(2, math.floor(request.batch * PROFILE_SECONDS / max(seconds, 1e-9)))
    return min(by_time, _fitting(request.batch, _largest_task_bytes(captured), 0.25 * _memory_bytes()))


def _fitting(batch: int, needed_bytes: int, free_bytes: float) -> int:
    # A task's inputs, outputs and a workspace of the same size, at twice the batch.
    return max(min(2, batch), min(batch, int(batch * free_bytes / max(1, 4 * needed_bytes))))


def _largest_task_bytes(captured: Captured) -> int:
    values = captured.program.values
    return max((sum(values[v].bytes for v in (*t.reads, *t.writes)) for t in captured.every_task()), default=0)


def _memory_bytes() -> int:
    return int(psutil.virtual_memory().total)


def plain_report(captured: Captured, costs: Mapping[str, Cost], extra_bytes: int) -> Report:
    """The simulator on plain PyTorch's schedule: every operator once, everything kept until its last use."""
    program, schedule, eager = plain_step(captured, costs)
    return simulate(program, schedule, eager, extra_bytes=extra_bytes)


def plain_step(captured: Captured, costs: Mapping[str, Cost]) -> tuple[Program, Schedule, dict[str, Cost]]:
    """Plain PyTorch's program and schedule, and what its operators cost there."""
    program = captured.plain
    eager = dict(costs)
    for (weight, *_), (given, *_) in zip(program.slots, program.slots[1:], strict=False):
        # PyTorch makes both gradients of a convolution in one operator, the input's first.
        if _halves(weight, given):
            for way, other, sign in ((weight, given, 1), (given, weight, -1)):
                beside = sum(program.values[v].bytes for v in other.writes)
                cost = costs[way.cost]
                eager[way.cost] = replace(cost, workspace_bytes=cost.workspace_bytes + sign * beside)
    return program, store_all(program), eager


def _halves(one: Task, other: Task) -> bool:
    """Whether two slots' own ways are one operator of PyTorch's, asked for other results."""
    first, second = one.calls[-1], other.calls[-1]
    return first.op == second.op == "aten.convolution_backward.default" and first.args[:-1] == second.args[:-1]


def compile_schedule(
    request: Request,
    budget: int | Callable[[int], int],
    device: torch.device,
    *,
    profile: Profile | DeviceLimits | None = None,
    save_profile: Callable[[Profile], None] | None = None,
    progress: Progress | None = None,
    plan_progress: Callable[[str], None] | None = None,
    captured: Captured | None = None,
) -> Compiled:
    """From a request to a schedule.

    Args:
        budget: bytes, or a function from plain PyTorch's peak to bytes.
        device: to measure on.
        profile: an earlier profile, what it lacks being measured; or a device's rates, nothing being measured.
        save_profile: called with the profile as soon as something was measured.
        captured: `captured_for` this request, if that is at hand.
    """
    ready = prepare(request, device, profile=profile, save_profile=save_profile, progress=progress, captured=captured)
    limit = budget if isinstance(budget, int) else budget(ready.plain.peak_bytes)
    found = plan_for(ready, request, limit, progress=plan_progress)
    record = make_record(request, ready, found, limit)
    return Compiled(
        ready.captured, ready.costs, found, ready.plain, record, {**ready.stage_seconds, **found.stage_seconds}
    )


def plan_for(
    ready: Prepared,
    request: Request,
    budget_bytes: int,
    *,
    strategy: str | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Plan:
    """Plan what was prepared, as the request says; ``strategy`` instead of the request's own, ``options`` are its.

    Where only variants multiply, cuBLAS's workspaces count if the schedule takes one: then it is planned anew with them, or
    without these variants where that does not fit.
    """
    chosen, program = strategy or request.strategy, ready.captured.program
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
        strategy=chosen,
        extra_bytes=ready.extra_bytes,
        progress=progress,
        **({"threads": request.threads} if chosen == "milp" else {}),
        **options,
    )


def prepare(
    request: Request,
    device: torch.device,
    *,
    profile: Profile | DeviceLimits | None = None,
    save_profile: Callable[[Profile], None] | None = None,
    progress: Progress | None = None,
    captured: Captured | None = None,
) -> Prepared:
    """Capture and profile; see `compile_schedule`."""
    started = time.perf_counter()
    if captured is None:
        captured = captured_for(request, request.example)
    seconds = {"capture": time.perf_counter() - started}
    started = time.perf_counter()
    found = _profiled(request, captured, device, profile, save_profile, progress)
    seconds["profile"] = time.perf_counter() - started
    return prepared(request, captured, found, found.costs, seconds)


def prepared(
    request: Request, captured: Captured, profile: Profile, costs: Mapping[str, Cost], seconds: Mapping[str, float]
) -> Prepared:
    """What planning needs, from a program and its costs."""
    plain, every = multiplies(captured.plain.every_task()), multiplies(captured.every_task())
    cublas, by_variants = (profile.cublas_bytes * counts for counts in (plain, every and not plain))
    extra = optimizer_bytes(request.model, request.optimizer) + cublas
    report = plain_report(captured, costs, extra)
    return Prepared(captured, profile, costs, extra, report, seconds, cublas, by_variants)


def with_workspaces_of(record: ScheduleRecord, ready: Prepared) -> Prepared:
    """What was prepared, with as much of cuBLAS's workspaces as a schedule counts: none in files that do not say."""
    optimizer, counted = ready.extra_bytes - ready.cublas_bytes, record.cublas_bytes
    plain = plain_report(ready.captured, ready.costs, optimizer + counted * bool(ready.cublas_bytes))
    return replace(ready, extra_bytes=optimizer + counted, cublas_bytes=counted, variants_cublas_bytes=0, plain=plain)


def _profiled(
    request: Request,
    captured: Captured,
    device: torch.device,
    profile: Profile | DeviceLimits | None,
    save_profile: Callable[[Profile], None] | None,
    progress: Progress | None,
) -> Profile:
    if isinstance(profile, DeviceLimits):
        costs = roofline(captured, profile)
        settings = f": {profile.settings}" if profile.settings else ""
        note = f"estimated from datasheet rates ({profile.source}{settings})"
        made_with = {"torch": torch.__version__}
        return Profile(f"roofline:{profile.name}", costs, note, made_with, cublas_bytes=profile.cublas_bytes)
    if profile and profile.device != device_name(device):
        completed = _completed(profile, captured, device)
        if completed is not profile and save_profile:
            save_profile(completed)
        return completed
    if profile and (changed := changed_settings(profile.settings, settings_of(device))):
        warnings.warn(
            f"the profile was measured with other settings, and costs differ with them: {changed}. All is measured anew "
            "and replaces it; to keep it, give another --profile",
            stacklevel=2,
        )
        profile = None
    known = profile.costs if profile else {}
    costs, note = measured_costs(request, captured, device, known=known, progress=progress)
    if profile is None or note:
        made = to_profile(costs, device, note)
    elif device.type == "cuda" and not profile.cublas_bytes:  # files of before do not say
        made = replace(profile, cublas_bytes=measured_bytes(device))
    else:
        return profile
    if save_profile:
        save_profile(made)
    return made


def _completed(profile: Profile, captured: Captured, device: torch.device) -> Profile:
    """A profile of another device with what it lacks, if that can be told from the device's rates."""
    lacking = [t.cost for t in captured.every_task() if t.cost and t.cost not in profile.costs]
    if not lacking:
        return profile
    kind, _, name = profile.device.partition(":")
    if kind == "roofline" and name in DEVICES:
        costs = roofline(captured, DEVICES[name])
        return replace(profile, costs={**profile.costs, **{key: costs[key] for key in lacking}})
    raise ProfileError(
        f"the profile was measured on {profile.device}, lacks {len(lacking)} operators of this model, and this is "
        f"{device_name(device)}; profile the model there, or give another --profile file"
    )


def make_record(request: Request, ready: Prepared, found: Plan, limit: int) -> ScheduleRecord:
    """What a schedule file holds."""
    captured, profile, plain = ready.captured, ready.profile, ready.plain
    tensors = [t for t in pytree.tree_leaves(request.example) if isinstance(t, torch.Tensor)]
    optimizer = ready.extra_bytes - ready.cublas_bytes
    extra = found.report.peak_bytes - simulate(captured.program, found.schedule, ready.costs).peak_bytes
    return ScheduleRecord(
        schedule=found.schedule,
        model=request.expression or type(request.model).__name__,
        inputs=tuple(map(described, tensors)),
        mode=request.mode,
        budget_bytes=limit,
        fingerprint=captured.program.fingerprint,
        device=profile.device,
        versions=versions(),
        peak_bytes=found.report.peak_bytes,
        seconds=found.report.seconds,
        plain_peak_bytes=plain.peak_bytes,
        plain_seconds=plain.seconds,
        solver=found.solver or found.found_by,
        status=found.status,
        bound_seconds=found.bound_seconds if found.bound_kind != "none" else None,
        gap=found.gap if found.bound_kind != "none" else None,
        bound_kind=found.bound_kind,
        solve_seconds=sum(found.stage_seconds.values()),
        ablation=request.ablation,
        optimizer=request.optimizer,
        optimizer_bytes=optimizer,
        cublas_bytes=extra - optimizer,
        autocast=request.autocast,
        layout=weights_layout(request.model),
        made_last=captured.made_last,
        note=profile.note + (f"; captured as on {request.target.type}, without one" if request.target else ""),
        counts=summary_counts(captured.program, found),
    )


def summary_counts(program: Program, found: Plan) -> dict[str, int]:
    """What a schedule is of and does, in numbers: parameters, values kept for the backward, tasks run again, variants chosen."""
    schedule = found.schedule
    again = Counter(index for tasks in schedule.again for index in tasks)
    made = {v for i in schedule.forward for v in program.tasks[i].writes if program.values[v].bytes}
    kept = kept_values(program, schedule)
    parameters, parameter_bytes = program.parameters
    counts = {
        "parameters": parameters,
        "parameter_bytes": parameter_bytes,
        "slots": len(program.slots),
        "kept": len(kept),
        "dropped": len(made - kept),
        "recomputed": len(again),
        "reruns": sum(again.values()),
    }
    chosen = [program.tasks[i].variant for i in (*schedule.forward, *again.elements())]
    chosen += [program.slots[s][w].variant for s, w in enumerate(schedule.ways)]
    if (processes := among(program)) > 1:
        counts["processes"] = processes
    if found.report.host_bytes:
        counts["host_bytes"] = found.report.host_bytes
    counts.update({f"variant {name}": n for name, n in sorted(Counter(chosen).items()) if name != "aten"})
    return counts


def kept_values(program: Program, schedule: Schedule) -> set[int]:
    """Forward values that exist when the forward ends and are read in the backward before they are made anew."""
    remade: set[int] = set()
    kept: set[int] = set()
    for slot, tasks in enumerate(schedule.again):
        for task in (*(program.tasks[i] for i in tasks), program.slots[slot][schedule.ways[slot]]):
            kept.update(v for v in program.forward_reads(task) if v not in remade)
            remade.update(task.writes)
    return kept


def default_names(name: str, request: Request, budget_bytes: int, folder: Path) -> Path:
    """``solutions/solution_resnet50_184_inplace_conv_multiway_newnode_10.00.pkl``: named as MONeT names them."""
    words = [weights_layout(request.model), f"autocast_{request.autocast}" if request.autocast else ""]
    suffix = "".join(f"_{word}" for word in (*words, "ablation" if request.ablation else "") if word)
    return folder / f"solution_{name}_{request.batch}_{request.mode}_{budget_bytes / 2**30:.2f}{suffix}.pkl"
