"""Seconds and workspace bytes of all tasks of a program: measured, estimated, or read from a profile."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

import psutil
import torch

from ..capture.captured import Captured
from ..capture.example_inputs import with_batch
from ..errors import ProfileError
from ..ir.profile_file import Profile
from ..ir.program import Cost, Task
from ..profile.cublas import measured_bytes
from ..profile.devices import DEVICES, DeviceLimits, device_name
from ..profile.made_layouts import as_made
from ..profile.profiler import Progress, measure
from ..profile.roofline import roofline
from ..profile.scaling import Scaling, matched
from ..profile.settings import changed_settings, settings_of, versions
from ..profile.task_inputs import Inputs
from .request import Request, captured_for

#: Measuring every operator should not be estimated to take longer than this (it takes several times that); else it is done at a smaller batch.
PROFILE_SECONDS = 12.0


def measured_costs(
    request: Request,
    captured: Captured,
    device: torch.device,
    *,
    known: Mapping[str, Cost] | None = None,
    timed: bool = True,
    progress: Progress | None = None,
) -> tuple[dict[str, Cost], str]:
    """Measure the costs of every task of ``captured`` on ``device``. Returns them and a note on how they were measured.

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
    """Inputs for measuring operators; on a GPU with the memory layouts that its operators produce."""
    return Inputs(as_made(captured, device) if device.type == "cuda" else captured, device, batches)


def _measure(
    maker: Inputs,
    pairs: list[tuple[Task, Task]],
    costs: dict[str, Cost],
    progress: Progress | None,
    label: str,
    timed: bool,
) -> None:
    """Measure the second task of every pair for the cost key of the first; ``label`` is shown with the progress."""
    whole = (pair for pair in pairs if pair[0].copies != "start")  # what is only begun shows no time
    distinct = {mine.cost: theirs for mine, theirs in whole if mine.cost not in costs}
    labelled = (lambda what, done, total: progress(f"{label}{what}", done, total)) if progress else None
    costs.update(measure(distinct, maker, timed=timed, progress=labelled))


def profile_batch(request: Request, captured: Captured, device: torch.device) -> int:
    """The batch at which to measure: the wanted batch, or a smaller one if measuring would take too long or too much memory."""
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
