"""The manual is true: what it tells readers to type works, what it shows is printed, what it describes is there."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import json
import random
import re
import runpy
import shlex
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from planning import network, peak
from random_programs import best_seconds, random_program
from replays import replayed, worst
from torch import nn
from training import run, twin

import monet_like
from monet_like.auto import kept_plans
from monet_like.capture.lower.step import capture
from monet_like.cli.group import main
from monet_like.export import decisions, policy_file, remat
from monet_like.files import cache_folder
from monet_like.inductor import plan_file
from monet_like.ir import profile_file, schedule_file
from monet_like.ir.profile_file import Profile
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.plan import plan
from monet_like.plan.random_schedules import random_schedule
from monet_like.plan.strategies import unregister_strategy
from monet_like.plan.subprogram import plain_operators
from monet_like.testing import check_variant
from monet_like.variants import admitted, unregister_variant
from monet_like.variants.plugins import names
from monet_like.zoo import model_file, registry

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def example(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def masked(text: str) -> str:
    """Numbers and spaces made alike: what does not depend on the machine."""
    return " ".join(re.sub(r"[0-9][0-9.,]*", "#", text).split())


# The tutorial -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_tutorial_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are written, its commands run in order, and every line that it shows after one is printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.syspath_prepend(tmp_path)  # the scripts import net.py
    output, ran, shown = "", 0, 0
    fences = re.findall(
        r"^```(\S*?)(?: python\n:caption: (\S+))?\n(.*?)^```", (DOCS / "tutorial.md").read_text(), re.M | re.S
    )
    for kind, caption, body in fences:
        if caption:
            (tmp_path / caption).write_text(body.lstrip("\n"))
        elif kind == "bash":
            (command,) = body.splitlines()
            output = typed(shlex.split(command))
            ran += 1
        else:
            assert kind == "text"
            for line in body.splitlines():
                assert masked(line) in masked(output), line
                shown += 1
    assert (ran, shown) == (6, 10)
    written = set(json.loads((tmp_path / "net.json").read_text()))
    described(
        "Schedule files", written | {"attention", "optimizer_in_backward", "offloaded", "device_seconds"}
    )  # left out where they say nothing
    (profile,) = cache_folder().glob("profile_*.json")
    described("Profiles", set(json.loads(profile.read_text())))
    assert isinstance(Profile.load(profile).costs, dict) and ScheduleRecord.load(tmp_path / "net.json").gap is not None


@pytest.mark.slow(full=True)
def test_plans_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines run in order and print what the page shows; an empty place between words is as wide as it may be."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MONET_LIKE_CACHE", str(tmp_path / "cache"))
    space: dict[str, object] = {}
    printed, compared = "", 0
    for kind, body in re.findall(r"^```(python|text)\n(.*?)^```", (DOCS / "python_api.md").read_text(), re.M | re.S):
        if kind == "text":
            assert [line.split() for line in body.splitlines()] == [line.split() for line in printed.splitlines()]
            compared += 1
            continue
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(body, space)
        printed = output.getvalue()
    assert compared == 7 and (tmp_path / "s.html").exists()


def typed(words: list[str]) -> str:
    """What a command prints, in this process, which has everything loaded."""
    if words[0] == "monet-like":
        result = CliRunner().invoke(main, words[1:])
        assert result.exit_code == 0, result.output
        return result.output
    assert words[0] == "python" and len(words) == 2
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(words[1], run_name="__main__")
    sys.modules.pop("net", None)  # the next script imports its own
    return output.getvalue()


def described(heading: str, fields: set[str]) -> None:
    """The table of a file format names just the fields of such a file."""
    section = (DOCS / "file_formats.md").read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == fields


def test_versions_of_files() -> None:
    """Each version that the page of file formats names is the one that is written."""
    page = (DOCS / "file_formats.md").read_text()
    rows = re.findall(r"^\| `format`.*?`(monet_like [a-z ]+)`, (\d+)", page, re.M)
    written = (decisions, kept_plans, model_file, plan_file, policy_file, profile_file, registry, remat, schedule_file)
    assert {form: int(version) for form, version in rows} == {module.FORMAT: module.VERSION for module in written}


# Adding a variant ---------------------------------------------------------------------------------------------


@pytest.fixture
def softshrink() -> Iterator[ModuleType]:
    yield example("custom_variant")
    if "softshrink" in names():  # the example takes it out again
        unregister_variant("softshrink")


@pytest.mark.slow(every=3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.usefixtures("softshrink")
def test_the_custom_variant_is_exact(dtype: torch.dtype) -> None:
    """Random schedules take any way: to the bit, inputs at the threshold, infinities and channels-last included."""
    threshold = float(torch.tensor(0.25, dtype=dtype))
    layers = (
        nn.Softshrink(threshold),
        nn.Conv2d(3, 5, 3, padding=1),
        nn.Softshrink(0.05),
        nn.AvgPool2d(2),
        nn.Conv2d(5, 4, 1),
    )
    model = nn.Sequential(nn.Conv2d(3, 3, 1, groups=3, bias=False), *layers).to(dtype).train()
    nn.init.ones_(model[0].weight)
    images = torch.randn(2, 3, 12, 12).to(dtype)
    near = torch.tensor([threshold, -threshold, 0.0, -0.0], dtype=dtype)
    up, down = torch.nextafter(near.float(), torch.full((4,), 9.0)).to(dtype), near * (1 + 2 * torch.finfo(dtype).eps)
    images[0, 0].view(-1)[:12] = torch.cat([near, up, down])
    for layout in (torch.contiguous_format, torch.channels_last):
        built = (model.to(memory_format=layout), (images.to(memory_format=layout),), {})
        captured = admitted(capture(*built), "multiway_newnode")
        offered = [way.variant for slot in captured.program.slots for way in slot if "softshrink" in way.variant]
        assert [offered.count(name) for name in ("softshrink.from_output", "softshrink.packed")] == [2, 2]
        plain, taken = run(twin(model), *built[1:]), set()
        for seed in range(6):
            schedule = random_schedule(captured.program, seed, drop=0.5, others=0.8)
            outcome = replayed(built, captured, schedule, "multiway_newnode", measured=False)
            assert worst(plain, outcome) == 0.0, (layout, seed)
            ways = zip(captured.program.slots, schedule.ways, strict=True)
            taken |= {slot[way].variant for slot, way in ways}
        assert taken >= {"softshrink.from_output", "softshrink.packed"}


def test_the_custom_variant_passes_its_check(softshrink: ModuleType) -> None:
    page = (DOCS / "adding_a_variant.md").read_text()
    code, said = re.search(r"^>>> (check_variant\(.*\))\n(.*)$", page, re.MULTILINE).groups()  # type: ignore[union-attr]
    scope = {"check_variant": check_variant, "make_model": softshrink.make_model, "torch": torch}
    assert repr(eval(code, scope)) == said == "exact"


@pytest.mark.slow
def test_the_custom_variant_is_chosen(softshrink: ModuleType) -> None:
    """And spares what running softshrink again would cost."""
    result = CliRunner().invoke(softshrink.main, [])
    assert result.exit_code == 0, result.output
    pattern = r"(\w+): peak (\d+)% .*?, (\d+) operators run again, variant used (\d+) times, gradients equal: True"
    with_it, without = re.findall(pattern, result.output)
    assert without[0] == "without" and int(without[3]) == 0
    assert with_it[0] == "with" and int(with_it[3]) > 0
    assert int(with_it[2]) < int(without[2])
    assert max(int(without[1]), int(with_it[1])) <= 60


# Adding a strategy --------------------------------------------------------------------------------------------


@pytest.fixture
def dearest_first() -> Iterator[ModuleType]:
    yield example("custom_strategy")
    unregister_strategy("dearest_first")


@pytest.mark.usefixtures("dearest_first")
def test_the_custom_strategy_is_sound() -> None:
    for seed in range(12):
        program, costs = random_program(random.Random(seed), 4)
        most = peak(plain_operators(program).program, costs)
        report = plan(program, costs, most, strategy="dearest_first").report
        best = best_seconds(program, costs, most)
        assert report.peak_bytes <= most
        assert best is not None and report.seconds >= best - 1e-9
    program, costs = network(12)
    most = peak(program, costs)
    times = [plan(program, costs, int(share * most), strategy="dearest_first").report for share in (1.0, 0.8, 0.6)]
    assert [report.peak_bytes <= share * most for report, share in zip(times, (1.0, 0.8, 0.6), strict=True)] == [
        True
    ] * 3
    assert times[0].rerun_seconds == 0 < times[1].rerun_seconds <= times[2].rerun_seconds


@pytest.mark.slow
def test_the_custom_strategys_example_runs(dearest_first: ModuleType) -> None:
    result = CliRunner().invoke(dearest_first.main, ["--budgets", "80%"])
    assert result.exit_code == 0, result.output
    found = dict(re.findall(r"^(\w+) +(\+\d+\.\d|-)", result.output, re.MULTILINE))
    assert set(found) == {"dearest_first", "chen_greedy", "chen_sqrt", "store_all"}
    assert found["store_all"] == "-" and 0 < float(found["dearest_first"]) < float(found["chen_sqrt"])


@pytest.mark.slow
def test_the_recipe_for_an_optimizer_in_the_backward_trains_as_plain_pytorch() -> None:
    text = (ROOT / "docs" / "training_scripts.md").read_text()
    block = next(b for b in re.findall(r"  ```python\n(.*?)  ```", text, re.DOTALL) if "step_and_free" in b)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())))
    x, plain = torch.randn(8, 16), copy.deepcopy(model)
    place: dict[str, Any] = {"model": model, "monet_like": monet_like, "torch": torch}
    exec(textwrap.dedent(block), place)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-5, fused=True)
    for _ in range(3):
        place["model"](x).square().mean().backward()
        assert all(p.grad is None for p in place["model"].parameters())
        plain(x).square().mean().backward()
        reference.step()
        reference.zero_grad()
    assert place["model"].record.optimizer_in_backward
    assert all(torch.equal(a, b) for a, b in zip(place["model"].parameters(), plain.parameters(), strict=True))
