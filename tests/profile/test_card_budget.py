"""A budget of "card": of an absent card, and where there is none; the fake GPU's tests have one that is here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import monet_like
from monet_like.errors import UsageError
from monet_like.ir.units import GIB, Budget, parse_budget
from monet_like.profile.card_budget import on_card
from monet_like.profile.devices import DEVICES

CPU = torch.device("cpu")


@pytest.mark.parametrize(("card", "gigabytes"), [("h100", 80 - 4), ("rtx3090", 24 - 1.25), ("rtx4080", 16 - 1)])
def test_of_an_absent_card_all_but_the_reserve_is_free(card: str, gigabytes: float) -> None:
    limits = DEVICES[card]
    found = on_card(parse_budget("card"), CPU, nn.Linear(2, 2), absent=limits)
    assert found.bytes is not None and limits.memory_bytes
    reserve = max(GIB, limits.memory_bytes // 20)
    assert limits.memory_bytes - reserve - GIB // 4 < found.bytes <= limits.memory_bytes - reserve
    assert found.bytes % (GIB // 4) == 0


def test_amounts_and_shares_stay() -> None:
    for budget in (Budget(5), Budget(share=0.5)):
        assert on_card(budget, CPU, nn.Linear(2, 2)) is budget


@pytest.mark.parametrize("blocks", [None, "*"])
def test_on_a_cpu_it_is_refused(blocks: str | None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train()
    with pytest.raises(UsageError, match=r"what is free on a GPU, and this step is for cpu.*60%"):
        monet_like.auto_schedule(model, torch.randn(2, 4), memory_budget="card", blocks=blocks)


def test_where_nothing_looks_at_a_card_it_is_refused() -> None:
    with pytest.raises(UsageError, match='a budget of "card" is not known here'):
        parse_budget("card").of(GIB)


def test_a_plan_for_an_absent_card_has_its_budget() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).train()
    record = monet_like.problem(net, torch.randn(2, 8), device="roofline:h100").plan("card", quick=True).record
    assert record.budget_bytes == on_card(parse_budget("card"), CPU, net, absent=DEVICES["h100"]).bytes
