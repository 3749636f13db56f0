"""Plans the schedules of a model's blocks under one budget: rehearsal, a menu for each kind of block, one choice for all."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..capture.example_inputs import Example, device_of
from ..compiler.pipeline import Prepared, make_record, prepare, settled_for
from ..compiler.progress import Progress, announce
from ..compiler.sources import Cached
from ..errors import InfeasibleError, UsageError
from ..ir.schedule import Schedule
from ..ir.schedule_file import ScheduleRecord
from ..ir.simulate import simulate
from ..ir.units import Budget, format_bytes, format_seconds
from ..plan.baseline import plain_step
from ..plan.block_points import Point, efficient, menu, point_of
from ..plan.blocks import Moment, choose, peak_of, seconds_of, smallest
from ..plan.result import Plan
from .agreement import from_all, from_first
from .block_wrapper import BlockCall, is_sharded
from .step_memory import Blocks, Rehearsed, StepMemory

#: Choices that are made at most: each after a rehearsal that keeps what the one before it keeps.
ROUNDS = 3
#: Seconds for a menu in a quick plan.
QUICK_SECONDS = 10.0


@dataclass(frozen=True)
class BlockSettings:
    """How the schedules of blocks are planned; see `monet_like.auto_schedule`.

    Attributes:
        loss: from the model's result to a scalar; None: a loss that takes no memory.
        quick: costs that are partly estimated, and the local search instead of the integer program.
        together: the processes of the default group plan together.
    """

    budget: Budget
    mode: str
    solver: str
    time_limit_seconds: float
    gap: float
    optimizer: str = "none"
    loss: Callable[[Any], torch.Tensor] | None = None
    quick: bool = False
    together: bool = True
    verbose: bool | None = None


@dataclass(frozen=True)
class BlockPlan:
    """What the schedules of a model's blocks promise for the whole step.

    Attributes:
        peak_bytes: predicted; in several processes of the one that needs most.
        moment: of that peak, in words.
        budget_bytes: of the whole step.
        plain_peak_bytes: predicted for the model without schedules.
        seconds, plain_seconds: predicted, of all blocks together.
        kinds: how many different programs the blocks have, sizes included.
        points: by block; one of zeros where nothing has a gradient.
    """

    peak_bytes: int
    moment: str
    budget_bytes: int
    plain_peak_bytes: int
    seconds: float
    plain_seconds: float
    kinds: int
    points: tuple[Point, ...]


#: Of a block that has no gradient: plain PyTorch runs it, and the rest of the model counts it.
NOTHING = Point(Schedule((), (), ()), 0.0, 0, 0, 0)


def plan_blocks(of: Blocks, example: Example, settings: BlockSettings) -> BlockPlan:
    """Plan the schedules of all blocks and give each its own.

    Args:
        example: arguments of the whole model.

    Raises:
        InfeasibleError: no schedules fit; says what would.
        CaptureError, UsageError: a block cannot be planned.
    """
    started = time.monotonic()
    for block in of.blocks:
        block._block_call, block.record, block._block_planned = None, None, False
    step = StepMemory(of, example, settings.optimizer, settings.loss, settings.together)
    first = step.rehearsed(None)
    kinds = _kinds(of, first)
    _check_alike(of, kinds, settings.together)
    found: dict[str, Prepared] = {}
    sent = from_first(lambda: _menus(of, kinds, settings, found), together=settings.together)
    cublas = max(program["cublas_bytes"] for program in sent.values())
    menus = [[*map(_point, sent[kind.program][kind.text]["menu"])] if kind else [NOTHING] for kind in kinds]
    plain = [_point(sent[kind.program][kind.text]["plain"]) if kind else NOTHING for kind in kinds]
    plain_peak = cublas + peak_of(plain, step.rehearsed([p.shared for p in plain]).moments)[0]
    budget = settings.budget.of(plain_peak)
    points, peak, moment = _chosen(step, menus, first, budget - cublas, settings)
    records = from_first(lambda: _records(of, kinds, points, found), together=settings.together)
    for block, content in zip(of.blocks, records, strict=True):
        block.record = ScheduleRecord.of_content(content, "the plan") if content else None
        block._block_planned, block._block_sharded = True, is_sharded(block)
    calls = first.calls
    made = BlockPlan(
        peak + cublas, moment, budget, plain_peak, seconds_of(points, calls), seconds_of(plain, calls),
        len({kind.program for kind in kinds if kind}), points,
    )  # fmt: skip
    _tell(of, made, time.monotonic() - started, settings.verbose)
    return made


@dataclass(frozen=True)
class Kind:
    """Blocks of one kind have one menu.

    Attributes:
        program: a digest of their program and its sizes.
        held: values that the rest of the model holds (`held_values`).
    """

    program: str
    held: tuple[int, ...]

    @property
    def text(self) -> str:
        """``held`` as a key of plain data."""
        return f"held {self.held}"


def _kinds(of: Blocks, first: Rehearsed) -> list[Kind | None]:
    """The kind of every block; None if it has no gradient.

    Raises:
        UsageError: no block has one.
    """
    found = [
        None if (call := block._block_call) is None else Kind(_digest(call), tuple(sorted(first.held[number])))
        for number, block in enumerate(of.blocks)
    ]
    if not any(found):
        raise UsageError(
            f"no block of {type(of.model).__name__} has a gradient in its training step; give blocks with parameters that are "
            "trained, or whose inputs have gradients"
        )
    return found


def _digest(call: BlockCall) -> str:
    program = call.captured.program
    of = (
        program.fingerprint, [(value.bytes, value.spec) for value in program.values], [t.cost for t in call.captured.every_task()],
        call.captured.made_last, call.request.autocast, call.layout, call.inputs,
    )  # fmt: skip
    return hashlib.sha256(repr(of).encode()).hexdigest()


def _check_alike(of: Blocks, kinds: Sequence[Kind | None], together: bool) -> None:
    """Refuse processes whose blocks differ: one plan would not do for all.

    Raises:
        UsageError: in every process.
    """
    every = from_all([kind and [kind.program, kind.text] for kind in kinds], together=together)
    for rank, theirs in enumerate(every):
        if theirs != every[0]:
            different = next((n for n, (a, b) in enumerate(zip(theirs, every[0], strict=False)) if a != b), None)
            what = "the number of blocks" if different is None else of.names[different]
            raise UsageError(
                f"the processes have different models or inputs: {what} differs between rank 0 and rank {rank}, and one plan is made for "
                "all; give all the same shapes, or same_plan=False to let each plan for itself"
            )


def _menus(
    of: Blocks, kinds: Sequence[Kind | None], settings: BlockSettings, found: dict[str, Prepared]
) -> dict[str, dict[str, Any]]:
    """For every program the points of its menu, plain PyTorch's point and cuBLAS's workspaces, as plain data.

    Args:
        found: gets the programs with their costs.
    """
    menus: dict[str, dict[str, Any]] = {}
    device = device_of(of.model)
    with Progress(quiet=settings.verbose is False) as progress:
        for block, kind in zip(of.blocks, kinds, strict=True):
            call = block._block_call
            if kind is None or call is None:
                continue
            if kind.program not in found:
                found[kind.program] = _costs(call, device, settings, progress)
                menus[kind.program] = {"schedules": _schedules(call, found[kind.program], settings, progress)}
            ready, there = found[kind.program], menus[kind.program]
            if kind.text not in there:
                points = [
                    point_of(ready.captured.program, s, ready.costs, kind.held)
                    for s in map(_schedule, there["schedules"])
                ]
                plain = point_of(
                    *plain_step(ready.captured.plain, ready.costs, autograd_nodes=ready.captured.autograd_nodes),
                    kind.held,
                )
                there[kind.text] = {"menu": [*map(_content, efficient(points))], "plain": _content(plain)}
            there["cublas_bytes"] = ready.cublas_bytes or ready.variants_cublas_bytes
    return menus


def _costs(call: BlockCall, device: torch.device, settings: BlockSettings, progress: Progress) -> Prepared:
    """A block's program with its costs; all workspaces are measured at the whole batch."""
    source = Cached.of(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        ready = prepare(
            call.request, device, profile=source.known, save_profile=source.save, progress=progress.profiling,
            captured=call.captured, quick=settings.quick,
        )  # fmt: skip
        return settled_for(ready, call.request, device, lambda _: (), progress.profiling, everything=True)


def _schedules(call: BlockCall, ready: Prepared, settings: BlockSettings, progress: Progress) -> list[Any]:
    """The schedules of a block's menu, as plain data."""
    seconds = settings.time_limit_seconds
    points = menu(
        call.captured.program, ready.costs, solver=settings.solver, gap=settings.gap,
        strategy="heuristic" if settings.quick else "milp",
        time_limit_seconds=min(seconds, QUICK_SECONDS) if settings.quick else seconds,
        progress=progress.planning,
    )  # fmt: skip
    return [_listed(point.schedule) for point in points]


def _listed(schedule: Schedule) -> list[Any]:
    """A schedule as plain data."""
    return [list(schedule.forward), [list(tasks) for tasks in schedule.again], list(schedule.ways)]


def _schedule(content: Any) -> Schedule:
    forward, again, ways = content
    return Schedule(tuple(forward), tuple(map(tuple, again)), tuple(ways))


def _content(point: Point) -> list[Any]:
    """A point as plain data."""
    return [_listed(point.schedule), point.numbers, point.shared]


def _point(content: Any) -> Point:
    schedule, (seconds, carried, forward_peak, backward_peak), shared = content
    return Point(_schedule(schedule), seconds, carried, forward_peak, backward_peak, tuple(shared))


def _chosen(
    step: StepMemory, menus: Sequence[Sequence[Point]], first: Rehearsed, budget_bytes: int, settings: BlockSettings
) -> tuple[tuple[Point, ...], int, str]:
    """The fastest points that fit, with the peak of a step in which blocks keep exactly what these points keep.

    The first choice is made as if blocks kept all inputs and results, which is never less than they do; the next as if they
    kept what the choice before keeps. Each choice is judged by a rehearsal of its own.

    Raises:
        InfeasibleError: nothing fits; says what would.
    """
    moments, picked = first.moments, None
    best: tuple[float, int, str, tuple[Point, ...]] | None = None
    least: tuple[int, str] | None = None
    for _ in range(ROUNDS):
        before = picked
        work = partial(_picked, menus, moments, budget_bytes, first.calls, settings)
        picked = from_first(work, together=settings.together)
        if picked == before:
            break
        points = tuple(menu[p] for menu, p in zip(menus, picked, strict=True))
        moments = step.rehearsed([p.shared for p in points]).moments
        peak, moment = peak_of(points, moments)
        seconds = seconds_of(points, first.calls)
        least = min(least or (peak, moment), (peak, moment))
        if peak <= budget_bytes and (best is None or seconds < best[0]):
            best = seconds, peak, moment, points
    if best is None:
        assert least is not None
        raise InfeasibleError(
            f"no schedules of the blocks fit the step into {format_bytes(budget_bytes)}: with the smallest that were found it "
            f"needs {format_bytes(least[0])} ({least[0]} bytes), {least[1]}; give that much, a smaller batch or shorter sequences, "
            "or shard the model over more processes",
            least[0],
            least[1],
        )
    return best[3], best[1], best[2]


def _picked(
    menus: Sequence[Sequence[Point]],
    moments: Sequence[Moment],
    budget_bytes: int,
    calls: Sequence[int],
    settings: BlockSettings,
) -> list[int]:
    """The place of a point in every menu: the fastest that fit, or those with the lowest peak."""
    limit = settings.time_limit_seconds
    try:
        points = choose(
            menus, moments, budget_bytes, calls=calls, solver=settings.solver, time_limit_seconds=limit
        ).points
    except InfeasibleError:
        points = smallest(menus, moments, solver=settings.solver, time_limit_seconds=limit).points
    return [menu.index(point) for menu, point in zip(menus, points, strict=True)]


def _records(
    of: Blocks, kinds: Sequence[Kind | None], points: Sequence[Point], found: Mapping[str, Prepared]
) -> list[Any]:
    """For every block the content of its schedule file; None if it has no gradient."""
    contents: list[Any] = []
    for block, kind, point in zip(of.blocks, kinds, points, strict=True):
        call = block._block_call
        if kind is None or call is None:
            contents.append(None)
            continue
        ready = found[kind.program]
        report = simulate(ready.captured.program, point.schedule, ready.costs)
        made = make_record(call.request, ready, Plan(point.schedule, report, "feasible"), report.peak_bytes)
        contents.append(replace(made, inputs=call.inputs, layout=call.layout).content())
    return contents


def _tell(of: Blocks, plan: BlockPlan, seconds: float, verbose: bool | None) -> None:
    """Log in one line what the schedules promise; also on stderr, if that is wanted."""
    announce(
        f"{type(of.model).__name__}, {len(of.blocks)} blocks of {plan.kinds} kinds: peak {format_bytes(plan.peak_bytes)} instead "
        f"of {format_bytes(plan.plain_peak_bytes)}, {plan.moment}; blocks {format_seconds(plan.seconds)} instead of "
        f"{format_seconds(plan.plain_seconds)} (predicted); planned in {format_seconds(seconds)}",
        verbose,
    )
