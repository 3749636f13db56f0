"""The suite that compares with others: gradients, limits, turns, and the words that it makes from rows."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chain import residual
from click.testing import CliRunner
from processes import forked_script
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks import run, work
from benchmarks.contenders import CONTENDERS, NotApplicableError
from benchmarks.malloc import EXACT
from benchmarks.processes import FEWEST, ROOT, DiedError, Running, take_turns
from benchmarks.report import pareto, trusted
from benchmarks.rows import Point, Trial, merged, read_rows, write_rows
from benchmarks.work import WORK, Job
from benchmarks.worker import Verdict, judge
from monet_like.compiler.request import Request
from monet_like.compiler.sources import Given
from monet_like.ir.schedule_file import InputSpec
from monet_like.job.job import Job as Compiler
from monet_like.profile.devices import DEVICES
from scripts import gpu_check

MB = 10**6
HELPERS = Path(__file__).parents[1] / "helpers"


def verdict(contender: str, setting: str = "", budget_bytes: int = 0, model: str = "dropout") -> Verdict:
    """What a contender's gradients are worth, in this process."""
    job = Job(model, "cpu", 8, contender, setting, budget_bytes, solver_seconds=2.0)
    plain, example = job.model_and_inputs()
    return judge(plain, CONTENDERS[contender].build(job, copy.deepcopy(plain), example).module, example, 0.0)


# Contenders ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_gradients_of_compiled_plans_are_right_for_the_masks_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two of the net's six layers: Inductor's kernels take seconds to compile."""
    usual = work.ASIDE["dropout"]
    few = replace(usual.cpu, make=lambda: work.probe()[:2])
    monkeypatch.setattr(work, "ASIDE", {"dropout": replace(usual, cpu=few)})
    found = verdict("torch.compile planned")
    assert (found.correct, found.checked) == (True, "finite differences")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("contender", "setting"),
    [
        ("plain PyTorch", ""),
        ("checkpoint per block", ""),
        ("checkpoint every n-th block", "2"),
        ("checkpoint_sequential", "3"),
        ("selective checkpoint", ""),
        ("selective checkpoint planned", ""),
        ("strategy chen_sqrt", ""),
        ("monet_like without variants", ""),
        ("monet_like", ""),
    ],
)
def test_gradients_with_dropout_are_plain_pytorchs(contender: str, setting: str) -> None:
    found = verdict(contender, setting)
    assert found.correct
    assert found.checked == "plain PyTorch"
    assert found.gradient_error < 1e-12


@pytest.mark.slow
def test_pytorchs_budget_runs_by_its_own_operators() -> None:
    """Its gradients with dropout are wrong in torch 2.15: that is reported, and not asserted here."""
    assert verdict("aot_eager budget", "1.0").correct


class Careless(nn.Module):
    """Blocks that are run again with other masks."""

    def __init__(self, model: nn.Module, *, preserve: bool, shifted: bool) -> None:
        super().__init__()
        self.model, self.preserve, self.shifted = model, preserve, shifted

    def forward(self, x: torch.Tensor) -> Any:
        if self.shifted:
            torch.rand(1)
        for block in self.model.children():
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.preserve)
        return x

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_parameters(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("preserve", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_masks_that_change_are_noticed(preserve: bool, shifted: bool, scale: float) -> None:
    """Also where masks are not plain PyTorch's, so that gradients cannot be compared, whether or not
    outputs show it.
    """
    plain, example = Job("dropout", "cpu", 8, "plain PyTorch").model_and_inputs()
    with torch.no_grad():
        for block in plain.children():
            block.inner[-1].weight.mul_(scale)
    careless = Careless(copy.deepcopy(plain), preserve=preserve, shifted=shifted)
    found = judge(plain, careless, example, 0.0)
    assert found.checked == ("plain PyTorch" if preserve and not shifted else "finite differences")
    assert found.correct is preserve


def test_wrong_gradients_without_masks_are_noticed() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    example = (torch.randn(4, 3, 8, 8),), {}
    other = copy.deepcopy(plain)
    for parameter in other.parameters():
        parameter.register_hook(lambda grad: 1.5 * grad)
    found = judge(plain, other, example, 0.0)
    assert (found.checked, found.correct) == ("plain PyTorch", False)


def test_every_setting_names_a_contender_that_can_be_asked() -> None:
    for name, contender in CONTENDERS.items():
        assert set(run.settings_of(contender, True)) <= set(contender.settings), name
        assert contender.front in ("eager", "inductor")
        assert "," not in name  # --contenders takes names with commas between


def test_a_model_that_is_no_sequence_is_said_to_be_none() -> None:
    with pytest.raises(NotApplicableError, match="googlenet is no sequence of modules"):
        CONTENDERS["checkpoint_sequential"].build(Job("googlenet", "cpu", 1, "", "2"), nn.Identity(), ((), {}))


@pytest.mark.parametrize("name", ["resnet50", "densenet121", "vit_b_16"])
def test_sequences_compute_what_the_model_does(name: str) -> None:
    size = WORK[name].cpu
    torch.manual_seed(0)
    model, example = size.make().eval(), size.inputs(1)
    sequence = WORK[name].sequence
    assert sequence is not None
    with torch.no_grad():
        expected = model(*example[0])
        owner, modules = sequence(model)
        owner.forward = nn.Sequential(*modules).forward  # type: ignore[method-assign]
        assert torch.equal(model(*example[0]), expected)


@pytest.mark.slow
def test_blocks_are_found_in_every_model() -> None:
    from benchmarks.contenders import _blocks

    for name, measured in WORK.items():
        with torch.device("meta"):
            model = measured.cpu.make()
        assert len(_blocks(Job(name, "cpu", 1, ""), model)) >= 2, name


# Processes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_dies_at_the_limit_and_not_below(tmp_path: Path) -> None:
    """On a net without convolutions: workspaces of oneDNN, larger with more threads, are allocated and
    hardly touched.
    """
    running = Running(Job("dropout", "cpu", 4096, "plain PyTorch", rounding=1.0), dict(os.environ, **EXACT))
    peak, static = running.ready["peak_bytes"], running.ready["static_bytes"]
    assert running.ready["correct"]
    assert peak > static + 20 * MB
    assert running.ready["process_bytes"] == pytest.approx(peak, rel=0.03)
    assert running.ask(f"limit {running.ready['process_bytes'] + run.SLACK_BYTES}") is True
    with pytest.raises(DiedError, match="allocate memory"):
        running.ask(f"limit {static}")


def test_turns_go_forth_and_back() -> None:
    class Fake:
        def __init__(self, name: str) -> None:
            self.name = name

        def ask(self, line: str) -> float:
            order.append(self.name)
            if self.name == "b" and len(order) > 4:
                raise DiedError("gone")
            return float(len(order))

    order: list[str] = []
    first, second, third = take_turns([Fake("a"), Fake("b"), Fake("c")], 2)  # type: ignore[list-item]
    assert "".join(order) == "abccbaac"
    assert first == [6.0, 7.0]
    assert isinstance(second, DiedError)
    assert third == [4.0, 8.0]
    (few,) = take_turns([Fake("a")], 9, most_seconds=0)  # type: ignore[list-item]
    assert len(few) == FEWEST


@pytest.mark.slow
def test_a_run_measures_what_is_missing_and_writes_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        run, "ESSENTIAL", ("checkpoint per block", "Rockmate")
    )  # in turn with one process of plain PyTorch
    other = tmp_path / "python"  # an interpreter without packages
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    other.chmod(0o755)
    arguments = ["--suite", "cpu", "--models", "resnet18", "--contenders", "checkpoint per block,Rockmate", "--quick"]
    arguments += ["--parts", "points", "--steps", "2", "--out", str(tmp_path), "--rockmate-python", str(other)]
    done = CliRunner().invoke(run.main, arguments)
    assert done.exit_code == 0, done.output
    rows = {p.label: p for p in read_rows(tmp_path / "points.csv", Point)}
    assert set(rows) == {"plain PyTorch", "checkpoint per block", "Rockmate hilp 45%"}
    block = rows["checkpoint per block"]
    assert block.status == "measured"
    assert block.correct
    assert block.peak_bytes < rows["plain PyTorch"].peak_bytes < block.process_bytes * 2
    assert block.plain_seconds > 0
    rockmate = rows["Rockmate hilp 45%"]
    assert (rockmate.status, rockmate.reason) == ("failed", "ModuleNotFoundError: No module named 'torch'")
    assert "gpu" not in (tmp_path / "rivals.md").read_text()
    before = (tmp_path / "points.csv").read_bytes()
    again = CliRunner().invoke(run.main, arguments)
    assert "batch 4:" in done.output and "batch 4:" not in again.output
    assert (tmp_path / "points.csv").read_bytes() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is measured")
def test_without_a_gpu_its_suite_says_so_and_nothing_else(tmp_path: Path) -> None:
    done = CliRunner().invoke(run.main, ["--suite", "gpu", "--out", str(tmp_path)])
    assert done.output == "not measured\n"
    assert not list(tmp_path.iterdir())


def test_unknown_names_are_refused() -> None:
    done = CliRunner().invoke(run.main, ["--suite", "cpu", "--models", "resnet5"])
    assert done.exit_code == 2
    assert "there is no model 'resnet5'" in done.output


# The search for the largest batch --------------------------------------------------------------------------------


def suite_of(folder: Path, *points: Point) -> run.Suite:
    """A suite with these points measured."""
    suite = run.Suite("cpu", folder, 1, 1, 1.0, 0.0, folder)
    suite.points = list(points)
    return suite


def batches_tried(search: Generator[int, Trial, None], trial: Callable[[int], Trial]) -> list[int]:
    """What a search asks for, in order, where ``trial`` says what came of it."""
    tried = [next(search)]
    with contextlib.suppress(StopIteration):
        while len(tried) <= run.TRIALS:
            tried.append(search.send(trial(tried[-1])))
    return tried


@pytest.mark.parametrize("largest", [1, 5, 8, 13, 60, 300])
@pytest.mark.parametrize("bent", [0.0, 0.2])
@pytest.mark.parametrize("setting", ["", "limit"])
def test_the_search_ends_between_what_fits_and_what_does_not(
    tmp_path: Path, largest: int, bent: float, setting: str
) -> None:
    """Peaks lie on a line, or only nearly so: with what is taken at any batch, and in steps of eight."""
    limit = 500 * MB
    suite = suite_of(tmp_path, point("plain PyTorch", 500, 1.0, static_bytes=100 * MB))

    def trial(batch: int) -> Trial:
        fits = batch <= largest
        share = (bent * (batch // 8 * 8) + batch) / (bent * (largest // 8 * 8) + largest + 0.5)
        peak = int(100 * MB + 400 * MB * (bent + share) / (1 + bent))
        assert (peak <= limit) is fits
        peak = limit if setting == "limit" else peak
        return Trial("resnet50", "", setting, limit, batch, "fits" if fits else "over", peak_bytes=peak)

    tried = batches_tried(run._batches(suite, "resnet50", 12, "monet_like", setting, limit), trial)
    assert len(tried) <= (run.TRIALS if setting == "limit" else 6)
    low, high = max(b for b in tried if b <= largest), min(b for b in tried if b > largest)
    assert low <= largest < high
    assert high - low <= max(1, low // 8)


def test_the_search_goes_on_from_the_peaks_that_are_known(tmp_path: Path) -> None:
    plain = point("plain PyTorch", 500, 1.0, static_bytes=100 * MB)
    suite = suite_of(tmp_path, plain, point("selective checkpoint", 300, 1, static_bytes=100 * MB))
    assert next(run._batches(suite, "resnet50", 12, "plain PyTorch", "", 525 * MB)) == 12
    assert next(run._batches(suite, "resnet50", 12, "selective checkpoint", "", 525 * MB)) == 25
    assert next(run._batches(suite, "resnet50", 12, "monet_like", "limit", 525 * MB)) == 36


def test_peaks_that_rise_late_are_sought_between_what_fits_and_what_does_not(tmp_path: Path) -> None:
    """As VGG-16's by torch.compile: at first gradients of weights take more than activations."""
    suite = suite_of(tmp_path, point("plain PyTorch", 1293, 1.0, static_bytes=560 * MB))
    search = run._batches(suite, "resnet50", 12, "torch.compile", "", 1357 * MB)

    def trial(batch: int) -> Trial:
        status, peak = "fits" if batch <= 46 else "over", max(1118 * MB, (612 + 16 * batch) * MB)
        return Trial("resnet50", "", "", 1357 * MB, batch, status, peak_bytes=peak)

    tried = batches_tried(search, trial)
    assert 46 in tried or max(b for b in tried if b <= 46) >= 42
    assert len(tried) <= 6


def test_what_dies_below_the_limit_is_sought_halfway(tmp_path: Path) -> None:
    """Its tensors would fit, so their peaks are no guide."""
    suite = suite_of(tmp_path, point("plain PyTorch", 500, 1.0, static_bytes=100 * MB))
    search = run._batches(suite, "resnet50", 12, "torch.compile", "", 525 * MB)

    def trial(batch: int) -> Trial:
        status, peak = "fits" if batch <= 20 else "died", (100 + 6 * batch) * MB
        return Trial("resnet50", "", "", 525 * MB, batch, status, peak_bytes=peak)

    tried = batches_tried(search, trial)
    assert tried == [12, 36, 24, 18, 21, 20]


def test_no_batch_fits(tmp_path: Path) -> None:
    suite = suite_of(tmp_path, point("plain PyTorch", 500, 1.0))
    for setting in ("", "limit"):
        search = run._batches(suite, "resnet50", 12, "monet_like", setting, 500 * MB)
        tried = batches_tried(search, partial(Trial, "resnet50", "", setting, 500 * MB, status="refused"))
        assert tried[-1] == 1


def test_ours_is_planned_for_what_the_others_take(tmp_path: Path) -> None:
    suite = suite_of(
        tmp_path,
        *(point("plain PyTorch", 500, 1.0), point("selective checkpoint", 400.123, 1.1)),
        *(point("checkpoint per block", 300, 1.3), point("monet_like", 299, 1.2, "20%")),
        point("monet_like", 502, 0.9, "100%"),
    )
    wanted = [("monet_like", "400.13 MB"), ("monet_like", "500 MB")]
    assert run.others_peaks(suite, "resnet50", 12, list(CONTENDERS)) == wanted
    assert suite.job("resnet50", 12, *wanted[0]).budget_bytes == 400.13 * MB
    assert suite.job("resnet50", 12, "monet_like", "20%").budget_bytes == 100 * MB


# Rows and reports ---------------------------------------------------------------------------------------------


def point(contender: str, peak_mb: float, ratio: float, setting: str = "", **more: Any) -> Point:
    return Point(
        "resnet50", 12, contender, setting, peak_bytes=round(peak_mb * MB), process_bytes=round(peak_mb * MB),
        seconds=ratio,
        plain_seconds=1.0, correct=True, checked="plain PyTorch", **more,
    )  # fmt: skip


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = [point("plain PyTorch", 500, 1.0), Point("unet", 2, "Rockmate", "x", "failed", 'a, "b"\nc', gap=0.25)]
    write_rows(tmp_path / "points.csv", rows)
    assert read_rows(tmp_path / "points.csv", Point) == rows
    committed = ROOT / "benchmarks" / "results" / "cpu-amd-epyc-2-threads" / "points.csv"
    write_rows(tmp_path / "again.csv", read_rows(committed, Point))
    assert (tmp_path / "again.csv").read_bytes() == committed.read_bytes()
    changed = replace(rows[0], seconds=2.0)
    assert merged(rows, [changed]) == [changed, rows[1]]


def test_a_front_has_no_point_that_another_beats() -> None:
    rows = [
        point("a", 500, 1.0),
        point("b", 400, 1.2),
        point("c", 450, 1.3),
        point("d", 300, 1.4),
        point("e", 300, 1.5),
    ]
    assert [p.contender for p in pareto(rows)] == ["d", "b", "a"]


def test_finite_differences_are_not_believed_against_the_net_of_dropout() -> None:
    there = replace(point("torch.compile budget", 300, 1.1, "0.2"), checked="finite differences")
    probe = replace(there, model="dropout", correct=False)
    other = replace(there, setting="0.5")
    compared = replace(there, checked="plain PyTorch")
    assert [p.correct for p in trusted([there, probe, other])] == [False, False, True]
    assert [p.correct for p in trusted([compared, probe])] == [True, False]


@pytest.mark.slow
def test_the_gpu_check_replays_and_profiles_without_a_solver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with a small net: the code is the same."""
    monkeypatch.delitem(sys.modules, "cvxpy", raising=False)  # of another test in this process
    example = ((torch.randn(2, 3, 16, 16),), {})
    request = Request(residual(), example, "normal", f"{HELPERS}/chain.py:residual", strategy="store_all")
    found = Compiler(request, torch.device("cpu"), Given(DEVICES["cpu"])).plan(2**40)
    found.record.save(tmp_path / "solutions" / "a.json")
    (tmp_path / "solutions" / "b.json").write_bytes(b"no schedule")
    words = ["--out", tmp_path, "--solutions", tmp_path / "solutions", "--models", "residual", "--device", "cpu"]
    done = CliRunner().invoke(gpu_check.main, [*map(str, words), "--steps", "1"])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "gpu_check.md").read_text()
    assert "| a | 1024.00 GiB |" in text
    assert "| 0e+00, rounding" in text
    assert "| py_residual_2: checkpoint per block |" in text
    assert len(list((tmp_path / "profiles").iterdir())) == 1
    alone = [*map(str, words), "--steps", "1", "--out", str(tmp_path / "alone"), "--no-plans"]
    done = CliRunner().invoke(gpu_check.main, alone)
    assert done.exit_code == 0 and "| a | 1024.00 GiB |" in (tmp_path / "alone" / "gpu_check.md").read_text()
    assert not (tmp_path / "alone" / "profiles").exists()


@pytest.mark.slow
def test_the_gpu_check_plans_from_its_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def solve(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return forked_script(tmp_path, command[1:])

    monkeypatch.setattr(gpu_check, "PLAN_SECONDS", 1)
    monkeypatch.setattr(gpu_check, "subprocess", SimpleNamespace(run=solve))
    inputs = (InputSpec((4, 3, 64, 64), "float32"),)
    work = gpu_check.Work(f"{HELPERS}/chain.py:chain", inputs, "", "inplace_conv_multiway_newnode", ("95%", "1%"))
    cpu = torch.device("cpu")
    line, _ = gpu_check.profile(work, cpu, tmp_path)
    assert line.startswith("profile_py_chain_4_cpu")
    said = [gpu_check.plan(work, budget, cpu, tmp_path) for budget in work.budgets]
    assert said[0].startswith("py_chain_4_95p: plain PyTorch (predicted)") and "this schedule (predicted)" in said[0]
    assert said[1].startswith("py_chain_4_1p: error: no schedule fits into")
    ((name, record),) = gpu_check.schedules(tmp_path / "schedules", cpu, "")
    assert name == "py_chain_4_95p" and record.peak_bytes <= record.budget_bytes
