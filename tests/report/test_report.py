"""Reports: every byte has a kind and a layer, a real step takes what was predicted, and a browser shows the page."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from torch import nn

from monet_like.capture.layers import layers_of, operator_of
from monet_like.capture.lower.step import capture
from monet_like.compiler.costs import measured_costs
from monet_like.compiler.request import Request, captured_for
from monet_like.compiler.sources import Given
from monet_like.ir.profile_file import Profile
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.ir.simulate import Free, simulate
from monet_like.job.job import Job
from monet_like.job.solved import SolvedPlan
from monet_like.models import is_registered
from monet_like.plan import store_all
from monet_like.plan.baseline import plain_step
from monet_like.report.charts import memory_chart
from monet_like.report.figures import KINDS, Course, course, groups, plain_course
from monet_like.report.live import live_step
from monet_like.report.page import Figures, charts, page
from monet_like.variants import admitted

CPU = torch.device("cpu")
ALL = "inplace_conv_multiway_newnode"
NETWORK = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm = torch.nn.BatchNorm2d(8)
        self.act = torch.nn.ReLU()

    def forward(self, x):
        return self.act(self.norm(self.conv(x))) + x

def make_model():
    return torch.nn.Sequential(*(Block() for _ in range(4)), torch.nn.Flatten(), torch.nn.Linear(8 * 12 * 12, 3))

def make_inputs(batch):
    return (torch.empty(batch, 8, 12, 12),)
"""
MODEL_NAME = "net.py:make_model"


def made() -> nn.Module:
    space: dict[str, Any] = {}
    exec(NETWORK, space)
    return space["make_model"]()


@pytest.fixture(scope="module")
def solved() -> tuple[SolvedPlan, nn.Module, tuple[Any, dict[str, Any]]]:
    """A schedule at 55 % of plain PyTorch's peak, by exact workspaces and made-up seconds."""
    torch.manual_seed(0)
    model = made()
    example = ((torch.randn(6, 8, 12, 12),), {})
    request = Request(model, example, ALL, MODEL_NAME, strategy="heuristic")

    costs, note = measured_costs(request, captured_for(request, example), CPU, timed=False)
    costs = {key: replace(cost, seconds=1e-3) for key, cost in costs.items()}
    compiled = Job(request, CPU, Given(Profile("cpu: counted", costs, note))).plan("55%")
    return compiled, model, example


@pytest.fixture
def folder(solved: tuple[SolvedPlan, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the network, the schedule and its profile, which is where commands run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NETWORK)
    compiled = solved[0]
    compiled.record.save(tmp_path / "net.json")
    Profile("cpu: counted", compiled.ready.costs).save(tmp_path / "costs.json")
    return tmp_path


def both(compiled: SolvedPlan, extra_bytes: int = 0) -> tuple[Course, Course]:
    captured, costs = compiled.ready.captured, compiled.ready.costs
    ours = course(captured, captured.program, compiled.record.schedule, costs, extra_bytes)
    return plain_course(captured, costs, extra_bytes), ours


# Figures ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_kinds_and_layers_add_up_to_what_the_simulator_counts(solved: tuple[SolvedPlan, Any, Any]) -> None:
    compiled = solved[0]
    plain, ours = both(compiled, extra_bytes=1000)
    program, schedule, eager = plain_step(
        compiled.ready.captured.plain, compiled.ready.costs, autograd_nodes=compiled.ready.captured.autograd_nodes
    )
    for found, report in (
        (plain, simulate(program, schedule, eager, extra_bytes=1000)),
        (
            ours,
            simulate(compiled.ready.captured.program, compiled.record.schedule, compiled.ready.costs, extra_bytes=1000),
        ),
    ):
        assert [run.total_bytes for run in found.runs] == [step.bytes for step in report.steps]
        assert [run.seconds for run in found.runs] == [step.seconds for step in report.steps]
        assert sum(map(sum, found.at_peak.values())) == found.peak.total_bytes == report.peak_bytes
        by_kind = [sum(counts) for counts in zip(*found.at_peak.values(), strict=True)]
        assert tuple(by_kind) == found.peak.bytes


def test_what_each_kind_holds(solved: tuple[SolvedPlan, Any, Any]) -> None:
    compiled, model, example = solved
    plain, ours = both(compiled, extra_bytes=1000)
    weights = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers()))
    for found in (plain, ours):
        kinds = [dict(zip(KINDS, run.bytes, strict=True)) for run in found.runs]
        assert {k["parameters"] for k in kinds} == {weights}
        assert {k["optimizer"] for k in kinds} == {1000}
        assert {k["inputs"] for k in kinds} == {example[0][0].untyped_storage().nbytes()}
        forward = [k for k, run in zip(kinds, found.runs, strict=True) if run.slot is None]
        assert {k["recomputed"] + k["backward"] + k["gradients"] for k in forward} == {0}
        gradients = [k["gradients"] for k in kinds]
        assert gradients == sorted(gradients)
        assert gradients[-1] == sum(p.untyped_storage().nbytes() for p in model.parameters())
    assert any(run.again for run in ours.runs)
    assert max(run.bytes[list(KINDS).index("recomputed")] for run in ours.runs) > 0
    assert not any(run.bytes[list(KINDS).index("recomputed")] for run in plain.runs)
    assert ours.kept_bytes < plain.kept_bytes


def test_a_linear_layer_by_hand() -> None:
    """x [4, 16] → [4, 8], float32: the product, then the gradients of weight and bias; nothing else is made."""
    captured = capture(nn.Sequential(nn.Linear(16, 8)), (torch.empty(4, 16),))
    found = course(captured, captured.program, store_all(captured.program), Free(), 0)
    kinds = [{k: n for k, n in zip(KINDS, run.bytes, strict=True) if n} for run in found.runs]
    always = {"parameters": 4 * (16 * 8 + 8), "inputs": 4 * 4 * 16}
    assert kinds[0] == {**always, "kept": 4 * 4 * 8}
    assert kinds[-1] == {**always, "kept": 4 * 4 * 8, "gradients": always["parameters"], "backward": 4 * 4 * 8}
    assert found.at_peak.keys() == {"0", "(inputs and loss)"}
    assert [run.operator for run in found.runs] == ["addmm", "mm", "sum"]


def test_values_belong_to_the_module_that_makes_them(solved: tuple[SolvedPlan, Any, Any]) -> None:
    compiled = solved[0]
    captured = compiled.ready.captured
    assert set(layers_of(captured, captured.program)) == {
        *(f"{i}.{name}" for i in range(4) for name in ("conv", "norm", "act")),
        *("0", "1", "2", "3", "5", "(inputs and loss)"),  # 4 flattens: a view
    }
    plain, ours = both(compiled)
    convolutions = [run.layer for run in plain.runs if run.operator == "convolution"]
    backward = [run.layer for run in plain.runs if run.operator == "convolution_backward"]
    assert convolutions == [f"{i}.conv" for i in range(4)]
    assert list(dict.fromkeys(backward)) == convolutions[::-1]
    sums = [run.layer for run in plain.runs if run.operator == "add" and run.slot is None]
    assert sums == ["0", "1", "2", "3"]
    assert {run.layer.split(".")[0] for run in ours.runs if run.again} <= {"0", "1", "2", "3"}


def test_what_the_model_itself_calls_has_the_functions_name() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).exp()

    captured = capture(Bare(), (torch.empty(2, 3),))
    program = captured.program
    layers = layers_of(captured, program)
    assert set(layers) == {"weight", "mul()", "exp()", "(inputs and loss)"}
    assert [layers[v] for task in program.tasks for v in task.writes] == ["mul()", "exp()"]
    assert layers[program.gradients[0]] == "weight"


def test_groups_cut_names_where_few_remain() -> None:
    names = [f"layer{i}.{j}.{part}" for i in range(3) for j in range(4) for part in ("conv", "norm")]
    assert len(set(groups(names, 24).values())) == 24
    assert groups(names, 23)["layer2.3.conv"] == "layer2.3"
    assert groups(names, 5)["layer2.3.conv"] == "layer2"
    assert groups([], 5) == {}


def test_rows_of_no_duration_stand_one_by_one(solved: tuple[SolvedPlan, Any, Any]) -> None:
    """The chart stacks every row by itself: else rows that share their time would be put on top of each other."""
    plain, ours = both(solved[0])
    rows = memory_chart(plain, ours, solved[0].record.budget_bytes)["data"]["values"]
    assert len({row["n"] for row in rows}) == len(rows) == len(plain.runs) + len(ours.runs) + 2
    assert all(sum(v for k, v in row.items() if k[0] == "k") == pytest.approx(row["all"], rel=1e-3) for row in rows)


# A real step --------------------------------------------------------------------------------------------------


def test_a_real_step_takes_what_was_predicted_at_every_run(solved: tuple[SolvedPlan, Any, Any]) -> None:
    compiled, model, example = solved
    ours = both(compiled, extra_bytes=100)[1]
    live = live_step(model, compiled.ready.captured, compiled.record.schedule, example, 100, "here")
    assert len(live.bytes) == len(ours.runs)
    apart = [count - run.total_bytes for run, count in zip(ours.runs, live.bytes, strict=True)]
    assert max(map(abs, apart)) <= 64  # the loss: a few numbers
    assert max(live.bytes) <= compiled.record.budget_bytes + 164
    assert all(p.grad is None for p in model.parameters())


# The page -----------------------------------------------------------------------------------------------------


def figures(compiled: SolvedPlan, **changes: Any) -> Figures:
    plain, ours = both(compiled)
    fronts = {"ogc": [(ours.peak.total_bytes, 2 * ours.seconds)], "<b>odd</b>": [(plain.peak.total_bytes, 0.1)]}
    return Figures(replace(compiled.record, **changes), plain, ours, "<i>a device</i>", fronts)


HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=document.title='taken'>{{ 7 * 7 }}"


@pytest.mark.slow
def test_texts_of_a_file_are_never_obeyed(solved: tuple[SolvedPlan, Any, Any]) -> None:
    found = figures(
        solved[0],
        **dict.fromkeys(("model", "mode", "device", "note", "solver", "status", "bound_kind"), HOSTILE),
        versions={HOSTILE: HOSTILE},
        gap=0.1,
        bound_seconds=1.0,
    )
    text = page(found, charts(found))
    assert "taken" in text and "7 * 7" in text
    assert "<script>document" not in text and "<img" not in text and "<b>odd" not in text and "<i>a" not in text
    assert text.count("</script>") == 4


def chromium() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium or Chrome is installed (apt-get install chromium)")
    return found


@pytest.fixture
def browser_page() -> Iterator[Any]:
    """A page of a real browser, and what went wrong in it."""
    library = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser: pip install playwright")
    with library.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1180, "height": 900})
        page.set_default_timeout(120_000)
        page.trouble = []
        page.on("console", lambda message: page.trouble.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: page.trouble.append(str(error)))
        page.on("request", lambda request: page.trouble.append(request.url) if request.url[:4] == "http" else None)
        yield page
        browser.close()


@pytest.mark.slow
def test_a_browser_shows_it(solved: tuple[SolvedPlan, Any, Any], browser_page: Any, tmp_path: Path) -> None:
    """All pictures are drawn, the table can be searched and sorted, nothing is loaded, and no error is logged."""
    compiled, model, example = solved
    live = live_step(model, compiled.ready.captured, compiled.record.schedule, example, 0, "here")
    found = replace(figures(compiled, model=HOSTILE), live=live)
    specs = charts(found)
    assert list(specs) == ["memory", "layers", "recomputed", "front", "live"]
    (tmp_path / "report.html").write_text(page(found, specs))
    browser_page.goto((tmp_path / "report.html").as_uri())
    browser_page.wait_for_function("document.body.dataset.drawn")
    for name in specs:
        box = browser_page.locator(f"#{name} svg.marks").bounding_box()
        assert box["width"] > 500 and box["height"] > 100, name
    assert browser_page.title() == f"{HOSTILE} in {compiled.record.budget_bytes / 2**10:.1f} KB"
    assert browser_page.inner_text("h1") == HOSTILE
    browser_page.locator("#memory svg.marks").hover(position={"x": 400, "y": 180})
    browser_page.wait_for_selector("#tip tr", state="visible")
    assert browser_page.inner_text("#tip tr:first-child td:first-child") == "task"
    assert "undefined" not in browser_page.inner_text("#tip")

    rows = browser_page.locator("#schedule tbody tr:visible")
    assert rows.count() == len(found.ours.runs)
    browser_page.fill("#search", "0.conv FORWARD")
    assert rows.count() == 1
    assert browser_page.inner_text("#count").startswith(f"1 of {len(found.ours.runs)} runs")
    browser_page.click("button[data-search=again]")
    assert rows.count() == sum(run.again for run in found.ours.runs)
    browser_page.click("button[data-search='']")
    browser_page.click("#schedule th button:has-text('memory')")
    assert int(rows.first.locator("td").first.inner_text()) == found.ours.runs.index(found.ours.peak)

    browser_page.set_viewport_size({"width": 360, "height": 740})  # a phone: nothing is wider than the page
    assert browser_page.evaluate("document.documentElement.scrollWidth") == 360
    for name in specs:  # pictures can be read, and moved inside their cards
        assert browser_page.locator(f"#{name} svg.marks").bounding_box()["width"] >= 700, name
        assert browser_page.locator(f"#{name}").bounding_box()["width"] < 360, name

    browser_page.set_viewport_size({"width": 1280, "height": 720})
    picture = browser_page.screenshot(full_page=True)
    assert picture.startswith(b"\x89PNG") and len(picture) > 50_000
    assert browser_page.trouble == []


@pytest.mark.slow
def test_pictures_are_there_without_scripts(
    solved: tuple[SolvedPlan, Any, Any], browser_page: Any, tmp_path: Path
) -> None:
    found = figures(solved[0])
    specs = charts(found)
    (tmp_path / "report.html").write_text(page(found, specs))
    still = browser_page.context.browser.new_page(java_script_enabled=False)
    still.goto((tmp_path / "report.html").as_uri())
    for name in specs:
        box = still.locator(f"#{name} svg").bounding_box()
        assert box["width"] > 500 and box["height"] > 100, name
        assert still.locator(f"#{name} svg path").count() > 3 < still.locator(f"#{name} svg text").count(), name


# The command --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_writes_a_page_and_pictures(folder: Path) -> None:
    result = run_command("report", "net.json", "--model", MODEL_NAME, "--profile", "costs.json", "--png", "--json")
    told = json.loads(result.stdout)
    record = ScheduleRecord.load(Path("net.json"))
    assert told["schedule"]["peak_bytes"] == record.peak_bytes
    assert told["plain"]["peak_bytes"] == record.plain_peak_bytes
    assert sum(told["plain"]["peak_by_layer"].values()) == record.plain_peak_bytes
    assert told["measured_bytes"] is None
    assert {"heuristic", "chen_sqrt", "ogc"} <= told["fronts"].keys()
    assert all(peak <= record.plain_peak_bytes for line in told["fronts"].values() for peak, _ in line)
    assert told["page"] == "net.html"
    assert told["pictures"] == [f"net_{name}.png" for name in ("memory", "layers", "recomputed", "front")]
    assert all(Path(name).read_bytes().startswith(b"\x89PNG") for name in told["pictures"])
    text = Path("net.html").read_text()
    assert text.startswith("<!doctype html>") and 400_000 < len(text) < 800_000
    assert {path.suffix for path in folder.iterdir()} == {".py", ".json", ".html", ".png"} | (
        {""} if Path("__pycache__").exists() else set()
    )


def test_the_command_for_people(folder: Path) -> None:
    common = ("report", "net.json", "--model", MODEL_NAME, "--profile", "costs.json", "--front", "off", "--live")
    told = run_command(*common, "--out", "here/page.html").stdout
    lines = told.splitlines()
    assert lines[0].startswith("net.py:make_model, budget ")
    assert [line.split("  ")[0].strip() for line in lines[2:5]] == [
        "this schedule (measured)", "this schedule (predicted)", "plain PyTorch (predicted)"
    ]  # fmt: skip
    assert lines[-1] == "wrote here/page.html"
    assert "\x1b" not in told


def test_what_a_file_names_is_not_run_unseen(folder: Path) -> None:
    result = run_command("report", "net.json", exit_code=2)
    assert result.stderr == (
        "error: the schedule is of 'net.py:make_model', and what a file names is not run unseen; if that is your "
        "model, say so: --model MODEL, such as --model path/to/file.py:make_model\n"
    )
    assert not Path("net.html").exists()


@pytest.mark.parametrize(
    ("expression", "known"),
    [
        ("torchvision.models.resnet18()", True),
        ("torchvision.models.resnet18(num_classes=10)", True),
        ("torchvision.models.inception_v3(aux_logits=False, init_weights=False)", True),
        ("torchvision.models.segmentation.fcn_resnet50(num_classes=3)", True),
        ("unet", True),
        ("darts()", True),
        ("torchvision.models.resnet18(weights='DEFAULT')", False),
        ("torchvision.models.segmentation.fcn_resnet50(weights_backbone='DEFAULT')", False),
        ("torchvision.models.resnet18(**{'weights': 'DEFAULT'})", False),
        ("torchvision.models.resnet18", False),
        ("torchvision.models.resnet.resnet18()", False),
        ("torchvision.models.os.system('touch sentinel')", False),
        ("torchvision.models.get_model('resnet18')", False),
        ("os.resnet18()", False),
        ("net.py:make_model", False),
        ("((((", False),
        ("", False),
    ],
)
def test_which_names_are_known(expression: str, known: bool) -> None:
    assert is_registered(expression) is known


def test_another_model_is_refused(folder: Path) -> None:
    Path("other.py").write_text(NETWORK.replace("range(4)", "range(3)"))
    common = ("report", "net.json", "--front", "off", "--profile", "roofline:cpu")
    result = run_command(*common, "--model", "other.py:make_model", exit_code=2)
    assert result.stderr.startswith(
        "error: this schedule does not match the model: it was planned for net.py:make_model"
    )
    assert not Path("net.html").exists()


def test_without_the_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    result = run_command("report", "net.json", exit_code=2)
    assert result.stderr == "error: a report needs vl-convert-python: pip install 'monet_like[plots]'\n"


# All commands -------------------------------------------------------------------------------------------------

TINY = """
import torch
def make_model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
def make_inputs(batch):
    return (torch.empty(batch, 4),)
"""
NAME = "tiny.py:make_model"
SMALL = ("--device", "cpu", "--profile", "roofline:cpu", "--time-limit", "2")
COMMANDS = {
    "solve": (NAME, "6", "0.01", "normal", "HIGHS", *SMALL, "--out", "tiny.json"),
    "schedule": (MODEL_NAME, "6", "0.01", ALL, "CBC", "--device", "cpu", "--solution-file", "net.json", "--run-bs"),
    "compare": (NAME, "6", "90%,1%", "normal", *SMALL, "--strategies", "chen_sqrt"),
    "pareto": (NAME, "6", "normal", *SMALL, "--budgets", "100%"),
    "smallest": (NAME, "6", "normal", *SMALL),
    "largest-batch": (NAME, "450B", "normal", *SMALL),
    "tune": (NAME, "1MB", "normal", *SMALL, "--batches", "2,4", "--best", "1", "--out", "tiny.json"),
    "inspect": ("net.json",),
    "report": ("net.json", "--model", MODEL_NAME, "--profile", "costs.json", "--front", "off"),
}
KEYS = {
    "solve": {"peak_bytes", "plain_seconds", "gap", "schedule_file", "profile_file", "stage_seconds", "counts"},
    "schedule": {"run_bs"},
    "compare": {"model", "batch", "plain_peak_bytes", "plain_seconds", "points"},
    "pareto": {"model", "batch", "plain_peak_bytes", "plain_seconds", "points"},
    "smallest": {"peak_bytes", "seconds", "proven_bytes", "peak_step"},
    "tune": {"batch", "samples_per_second", "plain_samples_per_second", "tried", "schedule_file"},
    "inspect": {"schedule", "inputs", "fingerprint"},
    "report": {"schedule", "plain", "page", "pictures"},
    "largest-batch": {"model", "budget_bytes", "batch"},
}


@pytest.mark.slow(but=["compare", "smallest", "solve"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_speaks_to_people_to_programs_and_to_nobody(folder: Path, command: str) -> None:
    Path("tiny.py").write_text(TINY)
    said = run_command(command, *COMMANDS[command])
    assert said.stdout and not said.stdout.startswith("{")
    assert command in ("schedule", "largest-batch") or "predicted" in said.stdout  # figures say that they are
    assert "\x1b" not in said.output
    assert said.stderr == ""
    told = run_command(command, *COMMANDS[command], "--json")
    assert json.loads(told.stdout).keys() >= KEYS[command]
    assert told.stdout.count("\n") == 1
    assert run_command(command, *COMMANDS[command], "--quiet").output == ""


def test_quiet_commands_still_say_what_is_wrong(folder: Path) -> None:
    Path("tiny.py").write_text(TINY)
    result = run_command("solve", NAME, "6", "100B", "normal", "HIGHS", *SMALL, "--quiet", exit_code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")


def test_operators_are_named_by_what_they_compute() -> None:
    """Not by the views that they end in."""
    net = nn.Sequential(nn.Conv3d(2, 4, 1), nn.InstanceNorm3d(4, affine=True), nn.LeakyReLU(inplace=True)).train()
    program = admitted(capture(net, (torch.randn(2, 2, 4, 4, 4),)), "inplace_conv_multiway_newnode").program
    named = {(task.variant, operator_of(task)) for task in program.every_task()}
    assert {("instance_norm_leaky_relu.train", "instance_norm_leaky_relu"), ("aten", "convolution_backward")} <= named
    assert not any("view" in operator.split(" + ") for _, operator in named)
