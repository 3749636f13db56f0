"""The arguments of `auto_schedule` and of the Trainer's callback: checked in one place, before anything is captured."""

from __future__ import annotations

import inspect
import re
from typing import Any, cast

import pytest
import torch
from torch import nn
from training import twin

import monet_like
from monet_like.auto import planning
from monet_like.auto.planning import Planning, Settings
from monet_like.errors import UsageError
from monet_like.integrations.huggingface import MemoryBudget
from monet_like.ir.defaults import EXACT_MODE, MODE

#: Arguments that are wrong, and what is said.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "misspelled": (
        {"efort": "quick"},
        "no keyword 'efort'; did you mean effort? Those for planning are backend",
    ),
    "nearest is named": ({"optimiser": "sgd"}, "did you mean optimizer?"),
    "unheard of": (
        {"colour": 3},
        "no keyword 'colour'. Those for planning are backend, cuda_graphs, effort, gap, keeps",
    ),
    "effort": ({"effort": "fast"}, "effort 'fast' is unknown; choose one of auto, quick, full"),
    "new input": ({"on_new_input": "other"}, "on_new_input 'other' is unknown; choose one of plan, plain, error"),
    "backend": ({"backend": "xla"}, "backend 'xla' is unknown; choose one of eager"),
    "optimizer": ({"optimizer": "lion"}, "optimizer 'lion' is unknown; choose one of none, sgd"),
    "solver": ({"solver": "abacus"}, "unknown solver 'abacus'; installed: "),
    "mode": ({"mode": "fastest"}, "mode 'fastest' has an unknown word 'fastest'"),
    "no mode": ({"mode": None}, "mode None must be text"),
    "lengths": ({"lengths": [8, 0]}, "lengths [8, 0] must be whole numbers of at least 1"),
    "a length": ({"lengths": 8}, "lengths 8 must be whole numbers of at least 1"),
    "time": ({"time_limit_seconds": 0}, "time_limit_seconds 0 must be more than 0 and at most 1e+09 seconds"),
    "text for time": ({"time_limit_seconds": "60"}, "time_limit_seconds '60' must be more than 0"),
    "gap": ({"gap": 1.0}, "gap 1.0 must be at least 0 and less than 1, such as 0.01 for 1 %"),
    "no number": ({"gap": float("nan")}, "gap nan must be at least 0"),
    "verbose": ({"verbose": "yes"}, "verbose 'yes' must be True, False or None"),
    "same plan": ({"same_plan": "no"}, "same_plan 'no' must be True or False"),
    "exact": ({"exact": "yes"}, "exact 'yes' must be True, False or None"),
    "exact and a mode": ({"exact": True, "mode": MODE}, "exact=True and mode='inplace_conv_multiway_newnode' both say"),
    "inexact and a mode": ({"exact": False, "mode": "normal"}, "exact=False and mode='normal' both say"),
    "exact Inductor": ({"exact": True, "backend": "inductor"}, "exact=True and backend='inductor' contradict"),
    "loss": ({"loss": torch.sum}, "loss is for blocks"),
    "result": ({"keeps_result": False}, "keeps_result is for blocks"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused_in_words_by_every_entrance(case: str) -> None:
    arguments, message = WRONG[case]
    with pytest.raises(UsageError, match=re.escape(message)):
        monet_like.auto_schedule(nn.Linear(4, 4), **arguments)
    with pytest.raises(UsageError, match=re.escape(message)):
        MemoryBudget(**arguments)
    if "is for blocks" not in message:
        with pytest.raises(UsageError, match=re.escape(message)):
            monet_like.auto_schedule(nn.Sequential(nn.Linear(4, 4)), blocks="0", **arguments)


def test_a_wrong_loss_is_refused_for_blocks() -> None:
    with pytest.raises(UsageError, match="loss 3 must be a function of the model's result, or None"):
        monet_like.auto_schedule(nn.Sequential(nn.Linear(4, 4)), blocks="0", loss=3)  # type: ignore[arg-type]


def test_there_are_few_arguments_and_each_keyword_is_checked_and_described() -> None:
    assert len(inspect.signature(monet_like.auto_schedule).parameters) <= 8
    keywords = set(Planning.__annotations__)
    assert keywords | {"exact", "optimizer"} == set(planning._RULES)
    assert {name for name in keywords if f"``{name}``" not in (Planning.__doc__ or "")} == set()


def settings(exact: bool | None = None, **given: Any) -> Settings:
    return Settings.of("8 GB", exact, "none", cast(Planning, given), blocks=True)


def test_what_is_left_out_is_as_it_always_was() -> None:
    assert settings() == settings(
        exact=False, effort="auto", solver="HIGHS", time_limit_seconds=None, gap=0.01, verbose=None, lengths=(),
        on_new_input="plan", backend="eager", optimizer_in_backward=False, loss=None, keeps_result=True, same_plan=True,
    )  # fmt: skip
    assert settings().mode == MODE and settings().quick and settings().refines
    assert settings().time_limit_seconds == 60.0 and settings().sharing == "same"
    timed = settings(time_limit_seconds=5)
    assert (timed.effort, timed.time_limit_seconds, timed.quick, timed.refines) == ("full", 5, False, False)
    assert settings(time_limit_seconds=5, effort="quick").quick
    assert settings(same_plan=False).sharing == "alone"
    assert settings(lengths=iter([3, 2])).lengths == (3, 2)


def test_exact_plans_have_no_variant_that_rounds() -> None:
    """A batch norm and its ReLU have a gradient in one operator that rounds otherwise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).train()
    x = torch.randn(4, 3, 12, 12)
    plain = twin(model)
    mine: Any = monet_like.auto_schedule(model, x, memory_budget="100%", exact=True, effort="quick")
    assert mine.record.mode == EXACT_MODE == settings(exact=True).mode
    for each in (mine, plain):
        each(x).square().mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
    assert settings(exact=False).mode == settings().mode == MODE
