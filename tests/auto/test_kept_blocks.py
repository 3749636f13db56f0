"""Plans of blocks in the cache: what is reused, what is planned anew, and what happens to a damaged file."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from block_models import EXACT, Decoder, assert_same_step, loss_of, measured_peak, plan_briefly, tokens
from planning import crash_solvers
from processes import elsewhere
from torch import nn

import monet_like
from monet_like.auto import block_plan
from monet_like.auto.block import blocks_of
from monet_like.auto.kept_blocks import KeptBlocks, _digest
from monet_like.errors import ScheduleFileError
from monet_like.files import cache_folder

QUICK = {"mode": EXACT, "loss": loss_of, "effort": "quick"}


def planned(model: nn.Module, budget: str | int = "75%", **options: Any) -> nn.Module:
    x = options.pop("x", None)
    x = tokens() if x is None else x
    return monet_like.auto_schedule(model, x, memory_budget=budget, **{"blocks": "layers.*", **QUICK, **options})


def kept_file() -> Path:
    (found,) = cache_folder().glob("blocks_*.json")
    return found


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_briefly(monkeypatch.setattr)


@pytest.fixture(scope="module")
def first_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache's folder when a `Decoder` has been planned once."""
    folder = tmp_path_factory.mktemp("first_start")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONET_LIKE_CACHE", str(folder))
        plan_briefly(patch.setattr)
        planned(Decoder())
    return folder


@pytest.fixture
def started(first_start: Path) -> Path:
    """The file of the plan of a `Decoder`, which an earlier start has left in this test's cache."""
    shutil.copytree(first_start, cache_folder())
    return kept_file()


@contextmanager
def planning_gives(kept: KeptBlocks) -> Iterator[list[int]]:
    """Gives that plan instead of planning, and an element whenever one is asked for: for tests of when that happens."""
    calls: list[int] = []

    def give(*_: Any) -> block_plan.Answer:
        calls.append(1)
        return kept, kept.peak_bytes, "", ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_plan, "_planned", give)
        yield calls


@pytest.fixture
def menus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an element whenever menus are made, which needs the solver."""
    calls: list[int] = []
    own = block_plan.menus_of

    def counted(*args: Any) -> Any:
        calls.append(1)
        return own(*args)

    monkeypatch.setattr(block_plan, "menus_of", counted)
    return calls


def test_the_second_start_needs_no_solver(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "monet_like")
    plain = Decoder()
    first = planned(copy.deepcopy(plain))
    assert "; planned in " in caplog.text and "reused" not in caplog.text

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a plan that is kept was made anew")

    for name in ("menus_of", "Chooser", "keep"):
        monkeypatch.setattr(block_plan, name, refuse)
    second = planned(copy.deepcopy(plain))
    day = KeptBlocks.load(kept_file()).planned
    assert f"; reused, planned on {day}" in caplog.text
    plans = [monet_like.block_plan(model) for model in (first, second)]
    assert plans[0] == plans[1] and plans[1] is not None
    contents = [[block.record.content() for block in blocks_of(model)] for model in (first, second)]
    assert contents[0] == contents[1]
    assert any(block.record.schedule.rerun_count for block in blocks_of(second))
    assert_same_step(plain, second, tokens())
    assert measured_peak(second, tokens()) == plans[1].peak_bytes <= plans[1].budget_bytes


@pytest.mark.slow
def test_a_choice_without_the_solver_is_told_and_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The solver's process crashes; a search chooses, and the next start asks the solver again."""
    caplog.set_level(logging.INFO, "monet_like")
    plain = Decoder()
    with pytest.MonkeyPatch.context() as patch:
        crash_solvers(patch.setattr)
        with pytest.warns(UserWarning, match=r"the solver HIGHS failed \(the solver's process ended with code -11\)"):
            mine = planned(copy.deepcopy(plain))
    plan = monet_like.block_plan(mine)
    assert plan is not None
    assert (plan.status, plan.reason) == ("searched", "the solver's process ended with code -11")
    assert "schedules chosen by a local search instead of the solver" in caplog.text
    assert_same_step(plain, mine, tokens())
    assert measured_peak(mine, tokens()) == plan.peak_bytes <= plan.budget_bytes
    assert not list(cache_folder().glob("blocks_*.json"))
    again = monet_like.block_plan(planned(copy.deepcopy(plain)))
    assert again is not None and (again.status, again.reason) == ("optimal", "")
    assert KeptBlocks.load(kept_file()).status == "optimal"


def _other_activation(model: Any) -> None:
    model.layers[1].dropout.p = 0.2


CHANGES: list[tuple[str, Callable[[Any], Any], dict[str, Any]]] = [
    ("budget", lambda model: None, {"budget": "80%"}),
    ("dropout of one block", _other_activation, {}),
    ("frozen parameter of one block", lambda model: model.layers[2].up.weight.requires_grad_(False), {}),
    ("batch", lambda model: None, {"x": tokens(8)}),
    ("optimizer", lambda model: None, {"optimizer": "adamw"}),
    ("variants", lambda model: None, {"mode": "inplace"}),
    ("memory of the rest", lambda model: None, {"loss": lambda result: (result.double() ** 2).mean()}),
]


@pytest.mark.slow(but=["budget"])
@pytest.mark.parametrize(("change", "options"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_what_changes_the_plan_plans_anew(
    change: Callable[[Any], Any], options: dict[str, Any], started: Path, menus: list[int]
) -> None:
    other = Decoder()
    change(other)
    mine = planned(copy.deepcopy(other), **options)
    assert len(menus) == 1
    plan = monet_like.block_plan(mine)
    assert plan is not None and plan.peak_bytes <= plan.budget_bytes
    planned(copy.deepcopy(other), **options)
    assert len(menus) == 1  # and that is kept, too


@pytest.mark.slow
def test_other_weights_and_texts_of_the_rest_reuse_the_plan(started: Path, menus: list[int]) -> None:
    torch.manual_seed(5)
    mine = planned(Decoder(), x=tokens().flip(0))
    assert not menus
    assert all(block.record for block in blocks_of(mine))


@pytest.mark.slow
def test_a_full_plan_serves_a_quick_start(menus: list[int]) -> None:
    def start(budget: str, effort: str) -> None:
        planned(Decoder(blocks=1), budget, effort=effort, time_limit_seconds=1.0)

    start("100%", "full")
    start("100%", "quick")
    assert len(menus) == 1
    start("90%", "quick")
    start("90%", "full")
    assert len(menus) == 3  # a quick one does not serve where a full one is wanted


@pytest.mark.slow
def test_a_quick_plan_is_refined_at_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    efforts: list[bool] = []
    own = block_plan.menus_of

    def briefly(of: Any, kinds: Any, settings: Any, found: Any, deadline: Any) -> Any:
        efforts.append(settings.quick)
        return own(of, kinds, replace(settings, quick=True), found, deadline)

    monkeypatch.setattr(block_plan, "menus_of", briefly)
    monkeypatch.setattr(block_plan, "_planned_here", set())
    planned(Decoder(blocks=1), "100%", effort="auto")
    planned(Decoder(blocks=1), "100%", effort="auto")
    assert efforts == [True]  # to call again is no new start
    for _ in range(2):
        block_plan._planned_here.clear()
        planned(Decoder(blocks=1), "100%", effort="auto")
        assert efforts == [True, False]
    block_plan._planned_here.clear()
    planned(Decoder(blocks=1), "100%", effort="quick")
    assert efforts == [True, False]


@pytest.mark.slow
def test_a_damaged_file_is_planned_anew_with_a_warning(started: Path, menus: list[int]) -> None:
    plain, whole, kept = Decoder(), started.read_bytes(), KeptBlocks.load(started)

    def start() -> None:
        with pytest.warns(UserWarning, match=r"the blocks of Decoder are planned anew: .* is no whole plan of blocks"):
            mine = planned(copy.deepcopy(plain))
        assert_same_step(plain, mine, tokens())
        assert KeptBlocks.load(started).points  # it has been replaced

    for damaged in (b"", b"[]", b"\xff\xfe", b"[" * 100_000, whole.replace(b'"points"', b'"dots"')):
        started.write_bytes(damaged)
        with planning_gives(kept) as calls:
            start()
        assert len(calls) == 1
    started.write_bytes(whole[: len(whole) // 2])
    start()
    assert len(menus) == 1


def test_no_changed_byte_is_read(tmp_path: Path) -> None:
    planned(Decoder(blocks=2))
    whole = kept_file().read_bytes()
    kept, path = KeptBlocks.load(kept_file()), tmp_path / "changed.json"
    for place in range(0, len(whole), max(1, len(whole) // 200)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            found = KeptBlocks.load(path)
        except ScheduleFileError:
            continue
        assert found == kept  # white space


def changed(content: Any, name: str) -> Any:
    """The content of a file with one wrong field and a digest that fits."""
    if name == "another program":
        content["schedules"][0]["fingerprint"] = "0" * 64
    elif name == "fewer blocks":
        content["blocks"] = content["blocks"][:-1]
    elif name == "no schedule":
        content["blocks"][0] = None
    elif name == "negative number":
        content["blocks"][0] = -1
    elif name == "wrong schedule":
        content["blocks"][0] = len(content["points"])
    elif name == "wrong value":
        content["points"][0][-1] = [100_000]
    else:
        content["points"][0][2] = "12"
    del content["sha256"]
    return {**content, "sha256": _digest(content)}


@pytest.mark.slow(but=["another program"])
@pytest.mark.parametrize(
    "name",
    [
        "another program",
        "fewer blocks",
        "no schedule",
        "wrong schedule",
        "negative number",
        "wrong value",
        "wrong type",
    ],
)
def test_a_file_that_does_not_fit_is_planned_anew(name: str, started: Path) -> None:
    kept = KeptBlocks.load(started)
    started.write_text(json.dumps(changed(json.loads(started.read_text()), name)))
    with planning_gives(kept) as calls, pytest.warns(UserWarning, match="the blocks of Decoder are planned anew"):
        planned(Decoder())
    assert len(calls) == 1
    assert KeptBlocks.load(started) == kept  # it has been replaced


def _start_again(folder: Path) -> None:
    """Plan, and leave the log, the schedules and the peak in a folder."""
    plan_briefly()
    logging.basicConfig(filename=folder / "log", level=logging.INFO)
    mine: Any = planned(Decoder())
    plan = monet_like.block_plan(mine)
    assert plan is not None
    (folder / "plan").write_text(f"{[block.record.schedule for block in mine.layers]} {plan.peak_bytes}")


@pytest.mark.slow
def test_another_process_reuses_the_plan(tmp_path: Path) -> None:
    mine: Any = planned(Decoder())
    elsewhere(_start_again, tmp_path)
    assert "; reused, planned on " in (tmp_path / "log").read_text()
    plan = monet_like.block_plan(mine)
    assert plan is not None
    expected = f"{[block.record.schedule for block in mine.layers]} {plan.peak_bytes}"
    assert (tmp_path / "plan").read_text() == expected
