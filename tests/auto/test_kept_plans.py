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
from block_models import EXACT, Decoder, assert_same_step, loss_of, measured_peak, plan_briefly, plan_of, tokens
from planning import crash_solvers
from processes import elsewhere
from torch import nn

import monet_like
from monet_like.auto import agreement, block_plan, kept_plans, whole_plan
from monet_like.auto.block import blocks_of
from monet_like.auto.kept_plans import KeptPlan
from monet_like.compiler import pipeline
from monet_like.compiler.request import Request
from monet_like.errors import InfeasibleError, ScheduleFileError, SolverError
from monet_like.files import cache_folder
from monet_like.ir.json_fields import digest_of_fields
from monet_like.ir.program import REFUSED
from monet_like.ir.simulate import simulate
from monet_like.plan import plan
from monet_like.plan.subprogram import plain_operators

QUICK = {"mode": EXACT, "loss": loss_of, "effort": "quick"}


def planned(model: nn.Module, budget: str | int = "75%", **options: Any) -> nn.Module:
    x = options.pop("x", None)
    x = tokens() if x is None else x
    return monet_like.auto_schedule(model, x, memory_budget=budget, **{"blocks": "layers.*", **QUICK, **options})


def kept_file() -> Path:
    (found,) = cache_folder().glob("plan_*.json")
    return found


@pytest.fixture(scope="module")
def first_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache's folder when a `Decoder` has been planned once."""
    folder = tmp_path_factory.mktemp("first_start")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONET_LIKE_CACHE", str(folder))
        planned(Decoder())
    return folder


@pytest.fixture
def started(first_start: Path) -> Path:
    """The file of the plan of a `Decoder`, which an earlier start has left in this test's cache."""
    shutil.copytree(first_start, cache_folder())
    return kept_file()


@contextmanager
def planning_gives(kept: KeptPlan) -> Iterator[list[int]]:
    """Gives that plan instead of planning, and an element whenever one is asked for: for tests of when that happens."""
    calls: list[int] = []

    def give(*_: Any) -> KeptPlan:
        calls.append(1)
        return kept

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

    for module, name in ((block_plan, "menus_of"), (block_plan, "Chooser"), (kept_plans, "keep")):
        monkeypatch.setattr(module, name, refuse)
    second = planned(copy.deepcopy(plain))
    day = KeptPlan.load(kept_file()).planned
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
    plan = plan_of(mine)
    assert (plan.status, plan.reason) == ("searched", "the solver's process ended with code -11")
    assert "schedules chosen by a local search instead of the solver" in str(plan) and str(plan) in caplog.text
    assert_same_step(plain, mine, tokens())
    assert measured_peak(mine, tokens()) == plan.peak_bytes <= plan.budget_bytes
    assert not list(cache_folder().glob("plan_*.json"))
    again = monet_like.block_plan(planned(copy.deepcopy(plain)))
    assert again is not None and (again.status, again.reason) == ("optimal", "")
    assert KeptPlan.load(kept_file()).promise.status == "optimal"


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


@pytest.mark.slow(but=["budget"], rare=2)
@pytest.mark.parametrize(("change", "options"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_what_changes_the_plan_plans_anew(
    change: Callable[[Any], Any], options: dict[str, Any], started: Path, menus: list[int]
) -> None:
    other = Decoder()
    change(other)
    mine = planned(copy.deepcopy(other), **options)
    assert len(menus) == 1
    plan = plan_of(mine)
    assert plan.peak_bytes <= plan.budget_bytes
    planned(copy.deepcopy(other), **options)
    assert len(menus) == 1  # and that is kept, too


@pytest.mark.slow
def test_other_weights_and_texts_of_the_rest_reuse_the_plan(started: Path, menus: list[int]) -> None:
    torch.manual_seed(5)
    mine = planned(Decoder(), x=tokens().flip(0))
    assert not menus
    assert all(block.record for block in blocks_of(mine))


@pytest.mark.slow
def test_a_quick_plan_is_refined_at_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    efforts: list[bool] = []
    own = block_plan.menus_of

    def briefly(of: Any, kinds: Any, settings: Any, *others: Any) -> Any:
        efforts.append(settings.quick)
        return own(of, kinds, replace(settings, effort="quick"), *others)

    monkeypatch.setattr(block_plan, "menus_of", briefly)
    monkeypatch.setattr(kept_plans, "_planned_here", set())
    planned(Decoder(blocks=1), "100%", effort="auto")
    planned(Decoder(blocks=1), "100%", effort="auto")
    assert efforts == [True]  # to call again is no new start
    for _ in range(2):
        kept_plans._planned_here.clear()
        planned(Decoder(blocks=1), "100%", effort="auto")
        assert efforts == [True, False]
    kept_plans._planned_here.clear()
    planned(Decoder(blocks=1), "100%", effort="quick")
    assert efforts == [True, False]  # a full one serves a quick start
    for effort in ("quick", "full"):
        planned(Decoder(blocks=1), "90%", effort=effort)
    assert efforts == [True, False, True, False]  # but not the other way round


@pytest.mark.slow
def test_a_damaged_file_is_planned_anew_with_a_warning(started: Path, menus: list[int]) -> None:
    plain, whole, kept = Decoder(), started.read_bytes(), KeptPlan.load(started)

    def start() -> None:
        with pytest.warns(UserWarning, match=r"the blocks of Decoder are planned anew: .* is no whole plan:"):
            mine = planned(copy.deepcopy(plain))
        assert_same_step(plain, mine, tokens())
        assert KeptPlan.load(started).promise.points  # it has been replaced

    for damaged in (b"", b"[]", b"\xff\xfe", b"[" * 100_000, whole.replace(b'"points"', b'"dots"')):
        started.write_bytes(damaged)
        with planning_gives(kept) as calls:
            start()
        assert len(calls) == 1
    started.write_bytes(whole[: len(whole) // 2])
    start()
    assert len(menus) == 1


def test_plans_travel_as_plain_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two processes that plan together, the one that sends."""
    model = planned(Decoder())
    records = tuple(block.record for block in blocks_of(model))
    kept = KeptPlan(plan_of(model), "2026-11-26", 0, 0, records)
    assert any(record.schedule.rerun_count for record in records) and len(kept.promise.moments) > 2 * 3
    sent: list[list[str]] = []
    monkeypatch.setattr(agreement, "processes", lambda: 2)
    monkeypatch.setattr(agreement.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(agreement.dist, "broadcast_object_list", lambda texts, src: sent.append(texts))
    assert agreement.planned_by(lambda: kept, "same", KeptPlan) == kept
    assert json.loads(*sent[0])["result"]["records"][0]["model"] == "Short"


def test_no_changed_byte_is_read(tmp_path: Path) -> None:
    planned(Decoder(blocks=2))
    whole = kept_file().read_bytes()
    kept, path = KeptPlan.load(kept_file()), tmp_path / "changed.json"
    for place in range(0, len(whole), max(1, len(whole) // 200)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            found = KeptPlan.load(path)
        except ScheduleFileError:
            continue
        assert found == kept  # white space


def setting(*place: Any, to: Any) -> Callable[[Any], None]:
    """A change of a file's content: the field, the number of an element of it, and perhaps one within that."""

    def change(content: Any) -> None:
        for part in place[:-1]:
            content = content[part]
        content[place[-1]] = to

    return change


#: A wrong field of a file, and what is said of it.
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another program": (
        setting("schedules", 0, "fingerprint", to="0" * 64),
        "a schedule that does not fit its program",
    ),
    "fewer blocks": (lambda content: content["pieces"].pop(), "the file has 2 blocks, the model 3"),
    "no schedule": (setting("pieces", 0, to=None), "has no schedule for"),
    "wrong schedule": (setting("pieces", 0, to=1000), "is no whole plan"),
    "negative number": (setting("pieces", 0, to=-1), "is no whole plan"),
    "wrong value": (setting("points", 0, 6, to=[100_000]), "keeps a value that it does not have"),
    "wrong type": (setting("points", 0, 2, to="12"), "is no whole plan"),
}


@pytest.mark.slow(but=["another program"])
@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_does_not_fit_is_planned_anew(name: str, started: Path) -> None:
    """Its digest fits."""
    kept, content = KeptPlan.load(started), json.loads(started.read_text())
    change, said = WRONG[name]
    change(content)
    del content["sha256"]
    started.write_text(json.dumps({**content, "sha256": digest_of_fields(content)}))
    why = f"the blocks of Decoder are planned anew.*{said}"
    with planning_gives(kept) as calls, pytest.warns(UserWarning, match=why):
        planned(Decoder())
    assert len(calls) == 1
    assert KeptPlan.load(started) == kept  # it has been replaced


class _One(nn.Sequential):
    pass


class _Other(nn.Sequential):
    pass


def test_whole_models_of_equal_programs_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their classes are called. One of other sizes and one of another budget have plans of their own."""
    asked: list[str] = []
    own = whole_plan._compiled

    def compiled(request: Any, *given: Any, **named: Any) -> Any:
        asked.append(request.expression)
        return own(request, *given, **named)

    monkeypatch.setattr(whole_plan, "_compiled", compiled)

    def start(kind: type[nn.Sequential], width: int = 16, budget: str = "120%") -> Any:
        model = kind(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, 8)).train()
        x = torch.randn(4, 8)
        found: Any = monet_like.auto_schedule(model, x, memory_budget=budget, exact=True, effort="quick")
        files = sorted(cache_folder().glob("plan_*"), key=lambda path: path.stat().st_mtime_ns)
        return found.record.schedule, KeptPlan.load(files[-1])

    schedule, kept = start(_One)
    assert start(_Other) == (schedule, kept) and asked == ["_One"]
    (point,) = kept.promise.points
    assert point.schedule == schedule and point.backward_peak_bytes > 0
    start(_Other, width=24)
    start(_Other, budget="110%")
    assert asked == ["_One", "_Other", "_Other"]


def _start_again(folder: Path) -> None:
    """Plan, and leave the log, the schedules and the peak in a folder."""
    plan_briefly()
    logging.basicConfig(filename=folder / "log", level=logging.INFO)
    mine: Any = planned(Decoder())
    plan = plan_of(mine)
    (folder / "plan").write_text(f"{[block.record.schedule for block in mine.layers]} {plan.peak_bytes}")


@pytest.mark.slow
def test_another_process_reuses_the_plan(tmp_path: Path) -> None:
    mine: Any = planned(Decoder())
    elsewhere(_start_again, tmp_path)
    assert "; reused, planned on " in (tmp_path / "log").read_text()
    plan = plan_of(mine)
    expected = f"{[block.record.schedule for block in mine.layers]} {plan.peak_bytes}"
    assert (tmp_path / "plan").read_text() == expected


class Wide(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh(), nn.Sigmoid())))


@pytest.mark.parametrize("effort", ["quick", "full"])
@pytest.mark.parametrize("budget", [900_000, "2%"], ids=["nothing is found", "an operator alone does not fit"])
def test_the_budget_that_an_error_names_has_the_plan_that_was_found(
    budget: str | int, effort: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another search may find none within it, in this process or at the next start."""
    x = torch.randn(512, 64)

    def started(budget: str | int) -> nn.Module:
        return monet_like.auto_schedule(Wide(), x, memory_budget=budget, exact=True, effort=effort)

    own = pipeline.plan

    def finds_a_larger_one(program: Any, costs: Any, limit: int, **options: Any) -> Any:
        found = own(program, costs, 5 * limit // 4, **options)
        error = SolverError("this search finds nothing smaller", found.report.peak_bytes)
        error.smallest = found.schedule
        raise error

    monkeypatch.setattr(pipeline, "plan", finds_a_larger_one)
    with pytest.raises(InfeasibleError, match="a plan was found") as refused:
        started(budget)
    named = refused.value.smallest_bytes
    assert named is not None

    def fails(*args: Any, **options: Any) -> Any:
        raise InfeasibleError("this search finds nothing")

    monkeypatch.setattr(pipeline, "plan", fails)
    assert started(named).record.peak_bytes <= named
    monkeypatch.setattr(kept_plans, "_planned_here", set())  # as another process
    assert started(named).record.peak_bytes <= named
    with pytest.raises(InfeasibleError):
        started(named - 1)


@pytest.mark.parametrize("effort", ["quick", pytest.param("auto", marks=pytest.mark.slow)])
def test_the_budget_that_an_error_of_blocks_names_has_its_plan(effort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another search may find none within it, in this process or at the next start."""
    with pytest.raises(InfeasibleError, match="with the smallest that were found") as refused:
        planned(Decoder(blocks=1), "10%", effort=effort)
    named = refused.value.smallest_bytes
    assert named is not None

    def fails(*args: Any) -> Any:
        raise InfeasibleError("this search finds nothing")

    monkeypatch.setattr(block_plan, "menus_of", fails)
    for _ in range(2):
        plan = monet_like.block_plan(planned(Decoder(blocks=1), named, effort=effort))
        assert plan is not None and plan.peak_bytes == plan.budget_bytes == named
        monkeypatch.setattr(kept_plans, "_planned_here", set())  # as another process
    with pytest.raises(InfeasibleError, match="this search finds nothing"):
        planned(Decoder(blocks=1), named - 1, effort=effort)


def test_the_budget_that_a_search_names_has_its_plan() -> None:
    """The schedule of an error is one of the program that was planned, also where ways of it were left out."""
    model, x = Wide(), torch.randn(512, 64)
    request = Request(model, ((x,), {}), "inplace_conv_multiway_newnode")
    ready = pipeline.prepare(request, torch.device("cpu"))
    program, costs = ready.captured.program, dict(ready.costs)
    plain = plain_operators(program).program
    kept = {task.cost for task in plain.every_task()}
    costs |= {task.cost: REFUSED for task in program.every_task() if task.cost not in kept}
    for strategy in ("milp", "heuristic"):
        with pytest.raises((InfeasibleError, SolverError)) as found:
            plan(program, costs, 400_000, strategy=strategy, time_limit_seconds=5)
        report = simulate(program, found.value.smallest, costs)
        assert report.peak_bytes == found.value.smallest_bytes
