"""A job and its plans: figures are the simulator's, tables have a row for each thing, and the plan trains
as it says.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path

import highspy
import pandas
import pytest
import torch
from torch import nn

import monet_like
from monet_like.cli.problem import read_problem
from monet_like.compiler import sources
from monet_like.compiler.costs import measured_costs
from monet_like.errors import InfeasibleError, SolverError, UsageError
from monet_like.files import cache_folder
from monet_like.ir.profile_file import Profile
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.ir.simulate import simulate
from monet_like.ir.units import format_bytes
from monet_like.job.job import Job
from monet_like.job.solved import SolvedPlan
from monet_like.profile.devices import DEVICES
from monet_like.report.fronts import Front
from monet_like.zoo.registry import Registry, zoo_folder

IMAGES = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
#: A terminal of usual size.
LINES, COLUMNS = 24, 140


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = (part for _ in range(3) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Flatten(), nn.Linear(8 * 32 * 32, 4))


@pytest.fixture(scope="module")
def job() -> Job:
    return monet_like.problem(net(), IMAGES, device="roofline:cpu", mode="inplace_multiway_newnode")


@pytest.fixture(scope="module")
def plan(job: Job) -> SolvedPlan:
    return job.plan("70%", gap=0.05, time_limit_seconds=300)


def test_a_job_is_four_lines(job: Job) -> None:
    lines = repr(job).splitlines()
    assert len(lines) == 4
    assert "Sequential, float32[8, 3, 32, 32], inplace_multiway_newnode" in lines[0]
    assert "roofline:cpu" in lines[2] and lines[3].endswith("(predicted)")


def test_a_plan_says_what_its_record_says(job: Job, plan: SolvedPlan) -> None:
    judged = simulate(job.program, plan.schedule, job.ready.costs, extra_bytes=job.ready.extra_bytes)
    assert (plan.peak_bytes, plan.seconds) == (judged.peak_bytes, judged.seconds)
    assert plan.peak_bytes <= plan.budget_bytes == int(0.7 * job.plain.peak_bytes)
    assert plan.status in ("optimal", "feasible")
    assert plan.bound is not None and plan.gap is not None
    assert plan.bound <= plan.seconds and plan.gap == pytest.approx(1 - plan.bound / plan.seconds, abs=1e-9)
    assert len(repr(plan).splitlines()) == 4 and repr(plan).count("predicted") == 2


def test_every_table_is_a_frame_with_a_row_for_each_thing(job: Job, plan: SolvedPlan) -> None:
    tasks, values = job.program.to_frame(), job.program.values_to_frame()
    assert list(tasks.task) == [task.name for task in job.program.every_task()]
    assert tasks.slot.isna().sum() == len(job.program.tasks)
    assert list(values.bytes) == [value.bytes for value in job.program.values]
    costs = job.profile.to_frame().set_index("cost")
    assert {key: (row.seconds, row.workspace_bytes) for key, row in costs.iterrows()} == {
        key: (cost.seconds, cost.workspace_bytes) for key, cost in job.profile.costs.items()
    }
    slots = plan.schedule.to_frame(job.program)
    assert list(slots.way) == list(plan.schedule.ways) and slots.recomputed.sum() == plan.schedule.rerun_count
    assert list(plan.schedule.to_frame().columns) == [name for name in slots.columns if name != "task"]
    (row,) = plan.record.to_frame().itertuples()
    assert (row.peak_bytes, row.seconds, row.model) == (plan.peak_bytes, plan.seconds, "Sequential")


def test_the_timeline_has_every_instant_and_every_byte(job: Job, plan: SolvedPlan) -> None:
    whole, by_kind = plan.compiled.plan.report.to_frame(), plan.to_frame()
    assert list(whole.bytes) == list(by_kind.bytes) and whole.bytes.max() == plan.peak_bytes
    assert list(by_kind.filter(regex="^(?!written).+_bytes$").sum(axis=1)) == list(by_kind.bytes)
    assert whole.seconds.sum() == pytest.approx(plan.seconds)
    assert whole.begins_seconds.iloc[-1] + whole.seconds.iloc[-1] == pytest.approx(plan.seconds)
    assert whole.again.sum() == plan.schedule.rerun_count
    assert list(job.plain.to_frame().columns) == list(whole.columns)


def test_a_front_and_a_comparison(job: Job, tmp_path: Path) -> None:
    front = job.pareto(["90%", 10**6, "70%"], gap=0.1, time_limit_seconds=3)
    table = front.to_frame()
    assert list(table.budget_bytes) == [10**6, *(int(share * job.plain.peak_bytes) for share in (0.7, 0.9))]
    assert table.peak_bytes.isna().tolist() == [True, False, False]
    planned = table[table.peak_bytes.notna()]
    assert (planned.peak_bytes <= planned.budget_bytes).all() and planned.seconds.is_monotonic_decreasing
    compared = job.compare("90%,70%", ["store_all", "heuristic"])
    table = compared.to_frame()
    assert list(table.strategy) == ["store_all"] * 2 + ["heuristic"] * 2
    assert table.seconds.isna().tolist() == [True, True, False, False]
    assert all("needs" in reason for reason in table.reason[:2]) and not any(table.reason[2:])
    for drawn in (front, compared):
        axes = drawn.plot()
        assert [line.get_label() for line in axes.get_lines()][-1] == "plain PyTorch"
        axes.figure.savefig(tmp_path / "drawn.png")


def test_ten_percent_more_memory_saves_what_the_front_says() -> None:
    """Straight between budgets of 100 and 200: 110 lies a tenth of the way; and level beyond the last."""
    from types import SimpleNamespace

    from monet_like.plan.budgets import FrontPoint, percent_per_tenth

    def point(budget: int, seconds: float | None) -> FrontPoint:
        return FrontPoint(budget, None if seconds is None else SimpleNamespace(report=SimpleNamespace(seconds=seconds)))  # type: ignore[arg-type]

    found = percent_per_tenth([point(50, None), point(100, 10.0), point(200, 5.0), point(210, 4.0), point(220, 4.0)])
    assert found == (None, pytest.approx(5.0), pytest.approx(20.0), pytest.approx(0.0), None)


def test_the_integer_program_of_a_plan_is_written_and_bounds_it(plan: SolvedPlan, tmp_path: Path) -> None:
    plan.milp.write(tmp_path / "p.mps")
    solver = highspy.Highs()
    solver.setOptionValue("output_flag", False)
    assert solver.readModel(str(tmp_path / "p.mps")) == highspy.HighsStatus.kOk
    assert solver.getNumCol() == len(plan.milp.columns) + 1  # the constant
    problem = plan.milp.to_cvxpy()
    problem.solve(solver="HIGHS")
    assert plan.milp.seconds(problem) <= plan.seconds * (1 + 1e-6)
    best = plan.milp.schedule(problem)
    judged = simulate(plan.ready.captured.program, best, plan.ready.costs, extra_bytes=plan.record.extra_bytes)
    assert judged.peak_bytes <= plan.budget_bytes and judged.seconds <= plan.seconds * (1 + 1e-6)


def test_a_wrapped_plan_trains_as_the_plain_model(tmp_path: Path) -> None:
    model = net()
    plain = copy.deepcopy(model)
    plan = monet_like.problem(model, IMAGES, device="roofline:cpu", mode="inplace_multiway_newnode").plan(
        "75%", solver="heuristic"
    )
    plan.save(tmp_path / "s.json")
    assert ScheduleRecord.load(tmp_path / "s.json") == plan.record
    wrapped = plan.wrap()
    loaded = monet_like.ScheduleWrapper(copy.deepcopy(plain), tmp_path / "s.json", IMAGES.shape)
    for each in (plain, wrapped, loaded):
        each(IMAGES).square().mean().backward()
    for one, other, third in zip(plain.parameters(), wrapped.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad) and torch.equal(one.grad, third.grad)  # type: ignore[arg-type]
    assert next(wrapped.parameters()) is next(model.parameters())


def test_a_report_has_the_figures_of_the_plan(plan: SolvedPlan, tmp_path: Path) -> None:
    figures = plan.report(tmp_path / "s.html", front="off")
    assert figures.ours.peak.total_bytes == plan.peak_bytes
    assert (tmp_path / "s.html").read_text().startswith("<!doctype html>")
    with pytest.raises(UsageError, match="front 'all' is unknown; give off, quick, full"):
        plan.report(tmp_path / "t.html", front="all")


def test_a_real_step_stands_first_and_leaves_the_model_alone(tmp_path: Path) -> None:
    """Its gradients, buffers and random numbers, too."""
    model = net()
    model(IMAGES).mean().backward()
    held = [*(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]  # type: ignore[union-attr]
    plan = monet_like.problem(model, IMAGES, device="roofline:cpu", mode="normal").plan("90%", strategy="heuristic")
    state = torch.get_rng_state()
    figures = plan.report(tmp_path / "s.html", front="off", live=True)
    after = [*(p.grad for p in model.parameters()), *model.buffers()]
    assert all(torch.equal(one, other) for one, other in zip(held, after, strict=True))  # type: ignore[arg-type]
    assert torch.equal(state, torch.get_rng_state())
    assert figures.live is not None and figures.live.seconds > 0
    text = (tmp_path / "s.html").read_text()
    tiles = re.findall(r'<div class="tile"><span>(.*?)</span><b>(.*?)</b><span>(.*?)</span></div>', text)
    assert [name for name, *_ in tiles][:2] == ["peak memory, measured", "time of a step, measured"]
    assert tiles[0][1] == format_bytes(max(figures.live.bytes))
    assert tiles[0][2].startswith(f"predicted {format_bytes(plan.peak_bytes)}; plain PyTorch ")
    assert all("predicted" in " ".join(tile) or "measured" in " ".join(tile) for tile in tiles)
    plan.report(tmp_path / "s.html", front="off")
    assert "measured" not in " ".join(re.findall(r'<div class="tile">.*', (tmp_path / "s.html").read_text()))


def test_measured_costs_are_kept_and_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`problem` measures nothing; the first figure does; the second job finds it all in the cache, as `auto_schedule`
    does.
    """
    monkeypatch.setenv("MONET_LIKE_CACHE", str(tmp_path))
    model, rows = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(4, 8)
    first = monet_like.problem(model, rows, mode="normal")
    assert "not measured yet" in repr(first) and not list(tmp_path.iterdir())
    assert first.plain.seconds > 0
    (kept,) = tmp_path.glob("profile_*.json")
    monkeypatch.setattr("monet_like.compiler.costs.measure", None)
    second = monet_like.problem(model, rows, mode="normal")
    assert second.plain == first.plain and Profile.load(kept).costs == first.profile.costs
    given = monet_like.problem(model, rows, mode="normal", profile=kept)
    assert given.plain == first.plain
    monet_like.auto_schedule(model, rows, memory_budget="100%", mode="normal", solver="HIGHS", time_limit_seconds=1.0)


@pytest.mark.slow
def test_a_quick_plan_and_then_a_full_one() -> None:
    """The second measures all; a quick one after it has its costs.

    Workspaces once measured serve the next quick plan.
    """
    job = monet_like.problem(net().train(), IMAGES, mode="inplace_multiway_newnode")
    job.request = replace(job.request, profile_batch=2)
    first = job.plan("70%", quick=True)
    assert first.record.solver == "heuristic" and "timed quickly at batch 2" in first.record.note
    assert first.peak_bytes <= first.budget_bytes == int(0.7 * first.record.plain_peak_bytes)
    assert "not measured yet" in repr(job) and not [*cache_folder().glob("profile_*.json")]
    exact, _ = measured_costs(replace(job.request, profile_batch=8), job.captured, job.device, timed=False)
    assert first.peak_bytes == simulate(job.program, first.schedule, exact).peak_bytes
    wide = job.plan("90%", quick=True)
    assert {*wide.ready.guessed} <= {*first.ready.guessed} and first.ready.guessed

    full = job.plan("70%", time_limit_seconds=1)
    assert full.record.solver == "HIGHS" and full.record.note == "measured at batch 2, scaled to 8"
    (kept,) = cache_folder().glob("profile_*.json")
    assert Profile.load(kept).costs == job.profile.costs and Profile.load(kept).note == ""
    again = job.plan("70%", quick=True)
    assert again.record.solver == "heuristic" and again.ready is job.ready
    for wrong in ({"strategy": "ogc"}, {"evaluations": 10}):
        with pytest.raises(UsageError, match="quick plans are made by the local search"):
            job.plan("70%", quick=True, **wrong)


def test_a_cache_that_cannot_be_written_to_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MONET_LIKE_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(sources, "_unwritable", set())
    job = monet_like.problem(nn.Linear(8, 4), torch.randn(4, 8), mode="normal")
    with pytest.warns(UserWarning, match="plans are not kept"):
        assert job.plain.peak_bytes > 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"device": "roofline:abacus"}, "there is no roofline for 'abacus'; choose one of "),
        ({"device": "roofline:a100", "profile": "mine.json"}, "says what operators cost, so leave profile out"),
        ({"device": "tpu"}, "device 'tpu' is unknown; give auto, cpu, cuda or cuda:1"),
        ({"device": "meta"}, "device 'meta' is not supported"),
        ({"mode": "fast"}, "fast"),
        ({"optimizer": "lion"}, "optimizer 'lion' is unknown"),
    ],
)
def test_wrong_arguments(given: dict[str, str], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        monet_like.problem(nn.Linear(8, 4), torch.randn(4, 8), **given)  # type: ignore[arg-type]
    assert expected in str(caught.value)


def test_a_model_in_eval_mode_is_refused() -> None:
    with pytest.raises(UsageError, match=r"in eval mode; call model.train\(\) before monet_like.problem"):
        monet_like.problem(nn.Linear(8, 4).eval(), torch.randn(4, 8))


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("abc%", "no percentage of plain PyTorch's peak"),
        ("0%", "must be more than 0 %"),
        (0.6, "must be like"),
        (True, "must be like"),
        (0, "must be more than 0"),
    ],
)
def test_wrong_budgets(job: Job, budget: str | int, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        job.plan(budget)
    with pytest.raises(UsageError):
        job.pareto([budget])


def test_one_grammar_of_budgets(job: Job) -> None:
    plain = job.plain.peak_bytes
    for budget in (plain, f"{plain} B", "100%", f"{plain / 2**30:.12f}", f"{plain / 2**30:.12f} GB"):
        found = job.plan(budget, strategy="store_all")
        assert abs(found.budget_bytes - plain) <= 1
        assert found.peak_bytes <= plain


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_plan_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    job = monet_like.problem(net(), IMAGES, device="cuda", profile="roofline:a100", mode="normal")
    plan = job.plan("100%", strategy="heuristic")
    assert job.request.target == torch.device("cuda", 0) and "captured as on cuda" in plan.record.note
    with pytest.raises(UsageError, match="for a GPU that is not here; save it, and wrap the model there"):
        plan.wrap()


@pytest.fixture(scope="module")
def deep() -> tuple[Job, SolvedPlan]:
    """Of a program with hundreds of values."""
    model = nn.Sequential(*(layer for _ in range(50) for layer in (nn.Linear(8, 8), nn.ReLU())))
    job = monet_like.problem(model, torch.randn(64, 8), device="roofline:cpu", mode="normal")
    assert len(job.program.values) > 300
    return job, job.plan("100%", strategy="heuristic", evaluations=100)


def test_no_repr_is_longer_than_a_screen(deep: tuple[Job, SolvedPlan], tmp_path: Path) -> None:
    """Of whatever a job and the command line lead to."""
    job, plan = deep
    problem = read_problem(
        model="torchvision.models.resnet18()", batch="2", budget="90%", mode="normal", solver="HIGHS", device="cpu",
        dtype="float32", input_shape="3,32,32",
    )  # fmt: skip
    registry = Registry.load(zoo_folder())
    compared = job.compare("90%,40%", ["store_all"])
    things = [
        *(job, job.captured, job.program, job.ready, job.profile, job.plain, job.request, job.source, job.device),
        *(plan, plan.compiled, plan.compiled.plan, plan.schedule, plan.record, plan.timeline, plan.ready, plan.request),
        *(problem, problem.spec, problem.request, problem.budget, registry, registry.schedules[0], registry.rows[-1]),
        *(compared, compared.points[0], compared.points[-1], Front((), job.plain, job.title)),
        *(plan.report(tmp_path / "s.html", front="off", live=True), DEVICES["a100"], job.captured.constants),
    ]
    for thing in things:
        text = repr(thing)
        lines = sum(1 + len(line) // COLUMNS for line in text.splitlines())
        assert lines <= LINES, f"{type(thing).__name__}: {len(text)} characters"


def test_a_share_of_plain_pytorch_below_one_task_is_refused_before_any_time_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an amount is; workspaces decide what the share is of, so they alone are measured."""
    from monet_like.compiler import costs

    monkeypatch.setenv("MONET_LIKE_CACHE", str(tmp_path))
    asked: list[bool] = []
    whole = costs.measure

    def measured(*given: object, timed: bool, **options: object) -> object:
        asked.append(timed)
        return whole(*given, timed=timed, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(costs, "measure", measured)
    job = monet_like.problem(net(), IMAGES, mode="normal")
    with pytest.raises(InfeasibleError, match=r"of the .* of plain PyTorch, no time was measured\): .* alone needs"):
        job.plan("20%")
    assert asked == [False]
    assert job.plan("95%", strategy="heuristic").peak_bytes > 0
    assert asked == [False, True]


@pytest.mark.parametrize("strategy", ["chen_sqrt", "chen_greedy", "griewank", "checkmate", "store_all", "torch_budget"])
def test_the_budget_that_an_error_names_is_enough_for_the_strategy(strategy: str) -> None:
    """A strategy that does not choose among all schedules needs more than the smallest of them."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())))
    job = monet_like.problem(model, torch.randn(256, 64), device="roofline:cpu", verbose=False)
    measured = monet_like.problem(model, torch.randn(256, 64), verbose=False)
    for one in (job, measured):  # the second refuses before any time is measured
        with pytest.raises((InfeasibleError, SolverError)) as refused:
            one.plan("10%", strategy=strategy)
        enough = refused.value.smallest_bytes
        assert enough is not None and one.plan(enough, strategy=strategy).peak_bytes <= enough


def test_a_frame_written_and_read_is_the_same(plan: SolvedPlan, tmp_path: Path) -> None:
    from monet_like.ir.frames import write_csv

    table = plan.to_frame()
    write_csv(table, tmp_path / "timeline.csv")
    read = pandas.read_csv(tmp_path / "timeline.csv", dtype={"slot": "Int64"}, keep_default_na=True)
    assert list(read.bytes) == list(table.bytes) and list(read.seconds) == list(table.seconds)
    assert read.slot.isna().tolist() == table.slot.isna().tolist()
