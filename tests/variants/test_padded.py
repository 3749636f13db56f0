"""Products of 16-bit matrices with odd rows, padded: captured as on a GPU, and run on the CPU."""

from __future__ import annotations

import pytest
import torch
from algorithm_cases import captured
from replays import FULL
from taking import outcome, random_inputs
from torch import nn
from torch.nn import functional as F

from monet_like.capture.captured import Captured
from monet_like.ir.program import Task
from monet_like.profile.devices import DEVICES
from monet_like.profile.roofline import roofline
from monet_like.profile.work import works_of

WORDS, WIDTH = 203, 24
ODD = "product, 16 bits, odd rows"


class Head(nn.Module):
    """What a language model ends with, and what a classifier does."""

    def __init__(self, loss: bool, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WORDS, bias=bias)
        self.loss = loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.last(self.first(x).relu())
        labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        return F.cross_entropy(logits.float(), labels) if self.loss else logits


def pairs(of: Captured) -> list[tuple[Task, Task]]:
    """What is padded, behind the same without padding."""
    groups = [*of.program.slots, of.program.tasks]
    return [
        (next(t for t in group if t.writes == padded.writes and t.variant == own), padded)
        for group in groups
        for padded in group
        if padded.variant.endswith("padded")
        for own in [padded.variant.removesuffix("padded").removesuffix("_") or "aten"]
    ]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss", [False, True])
def test_padded_products_make_the_same(loss: bool, bias: bool) -> None:
    torch.manual_seed(0)
    of = captured(Head(loss, bias), 37, WIDTH, dtype=torch.bfloat16, mode=FULL)
    found = pairs(of)
    variants = {way.variant for _, way in found}
    kinds = ("4", "16", "kept", "4_columns", "16_columns")  # by rows in the forward
    assert variants == {"padded", *(f"linear_cross_entropy.{kind}_padded" for kind in kinds if loss)}
    for own, way in found:
        inputs = random_inputs(of, own, way)
        for value, expected, other in zip(own.writes, outcome(own, inputs), outcome(way, inputs), strict=True):
            meta = of.metas[value]
            assert (other.dtype, other.shape, other.stride()) == (meta.dtype, meta.shape, meta.stride)
            assert other.untyped_storage().nbytes() == meta.storage_bytes
            assert float((other - expected).abs().max()) <= 2e-2 * float(expected.abs().max())


def test_no_padded_product_has_odd_rows_and_the_card_gains() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 30522))  # BERT's vocabulary
    of = captured(model, 4096, 512, dtype=torch.bfloat16, mode=FULL)
    costs, works = roofline(of, DEVICES["h100"]), works_of(of)
    found = pairs(of)
    assert len(found) == 3  # the layer and its two gradients
    for own, way in found:
        kinds = [{operation.kind for operation in works[task.cost].operations} for task in (own, way)]
        assert ODD in kinds[0] and ODD not in kinds[1]
        assert costs[way.cost].seconds < 0.5 * costs[own.cost].seconds


def test_even_rows_wide_floats_and_exact_modes_have_none() -> None:
    even = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64))
    assert not pairs(captured(even, 37, WIDTH, dtype=torch.bfloat16, mode=FULL))
    assert not pairs(captured(Head(True, False), 37, WIDTH, mode=FULL))
    assert not pairs(captured(Head(True, False), 37, WIDTH, dtype=torch.bfloat16, mode="inplace_multiway_newnode"))
