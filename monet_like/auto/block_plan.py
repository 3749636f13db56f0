"""Plans the schedules of a model's blocks under one budget: rehearsal, a menu for each kind of block, one choice for
all.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ..capture.checks import is_sharded
from ..capture.example_inputs import device_of
from ..capture.trace.alone import one_at_a_time
from ..compiler.prepared import Prepared
from ..compiler.progress import Progress, announce
from ..errors import InfeasibleError, ScheduleFileError, warn_caller
from ..ir.schedule import Schedule
from ..ir.schedule_file import ScheduleRecord
from ..ir.step import Moment, Point, Step, bytes_on_host, moments_of, seconds_of
from ..ir.units import Budget
from ..plan.bound.pieces import block_relaxation
from ..plan.step.choice import Choice
from ..plan.step.proof import BOUND_SECONDS, CHOICE_SECONDS, Chooser
from ..profile.card_budget import on_card
from ..replay.wrapper import ScheduleWrapper
from .agreement import all_agree, all_do, gathered, planned_by, processes
from .block_menus import (
    MENUS_SHARE,
    Deadline,
    Kind,
    check_alike,
    kinds_of,
    menus_of,
    own_point,
    plain_point,
    record_of,
)
from .block_shares import OwnPlans, Share
from .compiled_menus import compiled_menu
from .kept_plans import NOTHING, KeptPlan, StepKey, found_or_planned, here, is_near, most_of_rest
from .offloaded import NOT_PINNED, can_offload, link_rate, lone_in_all, offload, on_host, room_on_host
from .planning import Settings
from .promise import BlockPlan
from .rehearsal.counted import Changed
from .rehearsal.memory import Blocks, StepMemory, WholeStep
from .streamed import in_words, stream, streaming_of, why_not_more
from .whole_plan import is_of

#: Choices that are made at most: each after a rehearsal that keeps what the one before it keeps.
ROUNDS = 3
#: Wall seconds for all bounds of a quick plan.
QUICK_BOUND_SECONDS = 4.0


@one_at_a_time
def plan_blocks(of: Blocks, whole: WholeStep, settings: Settings) -> BlockPlan:
    """Plan the schedules of all blocks and give each its own.

    Args:
        whole: the training step of the model.

    Raises:
        InfeasibleError: no schedules fit; says what would.
        CaptureError, UsageError: a block cannot be planned.
    """
    for block in of.blocks:
        block.take_plan(None)
        block.let_go_of_trained()  # or else each rehearsal would, and put them back
    if settings.budget.is_card:
        device = device_of(of.model)
        mine = all_do(lambda: on_card(settings.budget, device, of.model, whole.example).bytes, settings.sharing)
        settings = replace(settings, budget=Budget(min(gathered(mine, settings.sharing))))
    with Progress(quiet=settings.verbose is False, first="rehearse") as progress:
        memory = all_do(lambda: StepMemory(of, whole, settings.optimizer, settings.sharing), settings.sharing)
        try:
            made, how = _planned_with(of, memory, settings, progress)
        finally:
            memory.close()
    _tell(of, made, how, settings.verbose)
    return made


def _planned_with(
    of: Blocks, memory: StepMemory, settings: Settings, progress: Progress, *, offloads: bool = True
) -> tuple[BlockPlan, str]:
    """`plan_blocks` with what counts the memory of the step; and how the plan came to be, in words."""
    sharing = settings.sharing
    first = memory.rehearsed(None)
    memory.host_bytes = room_on_host(of, first.step, settings) if offloads else 0
    lone = lone_in_all(memory, settings) if memory.host_bytes else {}
    kinds = all_do(lambda: kinds_of(of, first, lone), sharing)
    check_alike(of, kinds, sharing)
    memory.streaming = streaming_of(of, settings)
    first = replace(first, step=replace(first.step, streaming=memory.streaming, host_bytes=memory.host_bytes))
    link = link_rate(of, memory.host_bytes, settings)

    def planned(settings: Settings) -> KeptPlan:
        plan = partial(_planned, memory, first.step, kinds, settings, progress, link)
        return settings.earlier.tried(plan, sharing)

    key, found = partial(_key, kinds, first.step, memory), partial(_kept_before, memory, first.step)
    kept, how = found_or_planned(key, settings, found, planned, sharing)
    if not all_agree(can_offload(of, first.step, kept), sharing):
        warn_caller(NOT_PINNED)
        return _planned_with(of, memory, settings, progress, offloads=False)
    promise = replace(kept.promise, seconds=seconds_of(first.step, kept.promise.points))
    stream(of, first.step, promise.points, sharing)
    offload(of, kept)
    own = OwnPlans(settings, link)
    for block, record, point, kind in zip(of.blocks, kept.records, promise.points, kinds, strict=True):
        block.record, call, block._block_plan = record, block._block_call, promise
        block._block_planned, block._block_sharded = True, is_sharded(block)
        block._begun, block._block_own = True, own
        block._on_new_input, block._shows_progress = settings.on_new_input, settings.verbose
        if record is not None and call is not None and kind is not None:
            block._block_share = Share.of(point, call.as_in(record), kind)
            block._block_changed = Changed.of(kind.changed, call.as_in(record))
    return promise, f"{on_host(bytes_on_host(first.step, promise.points))}; {how}{settings.told}"


def _key(kinds: Sequence[Kind | None], first: Step, memory: StepMemory, settings: Settings) -> StepKey:
    return StepKey(
        tuple(kind and (kind.program, kind.text) for kind in kinds),
        tuple(piece.calls for piece in first.pieces),
        tuple(moment.what for moment in first.moments),
        max(gathered(memory.resident_bytes, settings.sharing)),
        (*settings.key, settings.backend, memory.streaming and memory.streaming.key, memory.host_bytes > 0),
        here(device_of(memory.of.model)),
        processes() if settings.sharing == "same" else 1,
    )


def _kept_before(memory: StepMemory, first: Step, key: StepKey, settings: Settings) -> tuple[KeptPlan, str] | None:
    """The plan in the cache, where it is there in all processes, fits, and needs what it did."""
    of, sharing, rest = memory.of, settings.sharing, most_of_rest(first)
    whose = f"the blocks of {type(of.model).__name__} are"
    find = partial(key.find, settings, lambda kept: _fits(of, kept) and is_near(rest, kept.rest_bytes), whose)
    found = planned_by(find, sharing, tuple[KeptPlan, str] | None)
    if not all_agree(found is not None, sharing):
        return None
    assert found is not None
    reused = _reused(found[0], memory)
    return None if not all_agree(reused is not None, sharing) or reused is None else (reused, found[1])


def _fits(of: Blocks, kept: KeptPlan) -> bool:
    """Check that a plan from the cache has a schedule for every block, and that each fits the block's program."""
    if len(kept.records) != len(of.blocks):
        raise ScheduleFileError(f"the file has {len(kept.records)} blocks, the model {len(of.blocks)}")
    for block, record, point in zip(of.blocks, kept.records, kept.promise.points, strict=True):
        call = block._block_call
        if (call is None) != (record is None):
            raise ScheduleFileError(f"the file has no schedule for {block._block_name}, or one too many")
        if call is not None and record is not None:
            captured = call.as_in(record)
            if not is_of(record, captured, device_of(of.model)):
                raise ScheduleFileError(f"in the file {block._block_name} has a schedule that does not fit its program")
            if not {*point.shared, *point.offloaded} <= set(range(len(captured.program.values))):
                raise ScheduleFileError(f"in the file {block._block_name} keeps a value that it does not have")
    return True


def _reused(kept: KeptPlan, memory: StepMemory) -> KeptPlan | None:
    """The plan from the cache with its peak at this start; None if the rest of the model takes another amount of
    memory.
    """
    points, planned = kept.promise.points, kept.promise.peak_bytes
    step = memory.step_with(points)
    kept = replace(kept, promise=kept.promise.at(moments_of(step, points), kept.cublas_bytes))
    peak = kept.promise.peak_bytes
    fits = peak <= kept.promise.budget_bytes and bytes_on_host(step, points) <= memory.host_bytes
    return kept if fits and is_near(peak, planned) else None


class _Planner:
    """Finds schedules of a model's blocks, in the process that plans; its results are plain data.

    Attributes:
        found: the blocks' programs with their costs; empty in processes that do not plan.
        compiles: points of Inductor's graphs are asked for; not where weights may come from the host.
    """

    def __init__(
        self, of: Blocks, kinds: Sequence[Kind | None], settings: Settings, progress: Progress, link: float,
        *, streams: bool,
    ) -> None:  # fmt: skip
        self.compiles = settings.backend == "inductor" and not streams
        self.of, self.kinds, self.settings, self.progress, self.link = of, kinds, settings, progress, link
        self.found: dict[str, Prepared] = {}
        self.menus: dict[Kind, tuple[Point, ...]] = {}
        self.lone: dict[Kind, frozenset[int]] = {}
        self.compiled: dict[Kind, tuple[Point, ...]] = {}  # schedules of those whose menus are of Inductor's graphs
        self.deadline = Deadline.of(settings)
        self.choice_seconds = max(settings.time_limit_seconds, CHOICE_SECONDS)
        self.bound_seconds = min(QUICK_BOUND_SECONDS if settings.quick else BOUND_SECONDS, settings.time_limit_seconds)
        self.chooser: Chooser | None = None

    def plain(self) -> tuple[tuple[Point, ...], int]:
        """Make the menus; plain PyTorch's points by block, and cuBLAS's workspaces."""
        given = self.settings, self.found, self.deadline.part(MENUS_SHARE), self.progress, self.link, self.lone
        self.menus = menus_of(self.of, self.kinds, *given)
        if self.compiles:
            self._compile()
        plain = {kind: plain_point(self.found[kind.program], kind) for kind in self.menus}
        cublas = max(ready.cublas_bytes or ready.variants_cublas_bytes for ready in self.found.values())
        return tuple(plain[kind] if kind else NOTHING for kind in self.kinds), cublas

    def _compile(self) -> None:
        """Put points of Inductor's graphs in the place of schedules, for kinds that it can compile. It takes as long as
        Inductor does, in no time of the plan's.
        """
        started = time.monotonic()
        for block, kind in zip(self.of.blocks, self.kinds, strict=True):
            call = block._block_call
            if kind is None or call is None or kind in self.compiled or kind.changed:
                continue
            name = type(block._model).__name__
            self.progress.at("plan", f"{name} in Inductor", len(self.compiled), len(self.menus))
            points = compiled_menu(
                block, call, self.found[kind.program], kind.held, self.menus[kind], self.lone[kind], self.link
            )
            if points:
                self.compiled[kind], self.menus[kind] = self.menus[kind], points
        self.deadline = Deadline(self.deadline.ends + time.monotonic() - started)

    def admit_schedules(self) -> bool:
        """Put schedules beside the points of Inductor's graphs; whether there are such points."""
        self.menus.update((kind, (*self.menus[kind], *schedules)) for kind, schedules in self.compiled.items())
        self.chooser = None
        return bool(self.compiled)

    def pick(self, least: Step, budget_bytes: int, moments: Sequence[Moment], known: Choice | None) -> Choice:
        """The fastest points that fit, or those with the lowest peak.

        Args:
            least: the step with bases that no schedules make smaller.
            moments: to choose with.
            known: the fastest choice so far; None: none fits.
        """
        most = min(self.choice_seconds + self.bound_seconds, self.deadline.left())
        self.progress.at("choose", f"a point for each of {len(self.kinds)} blocks", most=most)
        if self.chooser is None:
            self.chooser = self._chooser(least, budget_bytes)
            self.chooser.prove(None)
        elif known is not None:
            self.chooser.prove(known)
        return self.chooser.fastest(moments)

    def _chooser(self, least: Step, budget_bytes: int) -> Chooser:
        made = {key: block_relaxation(ready.captured.program, ready.costs) for key, ready in self.found.items()}
        return Chooser(
            least.with_menus(self.menus[kind] if kind else [NOTHING] for kind in self.kinds),
            [made[kind.program] if kind and kind not in self.compiled else None for kind in self.kinds],
            budget_bytes, self._point,
            self.settings.solver, choice_seconds=self.choice_seconds, bound_seconds=self.bound_seconds,
            seconds_left=self.deadline.left,
        )  # fmt: skip

    def _point(self, block: int, schedule: Schedule) -> Point:
        kind = self.kinds[block]
        assert kind is not None
        ready = self.found[kind.program]
        return own_point(ready.captured, schedule, ready.costs, kind.held, self.lone[kind], kind.changed)

    def bound(self, best: Choice) -> float:
        """No schedules that fit have fewer seconds."""
        assert self.chooser is not None
        self.chooser.prove(best)
        return self.chooser.bounded(best).bound_seconds

    def records(self, points: Sequence[Point] | None) -> tuple[ScheduleRecord | None, ...]:
        """For every block its schedule; None if it has no gradient, or where nobody has a schedule."""
        if points is None:
            return (None,) * len(self.kinds)
        calls = [block._block_call for block in self.of.blocks]
        every = zip(calls, self.kinds, points, strict=True)
        return tuple(record_of(call, self.found[kind.program], p) if call and kind else None for call, kind, p in every)


def _planned(
    memory: StepMemory, first: Step, kinds: Sequence[Kind | None], settings: Settings, progress: Progress, link: float
) -> KeptPlan:
    """Plan: a menu for each kind of block, and one choice for all.

    Raises:
        InfeasibleError: nothing fits; says what would. ``smallest``: the `KeptPlan` that would.
    """
    sharing, streams = settings.sharing, memory.streaming is not None
    planner = _Planner(memory.of, kinds, settings, progress, link, streams=streams)
    plain, cublas = planned_by(planner.plain, sharing, tuple[tuple[Point, ...], int])
    plain_choice = Choice.of(memory.step_with(plain), plain)
    plain_peak = plain_choice.peak_bytes
    budget = settings.budget.of(plain_peak + cublas)
    pick = partial(planner.pick, memory.least_step(first), budget - cublas)
    best = _chosen(memory, first, pick, budget - cublas, settings, plain_choice)
    if settings.backend == "inductor":  # where no graphs fit, schedules of some blocks may
        fits = best is not plain_choice and best.peak_bytes <= budget - cublas
        if not all_agree(fits, sharing) and planned_by(planner.admit_schedules, sharing, bool):
            best = _chosen(memory, first, pick, budget - cublas, settings, plain_choice)

    def kept(budget_bytes: int, bound_seconds: float) -> KeptPlan:
        followed = None if best is plain_choice else best.points
        records = planned_by(partial(planner.records, followed), sharing, tuple[ScheduleRecord | None, ...])
        promise = BlockPlan(
            best.peak_bytes, best.moment, budget_bytes, plain_peak + cublas, best.seconds, plain_choice.seconds,
            len({kind.program for kind in kinds if kind}), best.points, best.status, best.reason, bound_seconds,
        ).at(best.moments, cublas)  # fmt: skip
        return KeptPlan(promise, datetime.date.today().isoformat(), cublas, most_of_rest(first), records)

    counted = replace(best, peak_bytes=best.peak_bytes + cublas)
    more = why_not_more(memory.of, memory.streaming)
    try:
        all_do(partial(counted.check_fits, budget, settings.solver, more), sharing)
    except InfeasibleError as error:
        error.smallest = kept(counted.peak_bytes, 0.0)
        raise
    return kept(budget, planned_by(partial(planner.bound, best), sharing, float))


def _chosen(
    memory: StepMemory, first: Step, pick: Callable[..., Choice], budget_bytes: int, settings: Settings, plain: Choice
) -> Choice:
    """The fastest points that fit, with the peak of a step in which blocks keep exactly what these points keep; those
    with the lowest peak where none fit.

    The first choice is made as if blocks kept all inputs and results, which is never less than they do; the next as if
    they kept what the choice before keeps. Each choice is judged by a rehearsal of its own.

    Args:
        pick: `_Planner.pick`, given moments and the best choice.
        plain: blocks without schedules, which are taken if nothing else fits.
    """
    step, before = first, None
    best: Choice | None = None
    least: Choice | None = None
    for _ in range(ROUNDS):
        picked = planned_by(partial(pick, step.moments, best), settings.sharing, Choice)
        if all_agree(before == (before := (picked.points, picked.status, picked.reason)), settings.sharing):
            break
        step = memory.step_with(picked.points)
        found = Choice.of(step, picked.points, picked.status, picked.reason)
        if least is None or found.peak_bytes < least.peak_bytes:
            least = found
        if found.peak_bytes <= budget_bytes and (best is None or found.seconds < best.seconds):
            best = found
    assert least is not None
    if best is None and plain.peak_bytes <= budget_bytes:
        best = plain
    return best or min(least, plain, key=lambda choice: choice.peak_bytes)


def _tell(of: Blocks, plan: BlockPlan, how: str, verbose: bool | None) -> None:
    """Log in one line what the schedules promise; also on stderr, if that is wanted."""
    model = of.model._model if isinstance(of.model, ScheduleWrapper) else of.model
    announce(f"{type(model).__name__}, {plan}{in_words(of)}{how}", verbose)
