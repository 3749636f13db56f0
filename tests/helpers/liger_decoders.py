"""A small decoder, and schedules of it that take Liger's kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from replays import FULL, record_for
from taking import taking
from training import twin
from zoo import Built

from monet_like.capture.captured import Captured
from monet_like.ir.schedule import Schedule
from monet_like.models.decoders import Decoder, Shape
from monet_like.ops.liger import PACKAGE
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
    of_norm = "liger_rms_norm.backward"
    wanted = (*([f"{of_norm}_in_place"] if in_place else []), of_norm, "rms_norm.backward", of_mlp)
    return taking(captured, "liger_rms_norm.train", "liger_swiglu", ways=wanted, again="liger_rms_norm.apply")


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
