"""Menus of blocks: which blocks are of one kind, the schedules that each kind may take, and what these cost."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import torch

from ..capture.captured import Captured
from ..capture.example_inputs import device_of
from ..compiler.floor import delays_cost
from ..compiler.pipeline import make_record, prepare, settled_for
from ..compiler.prepared import Prepared
from ..compiler.progress import Progress
from ..compiler.request import Request
from ..compiler.sources import Cached
from ..errors import UsageError
from ..ir.program import Cost
from ..ir.schedule import Schedule, kept_values
from ..ir.schedule_file import ScheduleRecord
from ..ir.simulate import simulate
from ..ir.step import Point
from ..plan.baseline import plain_step
from ..plan.result import Plan
from ..plan.step.menus import efficient, menu, offloading, owning, point_of
from ..replay.segments import handed_gradients
from .agreement import Sharing, gathered
from .block import BlockCall
from .kept_pieces import KeptPiece, keep_costs, keep_menu
from .kept_plans import digest_of
from .offloaded import Lone, offloadable
from .planning import Settings
from .rehearsal.memory import Blocks, Rehearsed

#: Wall seconds for a quick plan: costs, menus, bounds and choices of all kinds of blocks. The capture, the first
#: rehearsal and one run of each operator, without which there is no plan, come on top. The manual has this number
#: (docs/blocks.md, `monet_like.auto_schedule`).
QUICK_SECONDS = 20.0
#: The share of them that costs and menus may take, and that of a kind's costs.
MENUS_SHARE, COSTS_SHARE = 0.7, 0.4


@dataclass(frozen=True)
class Deadline:
    """When a part of a quick plan must be there, on the clock `time.monotonic`; a full plan has limits for each part
    instead.
    """

    ends: float

    @staticmethod
    def of(settings: Settings) -> Deadline:
        """That of a plan that begins now."""
        return Deadline(time.monotonic() + QUICK_SECONDS if settings.quick else inf)

    def left(self) -> float:
        """Wall seconds."""
        return max(0.0, self.ends - time.monotonic())

    def part(self, share: float) -> Deadline:
        """The end of a part that begins now and may take this share of what is left."""
        return Deadline(time.monotonic() + share * self.left())


@dataclass(frozen=True)
class Kind:
    """Blocks of one kind have one menu.

    Attributes:
        program: a digest of their program and its sizes.
        held: values that the rest of the model holds (`held_values`).
        changed: inputs and results that the rest of the model changes in place (`changed_values`): of what a schedule
            keeps of them there is a copy.
        lone: inputs that are gone when the block lets go of them, each with the programs of which it is a result
            (`lone_inputs`); none: nothing is offloaded.
    """

    program: str
    held: tuple[int, ...]
    changed: tuple[int, ...] = ()
    lone: tuple[tuple[int, tuple[str, ...]], ...] = ()

    @property
    def text(self) -> str:
        """All but the program as a key of plain data."""
        return f"held {self.held}, changed {self.changed}, lone {self.lone}"


def kinds_of(of: Blocks, first: Rehearsed, lone: Lone) -> list[Kind | None]:
    """The kind of every block; None if it has no gradient."""
    calls = [block._block_call for block in of.blocks]
    programs = [None if call is None else digest_of_call(call) for call in calls]
    found: list[Kind | None] = []
    for number, program in enumerate(programs):
        if program is None:
            found.append(None)
            continue
        mine = sorted(lone.get(number, {}).items())
        makers = ((v, tuple(sorted({programs[block] or "" for block in blocks}))) for v, blocks in mine)
        held, changed = (tuple(sorted(values.get(number, ()))) for values in (first.held, first.changed))
        found.append(Kind(program, held, changed, tuple(makers)))
    if not any(found):
        raise UsageError(
            f"no block of {type(of.model).__name__} has a gradient in its training step; give blocks with parameters "
            "that are trained, or whose inputs have gradients, in training mode (model.train()) and without reentrant "
            "checkpointing around them (model.gradient_checkpointing_disable()): a schedule says what runs again"
        )
    return found


def digest_of_call(call: BlockCall) -> str:
    """A digest of a call's program and its sizes."""
    return digest_of(call.captured, call.request.autocast, call.layout, call.inputs)


def check_alike(of: Blocks, kinds: Sequence[Kind | None], sharing: Sharing) -> None:
    """Refuse processes whose blocks differ: one plan would not do for all."""
    every = gathered([kind and [kind.program, kind.text] for kind in kinds], sharing)
    for rank, theirs in enumerate(every):
        if theirs != every[0]:
            different = next((n for n, (a, b) in enumerate(zip(theirs, every[0], strict=False)) if a != b), None)
            what = "the number of blocks" if different is None else of.names[different]
            raise UsageError(
                f"the processes have different models or inputs: {what} differs between rank 0 and rank {rank}, and "
                "one plan is made for all; give all the same shapes, or same_plan=False to let each plan for itself"
            )


def menus_of(
    of: Blocks,
    kinds: Sequence[Kind | None],
    settings: Settings,
    found: dict[str, Prepared],
    deadline: Deadline,
    progress: Progress,
    link: float,
    lone: dict[Kind, frozenset[int]],
) -> dict[Kind, tuple[Point, ...]]:
    """The menu of every kind of block.

    Args:
        found: gets the programs with their costs.
        lone: gets the inputs that each kind has alone, where something may be offloaded.
        link: bytes a second to and from the host, each way; 0: nothing is offloaded.
        deadline: of all menus; each of those that are still to be made may take as long as the others.
    """
    menus: dict[Kind, tuple[Point, ...]] = {}
    schedules: dict[str, tuple[Schedule, ...]] = {}
    device, programs = device_of(of.model), len({kind.program for kind in kinds if kind})
    for block, kind in zip(of.blocks, kinds, strict=True):
        call = block._block_call
        if kind is None or call is None or kind in menus:
            continue
        if kind.program not in found:
            to_make = programs - len(found)
            mine = deadline.part(1 / to_make)
            ready = costs_of_call(call, kind.program, device, settings, progress, mine.part(COSTS_SHARE))
            most = min(settings.time_limit_seconds * to_make, deadline.left())
            progress.at("plan", type(block._model).__name__, len(found), programs, most)
            found[kind.program] = ready
            schedules[kind.program] = schedules_of(ready, kind.program, settings, progress, mine)
        menus[kind] = ()
    keep = {name for name, every in schedules.items() if any(_keeps_results(found[name], one) for one in every)}
    for kind in menus:
        own = ((v, makers) for v, makers in kind.lone if link and v not in kind.changed)
        lone[kind] = frozenset(v for v, makers in own if keep.isdisjoint(makers))
        menus[kind] = points_of(found[kind.program], kind, schedules[kind.program], link, lone[kind])
    return menus


def _keeps_results(ready: Prepared, schedule: Schedule) -> bool:
    program = ready.captured.program
    return not kept_values(program, schedule).isdisjoint(program.outputs)


def points_of(
    ready: Prepared, kind: Kind, schedules: Sequence[Schedule], link: float, lone: Collection[int]
) -> tuple[Point, ...]:
    """The points of schedules, and if there is a link, those that offload.

    Args:
        lone: inputs that count as carried: nobody else keeps them.
    """
    program = ready.captured.program
    ends = kind.held, lone, kind.changed
    points = efficient([own_point(ready.captured, one, ready.costs, *ends) for one in schedules])
    if not link:
        return points
    movable = offloadable(ready.captured, {*kind.held, *kind.changed}, lone)
    return efficient([*points, *(more for point in points for more in offloading(point, program, movable, link))])


def plain_point(ready: Prepared, kind: Kind) -> Point:
    """What plain PyTorch costs; values are of the plain program."""
    captured = ready.captured
    plain = plain_step(captured.plain, ready.costs, autograd_nodes=captured.autograd_nodes)
    return point_of(*plain, kind.held, handed_plainly(captured))


def own_point(
    captured: Captured, schedule: Schedule, costs: Mapping[str, Cost], held: Collection[int] = (),
    lone: Collection[int] = (), changed: Collection[int] = (),
) -> Point:  # fmt: skip
    """A schedule of a program with variants, judged by the simulator; values as of `point_of` and `owning`."""
    point = point_of(captured.program, schedule, costs, held, handed_gradients(captured, schedule))
    return owning(point, captured.program, lone, changed)


def handed_plainly(captured: Captured) -> dict[int, int]:
    """As `handed_gradients`, in plain PyTorch: when the node of autograd has ended that makes the gradient."""
    plain, nodes = captured.plain, captured.autograd_nodes
    node_of = [nodes.get(ways[0].name, -1 - place) for place, ways in enumerate(plain.slots)]
    ends = {node: place for place, node in enumerate(node_of)}
    last = {v: place for place, ways in enumerate(plain.slots) for v in (*ways[0].reads, *ways[0].writes)}
    kept = {tensor.value for _, tensor in captured.input_gradients}
    made = {tensor.value for _, tensor in captured.parameter_gradients} - kept
    return {value: ends[node_of[last[value]]] for value in made if value in last}


def costs_of_call(
    call: BlockCall, piece: str, device: torch.device, settings: Settings, progress: Progress, deadline: Deadline
) -> Prepared:
    """A block's program with its costs; gradients are delayed in it unless the workspaces make that dearer.

    Args:
        piece: `digest_of_call`.
    """
    measured = partial(_measured, piece=piece, device=device, settings=settings, progress=progress, deadline=deadline)
    ready = measured(call.captured, call.request)
    if call.undelayed and delays_cost(replace(call.request, made_last=None), ready.captured, ready.costs):
        return measured(call.undelayed, replace(call.request, made_last=()))
    return ready


def _measured(
    captured: Captured,
    request: Request,
    piece: str,
    device: torch.device,
    settings: Settings,
    progress: Progress,
    deadline: Deadline,
) -> Prepared:
    """A block's program with its costs; all workspaces are measured at the whole batch."""
    source, earlier = Cached.of(device), settings.earlier.alike(captured) if settings.quick else None
    known = KeptPiece.of(piece, device).profile(device, source.known) if settings.quick else source.known
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        ready = prepare(
            request, device, profile=known, save_profile=source.save, progress=progress.profiling,
            captured=captured, quick=settings.quick, quick_seconds=deadline.left(),
            earlier=earlier.ready if earlier else None,
        )  # fmt: skip
        ready = settled_for(ready, request, device, lambda _: (), progress.profiling, everything=True)
    if settings.quick and earlier is None:
        settings.earlier.add(ready, ())
        keep_costs(piece, device, ready)
    return ready


def schedules_of(
    ready: Prepared, piece: str, settings: Settings, progress: Progress, deadline: Deadline
) -> tuple[Schedule, ...]:
    """The schedules of a block's menu, if need be searched; a quick plan also takes those of other sizes."""
    device = ready.captured.device
    if (kept := KeptPiece.of(piece, device).menu(ready, settings)) is not None:
        if settings.quick:
            settings.earlier.add(ready, kept)
        return kept
    if settings.quick and (earlier := settings.earlier.alike(ready.captured)) and earlier.schedules:
        settings.earlier.taken += 1
        return earlier.schedules
    points = menu(
        ready.captured.program, ready.costs, solver=settings.solver, gap=settings.gap,
        strategy="heuristic" if settings.quick else "milp",
        time_limit_seconds=min(settings.time_limit_seconds, deadline.left()),
        progress=progress.planning,
    )  # fmt: skip
    schedules = tuple(point.schedule for point in points)
    if deadline.left():  # else the search was cut short
        keep_menu(piece, device, schedules, settings)
    if settings.quick:
        settings.earlier.add(ready, schedules)
    return schedules


def record_of(call: BlockCall, ready: Prepared, point: Point) -> ScheduleRecord:
    """The schedule file of a call of a block."""
    report = simulate(ready.captured.program, point.schedule, ready.costs)
    made = make_record(call.request, ready, Plan(point.schedule, report, "feasible"), report.peak_bytes)
    return replace(  # seconds without launches, which are made while the GPU runs the block before
        made, inputs=call.inputs, layout=call.layout, offloaded=point.offloaded, seconds=report.seconds,
        plain_seconds=ready.plain.seconds,
    )  # fmt: skip
