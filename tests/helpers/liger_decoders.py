"""A small decoder, and schedules of it that take Liger's kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from replays import FULL, record_for
from training import twin
from zoo import Built

from monet_like.capture.captured import Captured
from monet_like.ir.program import Task
from monet_like.ir.schedule import Schedule, prune
from monet_like.models.decoders import Decoder, Shape
from monet_like.ops.liger import PACKAGE
from monet_like.plan.baseline import store_all
from monet_like.replay.wrapper import ScheduleWrapper

SHAPE = Shape(width=16, blocks=1, heads=2, groups=1, hidden=72, vocabulary=50)


def small_decoder(dtype: torch.dtype = torch.float32, *, length: int = 7) -> Built:
    """One block of Llama's kind, whose MLP is wide enough for tiles, with tokens and labels."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(0, SHAPE.vocabulary, (2, length), generator=generator) for _ in range(2))
    return Decoder(SHAPE).to(dtype).train(), (tokens, labels), {}


def by_liger(captured: Captured, of_mlp: str = "liger_swiglu.backward", *, in_place: bool = False) -> Schedule:
    """Plain PyTorch's schedule with Liger's tasks wherever they are offered, and norms made again before they are read.

    A norm whose gradient Liger does not compute takes ours.

    Args:
        of_mlp: the way of an MLP's gradients.
        in_place: norms overwrite the gradients that come to them, where they may.
    """
    program = captured.program
    kept = store_all(program)
    of_norm = "liger_rms_norm.backward"
    wanted = (*([f"{of_norm}_in_place"] if in_place else []), of_norm, "rms_norm.backward", of_mlp)
    forward = placed(captured, lambda task: task.variant in ("liger_rms_norm.train", "liger_swiglu"))
    again = [place for place, task in enumerate(program.tasks) if task.variant == "liger_rms_norm.apply"]
    names = [[way.variant for way in slot] for slot in program.slots]
    ways = tuple(next((slot.index(name) for name in wanted if name in slot), 0) for slot in names)
    reads = [set(slot[way].reads) for slot, way in zip(program.slots, ways, strict=True)]
    rerun = tuple(tuple(p for p in again if not read.isdisjoint(program.tasks[p].writes)) for read in reads)
    return prune(program, replace(kept, forward=forward, again=rerun, ways=ways))


def wrapped(
    example: Built, captured: Captured, schedule: Schedule, *, autocast: bool = False, anew: bool = True
) -> ScheduleWrapper:
    """The model with a schedule.

    Args:
        anew: its program is captured anew, as for a schedule of a file.
    """
    model, args, kwargs = example
    record = replace(record_for(captured, schedule, FULL, example), versions={PACKAGE: "0.8.5"})
    record = replace(record, autocast="bfloat16" if autocast else "")
    return ScheduleWrapper(twin(model), record, example=(args, kwargs), captured=None if anew else captured)


def placed(captured: Captured, wanted: Callable[[Task], bool]) -> tuple[int, ...]:
    """Plain PyTorch's forward with the tasks that are wanted in place of those that write the same."""
    program = captured.program
    chosen = [place for place, task in enumerate(program.tasks) if wanted(task)]
    made = {value for place in chosen for value in program.tasks[place].writes}
    others = (p for p in store_all(program).forward if made.isdisjoint(program.tasks[p].writes))
    return tuple(sorted((*others, *chosen)))
