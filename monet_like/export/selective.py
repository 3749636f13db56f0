"""`checkpoint_policy`: the best plan that PyTorch's selective activation checkpointing can express, as its
``context_fn``.

PyTorch asks a policy about every operator of a checkpointed region, in the order of execution, whether to save its
results. `monet_like.export.selection` says what the mechanism then does, and chooses. Here the operators that PyTorch
calls are lined up with those of the captured program, and the choice becomes an answer for each call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import CheckpointPolicy as Answer
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ..capture.captured import Captured
from ..capture.layers import layers_of
from ..capture.precision import autocast_as
from ..capture.trees import tensors_of
from ..compiler.prepared import Prepared, with_workspaces_of
from ..compiler.request import Request
from ..errors import ScheduleError, UsageError
from ..ir.defaults import SOLVER
from ..ir.program import Program
from ..ir.schedule_file import ScheduleRecord
from ..ir.units import format_bytes, format_seconds
from ..plan.baseline import plain_step
from ..replay.verify.steps import real_example
from ..runtime.operators import overload
from .checkpointed import Item, Region, StepOfRegions
from .policy_file import RegionDecisions, SelectivePlan, read_policy, write_policy
from .recording import Operator, find_regions, record_operators
from .selection import Selection, choose


class SelectivePolicy:
    """Answers of a plan to selective activation checkpointing; give it as ``context_fn``.

    It is called once for every checkpointed region of a step: the n-th call serves the n-th region of the plan. Regions
    must therefore be called in the order of the plan in every step, as layers are. Gradients do not depend on it.

    Attributes:
        plan: the decisions, and the predicted peak and time.
    """

    def __init__(self, plan: SelectivePlan) -> None:
        self.plan = plan
        self._next = 0

    @property
    def peak_bytes(self) -> int:
        """Predicted peak memory of the step."""
        return self.plan.peak_bytes

    @property
    def seconds(self) -> float:
        """Predicted time of the step."""
        return self.plan.seconds

    def __call__(self) -> tuple[Any, Any]:
        """The contexts of the forward and the recomputation of the next region."""
        region = self.plan.regions[self._next % len(self.plan.regions)]
        self._next += 1
        contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(
            _Answers(region), allow_cache_entry_mutation=region.in_place
        )
        return contexts

    def save(self, path: str | Path) -> None:
        """Write the decisions as JSON, for `monet_like.checkpoint_policy`.

        Raises:
            UsageError: it cannot be written.
        """
        write_policy(self.plan, Path(path))

    def __repr__(self) -> str:
        plan = self.plan
        calls = [decision for region in plan.regions for _, decision in region.operators]
        return (
            f"SelectivePolicy({len(plan.regions)} regions of {plan.model}, {sum(calls)} of {len(calls)} calls saved: "
            f"peak {format_bytes(plan.peak_bytes)}, step {format_seconds(plan.seconds)} predicted; the full plan: "
            f"{format_bytes(plan.full_peak_bytes)}, {format_seconds(plan.full_seconds)}; plain PyTorch: "
            f"{format_bytes(plan.plain_peak_bytes)}, {format_seconds(plan.plain_seconds)})"
        )


class _Answers:
    """The policy function of one call of a region."""

    def __init__(self, region: RegionDecisions) -> None:
        self.region = region
        self.places = {False: 0, True: 0}

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> Answer:
        place = self.places[context.is_recompute]
        self.places[context.is_recompute] += 1
        known = self.region.operators
        wanted, saved = known[place] if place < len(known) else ("", False)
        if str(op) != wanted:
            raise ScheduleError(
                f"the checkpoint policy does not match {self.region.module or 'the model'}: call {place + 1} is {op}, "
                f"and the plan has {wanted or f'only {len(known)} calls'} there; plan again with this model, these "
                "inputs and this device"
            )
        return Answer.MUST_SAVE if saved else Answer.MUST_RECOMPUTE


class Planned(Protocol):
    """What a policy needs of a `monet_like.job.solved.SolvedPlan`."""

    @property
    def record(self) -> ScheduleRecord:
        """The schedule, its budget and what is predicted."""

    ready: Prepared
    request: Request
    device: torch.device


def checkpoint_policy(
    plan: Planned | str | Path,
    *,
    regions: str | Sequence[str] = "",
    solver: str = SOLVER,
    time_limit_seconds: float = 60.0,
) -> SelectivePolicy:
    """The fastest plan that ``torch.utils.checkpoint`` can run within the budget of ``plan``, as a ``context_fn``.

    Each operator of a region is saved, or runs once more when the backward of its region begins. That is less than the
    full plan can do, so the predicted step is slower, or the budget is not reached; `SelectivePolicy` has both
    predictions. Nothing is compiled, and gradients and random masks equal plain PyTorch's. Side effects, such as batch
    norm's statistics, happen once.

    Args:
        plan: of `monet_like.problem`, which gives the model, its inputs, the costs and the budget; or a file that
            `SelectivePolicy.save` has written.
        regions: names of the modules that are checkpointed, in which ``*`` stands for one part of a name:
            ``"model.layers.*"``. "": the whole model in one region.
        solver: of the integer program.
        time_limit_seconds: of its solution.

    Raises:
        UsageError: a region cannot be checkpointed, or the model's operators are not those of the plan.
        InfeasibleError: the mechanism cannot reach the budget; the message says what it reaches.
        ScheduleFileError: the file is none of these.
    """
    if isinstance(plan, str | Path):
        return SelectivePolicy(read_policy(Path(plan)))
    patterns = (regions,) if isinstance(regions, str) else tuple(regions)
    given = plan.record, plan.ready, plan.request, plan.device
    return SelectivePolicy(selective_plan(*given, patterns, solver=solver, time_limit_seconds=time_limit_seconds))


def selective_plan(
    record: ScheduleRecord,
    ready: Prepared,
    request: Request,
    device: torch.device,
    patterns: Sequence[str],
    *,
    draws_saved: bool = False,
    solver: str = SOLVER,
    time_limit_seconds: float = 60.0,
) -> SelectivePlan:
    """The decisions of `checkpoint_policy`, for a schedule and the prepared program of its model.

    Args:
        patterns: names of regions, in which ``*`` stands for one part of a name.
        draws_saved: save the result of every operator that draws random numbers, for those who cannot repeat a draw.
    """
    ready, called, names = recorded(record, ready, request, device, patterns)
    step, groups = checkpointing_step(ready, called, names, draws_saved=draws_saved)
    choice = choose(step, record.budget_bytes, solver=solver, time_limit_seconds=time_limit_seconds)
    saved = {groups[i] for i in choice.saved}
    return SelectivePlan(
        **predictions(record, choice),
        regions=tuple(_decided(name, [o for o in called if o.region == k], saved) for k, name in enumerate(names)),
    )


def predictions(record: ScheduleRecord, choice: Selection) -> dict[str, Any]:
    """The fields of `Predictions`: of a choice within the budget of a schedule."""
    return {
        "model": record.model,
        "device": record.device,
        "budget_bytes": record.budget_bytes,
        "peak_bytes": choice.report.peak_bytes,
        "seconds": choice.report.seconds,
        "bound_seconds": choice.bound_seconds,
        "full_peak_bytes": record.peak_bytes,
        "full_seconds": record.seconds,
        "plain_peak_bytes": record.plain_peak_bytes,
        "plain_seconds": record.plain_seconds,
    }


def recorded(
    record: ScheduleRecord, ready: Prepared, request: Request, device: torch.device, patterns: Sequence[str]
) -> tuple[Prepared, tuple[Operator, ...], list[str]]:
    """The program with the workspaces of a schedule, the operators that PyTorch calls in a forward of its model, and
    the names of the regions that the patterns name.
    """
    if request.target is not None:
        raise UsageError(
            "this plan is for a GPU that is not here, where PyTorch calls other operators; make the policy there"
        )
    model, example = request.model, request.example
    ready, names = with_workspaces_of(record, ready), find_regions(model, patterns)
    if any(isinstance(t, FakeTensor) for t in tensors_of(example)):
        example = real_example(example, device)
    with autocast_as(request.autocast, device):
        return ready, record_operators(model, example, names), names


def _decided(name: str, called: Sequence[Operator], saved: Collection[int | None]) -> RegionDecisions:
    """The decisions for a region, given the groups of operators that are saved."""
    answers = tuple((o.op, o.changes_state or o.group in saved) for o in called)
    kept = sum(o.bytes for o in called if o.group in saved)
    in_place = any(o.changes_state or (o.changes and o.group in saved) for o in called)
    return RegionDecisions(name, answers, kept, in_place)


def checkpointing_step(
    ready: Prepared, called: Sequence[Operator], names: Sequence[str], *, draws_saved: bool = False
) -> tuple[StepOfRegions, list[int]]:
    """Plain PyTorch's step with its regions and items, and the group of operators that each item is.

    Args:
        draws_saved: random draws must be saved.

    Raises:
        UsageError: the operators are not those of the program.
    """
    program, schedule, costs = plain_step(
        _without_states(ready.captured.plain), ready.costs, autograd_nodes=ready.captured.autograd_nodes
    )
    tasks_of = _lined_up(program, ready.captured, called)
    region_of = {o.group: o.region for o in called if o.group is not None and o.region is not None}
    groups = [g for g in region_of if tasks_of.get(g)]
    number = {g: i for i, g in enumerate(groups)}
    items = []
    for g in groups:
        own = [o for o in called if o.group == g]
        draws = any(o.draws for o in own)
        once = draws_saved if draws else any(program.tasks[p].runs == "first" for p in tasks_of[g])
        implied = {number[o.group] for o in called if g in o.early and o.group in number}
        if draws:  # the random state of the recomputation is right until the first draw that is left out
            later = groups[number[g] + 1 :]
            drawing = {o.group for o in called if o.draws and o.region == region_of[g]}
            implied.update(number[h] for h in later if h in drawing)
        # Inside autocast PyTorch may have casts of weights from a cache, so that their calls cannot be counted.
        never = any(o.op in _CASTS for o in own)
        items.append(Item(region_of[g], tuple(sorted(tasks_of[g])), once, tuple(sorted(implied)), never))
    layers = layers_of(ready.captured, program)
    regions = []
    for k, name in enumerate(names):
        tasks = sorted(p for item in items if item.region == k for p in item.tasks)
        slots = [
            s for s, ways in enumerate(program.slots) if ways[0].writes and _within(layers[ways[0].writes[0]], name)
        ]
        regions.append(Region(name, tuple(tasks), tuple(slots)))
    # Checkpointing keeps the CPU's random state for every region; a GPU's budget does not count it.
    states = len(names) * torch.get_rng_state().nbytes if ready.captured.device.type == "cpu" else 0
    held = _held(program, called, tasks_of)
    return StepOfRegions(
        program, schedule, costs, ready.extra_bytes + states, tuple(regions), tuple(items), held
    ), groups


def _held(program: Program, called: Sequence[Operator], tasks_of: Mapping[int, set[int]]) -> dict[int, tuple[int, ...]]:
    """For tasks of regions, the values of the same region that exist until then, as they did in the recording."""
    over = {task.overwrites for task in program.tasks}
    at: list[int] = []  # the last task of the region that has run when a call has returned
    for place, operator in enumerate(called):
        same = place and called[place - 1].region == operator.region
        mine = tasks_of.get(operator.group, ()) if operator.group is not None else ()
        at.append(max([at[-1] if same else -1, *(p for p in mine)]))
    found: dict[int, list[int]] = {}
    for place, operator in enumerate(called):
        if operator.region is None or operator.group is None or not operator.until:
            continue
        values = [v for p in sorted(tasks_of.get(operator.group, ())) for v in program.tasks[p].writes]
        values = [v for v in values if v not in over and program.values[v].bytes]
        untils = operator.until if len(operator.until) == len(values) else [max(operator.until)] * len(values)
        for v, until in zip(values, untils, strict=True):
            there = next(q for q in range(until, place - 1, -1) if called[q].region == operator.region)
            if at[there] > max(tasks_of[operator.group]):
                found.setdefault(at[there], []).append(v)
    return {p: tuple(dict.fromkeys(values)) for p, values in found.items()}


def _without_states(program: Program) -> Program:
    """The program without the bytes of random states, of which checkpointing keeps one for each region."""
    states = {
        out.name
        for task in program.tasks
        for call in task.calls
        if call.op == "monet_like.get_rng_state"
        for out in call.outs
        if out
    }
    values = tuple(replace(value, bytes=0) if v in states else value for v, value in enumerate(program.values))
    return replace(program, values=values)


def _within(layer: str, region: str) -> bool:
    return not region or layer == region or layer.startswith(f"{region}.")


#: Casts, which autocast makes of weights once and then has in a cache.
_CASTS = frozenset({"aten._to_copy.default"})
#: Operators that only reserve memory, which capture and PyTorch do in several ways.
_RESERVING = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
#: Operators that PyTorch takes apart before it asks a policy.
_PARTS = {"reshape": "clone", "contiguous": "clone"}


def _base(op: str) -> str:
    """The name by which an operator and its form in place are the same."""
    name = op.split(".")[1] if "." in op else op
    name = name if name.startswith("_") and name.endswith("__") else name.removesuffix("_")
    return _PARTS.get(name, name)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A call of a task that PyTorch must make, too; ``shape`` is of its result, where that is known."""

    task: int
    base: str
    shape: tuple[int, ...] | None

    def is_call(self, operator: Operator) -> bool:
        return self.base == _base(operator.op) and self.shape in (None, operator.shape)


def _lined_up(program: Program, captured: Captured, called: Sequence[Operator]) -> dict[int, set[int]]:
    """The tasks of every group of operators. PyTorch calls the program's operators in order, and others in between.

    Raises:
        UsageError: a task is called by nobody.
    """
    wanted: deque[_Wanted] = deque()
    for p, task in enumerate(program.tasks):
        if task.runs != "again" and task.variant == "aten" and any(program.values[v].bytes for v in task.writes):
            calls = [call.op for call in task.calls if _computes(call.op)]
            shapes = [None] * (len(calls) - 1) + [captured.metas[task.writes[0]].shape]
            wanted += (_Wanted(p, _base(op), shape) for op, shape in zip(calls, shapes, strict=True))
    found: dict[int, set[int]] = {}
    for operator in called:
        if operator.group is not None and wanted and wanted[0].is_call(operator):
            found.setdefault(operator.group, set()).add(wanted.popleft().task)
    if wanted:
        missing = program.tasks[wanted[0].task]
        raise UsageError(
            f"the operators that PyTorch calls are not those of the plan, which has {wanted[0].base} for "
            f"{missing.name} there; a policy can be made for models whose forward calls the same operators in training "
            "as when it was captured"
        )
    return found


def _computes(op: str) -> bool:
    """Whether a call of a task makes something: no view, no bookkeeping of random states, no reserved memory."""
    if not op.startswith("aten.") or _base(op) in _RESERVING:
        return False
    return not overload(op).is_view
