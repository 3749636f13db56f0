"""Costs in seconds instead of minutes: workspaces measured, times measured as far as an allowance goes, and else
estimated.

Every operator runs once for its workspace, at a small batch where a step is long. Then one operator of each kind is
timed, and after these those on which plans depend most, one pass, until the allowance is spent. The others have the
time that the device's rates give, times the ratio of measured to estimated time of the timed operators of the same
kind.

Workspaces do not grow in proportion to the batch: libraries take other algorithms. So what was measured at a small
batch is only a guess, for the search. Before a peak is promised, `settled` measures at the whole batch the workspace of
every task that could reach that peak.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from ..capture.captured import Captured, distinct_tasks
from ..capture.example_inputs import with_batch
from ..errors import ProfileError
from ..ir.profile_file import Profile
from ..ir.program import REFUSED, Cost, Task
from ..ir.simulate import Running
from ..profile.devices import DeviceLimits, device_name
from ..profile.profiler import Progress, measure, measure_partly
from ..profile.rates import measured_limits
from ..profile.roofline import roofline
from ..profile.scaling import matched
from ..profile.work import touched_bytes
from .costs import inputs_on, profile_batch, profiled, sources, to_profile, usable
from .influence import by_influence
from .prepared import Prepared
from .request import Request, captured_for

#: Wall seconds for workspaces and times, and the least of them that times have where the workspaces take long.
ALLOWANCE_SECONDS, LEAST_SECONDS = 5.0, 1.5
#: Running every operator once should not be estimated to take longer than this; else a smaller batch is measured.
RUN_SECONDS = 1.5
#: The most workspace that a task is taken to need, in units of what its operators read and write, where a small batch
#: shows less. Measured on ResNet-50, MobileNetV2 and ViT: at most 1.7.
MOST_WORKSPACE = 3


#: Costs that are partly estimated; and the keys of those whose workspace was measured at a small batch, with the most
#: bytes that it may be.
Partly = tuple[Profile, Mapping[str, int]]


def quick_costs(
    request: Request,
    captured: Captured,
    device: torch.device,
    profile: Profile | None = None,
    progress: Progress | None = None,
    seconds: float = math.inf,
) -> Partly:
    """Costs of all tasks in about `ALLOWANCE_SECONDS`; what a profile of this device knows is not measured.

    Args:
        seconds: wall seconds, if fewer are left: then nothing more is timed.

    Raises:
        ProfileError: an operator failed.
    """
    started = time.monotonic()
    known = usable(profile, device) or to_profile({}, device, "")
    estimated = roofline(captured, measured_limits(device))
    possible = {key: cost.seconds for key, cost in estimated.items() if cost != REFUSED}
    tasks = distinct_tasks(captured)
    distinct = {key: tasks[key] for key in possible if key not in known.costs and tasks[key].copies != "start"}
    kinds = {key: kind_of(task) for key, task in tasks.items()}
    ordered = one_of_each_kind_first(by_influence(distinct, captured, estimated), kinds)
    batch, small = request.batch, request.profile_batch or quick_batch(request, captured, device, possible)
    ratio, other, tasks = 1.0, captured, distinct
    if ordered and small < batch:
        ratio = batch / small
        other = captured_for(replace(request, made_last=captured.made_last), with_batch(request.example, small))
        tasks = {mine.cost: theirs for mine, theirs in matched(captured, other) if mine.cost in distinct}
    found, timed = measure_partly(
        {key: tasks[key] for key in ordered},
        inputs_on(other, device, ratio),
        _Allowance(started, seconds),
        progress=progress,
    )
    guesses, most = _at_whole_batch(captured, other, distinct, tasks, found, ratio)
    most |= most_workspaces(captured, known)
    measured = {key: found[key].seconds * ratio for key in timed}
    measured |= {key: cost.seconds for key, cost in known.costs.items() if key in possible and cost != REFUSED}
    filled = _filled(possible, measured, kinds)
    costs = {key: Cost(filled[key], guesses.get(key, 0)) for key in possible if found.get(key) != REFUSED}
    costs = {**dict.fromkeys(estimated, REFUSED), **costs, **known.costs}
    note = f"{len(timed)} of {len(ordered)} operators timed quickly at batch {small}" if ordered else ""
    if len(timed) < len(ordered):
        note += ", the others estimated"
    made = replace(to_profile(costs, device, ""), note=sources(captured, known, note))
    return made, most


def scaled_costs(captured: Captured, earlier: Prepared, device: torch.device, profile: Profile | None = None) -> Partly:
    """Costs of a program from those of the same program at other sizes: nothing is measured.

    Seconds grow as the device's rates tell, workspaces as what the operator touches. What a profile of this device
    knows is taken from there.
    """
    known, limits = usable(profile, device) or to_profile({}, device, ""), measured_limits(device)
    here, there = roofline(captured, limits), roofline(earlier.captured, limits)
    costs, most = dict[str, Cost](), dict[str, int]()
    for mine, theirs in matched(captured, earlier.captured):
        if mine.cost in costs or not mine.cost:
            continue
        cost = earlier.costs[theirs.cost]
        if REFUSED in (cost, here[mine.cost], there[theirs.cost]):
            costs[mine.cost] = REFUSED
            continue
        touched = touched_bytes(captured, mine)
        workspace = int(cost.workspace_bytes * touched / max(1, touched_bytes(earlier.captured, theirs)))
        slower = here[mine.cost].seconds / max(1e-12, there[theirs.cost].seconds)
        costs[mine.cost] = Cost(cost.seconds * slower, workspace)
        if mine.copies != "start" and mine.cost not in known.costs:
            most[mine.cost] = max(workspace, MOST_WORKSPACE * touched)
    made = to_profile({**costs, **known.costs}, device, "")
    note = sources(captured, known, "estimated from those at other sizes")
    return replace(made, note=note), most | most_workspaces(captured, known)


def most_workspaces(captured: Captured, profile: Profile) -> dict[str, int]:
    """The most that workspaces may be that a profile has scaled from a smaller batch, by cost key."""
    found = {}
    for key, task in distinct_tasks(captured).items():
        if key in profile.scaled and profile.costs[key] != REFUSED and task.copies != "start":
            found[key] = max(profile.costs[key].workspace_bytes, MOST_WORKSPACE * touched_bytes(captured, task))
    return found


class _Allowance:
    """Tells when the time for measuring is spent; the first call is when timing begins.

    Args:
        seconds: there are no more than these.
    """

    def __init__(self, started: float, seconds: float) -> None:
        self.ends, self.latest, self._asked = started + ALLOWANCE_SECONDS, started + seconds, False

    def __call__(self) -> bool:
        now = time.monotonic()
        if not self._asked:
            self.ends, self._asked = min(self.latest, max(self.ends, now + LEAST_SECONDS)), True
        return now >= self.ends


def quick_batch(request: Request, captured: Captured, device: torch.device, seconds: Mapping[str, float]) -> int:
    """The batch at which every operator is run once: the wanted one, or less where that would take long."""
    by_time = max(2, math.floor(request.batch * RUN_SECONDS / max(sum(seconds.values()), 1e-9)))
    most = profile_batch(request, captured, device)
    return most if captured.answers else min(by_time, most)


def _at_whole_batch(
    captured: Captured,
    other: Captured,
    distinct: Mapping[str, Task],
    tasks: Mapping[str, Task],
    found: Mapping[str, Cost],
    ratio: float,
) -> tuple[dict[str, int], dict[str, int]]:
    """Workspaces at the whole batch: guesses, and the most they may be; none for the latter where they are exact."""
    if ratio == 1.0:
        return {key: cost.workspace_bytes for key, cost in found.items()}, {}
    guesses, most = dict[str, int](), dict[str, int]()
    for key, cost in found.items():
        if cost != REFUSED:
            touched = touched_bytes(captured, distinct[key])
            growth = touched / max(1, touched_bytes(other, tasks[key])) if cost.workspace_bytes else 1.0
            guesses[key] = int(cost.workspace_bytes * growth)
            most[key] = max(int(cost.workspace_bytes * ratio), MOST_WORKSPACE * touched)
    return guesses, most


def _filled(
    estimated: Mapping[str, float], measured: Mapping[str, float], kinds: Mapping[str, str]
) -> dict[str, float]:
    """Measured seconds; for other operators estimates, corrected by how measured ones of the same kind compare to
    theirs.
    """
    ratios: dict[str, list[float]] = defaultdict(list)
    for key, seconds in measured.items():
        if estimated[key] > 0 and seconds > 0:
            ratios[kinds[key]].append(math.log(seconds / estimated[key]))
    overall = statistics.median([ratio for some in ratios.values() for ratio in some] or [0.0])
    factors = {kind: math.exp(statistics.median(some)) for kind, some in ratios.items()}
    return {
        key: measured.get(key, seconds * factors.get(kinds[key], math.exp(overall)))
        for key, seconds in estimated.items()
    }


def one_of_each_kind_first(ordered: Sequence[str], kinds: Mapping[str, str]) -> list[str]:
    """The first key of every kind, then the others: what is timed of a kind corrects all estimates of it."""
    first: dict[str, str] = {}
    for key in ordered:
        first.setdefault(kinds[key], key)
    return list(dict.fromkeys((*first.values(), *ordered)))


def kind_of(task: Task) -> str:
    """The name of a task's last operator, and whether it is a grouped convolution: rates of these are far
    from others'.
    """
    call = task.calls[-1]
    place = {"aten.convolution.default": 8, "aten.convolution_backward.default": 9}.get(call.op)
    return f"{call.op} in groups" if place is not None and call.args[place] > 1 else call.op


#: The simulator's steps of a schedule, given costs.
Steps = Callable[[Mapping[str, Cost]], Iterable[Running]]


def settled(
    captured: Captured,
    device: torch.device,
    costs: Mapping[str, Cost],
    guessed: Mapping[str, int],
    steps: Steps,
    progress: Progress | None = None,
    *,
    everything: bool = False,
) -> tuple[dict[str, Cost], dict[str, int]]:
    """Measure at the whole batch the guessed workspaces that could reach the peak of a schedule.

    Args:
        steps: of the schedule.
        everything: measure all that is guessed.

    Returns:
        The costs, and what is still guessed: nothing of it can reach that peak.
    """
    costs, guessed, tasks = dict(costs), dict(guessed), distinct_tasks(captured)
    while unsure := list(guessed) if everything else _unsure(list(steps(costs)), costs, guessed):
        try:
            maker = inputs_on(captured, device)
            exact = measure({key: tasks[key] for key in unsure}, maker, timed=False, progress=progress)
        except ProfileError:  # it does not run by itself at this size: the most that it may need is what counts
            exact = {key: Cost(0.0, guessed[key]) for key in unsure}
        for key in unsure:
            costs[key] = replace(costs[key], workspace_bytes=exact[key].workspace_bytes)
            del guessed[key]
    return costs, guessed


def _unsure(steps: Sequence[Running], costs: Mapping[str, Cost], guessed: Mapping[str, int]) -> list[str]:
    """Keys of guessed workspaces with which a step would exceed the peak if they were as large as they may be."""
    peak = max((moment.step.bytes for moment in steps), default=0)
    keys = (moment.task.cost for moment in steps if _at_most(moment, costs, guessed) > peak)
    return list(dict.fromkeys(keys))


def _at_most(moment: Running, costs: Mapping[str, Cost], guessed: Mapping[str, int]) -> int:
    key = moment.task.cost
    return moment.step.bytes + guessed[key] - costs[key].workspace_bytes if key in guessed else 0


def priced(
    request: Request,
    captured: Captured,
    device: torch.device,
    profile: Profile | DeviceLimits | None,
    save_profile: Callable[[Profile], None] | None,
    progress: Progress | None,
    *,
    quick: bool,
    seconds: float,
    earlier: Prepared | None = None,
) -> Partly:
    """The costs of a program, and the keys of those whose workspace is guessed.

    Args:
        seconds: wall seconds, if the costs are to be quick.
        earlier: the same program at other sizes, whose costs are taken then.
    """
    if quick and not isinstance(profile, DeviceLimits) and (profile is None or profile.device == device_name(device)):
        if earlier is None:
            return quick_costs(request, captured, device, profile, progress, seconds)
        return scaled_costs(captured, earlier, device, profile)
    found = profiled(request, captured, device, profile, save_profile, progress)
    return found, most_workspaces(captured, found) if found.device == device_name(device) else {}
