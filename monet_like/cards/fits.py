"""`fits`: which cards a decoder trains on, how fast, and how large its batch may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..errors import UsageError
from ..ir.units import GIB, parse_budget
from ..models import attention_window
from ..profile.devices import DEVICES, DeviceLimits
from .answer import Answer
from .decoder import read_question
from .largest import add_largest
from .table import Fits

#: One card of each usual size: 16, 24, 40, 48, 80 and 141 GB.
CARDS = ("rtx4080", "rtx4090", "a100", "l40s", "h100", "h200")
LARGEST = ("", "batch", "length")
#: Of each card's memory that a step may not use: the driver's context, the allocator's fragments.
RESERVE = "1 GB"
#: Batches and lengths are not larger than this.
MOST = 2**24


def fits(
    model: str | nn.Module,
    *,
    batch: int = 1,
    length: int = 2048,
    cards: Sequence[str | DeviceLimits] = CARDS,
    largest: str = "batch",
    reserve: str | int = RESERVE,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Fits:
    """Predict which cards a decoder trains on; no card and no weights are needed.

    Each distinct block is captured once, on meta tensors as on the target card, and gets a menu of schedules. For each
    card one integer program chooses a schedule for every block, so that the whole step fits
    (`monet_like.plan.step.choice`).

    Args:
        model: a name such as ``"Llama-3.1-8B"``, a ``config.json`` of Transformers, the name of a model on Hugging Face
            whose config is in the cache, ``"transformers:LlamaForCausalLM(config.json)"``, another MODEL of the command
            line, or a module whose parts are known (`monet_like.models.parts_of`).
        batch, length: samples and tokens of a step.
        cards: names of data sheets in `monet_like.profile.devices.DEVICES` such as ``"rtx3090"``, memories such as
            ``"24GB"``, which get the rates of the usual card of that size, or data sheets.
        largest: what to look for the largest of: ``batch`` at this length, ``length`` at this batch, or "".
        reserve: of each card's memory that the step may not use, such as ``"1 GB"``.
        progress: called with lines for people.
        options: ``dtype``, ``lora``, ``quant``, ``optimizer``, ``optimizer_in_backward``, ``attention`` and ``mode``;
            see `monet_like.cards.decoder.read_question`.

    Raises:
        UsageError: an argument is wrong.
        CaptureError: a part of the model cannot be captured for a card.
    """
    limits = [_card(card) for card in cards]
    if largest not in LARGEST:
        raise UsageError(f"largest {largest!r} is unknown; give batch, length or nothing")
    for name, count in (("batch", batch), ("length", length)):
        if not 1 <= count <= MOST:
            raise UsageError(f"{name} {count} must be at least 1 and at most {MOST}")
    free = parse_budget(reserve, "reserve").of(0) if reserve not in (0, "0") else 0
    asked = read_question(model, **options)
    window = attention_window(asked.model)
    if 0 < window < length:
        raise UsageError(
            f"{asked.name} has layers that look {window} tokens back, by a mask where a sample is longer, and fits "
            f"knows attention without a mask alone; ask for a length of at most {window}"
        )
    answer = Answer(asked, batch, length, free, progress or (lambda _: None))
    for card in limits:
        answer.add(card)
    if largest:
        with answer.timed("largest"):
            answer.rows = add_largest(answer, limits, largest)
    return Fits(str(asked), batch, length, largest, free, tuple(answer.rows), answer.seconds)


def _card(card: str | DeviceLimits) -> DeviceLimits:
    """The data sheet of a card.

    Raises:
        UsageError: it is not known, or of no GPU with a known memory.
    """
    gpus = {name: limits for name, limits in DEVICES.items() if limits.device == "cuda"}
    limits = _named(card, gpus) if isinstance(card, str) else card
    if limits is None or limits.device != "cuda" or not limits.memory_bytes:
        raise UsageError(f"card {card!r} is unknown; choose of {', '.join(gpus)}, or give a memory such as 24GB")
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
