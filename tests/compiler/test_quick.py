"""A first plan in seconds: what is timed and what is estimated, exact memory, and when it is replaced by a full one."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import run_command
from torch import nn

import monet_like
from monet_like.auto import kept_plans, planning
from monet_like.capture.captured import Captured, distinct_tasks
from monet_like.compiler import pipeline, quick
from monet_like.compiler.costs import inputs_on, measured_costs, to_profile
from monet_like.compiler.influence import by_influence
from monet_like.compiler.prepared import Prepared, prepared
from monet_like.compiler.quick import kind_of, one_of_each_kind_first, quick_costs
from monet_like.compiler.request import Request, captured_for
from monet_like.errors import SolverError, UsageError
from monet_like.files import cache_folder
from monet_like.ir.profile_file import Profile
from monet_like.ir.program import Cost
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.plan import STRATEGIES
from monet_like.profile import rates
from monet_like.profile.profiler import measure, measure_partly
from monet_like.profile.rates import measured_limits
from monet_like.profile.roofline import roofline

CPU = torch.device("cpu")
MODE = "inplace_conv_multiway_newnode"


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Conv2d(c, 2 * c, 3, padding=1), nn.BatchNorm2d(2 * c), nn.ReLU(), nn.Conv2d(2 * c, c, 1))
        for c in (16, 16, 16)
    ]
    return nn.Sequential(nn.Conv2d(3, 16, 3, 2), *layers, nn.Flatten(), nn.Linear(16 * 121, 4)).train()


def problem(batch: int = 16) -> tuple[Request, Captured]:
    request = Request(net(), ((torch.randn(batch, 3, 23, 23),), {}), MODE)
    return request, captured_for(request, request.example)


@pytest.fixture(autouse=True, scope="module")
def _called_once() -> None:
    """The first batch norm of a process tries its kernel on a few kilobytes, which would count as its workspace."""
    _, captured = problem()
    measure(distinct_tasks(captured), inputs_on(captured, CPU), timed=False)


def ticking(times: int) -> Callable[[], float]:
    """A clock that stands for so many questions, and is then past everything."""
    questions = itertools.count()
    return lambda: 0.0 if next(questions) < times else 1e9


def test_rates_are_measured_once_under_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[object] = []

    def timed(run: object, *_: object, **__: object) -> float:
        runs.append(run)
        return 0.01

    monkeypatch.setattr(rates, "seconds_of", timed)
    rates._measured.cache_clear()
    first = measured_limits(CPU)
    assert measured_limits(CPU) is first and len(runs) == 2  # a product and a copy
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert measured_limits(CPU) is not first and len(runs) == 4
    finally:
        torch.set_num_threads(before)
        rates._measured.cache_clear()


def test_the_most_influential_operators_are_timed_within_the_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    request, captured = problem()
    request = replace(request, profile_batch=16)
    monkeypatch.setattr(quick, "measured_limits", lambda device: measured)
    measured = measured_limits(CPU)
    kinds = {key: kind_of(task) for key, task in distinct_tasks(captured).items()}
    ordered = one_of_each_kind_first(by_influence(kinds, captured, roofline(captured, measured)), kinds)
    timed: list[str] = []

    def noting(tasks: object, maker: object, enough: Callable[[], bool], **options: object) -> object:
        found, names = measure_partly(tasks, maker, enough, **options)
        timed.extend(sorted(names))
        return found, names

    monkeypatch.setattr(quick, "measure_partly", noting)
    monkeypatch.setattr(quick.time, "monotonic", ticking(6))  # one question as it begins, one before each operator
    found, guessed = quick_costs(request, captured, CPU)
    assert timed == sorted(ordered[:5])
    assert found.note == f"5 of {len(ordered)} operators timed quickly at batch 16, the others estimated"
    assert guessed == {}
    exact = measured_costs(request, captured, CPU, timed=False)[0]
    assert {k: c.workspace_bytes for k, c in found.costs.items()} == {k: c.workspace_bytes for k, c in exact.items()}


def test_measured_times_are_used_at_the_wanted_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three operators; the others of their kinds are estimated, corrected by these."""
    request, captured = problem()
    first: list[str] = []

    def three(tasks: dict[str, object], *_: object, **options: object) -> tuple[dict[str, Cost], set[str]]:
        first.extend([*tasks][:3])
        return {key: Cost(3.0 if key in first else 0.0) for key in tasks}, set(first)

    monkeypatch.setattr(quick, "measure_partly", three)
    for batch, seconds in ((16, 3.0), (4, 12.0)):
        first.clear()
        costs = quick_costs(replace(request, profile_batch=batch), captured, CPU)[0].costs
        assert [costs[key].seconds for key in first] == [seconds] * 3


def test_what_the_store_knows_is_not_measured() -> None:
    request, captured = problem()
    saved: list[Profile] = []
    full = pipeline.prepare(request, CPU, save_profile=saved.append, captured=captured)
    dated = replace(saved[-1], days=dict.fromkeys(saved[-1].costs, "2026-11-24"), note="")
    found, _ = quick_costs(request, captured, CPU, dated)
    assert found.costs == full.costs
    count = len(distinct_tasks(captured))
    assert found.note == f"{count} of {count} operators reused, measured on 2026-11-24"


def test_times_grow_with_the_time_for_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces are always measured; where they took the allowance, some time is left to time."""
    for most, found in ((inf, [False, False, True]), (91.0, [False, True, True]), (1.0, [True, True, True])):
        now = iter([100.0, 101.4, 101.6])
        monkeypatch.setattr(quick.time, "monotonic", lambda now=now: next(now))
        allowance = quick._Allowance(10.0, most)
        assert [allowance(), allowance(), allowance()] == found


def test_where_no_time_is_left_all_workspaces_are_measured_and_no_time() -> None:
    request, captured = problem()
    found, whole = (quick_costs(request, captured, CPU, seconds=seconds)[0] for seconds in (0.0, inf))
    assert found.note.startswith("0 of ") and found.costs.keys() == whole.costs.keys()
    assert all(cost.workspace_bytes == whole.costs[key].workspace_bytes for key, cost in found.costs.items())
    assert all(cost.seconds > 0 for cost in found.costs.values() if cost.seconds < inf)


def test_estimates_are_corrected_by_operators_of_the_same_kind() -> None:
    estimated = {"mm 1": 1.0, "mm 2": 2.0, "mm 3": 4.0, "relu 1": 8.0, "add 1": 16.0}
    kinds = {key: key[:-2] for key in estimated}
    measured = {"mm 1": 3.0, "mm 2": 6.0, "relu 1": 16.0}
    assert quick._filled(estimated, measured, kinds) == pytest.approx({**measured, "mm 3": 12.0, "add 1": 48.0})
    assert quick._filled(estimated, {}, kinds) == estimated


def test_one_operator_of_each_kind_is_timed_before_a_second_one() -> None:
    keys = ["mm 1", "mm 2", "relu 1", "mm 3", "relu 2", "add 1"]
    found = one_of_each_kind_first(keys, {key: key[:-2] for key in keys})
    assert found == ["mm 1", "relu 1", "add 1", "mm 2", "mm 3", "relu 2"]


def test_grouped_convolutions_are_a_kind_of_their_own() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3, groups=4)).train()
    request = Request(model, ((torch.randn(2, 3, 8, 8),), {}), "normal")
    kinds = [kind_of(task) for task in captured_for(request, request.example).every_task() if task.cost]
    for name in ("aten.convolution.default", "aten.convolution_backward.default"):
        assert {kind for kind in kinds if kind.startswith(name)} == {name, f"{name} in groups"}


def planned(capsys: pytest.CaptureFixture[str], **options: object) -> tuple[ScheduleRecord, str]:
    model = net()
    wrapped = monet_like.auto_schedule(
        model, torch.randn(8, 3, 23, 23), memory_budget="80%", solver="HIGHS", verbose=True, **options
    )
    assert wrapped.record is not None
    return wrapped.record, capsys.readouterr().err


def files() -> list[str]:
    return sorted("quick" if "quick" in path.name else path.name.partition("_")[0] for path in cache_folder().iterdir())


@pytest.mark.slow
def test_quick_first_and_full_at_the_next_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "TIME_LIMIT_SECONDS", 1.0)
    first, said = planned(capsys)
    assert first.solver == "heuristic" and files() == ["piece", "quick"]  # kept for quick plans alone
    assert "s (quickly; all is measured and refined at the next start, or now with effort='full'), kept in " in said
    assert "operators timed quickly at batch 8" in said
    same, said = planned(capsys)  # no new start
    assert same == first and "_quick.json" in said and files() == ["piece", "quick"]

    monkeypatch.setattr(kept_plans, "_planned_here", set())  # a new start
    for name, value in (("LOCAL_RANK", "1"), ("RANK", "3")):  # in another process than the first of this machine
        with monkeypatch.context() as process:
            process.setenv(name, value)
            assert planned(capsys)[0] == first and files() == ["piece", "quick"]
    kept, said = planned(capsys, effort="quick")
    assert kept == first and files() == ["piece", "quick"]

    full, said = planned(capsys)
    assert full.solver == "HIGHS" and files() == ["piece", "plan", "profile", "quick"]
    assert "quickly" not in said and "; costs: measured at batch 8" in said
    with monkeypatch.context() as process:
        process.setenv("LOCAL_RANK", "1")
        assert planned(capsys)[0] == full  # all ranks have one plan
    assert planned(capsys, effort="quick")[0] == full


@pytest.mark.slow
def test_the_full_plan_at_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "TIME_LIMIT_SECONDS", 1.0)
    full, _ = planned(capsys, effort="full")
    assert full.solver == "HIGHS" and files() == ["plan", "profile"]
    assert planned(capsys)[0] == full
    limited, said = planned(capsys, time_limit_seconds=1.5)  # who gives a limit wants the solver
    assert limited.solver == "HIGHS" and "operators reused, measured on 20" in said
    quickly, _ = planned(capsys, effort="quick", time_limit_seconds=1.2)
    assert quickly.solver == "heuristic"
    with pytest.raises(UsageError, match="effort 'slow' is unknown; choose one of auto, quick, full"):
        planned(capsys, effort="slow")


@pytest.mark.slow
def test_where_the_local_search_finds_nothing_the_solver_is_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: object, **__: object) -> None:
        raise SolverError("nothing found")

    monkeypatch.setitem(STRATEGIES, "heuristic", nothing)
    assert planned(capsys)[0].solver == "HIGHS" and files() == ["piece", "quick"]


def test_searches_for_a_quick_plan_have_a_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as each search takes what it is given, and where the first plan turns out too large."""
    now, asked = 0.0, []

    def search(ready: Prepared, request: Request, *, strategy: str, budget_bytes: int, **options: Any) -> None:
        nonlocal now
        if strategy == "heuristic":
            took = 0.0 if options["enough"](False) else 6.0
            assert options["seconds"] == pytest.approx(pipeline.QUICK_SECONDS - now)
        else:
            took = 2 * request.time_limit_seconds
        now += took
        asked.append((strategy, took))
        raise SolverError("nothing found")

    request, captured = problem()
    ready = prepared(
        request, captured, to_profile({}, CPU, ""), {task.cost: Cost(1.0) for task in captured.every_task()}, {}
    )
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(pipeline, "plan_for", search)
    monkeypatch.setattr(pipeline, "settled_for", lambda ready, *_, **__: replace(ready, guessed={}))
    with pytest.raises(SolverError, match="nothing found"):
        pipeline.plan_quickly(replace(ready, guessed={"a": 1}), request, 10**6, CPU)
    assert asked == [("heuristic", 6.0), ("milp", 9.0), ("heuristic", 0.0)]
    assert now == pipeline.QUICK_SECONDS


@pytest.mark.slow
def test_the_command_line_and_auto_schedule_have_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef make(): return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))\n"
    )
    words = ("solve", "net.py:make", "8", "1", "normal", "HIGHS", "--input-shape", "16")
    first = run_command(*words, "--quick")
    assert "timed quickly at batch 8" in first.stdout and not [*cache_folder().glob("profile_*.json")]
    run_command(*words)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    (store,) = cache_folder().glob("profile_*.json")
    count = len(Profile.load(store).costs)
    record = monet_like.auto_schedule(
        copy.deepcopy(model), torch.randn(8, 16), memory_budget="100%", mode="normal", effort="full"
    ).record
    assert record is not None
    assert record.note.startswith(f"{count} of {count} operators reused, measured on 20")
    refused = run_command(*words, "--quick", "--strategy", "ogc", exit_code=2)
    assert "leave out --quick or --strategy ogc" in refused.stderr
