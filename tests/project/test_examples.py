"""The examples, run as their readers would."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
import torch
from click.testing import CliRunner
from torchvision.io import write_png

from monet_like.cli.group import main

ROOT = Path(__file__).parents[2]
#: For the examples that plan themselves.
QUICK = ("--size", "64", "--planning", "2")


def losses(command: list[str], folder: Path) -> list[float]:
    """Run a command in ``folder`` and read the losses it prints."""
    environment = {**os.environ, "MONET_LIKE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return printed_losses(done.stdout)


def printed_losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"^(?:epoch \d+ )?step \S+: loss (\d+\.\d+)", output, re.MULTILINE)]


@pytest.mark.slow
def test_training(tmp_path: Path) -> None:
    found = losses([sys.executable, f"{ROOT}/examples/training.py", "--steps", "6", *QUICK], tmp_path)
    assert len(found) == 6 and found[-1] < found[0]


@pytest.mark.slow
def test_volumes(tmp_path: Path) -> None:
    script = [sys.executable, f"{ROOT}/examples/volumes.py", "--device", "cpu", "--side", "32", "--budget", "70%"]
    found = losses([*script, "--steps", "6"], tmp_path)
    assert len(found) == 6 and found[-1] < found[0]


@pytest.mark.slow
def test_distributed_training_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = losses([*torchrun, f"{ROOT}/examples/dist_training.py", "--steps", "5", "--sync-bn", *QUICK], tmp_path)
    assert len(found) == 5 and found[-1] < found[0]
    assert (tmp_path / "schedule.pkl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("example", ["fsdp2", "lora_blocks"])
def test_blocks_sharded_over_two_processes(example: str, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = losses([*torchrun, f"{ROOT}/examples/{example}.py", "--steps", "4"], tmp_path)
    assert len(found) == 4 and found[-1] < found[0]


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Three classes of noise of different brightness, 23 images each to train."""
    for part, count in (("train", 23), ("val", 4)):
        for label in range(3):
            folder = tmp_path / "images" / part / f"class_{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                image = torch.randint(60 * label, 60 * label + 90, (3, 40, 40), dtype=torch.uint8)
                write_png(image, str(folder / f"{number}.png"))
    return tmp_path / "images"


MODEL = "torchvision.models.resnet18(num_classes=3)"
SMALL = ("--image-size", "32", "-p", "1", "-j", "0", "--seed", "1", "--epochs", "2", "--lr", "0.01")


def solve(folder: Path, batch: int, mode: str, *options: str, model: str = MODEL) -> str:
    """Plan in this process, whose one thread the example has too: oneDNN's workspaces grow with their number."""
    command = ["solve", model, str(batch), "120%", mode, "heuristic", "--input-shape", "3,32,32", *options]
    done = CliRunner().invoke(main, [*command, "--out", str(folder / "schedule.pkl")])
    assert done.exit_code == 0, done.output
    return "schedule.pkl"


@pytest.mark.slow
def test_imagenet_trains_as_without_a_schedule(
    tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """69 images in batches of 16: the last has five. Equal to the bit with no word that changes an order of sums."""
    monkeypatch.chdir(tmp_path)
    command = runpy.run_path(f"{ROOT}/examples/imagenet.py")["main"]

    def trained(*options: str) -> list[float]:
        done = CliRunner().invoke(command, [str(image_folder), *SMALL, "-b", "16", *options], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return printed_losses(done.stdout)

    wanted = trained()
    schedule = solve(tmp_path, 16, "inplace_multiway_newnode")
    assert trained("--solution_file", schedule) == wanted
    assert len(wanted) == 2 * 5
    assert trained("--resume", "checkpoint.pth.tar", "--epochs", "3")
    assert trained("--resume", "checkpoint.pth.tar", "-e") == []


@pytest.mark.slow
def test_imagenet_in_two_processes(tmp_path: Path, image_folder: Path) -> None:
    """The schedule is one for SyncBatchNorm alone."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = (*SMALL, "--epochs", "1", "-b", "16", "--sync-bn")
    plain = [*torchrun, f"{ROOT}/examples/imagenet.py", str(image_folder), *options]
    (tmp_path / "net.py").write_text(
        f"import monet_like, torchvision\n\ndef net():\n    return monet_like.convert_sync_batchnorm({MODEL})\n"
    )
    schedule = solve(tmp_path, 8, "inplace_multiway_newnode", "--processes", "2", model=f"{tmp_path}/net.py:net")
    found = losses([*plain, "--solution_file", schedule], tmp_path)
    assert found and found == losses(plain, tmp_path)


def executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> list[Any]:
    """The cells of a notebook after a run in ``folder``, with other ``settings`` than its first cell's."""
    notebook = nbformat.read(ROOT / "examples" / name, as_version=4)
    first = next(number for number, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    assert all(name in notebook.cells[first].source for name in settings)
    lines = "\n".join(f"{name} = {value!r}" for name, value in settings.items())
    notebook.cells.insert(first + 1, nbformat.v4.new_code_cell(lines))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(folder)}}).execute()
    return list(notebook.cells)


@pytest.mark.slow
def test_notebook_on_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = executed("train_cifar10.ipynb", tmp_path, monkeypatch, EPOCHS=2, BATCH=32, IMAGES=235, PLANNING=2)
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    last = cells[-1].outputs[0].text
    assert "16 of 16 losses are equal to the bit" in last
    assert int(last.partition("%")[0]) <= 50


@pytest.mark.slow
def test_notebook_on_granularity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = executed("custom_graph.ipynb", tmp_path, monkeypatch)
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    lines = [output.text for output in outputs if output.get("name") == "stdout"]
    assert len(lines) == 4
    told = [
        output.text for output in outputs if output.get("name") == "stderr"
    ]  # by auto_schedule, which a notebook sees
    assert len(told) == 4 and all("(predicted)" in line for line in told)
    assert all("gradients equal" in line for line in lines)


def test_the_walk_prints_what_the_manual_says(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MONET_LIKE_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", f"{ROOT}/examples/walk.py"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shown = (ROOT / "docs" / "walk.md").read_text().partition("```text\n")[2].partition("```")[0]
    assert done.stdout == shown
