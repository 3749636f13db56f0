"""Decisions of a schedule: every run of the schedule and every kept byte is in them once, under a module's name."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import monet_like
from monet_like.cli.group import main
from monet_like.export.decisions import Decisions, decisions_of
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.job.solved import SolvedPlan

NET = """import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        parts = (p for _ in range(4) for p in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Tanh()))
        self.layers = nn.Sequential(*parts)

    def forward(self, images):
        return self.layers(images).mean()


def make_inputs(batch):
    return torch.randn(batch, 4, 32, 32)
"""


def net() -> nn.Module:
    space: dict[str, type[nn.Module]] = {}
    exec(NET, space)
    torch.manual_seed(0)
    return space["Net"]()


@functools.cache
def solved(budget: str, mode: str) -> SolvedPlan:
    job = monet_like.problem(net(), torch.randn(8, 4, 32, 32), device="roofline:a100", mode=mode, verbose=False)
    return job.plan(budget, solver="heuristic")


@pytest.mark.slow(but=["60%-normal"])
@pytest.mark.parametrize(
    ("budget", "mode"), [("60%", "normal"), ("55%", "inplace_conv_multiway_newnode"), ("60%", "offload")]
)
def test_every_run_and_every_kept_byte_is_there_once(budget: str, mode: str) -> None:
    plan = solved(budget, mode)
    found, schedule, program = decisions_of(plan.record, plan.ready), plan.schedule, plan.ready.captured.program
    by_stage = {s: [d for d in found.decisions if d.stage == s] for s in ("forward", "again", "backward")}
    assert [d.task for d in by_stage["forward"]] == [program.tasks[p].name for p in schedule.forward]
    assert [d.variant for d in by_stage["backward"]] == [
        program.slots[slot][way].variant for slot, way in enumerate(schedule.ways)
    ]
    runs = [run for d in found.decisions for run in d.reruns]
    assert len(runs) == schedule.rerun_count > 0
    result_bytes = 4  # the loss is in the timeline's figure, too
    assert sum(d.kept_bytes for d in found.decisions) + result_bytes == plan.timeline.kept_bytes > result_bytes
    assert (found.peak_bytes, found.seconds) == (plan.peak_bytes, plan.seconds)
    if mode != "offload":  # copies overlap
        total = sum(d.seconds for d in found.decisions if d.stage != "again") + sum(run.seconds for run in runs)
        assert total == pytest.approx(plan.seconds)
    assert {d.fate for d in by_stage["forward"]} >= {"kept", "recomputed", "output"} - (
        {"recomputed"} if mode == "offload" else set()
    )


def test_modules_have_their_names() -> None:
    """Each operator of a layer is under the layer's name, its gradients too."""
    plan = solved("60%", "normal")
    found = decisions_of(plan.record, plan.ready)
    names = {name for name, _ in net().named_modules()}
    assert {d.module for d in found.decisions} - names <= {"mean()", "div()", "(inputs and loss)"}
    convolutions = [d.module for d in found.decisions if d.operator == "convolution"]
    assert convolutions == [f"layers.{4 * k}" for k in range(4)]
    tanhs = [d.module for d in found.decisions if d.operator == "tanh_backward"]
    assert tanhs == [f"layers.{4 * k + 3}" for k in reversed(range(4))]


@pytest.mark.slow
def test_offloaded_results_say_so() -> None:
    plan = solved("60%", "offload")
    found = decisions_of(plan.record, plan.ready)
    sent = [
        d
        for d in found.decisions
        if d.fate == "offloaded" and d.stage == "forward" and not d.variant.startswith("offload")
    ]
    assert sent
    for d in sent:
        assert any(run.variant.startswith("offload.fetch") for run in d.reruns)


def test_the_command_writes_what_the_function_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    solve = "solve net.py:Net 8 60% normal heuristic --profile roofline:a100 --out n.json --quiet"
    assert CliRunner().invoke(main, solve).exit_code == 0
    done = CliRunner().invoke(main, ("export", "n.json", "--model", "net.py:Net", "--json"))
    assert done.exit_code == 0, done.output
    record, content = ScheduleRecord.load(Path("n.json")), json.loads(Path("n.decisions.json").read_text())
    assert json.loads(done.stdout) == content
    assert (content["format"], content["version"]) == ("monet_like decisions", 1)
    assert (content["peak_bytes"], content["seconds"]) == (record.peak_bytes, record.seconds)
    entries = [entry for found in content["modules"].values() for entry in found]
    assert sum(len(entry["reruns"]) for entry in entries) == record.schedule.rerun_count
    assert sum(entry["stage"] == "forward" for entry in entries) == len(record.schedule.forward)


def test_the_command_says_that_it_needs_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    solved("60%", "normal").save("n.json")
    done = CliRunner().invoke(main, ("export", "n.json"))
    assert done.exit_code == 2
    assert "--model" in done.output
    assert not Path("n.decisions.json").exists()


def test_the_table_has_a_row_for_each_operator() -> None:
    plan = solved("60%", "normal")
    found: Decisions = decisions_of(plan.record, plan.ready)
    table = found.to_frame()
    assert len(table) == len(found.decisions)
    assert table["reruns"].sum() == plan.schedule.rerun_count
    assert table["rerun_seconds"].sum() == pytest.approx(found.rerun_seconds)
