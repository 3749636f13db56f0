"""Batches: costs between two measured ones, and the batch with the highest throughput."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from commands import run_command

from monet_like.ir.program import Cost
from monet_like.ir.schedule_file import ScheduleRecord
from monet_like.profile.scaling import on_line

NETWORK = """
import torch
def make_model():
    layers = [
        layer
        for _ in range(3)
        for layer in (torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
    ]
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(8 * 16 * 16, 4))
"""


def test_costs_lie_between_constant_and_in_proportion() -> None:
    at = {batch: Cost(1.0 + 0.5 * batch, 100 + 10 * batch) for batch in (4, 8, 32)}
    assert on_line(32, (4, at[4]), (8, at[8])) == at[32]
    assert on_line(8, (4, at[4]), (32, at[32])) == at[8]
    falling = on_line(32, (4, Cost(2.0, 10)), (8, Cost(1.0, 0)))
    assert falling == Cost(1.0, 0)
    steep = on_line(32, (4, Cost(1.0, 0)), (8, Cost(4.0, 800)))  # noise: its line would be negative at 0
    assert steep == Cost(16.0, 3200)
    assert on_line(1, (4, Cost(1.0, 0)), (8, Cost(4.0, 800))) == Cost(0.5, 100)


@pytest.mark.slow
def test_finds_the_best_batch_and_writes_its_schedule(tmp_path: Path) -> None:
    model, out, table, picture = (tmp_path / name for name in ("net.py", "best.json", "all.csv", "all.png"))
    model.write_text(NETWORK)
    files = ("--csv", str(table), "--plot", str(picture), "--out", str(out))
    arguments = (f"{model}:make_model", "0.018", "--input-shape", "8,16,16", "--profile", "roofline:a100")
    text = run_command("tune", *arguments, "--best", "2", "--time-limit", "1", *files).output
    record = ScheduleRecord.load(out)
    batch = record.inputs[0].shape[0]
    assert f"best: batch {batch}," in text
    assert "predicted" in text
    assert record.peak_bytes <= record.budget_bytes == int(0.018 * 2**30)
    rows = {int(row["batch"]): row for row in csv.DictReader(table.open())}
    rates = {b: b / float(row["seconds"]) for b, row in rows.items() if row["seconds"]}
    assert rates[batch] == max(rates.values())
    assert len(rates) > 4
    assert any(not row["seconds"] for row in rows.values())  # it went as far as there is memory
    plain = [b for b, row in rows.items() if int(row["plain_peak_bytes"]) <= record.budget_bytes]
    assert max(plain) < max(rates)  # batches that plain PyTorch cannot
    slope = (int(rows[max(plain)]["plain_peak_bytes"]) - int(rows[min(plain)]["plain_peak_bytes"])) / (
        max(plain) - min(plain)
    )
    assert int(rows[max(plain)]["plain_peak_bytes"]) + slope > record.budget_bytes  # its largest was tried
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_best_are_run(tmp_path: Path) -> None:
    model, store, out = tmp_path / "net.py", tmp_path / "profile.json", tmp_path / "best.json"
    model.write_text(NETWORK)
    arguments = (f"{model}:make_model", "0.003", "--input-shape", "8,16,16", "--batches", "4,8,16", "--device", "cpu")
    files = ("--profile", str(store), "--out", str(out), "--time-limit", "2")
    text = run_command("tune", *arguments, "--steps", "1", "--best", "2", *files).output
    assert "samples/s measured" in text
    assert "plain PyTorch at its best batch within the memory" in text
    best = next(line.split() for line in text.splitlines() if " * " in line)
    assert int(best[0]) in (4, 8, 16)
    assert store.exists()
    before = store.read_bytes()
    run_command("tune", *arguments, "--steps", "0", *files)
    assert store.read_bytes() == before  # nothing was measured again


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("0.1", "--batches", "8,zero"), "whole number"),
        (("0.1", "--best", "0"), "at least 1"),
        (("1 KB",), "not even a batch of 1"),
        (("1 MB", "--batches", "4096"), "none of the batches 4096"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NETWORK)
    options = ("--input-shape", "8,16,16", "--profile", "roofline:a100")
    said = run_command("tune", f"{tmp_path / 'net.py'}:make_model", *arguments, *options, exit_code=2).output
    assert words in said
