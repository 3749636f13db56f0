"""`fits`: on which cards a model trains, how fast, and how large its batch may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ...errors import UsageError
from ...ir.units import GIB, parse_budget
from ...plan.budgets import MOST_SIZE
from ...profile.devices import DEVICES, DeviceLimits
from .answer import Answer
from .largest import add_largest
from .question import read_question
from .table import Fits

#: One card of each usual size: 16, 24, 40, 48, 80 and 141 GB.
CARDS = ("rtx4080", "rtx4090", "a100", "l40s", "h100", "h200")
LARGEST = ("", "batch", "length")


def fits(
    model: str | nn.Module,
    inputs: Any = None,
    *,
    batch: int | None = None,
    length: int | None = None,
    cards: Sequence[str | DeviceLimits] = CARDS,
    largest: str = "batch",
    reserve: str | int | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Fits:
    """Predict on which cards a model trains; no card and no weights are needed.

    The forward of one step is run on fake tensors and cut at equal layers. Each distinct piece is captured once, as on
    the target card, and gets a menu of schedules. For each card one integer program chooses a schedule for every piece,
    so that the whole step fits (`monet_like.plan.step.choice`).

    Args:
        model: a name such as ``"Llama-3.1-8B"``, a ``config.json`` of Transformers, the name of a model on Hugging Face
            whose config is in the cache, ``"transformers:LlamaForCausalLM(config.json)"``, ``"net.py:make_step"`` (a
            function that runs a training step, or returns a model and its inputs), another MODEL of the command line,
            or a module on the meta device.
        inputs: of a module: a tensor, a tuple of arguments, a dict of keyword arguments, or both in a tuple.
        batch: samples of a step; None: those of the inputs that are given, else 1.
        length: tokens of a sample; None: those of the inputs that are given, else 2048 where the model takes texts.
        cards: names of data sheets in `monet_like.profile.devices.DEVICES` such as ``"rtx3090"``, memories such as
            ``"24GB"``, which get the rates of the usual card of that size, or data sheets.
        largest: what to look for the largest of: ``batch`` at this length, ``length`` at this batch, or "". A function
            that takes no ``batch`` and runs its own step has no largest batch.
        reserve: of each card's memory that the step may not use, such as ``"1 GB"``; None: as much as with
            ``memory_budget="card"``, 5 % of the card and at least 1 GB.
        progress: called with lines for people.
        options: ``loss``, ``dtype``, ``lora``, ``quant``, ``optimizer``, ``optimizer_in_backward``, ``attention`` and
            ``mode``; see `monet_like.auto.fits.question.read_question`.

    Raises:
        UsageError: an argument is wrong.
        CaptureError: a part of the step cannot be captured for a card.
    """
    limits = [_card(card) for card in cards]
    if largest not in LARGEST:
        raise UsageError(f"largest {largest!r} is unknown; give batch, length or nothing")
    for name, count in (("batch", batch), ("length", length)):
        if count is not None and not 1 <= count <= MOST_SIZE:
            raise UsageError(f"{name} {count} must be at least 1 and at most {MOST_SIZE}")
    free = 0 if reserve in (0, "0") else None if reserve is None else parse_budget(reserve, "reserve").of(0)
    asked = read_question(model, inputs, batch=batch, length=length, **options)
    sizes = asked.steps.sizes
    for name, count in (("batch", batch), ("length", length), (largest, 1 if largest == "length" else None)):
        if count is not None and name not in sizes:
            raise UsageError(
                f"the step of {asked.name} has no {name} that could be another; give a function that takes {name}, or "
                f"leave the {name} out"
            )
    answer = Answer(asked, sizes.get("batch", 0), sizes.get("length", 0), free, progress or (lambda _: None))
    for card in limits:
        answer.add(card)
    largest = largest if largest in sizes else ""
    if largest:
        with answer.timed("largest"):
            answer.rows = add_largest(answer, limits, largest)
    return Fits(str(asked), answer.batch, answer.length, largest, free, tuple(answer.rows), answer.seconds)


def _card(card: str | DeviceLimits) -> DeviceLimits:
    """The data sheet of a card."""
    gpus = {name: limits for name, limits in DEVICES.items() if limits.device == "cuda"}
    limits = _named(card, gpus) if isinstance(card, str) else card
    if limits is None or limits.device != "cuda" or not limits.memory_bytes:
        raise UsageError(f"card {card!r} is unknown; choose one of {', '.join(gpus)}, or give a memory such as 24GB")
    return limits


def _named(card: str, gpus: Mapping[str, DeviceLimits]) -> DeviceLimits | None:
    """The data sheet of a name, however it is spelt; of a memory such as 24GB one with the rates of the usual card of
    that size.
    """
    short = re.sub(r"nvidia|geforce|tesla|[^a-z0-9.]", "", card.lower())
    for name, limits in gpus.items():
        if short in (re.sub("[^a-z0-9]", "", word.lower().replace("geforce", "")) for word in (name, *limits.products)):
            return limits
    if not (size := re.fullmatch(r"(\d+(?:\.\d+)?)g(?:i?b)?", short)):
        return None
    memory = int(float(size[1]) * GIB)
    usual = sorted((gpus[name] for name in CARDS), key=lambda limits: limits.memory_bytes)
    like = next((limits for limits in usual if limits.memory_bytes >= memory), usual[-1])
    return replace(like, name=f"{size[1]}GB as {like.name}", memory_bytes=memory)
