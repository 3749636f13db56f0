"""Frozen weights of layers on the host, on cards that are too small for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from monet_like import fits
from monet_like.auto.fits.pieces import Capturing
from monet_like.auto.fits.question import read_question
from monet_like.auto.fits.step import pinned_bytes
from monet_like.auto.fits.table import Fits
from monet_like.ir.schedule import Schedule
from monet_like.ir.step import Point
from monet_like.ir.units import format_bytes
from monet_like.models import Decoder, Shape, add_adapters
from monet_like.profile.devices import DEVICES
from monet_like.runtime.frozen_weights import frozen_weights, host_bytes, slot_bytes

SHAPE = Shape(width=128, blocks=8, heads=4, groups=2, hidden=640, vocabulary=64)
#: Weights of a layer's products, and bytes of them in bfloat16.
PRODUCTS = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 640
LAYER = 2 * PRODUCTS
#: What they take of pinned memory, of which PyTorch takes powers of two.
ON_HOST = 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 1024)


def made(device: str) -> Decoder:
    with torch.device(device):
        return Decoder(SHAPE, length=16)


def tokens() -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(1, 16, dtype=torch.long, device="meta") for _ in range(2))


def asked(memory_bytes: int, *, rate: float = 32e9, **options: object) -> Fits:
    """A table of one card; by default without the search for the largest batch."""
    card = replace(DEVICES["a100"], name="small", memory_bytes=memory_bytes, host_bytes_per_second=rate)
    options = {"reserve": "0", "optimizer": "none", "dtype": "bfloat16", "largest": "", **options}
    return fits(made("meta"), tokens(), cards=[card], **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole() -> Fits:
    """On a card with room for all."""
    return asked(2**30, lora=4, largest="batch")


@pytest.mark.parametrize("quant", ["", "nf4"])
def test_they_are_those_that_a_plan_of_blocks_streams(quant: str) -> None:
    model = made("cpu").to(torch.bfloat16)
    add_adapters(model, (model,), 4)
    weights = frozen_weights(model, list(model.layers))
    streamed = [slot_bytes(own) for own in weights]
    question = read_question(made("meta"), tokens(), dtype="bfloat16", lora=4, quant=quant)
    pieces = Capturing(question).at(1, 16, DEVICES["a100"].capability)
    found = {part.name: sum(part.frozen) for part in pieces.ranges}
    # Of attention's weights, the scales are less than a page, and stay on the card.
    expected = [PRODUCTS // 2 + 3 * 128 * 640 // 64 * 4] * 8 if quant else streamed
    assert [found.pop(f"layers.{place}") for place in range(8)] == expected
    assert not any(found.values()), "only layers are blocks"
    if not quant:
        on_host = [sum(host_bytes(weight.bytes, torch.device("cuda")) for weight in own) for own in weights]
        streams = [Point(Schedule((), (), ()), 0.0, 0, 0, 0, 0, ahead=1)] * len(pieces.trained)
        assert on_host == [ON_HOST] * 8 and pinned_bytes(pieces, streams) == sum(on_host), (
            "the head is trained as it is"
        )


@pytest.mark.slow
def test_nothing_is_on_the_host_that_fits_the_card(whole: Fits) -> None:
    ours, host = whole.row("small", "ours"), whole.row("small", "host")
    assert host == replace(ours, way="host", largest=host.largest, largest_host_bytes=host.largest_host_bytes)
    assert host.largest is not None and ours.largest is not None and host.largest > ours.largest
    ((*_, cell, _, largest),) = whole.table()[1]
    assert cell == "not needed"
    assert host.largest_host_bytes and not ours.largest_host_bytes
    there = format_bytes(host.largest_host_bytes)
    assert largest.endswith(f"{ours.largest} / {host.largest} ({there} of the host)")


@pytest.mark.slow
def test_a_card_that_is_too_small_gets_them_from_the_host(whole: Fits) -> None:
    needed = whole.row("small", "ours").peak_bytes
    found = asked(needed - 3 * LAYER, lora=4, largest="batch")
    ours, host = found.row("small", "ours"), found.row("small", "host")
    assert (ours.fits, ours.largest, ours.host_bytes) == (False, 0, 0)
    assert host.fits and host.peak_bytes <= needed - 3 * LAYER and host.largest
    assert 3 * ON_HOST <= host.host_bytes < 8 * ON_HOST, "some stay on the card"
    ((*_, cell, _, _),) = found.table()[1]
    assert cell.endswith(f" %, {format_bytes(host.host_bytes)} of the host")


@pytest.mark.slow
def test_a_slow_link_is_waited_for(whole: Fits) -> None:
    def seconds(rate: float) -> float:
        row = asked(whole.row("small", "ours").peak_bytes - 3 * LAYER, rate=rate, lora=4).row("small", "host")
        assert row.fits and row.seconds is not None
        return row.seconds

    assert seconds(1e9) - seconds(1e15) > LAYER / 1e9


def test_without_frozen_weights_there_is_no_such_row() -> None:
    assert asked(2**30).ways == ("plain", "checkpoint", "ours")
