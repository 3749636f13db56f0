"""Seconds and workspace bytes of all tasks of a program: measured, estimated, or read from a profile."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

import psutil
import torch

from ..capture.captured import Captured, distinct_tasks
from ..capture.example_inputs import with_batch
from ..errors import ProfileError
from ..ir.profile_file import Profile
from ..ir.program import Cost, Task
from ..profile.cublas import measured_bytes
from ..profile.devices import DEVICES, DeviceLimits, device_name
from ..profile.made_layouts import as_made
from ..profile.profiler import Progress, measure
from ..profile.rates import limits_like
from ..profile.roofline import roofline
from ..profile.scaling import Scaling, matched
from ..profile.settings import changed_settings, settings_of, versions
from ..profile.store import today
from ..profile.task_inputs import Inputs
from .influence import by_influence, in_parts
from .request import Request, captured_for

#: Measuring every operator should not be estimated to take longer than this (it takes several times that); else it is
#: done at a smaller batch.
PROFILE_SECONDS = 12.0


def measured_costs(
    request: Request,
    captured: Captured,
    device: torch.device,
    *,
    known: Mapping[str, Cost] | None = None,
    timed: bool = True,
    progress: Progress | None = None,
    keep: Callable[[dict[str, Cost], str], None] | None = None,
) -> tuple[dict[str, Cost], str]:
    """Measure the costs of every task of ``captured`` on ``device``. Returns them and a note on how they were measured.

    The costs that plans depend on most are measured first.

    Args:
        known: costs from an earlier profile; only what is missing is measured.
        timed: measure seconds as well as workspace; else they are 0.
        keep: called after every part with all costs so far, and the note.
    """
    costs = dict(known or {})
    missing = [t for t in captured.every_task() if t.cost and t.cost not in costs]
    if not missing:
        return costs, ""
    batch, small = request.batch, measured_batch(request, captured, device)
    note = f"measured at batch {batch}" if small >= batch else f"measured at batch {small}, scaled to {batch}"

    def found(part: dict[str, Cost]) -> None:
        costs.update(part)
        if keep:
            keep(costs, note)

    distinct = {task.cost: task for task in missing if task.copies != "start"}  # its begin shows no time
    if small >= batch:
        _measure(inputs_on(captured, device), captured, distinct, found, progress, timed)
        return costs, note
    scaling = Scaling(batch, small, min(2 * small, batch))
    makers, tasks = [], []
    for count in (scaling.measured, scaling.second):
        other = captured_for(replace(request, made_last=captured.made_last), with_batch(request.example, count))
        pairs = matched(captured, other)
        tasks.append({mine.cost: theirs for mine, theirs in pairs if mine.cost in distinct and mine.copies != "start"})
        makers.append(inputs_on(other, device, batch / count))
    large: dict[str, Cost] = {}
    twice = (lambda what, *counts: progress(f"workspace at twice the batch: {what}", *counts)) if progress else None
    _measure(makers[1], captured, tasks[1], large.update, twice, False)

    def scaled(part: dict[str, Cost]) -> None:
        found({key: scaling.scale(cost, large[key]) for key, cost in part.items()})

    _measure(makers[0], captured, tasks[0], scaled, progress, timed)
    return costs, note


def inputs_on(captured: Captured, device: torch.device, batches: float = 1.0) -> Inputs:
    """Inputs for measuring operators; on a GPU with the memory layouts that its operators produce."""
    return Inputs(as_made(captured, device) if device.type == "cuda" else captured, device, batches)


def _measure(
    maker: Inputs,
    captured: Captured,
    tasks: Mapping[str, Task],
    found: Callable[[dict[str, Cost]], None],
    progress: Progress | None,
    timed: bool,
) -> None:
    """Measure tasks, by the cost keys of ``captured``; every part that is complete is given to ``found``."""
    estimated = roofline(captured, limits_like(maker.device)) if timed else {}
    parts = in_parts(by_influence(tasks, captured, estimated), captured, estimated) if timed else [list(tasks)]
    before = 0
    for part in parts:

        def among(what: str, done: int, total: int, before: int = before, count: int = len(part)) -> None:
            if progress:
                progress(what, done + before * total // count, total * len(tasks) // count)

        found(measure({key: tasks[key] for key in part}, maker, timed=timed, progress=among))
        before += len(part)


def measured_batch(request: Request, captured: Captured, device: torch.device) -> int:
    """The batch that the request asks to measure at, or `profile_batch`."""
    return request.profile_batch or profile_batch(request, captured, device)


def profile_batch(request: Request, captured: Captured, device: torch.device) -> int:
    """The batch at which to measure: the wanted batch, or a smaller one if measuring would take too long or too much
    memory.

    A step that asks for values is measured at the wanted one: another batch has none.
    """
    if captured.answers:
        return request.batch
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


def profiled(
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
    known = usable(profile, device)
    base = known or to_profile({}, device, "")
    if device.type == "cuda" and not base.cublas_bytes:  # files of before do not say
        base = replace(base, cublas_bytes=measured_bytes(device))

    def with_measured(costs: Mapping[str, Cost], note: str) -> Profile:
        scaled = measured_batch(request, captured, device) < request.batch  # takes seconds: not where all is known
        return extended(base, costs, device, note, scaled=scaled)

    def keep(costs: dict[str, Cost], note: str) -> None:
        if save_profile:
            save_profile(with_measured(costs, note))

    costs, note = measured_costs(request, captured, device, known=base.costs, progress=progress, keep=keep)
    made = with_measured(costs, note) if note else base
    if save_profile and known and not note and made.cublas_bytes != known.cublas_bytes:
        save_profile(made)
    return replace(made, note=sources(captured, base, note))


def usable(profile: Profile | None, device: torch.device) -> Profile | None:
    """A profile of this device, if its costs were measured under the present settings and versions; else None, and a
    warning.
    """
    if profile and (changed := changed_settings(profile.settings, settings_of(device))):
        warnings.warn(
            f"the profile was measured with other settings, and costs differ with them: {changed}. All is measured "
            "anew and replaces it; to keep it, give another --profile",
            stacklevel=3,
        )
        return None
    return profile


def extended(
    base: Profile, costs: Mapping[str, Cost], device: torch.device, note: str, *, scaled: bool = False
) -> Profile:
    """A profile with costs that were measured just now, under the present settings; ``costs`` has those of before, too.

    Args:
        scaled: the new ones are from a smaller batch.
    """
    new = costs.keys() - base.costs.keys()
    return replace(
        base,
        costs=dict(costs),
        note=note,
        days={**base.days, **dict.fromkeys(new, today())},
        versions=versions(),
        settings=settings_of(device),
        scaled=base.scaled | new if scaled else base.scaled,
    )


def sources(captured: Captured, known: Profile, note: str) -> str:
    """Where a program's costs come from: how they were measured, how many are from earlier, and from which day."""
    keys = distinct_tasks(captured).keys()
    reused = keys & known.costs.keys()
    if not reused:
        return note
    day = known.measured_on(reused)
    said = f"{len(reused)} of {len(keys)} operators reused" + (f", measured on {day}" if day else "")
    return "; ".join(filter(None, (note or known.note, said)))


def as_filed(profile: Profile) -> Profile:
    """As a file holds it: without what `sources` has added to the note."""
    return replace(profile, note=re.sub(r"(; |^)\d+ of \d+ operators reused.*", "", profile.note))


def _completed(profile: Profile, captured: Captured, device: torch.device) -> Profile:
    """Complete a profile of another device with estimates, if the device's rates are known."""
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


def to_profile(costs: Mapping[str, Cost], device: torch.device, note: str) -> Profile:
    """A `Profile` of this machine."""
    return Profile(device_name(device), dict(costs), note, versions(), settings_of(device), measured_bytes(device))
