"""Plans the schedules of a model's blocks under one budget: rehearsal, a menu for each kind of block, one choice for
all.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..capture.checks import is_sharded
from ..capture.example_inputs import device_of
from ..compiler.prepared import Prepared
from ..compiler.progress import announce
from ..compiler.sources import keep
from ..errors import InfeasibleError, ScheduleFileError, warn_caller
from ..ir.schedule import Schedule
from ..ir.schedule_file import ScheduleRecord
from ..ir.step import Moment, Point, Step, peak_of, seconds_of
from ..ir.units import format_bytes, format_seconds
from ..plan.bound.pieces import block_relaxation
from ..plan.step.choice import Choice, ChoiceStatus
from ..plan.step.proof import BOUND_SECONDS, CHOICE_SECONDS, Chooser
from ..profile.devices import device_name
from ..profile.settings import settings_digest
from .agreement import all_agree, all_do, gathered, planned_by, processes
from .block_menus import (
    MENUS_SHARE,
    BlockSettings,
    Deadline,
    Kind,
    check_alike,
    content_of,
    kinds_of,
    menus_of,
    own_point,
    plain_point,
    read_points,
    records_of,
)
from .block_shares import OwnPlans, Share
from .kept_blocks import NOTHING, BlockKey, KeptBlocks, most_of_rest
from .rehearsal.memory import Blocks, StepMemory, WholeStep
from .whole_plan import is_of

#: Choices that are made at most: each after a rehearsal that keeps what the one before it keeps.
ROUNDS = 3
#: Wall seconds for all bounds of a quick plan.
QUICK_BOUND_SECONDS = 4.0


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
        status: of the choice among the blocks' menus. ``optimal``: the fastest, proven; ``feasible``: the solver's
            best, not proven; ``searched``: by a local search, because the solver failed or found nothing in time. Such
            a plan is not kept in the cache.
        reason: where it was ``searched``: what the solver said.
        bound_seconds: no schedules of the blocks that fit are faster, whether they are in the menus or not, by the
            memory that the rest of the model took when this was planned; 0: nothing is known.
    """

    peak_bytes: int
    moment: str
    budget_bytes: int
    plain_peak_bytes: int
    seconds: float
    plain_seconds: float
    kinds: int
    points: tuple[Point, ...]
    status: ChoiceStatus = "optimal"
    reason: str = ""
    bound_seconds: float = 0.0

    @property
    def gap(self) -> float:
        """By how much of its seconds the plan may be slower than the fastest of all schedules that fit; 1: nothing is
        known.
        """
        return 1 - self.bound_seconds / self.seconds if self.seconds else 0.0


def plan_blocks(of: Blocks, whole: WholeStep, settings: BlockSettings) -> BlockPlan:
    """Plan the schedules of all blocks and give each its own.

    Args:
        whole: the training step of the model.

    Raises:
        InfeasibleError: no schedules fit; says what would.
        CaptureError, UsageError: a block cannot be planned.
    """
    for block in of.blocks:
        block.take_plan(None)
    memory = all_do(lambda: StepMemory(of, whole, settings.optimizer, settings.sharing), settings.sharing)
    try:
        return _planned_with(of, memory, settings)
    finally:
        memory.close()


def _planned_with(of: Blocks, memory: StepMemory, settings: BlockSettings) -> BlockPlan:
    """`plan_blocks` with what counts the memory of the step."""
    started, sharing = time.monotonic(), settings.sharing
    first = memory.rehearsed(None)
    kinds = all_do(lambda: kinds_of(of, first), sharing)
    check_alike(of, kinds, sharing)
    key = _key(of, kinds, first.step, memory, settings)
    found = planned_by(partial(_kept_content, of, first.step, key, settings), sharing)
    answer = None
    if all_agree(bool(found), sharing):
        reused = _reused(KeptBlocks.of_content(found, "the plan"), memory)
        answer = reused if all_agree(reused is not None, sharing) else None
    how = "" if answer is None else f"reused, planned on {answer[0].planned}"
    if answer is None:
        if _refines(key, settings):
            settings = replace(settings, quick=False)
        answer = _planned(of, memory, first.step, kinds, settings)
        new, place = answer[0], key.path(quick=settings.quick)
        if new.status != "searched" and any(new.records):  # else the solver may do better at the next start
            planned_by(lambda: keep(new, place), sharing)
            _planned_here.add(place)
        later = REFINED if settings.quick and settings.refines else ""
        how = f"planned in {format_seconds(time.monotonic() - started)}{later}"
    kept, peak, moment, reason = answer
    own = OwnPlans(settings)
    for block, record, point, kind in zip(of.blocks, kept.records, kept.points, kinds, strict=True):
        block.record, call = record, block._block_call
        block._block_planned, block._block_sharded = True, is_sharded(block)
        block._begun, block._on_new_input, block._block_own = True, settings.on_new_input, own
        if record is not None and call is not None and kind is not None:
            block._block_share = Share.of(point, call.as_in(record), kind.held)
    made = BlockPlan(
        peak, moment, kept.budget_bytes, kept.plain_peak_bytes, seconds_of(first.step, kept.points), kept.plain_seconds,
        kept.kinds, kept.points, kept.status, reason, kept.bound_seconds,
    )  # fmt: skip
    _tell(of, made, how, settings.verbose)
    return made


#: Said of a quick plan.
REFINED = " (quickly; all is measured and refined at the next start, or now with effort='full')"
#: Plans that this process has made: to call again is no new start.
_planned_here: set[Path] = set()


def _refines(key: BlockKey, settings: BlockSettings) -> bool:
    """Whether a full plan is made now because an earlier start has left a quick one."""
    quick = key.path(quick=True)
    return settings.refines and settings.quick and quick not in _planned_here and quick.exists()


#: The schedules of all blocks, with the peak of the whole step, the moment of that peak, and `BlockPlan.reason`.
Answer = tuple[KeptBlocks, int, str, str]


def _key(
    of: Blocks, kinds: Sequence[Kind | None], first: Step, memory: StepMemory, settings: BlockSettings
) -> BlockKey:
    """Everything that the plan depends on, but for the memory of the rest of the model."""
    device = device_of(of.model)
    return BlockKey(
        tuple(kind and (kind.program, kind.text) for kind in kinds),
        tuple(piece.calls for piece in first.pieces),
        tuple(moment.what for moment in first.moments),
        max(gathered(memory.resident_bytes, settings.sharing)),
        (
            settings.budget.bytes or settings.budget.share, settings.mode, settings.solver.upper(), settings.gap,
            settings.time_limit_seconds, settings.optimizer,
        ),
        (device_name(device), settings_digest(device)),
        processes() if settings.sharing == "same" else 1,
    )  # fmt: skip


def _kept_content(of: Blocks, first: Step, key: BlockKey, settings: BlockSettings) -> Any:
    """The plan in the cache that fits, as plain data; None if there is none, or a quick one that is to be refined.

    A full plan serves where a quick one is wanted.
    """
    for quick in (False, True) if settings.quick and not _refines(key, settings) else (False,):
        path = key.path(quick=quick)
        if not path.exists():
            continue
        try:
            kept = KeptBlocks.load(path)
            _check_kept(of, kept)
        except ScheduleFileError as error:
            warn_caller(f"the blocks of {type(of.model).__name__} are planned anew: {error}")
            continue
        if kept.same_rest(most_of_rest(first)):
            return kept.content()
    return None


def _check_kept(of: Blocks, kept: KeptBlocks) -> None:
    """Check that a plan from the cache has a schedule for every block, and that each fits the block's program.

    Raises:
        ScheduleFileError: it has not.
    """
    if len(kept.records) != len(of.blocks):
        raise ScheduleFileError(f"the file has {len(kept.records)} blocks, the model {len(of.blocks)}")
    for block, record, point in zip(of.blocks, kept.records, kept.points, strict=True):
        call = block._block_call
        if (call is None) != (record is None):
            raise ScheduleFileError(f"the file has no schedule for {block._block_name}, or one too many")
        if call is not None and record is not None:
            captured = call.as_in(record)
            if not is_of(record, captured, device_of(of.model)):
                raise ScheduleFileError(f"in the file {block._block_name} has a schedule that does not fit its program")
            if not set(point.shared) <= set(range(len(captured.program.values))):
                raise ScheduleFileError(f"in the file {block._block_name} keeps a value that it does not have")


def _reused(kept: KeptBlocks, memory: StepMemory) -> Answer | None:
    """The plan from the cache with its peak at this start; None if the rest of the model takes another amount of
    memory.
    """
    peak, moment = peak_of(memory.step_with(kept.points), kept.points)
    peak += kept.cublas_bytes
    return (kept, peak, moment, "") if peak <= kept.budget_bytes and kept.same_peak(peak) else None


class _Planner:
    """Finds schedules of a model's blocks, in the process that plans; its results are plain data.

    Attributes:
        found: the blocks' programs with their costs; empty in processes that do not plan.
    """

    def __init__(self, of: Blocks, kinds: Sequence[Kind | None], settings: BlockSettings) -> None:
        self.of, self.kinds, self.settings = of, kinds, settings
        self.found: dict[str, Prepared] = {}
        self.menus: dict[Kind, tuple[Point, ...]] = {}
        self.deadline = Deadline.of(settings)
        self.chooser: Chooser | None = None

    def plain(self) -> Any:
        """Make the menus; plain PyTorch's points by block, and cuBLAS's workspaces."""
        menus = self.deadline.part(MENUS_SHARE)
        self.menus = menus_of(self.of, self.kinds, self.settings, self.found, menus)
        plain = {kind: plain_point(self.found[kind.program], kind) for kind in self.menus}
        cublas = max(ready.cublas_bytes or ready.variants_cublas_bytes for ready in self.found.values())
        return {**content_of([plain[kind] if kind else NOTHING for kind in self.kinds]), "cublas_bytes": cublas}

    def pick(self, least: Step, budget_bytes: int, moments: Sequence[Moment], known: Choice | None) -> Any:
        """The fastest points that fit, or those with the lowest peak; `Choice.status` and its reason.

        Args:
            least: the step with bases that no schedules make smaller.
            moments: to choose with.
            known: the fastest choice so far; None: none fits.
        """
        if self.chooser is None:
            self.chooser = self._chooser(least, budget_bytes)
            self.chooser.prove(None)
        elif known is not None:
            self.chooser.prove(known)
        found = self.chooser.fastest(moments)
        return {**content_of(found.points), "status": found.status, "reason": found.reason}

    def _chooser(self, least: Step, budget_bytes: int) -> Chooser:
        settings = self.settings
        made = {key: block_relaxation(ready.captured.program, ready.costs) for key, ready in self.found.items()}
        bounds = min(QUICK_BOUND_SECONDS if settings.quick else BOUND_SECONDS, settings.time_limit_seconds)
        return Chooser(
            least.with_menus(self.menus[kind] if kind else [NOTHING] for kind in self.kinds),
            [made[kind.program] if kind else None for kind in self.kinds], budget_bytes, self._point, settings.solver,
            choice_seconds=max(settings.time_limit_seconds, CHOICE_SECONDS), bound_seconds=bounds,
            seconds_left=self.deadline.left,
        )  # fmt: skip

    def _point(self, block: int, schedule: Schedule) -> Point:
        kind = self.kinds[block]
        assert kind is not None
        return own_point(self.found[kind.program], schedule, kind)

    def bound(self, best: Choice) -> float:
        """No schedules that fit have fewer seconds."""
        assert self.chooser is not None
        self.chooser.prove(best)
        return self.chooser.bounded(best).bound_seconds

    def records(self, points: Sequence[Point] | None) -> list[Any]:
        """For every block the content of its schedule file; None if it has no gradient, or where nobody has
        a schedule.
        """
        return records_of(self.of, self.kinds, points, self.found) if points else [None] * len(self.kinds)


def _planned(
    of: Blocks, memory: StepMemory, first: Step, kinds: Sequence[Kind | None], settings: BlockSettings
) -> Answer:
    """Plan: a menu for each kind of block, and one choice for all.

    Where nothing of menus for other sizes fits, new ones are found.
    """
    return settings.earlier.tried(partial(_planned_by_menus, of, memory, first, kinds, settings), settings.sharing)


def _planned_by_menus(
    of: Blocks, memory: StepMemory, first: Step, kinds: Sequence[Kind | None], settings: BlockSettings
) -> Answer:
    planner, sharing = _Planner(of, kinds, settings), settings.sharing
    sent = planned_by(planner.plain, sharing)
    plain, cublas = read_points(sent), sent["cublas_bytes"]
    plain_peak, plain_moment = peak_of(memory.step_with(plain), plain)
    budget = settings.budget.of(plain_peak + cublas)
    plain_choice = Choice(plain, plain_peak, plain_moment, seconds_of(first, plain), 0.0, "feasible")
    pick = partial(planner.pick, memory.least_step(first), budget - cublas)
    best = _chosen(memory, first, pick, budget - cublas, settings, plain_choice)
    bound = planned_by(partial(planner.bound, best), sharing)
    contents = planned_by(partial(planner.records, None if best is plain_choice else best.points), sharing)
    records = tuple(ScheduleRecord.of_content(content, "the plan") if content else None for content in contents)
    kept = KeptBlocks(
        datetime.date.today().isoformat(), budget, best.peak_bytes + cublas, plain_peak + cublas, plain_choice.seconds,
        cublas,
        len({kind.program for kind in kinds if kind}), most_of_rest(first), best.points, records, best.status, bound,
    )  # fmt: skip
    return kept, kept.peak_bytes, best.moment, best.reason


def _chosen(
    memory: StepMemory, first: Step, pick: Callable[..., Any], budget_bytes: int, settings: BlockSettings, plain: Choice
) -> Choice:
    """The fastest points that fit, with the peak of a step in which blocks keep exactly what these points keep.

    The first choice is made as if blocks kept all inputs and results, which is never less than they do; the next as if
    they kept what the choice before keeps. Each choice is judged by a rehearsal of its own.

    Args:
        pick: `_Planner.pick`, given moments and the best choice.
        plain: blocks without schedules, which are taken if nothing else fits.

    Raises:
        InfeasibleError: nothing fits; says what would.
    """
    step, picked = first, None
    best: Choice | None = None
    least: Choice | None = None
    for _ in range(ROUNDS):
        before = picked
        picked = planned_by(partial(pick, step.moments, best), settings.sharing)
        if all_agree(picked == before, settings.sharing):
            break
        points = read_points(picked)
        step = memory.step_with(points)
        seconds, status, reason = seconds_of(step, points), picked["status"], picked["reason"]
        found = Choice(points, *peak_of(step, points), seconds, 0.0, status, reason)
        if least is None or found.peak_bytes < least.peak_bytes:
            least = found
        if found.peak_bytes <= budget_bytes and (best is None or found.seconds < best.seconds):
            best = found
    assert least is not None
    if best is None and plain.peak_bytes <= budget_bytes:
        best = plain
    all_do(partial(_check_fits, best is not None, least, budget_bytes, settings.solver), settings.sharing)
    assert best is not None
    return best


def _check_fits(fits: bool, least: Choice, budget_bytes: int, solver: str) -> None:
    """Refuse a budget into which no choice fits; ``least``: that with the lowest peak that was found.

    Raises:
        InfeasibleError: says what would do.
    """
    if not fits:
        peak, moment = least.peak_bytes, least.moment
        without = (
            f"; they were found without the solver {solver} ({least.reason})" if least.status == "searched" else ""
        )
        raise InfeasibleError(
            f"no schedules of the blocks fit the step into {format_bytes(budget_bytes)}: with the smallest that were "
            f"found it needs {format_bytes(peak)} ({peak} bytes), {moment}; give that much, a smaller batch or shorter "
            f"sequences, or shard the model over more processes{without}",
            peak,
            moment,
        )


#: What is said of a choice whose speed is not proven.
_UNPROVEN = {
    "feasible": ", the choice of schedules not proven best",
    "searched": ", schedules chosen by a local search instead of the solver",
}


def _tell(of: Blocks, plan: BlockPlan, how: str, verbose: bool | None) -> None:
    """Log in one line what the schedules promise; also on stderr, if that is wanted."""
    proof = (
        f", within {100 * plan.gap:.2f} % of a bound for all schedules" if plan.bound_seconds and plan.seconds else ""
    )
    announce(
        f"{type(of.model).__name__}, {len(of.blocks)} blocks of {plan.kinds} kinds: peak "
        f"{format_bytes(plan.peak_bytes)} instead of {format_bytes(plan.plain_peak_bytes)}, {plan.moment}; blocks "
        f"{format_seconds(plan.seconds)} instead of {format_seconds(plan.plain_seconds)} "
        f"(predicted{_UNPROVEN.get(plan.status, '')}{proof}); {how}",
        verbose,
    )
