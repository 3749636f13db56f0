"""``--csv``: what a command prints is also a table, read back by pandas with the same figures."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest
from click.testing import CliRunner
from commands import run_command
from planning import ROOT

from monet_like.cli.group import main
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.zoo.registry import Registry, zoo_folder

CHAIN = f"{ROOT / 'tests' / 'helpers' / 'chain.py'}:chain"


@pytest.fixture(scope="module")
def solved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a schedule and its memory timeline."""
    folder = tmp_path_factory.mktemp("solved")
    files = ("--out", str(folder / "s.json"), "--csv", str(folder / "timeline.csv"))
    text = run_command("solve", CHAIN, "1", "80%", "normal", "heuristic", "--profile", "roofline:cpu", *files).output
    assert f"wrote {folder / 'timeline.csv'}" in text
    return folder


def test_a_solved_schedule(solved: Path) -> None:
    record, timeline = ScheduleRecord.load(solved / "s.json"), pandas.read_csv(solved / "timeline.csv")
    assert timeline.bytes.max() == record.peak_bytes
    assert timeline.seconds.sum() == pytest.approx(record.seconds)
    assert len(timeline) == len(record.schedule.runs())


def test_an_inspected_schedule(solved: Path, tmp_path: Path) -> None:
    record = ScheduleRecord.load(solved / "s.json")
    output = run_command("inspect", str(solved / "s.json"), "--csv", str(tmp_path / "slots.csv"), "--json").output
    assert json.loads(output)["peak_bytes"] == record.peak_bytes  # nothing else is printed
    slots = pandas.read_csv(tmp_path / "slots.csv")
    assert list(slots.way) == list(record.schedule.ways) and slots.recomputed.sum() == record.schedule.rerun_count


@pytest.mark.slow
def test_a_report_has_measured_bytes_too(solved: Path, tmp_path: Path) -> None:
    files = ("--out", str(tmp_path / "s.html"), "--csv", str(tmp_path / "timeline.csv"))
    words = ("--model", CHAIN, "--profile", "roofline:cpu", "--front", "off", "--live", "--device", "cpu", "--json")
    told = json.loads(run_command("report", str(solved / "s.json"), *words, *files).output)
    timeline = pandas.read_csv(tmp_path / "timeline.csv")
    assert list(timeline.bytes) == list(pandas.read_csv(solved / "timeline.csv").bytes)
    assert list(timeline.measured_bytes) == told["measured_bytes"]


def test_the_zoo(tmp_path: Path) -> None:
    output = run_command("zoo", "list", "--profile", "a100", "--csv", str(tmp_path / "zoo.csv")).output
    table, registry = pandas.read_csv(tmp_path / "zoo.csv"), Registry.load(zoo_folder())
    listed = [one for one in registry.schedules if one.profile == "a100"]
    assert list(table.name) == [one.name for one in listed] and list(table.seconds) == [one.seconds for one in listed]
    assert f"wrote {tmp_path / 'zoo.csv'}" in output
    assert len(registry.to_frame()) == len(registry.schedules) > len(table)


def test_a_table_that_cannot_be_written_is_said_before_any_work(tmp_path: Path) -> None:
    for words in (("solve", CHAIN, "16", "80%", "normal"), ("zoo", "list"), ("compare", CHAIN, "16", "80%")):
        result = CliRunner().invoke(main, [*words, "--csv", "/proc/none/t.csv"])
        assert result.exit_code == 2 and "cannot write /proc/none/t.csv" in result.stderr
    assert not list(tmp_path.iterdir())
