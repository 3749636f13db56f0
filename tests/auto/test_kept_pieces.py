"""What is known of pieces in the cache: equal pieces are measured and searched once, whatever they are planned for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from block_models import EXACT, Decoder, loss_of, plan_of, tokens
from torch import nn

import monet_like
from monet_like.auto import block_menus
from monet_like.auto.kept_pieces import KeptPiece
from monet_like.compiler import quick
from monet_like.errors import ScheduleFileError
from monet_like.files import cache_folder
from monet_like.ir.json_fields import digest_of_fields


class Work:
    """How many operators are measured and how many menus are searched, since it was last asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.measured = self.searched = 0
        measure, menu = quick.measure_partly, block_menus.menu

        def measuring(tasks: Mapping[str, Any], *given: Any, **named: Any) -> Any:
            self.measured += len(tasks)
            return measure(tasks, *given, **named)

        def searching(*given: Any, **named: Any) -> Any:
            self.searched += 1
            return menu(*given, **named)

        monkeypatch.setattr(quick, "measure_partly", measuring)
        monkeypatch.setattr(block_menus, "menu", searching)

    def done(self) -> tuple[bool, int]:
        """Whether anything was measured, and the menus."""
        found = self.measured > 0, self.searched
        self.measured = self.searched = 0
        return found


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Work:
    return Work(monkeypatch)


def planned(model: nn.Module, x: torch.Tensor | None = None, **options: Any) -> Any:
    settings = {"mode": EXACT, "loss": loss_of, "effort": "quick", "blocks": "layers.*", "memory_budget": "80%"}
    return monet_like.auto_schedule(model, tokens() if x is None else x, **{**settings, **options})


def piece_files() -> list[Path]:
    return sorted(cache_folder().glob("piece_*.json"))


def test_another_budget_and_a_deeper_model_measure_and_search_nothing(work: Work) -> None:
    planned(Decoder(blocks=2))
    assert work.done() == (True, 1)
    for budget, blocks in (("85%", 2), (10**9, 3)):
        mine = planned(Decoder(blocks=blocks), memory_budget=budget)
        assert work.done() == (False, 0)
        plan = plan_of(mine)
        assert plan.peak_bytes <= plan.budget_bytes
    planned(Decoder(blocks=2), tokens(8))
    assert work.done() == (True, 1)  # of other sizes
    assert len(piece_files()) == 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize("whole_first", [True, False])
def test_a_whole_model_and_an_equal_block_share_costs(work: Work, whole_first: bool) -> None:
    x, settings = torch.randn(32, 16), {"memory_budget": "150%", "exact": True, "effort": "quick"}
    parts = nn.Sequential(Layer(), nn.Linear(16, 16)).train()
    starts = [
        lambda: monet_like.auto_schedule(Layer().train(), x, **settings),  # type: ignore[arg-type]
        lambda: monet_like.auto_schedule(parts, x, blocks="0", **settings),  # type: ignore[arg-type]
    ]
    first, second = starts if whole_first else reversed(starts)
    first()
    assert work.done()[0]
    second()
    assert not work.done()[0]
    assert len(piece_files()) == 1


@pytest.mark.slow(rare=1)
def test_menus_of_full_plans_serve_other_budgets_and_quick_plans(work: Work) -> None:
    full = {"effort": "full", "time_limit_seconds": 1.0}
    model = Decoder(blocks=1)
    planned(model, **full, memory_budget="100%")
    assert work.done()[1] == 1
    planned(Decoder(blocks=1), **full, memory_budget="120%")
    assert work.done()[1] == 0
    planned(Decoder(blocks=1), memory_budget="110%")
    assert work.done()[1] == 0
    planned(Decoder(blocks=1), **{**full, "time_limit_seconds": 1.5}, memory_budget="120%")
    assert work.done()[1] == 1  # who gives more time wants it to be used


def test_a_search_that_was_cut_short_and_scaled_costs_are_not_kept(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(block_menus, "QUICK_SECONDS", 0.0)
        mine = planned(Decoder(blocks=1), tokens(8, 16), memory_budget="300%")
    (file,) = piece_files()
    kept = KeptPiece.load(file)
    assert kept.costs and not kept.menus
    work.done()
    mine(tokens(8, 24)).sum().backward()  # another form of the model
    assert work.done()[0] is False and len(piece_files()) == 1


def test_damaged_files_are_found_out_anew_with_a_warning(work: Work, tmp_path: Path) -> None:
    planned(Decoder(blocks=1))
    (file,) = piece_files()
    whole, kept = file.read_bytes(), KeptPiece.load(file)
    for place in range(0, len(whole), max(1, len(whole) // 100)):
        (tmp_path / "changed").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            assert KeptPiece.load(tmp_path / "changed") == kept  # white space
        except ScheduleFileError:
            continue
    wrong = json.loads(whole)
    wrong["menus"]["quick"] = [{"forward": [10**6], "again": [], "ways": []}]
    del wrong["sha256"]
    work.done()
    for number, damaged in enumerate((whole[: len(whole) // 2], b"[]")):
        file.write_bytes(damaged)
        with pytest.warns(UserWarning, match="what is known of a piece is found out anew: .*piece_"):
            planned(Decoder(blocks=1), memory_budget=f"{110 + number}%")
        assert work.done() == (True, 1)
        assert KeptPiece.load(file).menus.keys() == kept.menus.keys()  # it has been replaced
    file.write_text(json.dumps({**wrong, "sha256": digest_of_fields(wrong)}))
    planned(Decoder(blocks=1), memory_budget="115%")
    assert work.done() == (False, 1)  # schedules of another program are searched anew
