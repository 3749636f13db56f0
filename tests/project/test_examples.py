"""The examples, run as their readers would."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
import torch
import torchvision
from block_models import plan_briefly
from click.testing import CliRunner
from processes import scripts_together
from torchvision.io import write_png
from torchvision.models import MobileNetV2
from zoo import shallow_resnet

import monet_like
from monet_like.cli.group import main
from monet_like.plan.local_search import searcher
from monet_like.plan.step import menus as block_points

ROOT = Path(__file__).parents[2]
#: For the examples that plan themselves.
QUICK = ("--size", "64", "--planning", "2")


def few_blocks(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Give the examples a MobileNetV2 of three blocks, a shallow ResNet by any name, and quick plans.

    A block's menu is its fastest schedule, the one that carries least, the one with the lowest peak, and one near both.
    """
    blocks = [[1, 16, 1, 2], [6, 24, 1, 2], [6, 32, 1, 2]]
    replace(torchvision.models, "mobilenet_v2", partial(MobileNetV2, inverted_residual_setting=blocks))
    replace(torchvision.models, "get_model", lambda name, **options: shallow_resnet(**options))
    replace(monet_like, "auto_schedule", partial(monet_like.auto_schedule, effort="quick"))
    plan_briefly(replace)
    replace(block_points, "CARRIED_SHARES", ())
    replace(searcher, "QUICK_SHARE", searcher.QUICK_SHARE / 8)


def printed_losses(output: str) -> list[float]:
    return [float(found) for found in re.findall(r"^(?:epoch \d+ )?step \S+: loss (\d+\.\d+)", output, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [("training.py", *QUICK), ("volumes.py", "--device", "cpu", "--side", "16", "--budget", "70%")],
    ids=lambda words: words[0],
)
def test_training(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    few_blocks(monkeypatch.setattr)
    command = runpy.run_path(f"{ROOT}/examples/{words[0]}")["main"]
    done = CliRunner().invoke(command, [*words[1:], "--steps", "6"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = printed_losses(done.stdout)
    assert len(found) == 6 and found[-1] < found[0]


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


SMALL = ("--image-size", "32", "-p", "1", "-j", "0", "--seed", "1", "-b", "16", "--lr", "0.01")


def solve(folder: Path, batch: int, *options: str, convert: str = "") -> str:
    """Plan in this process, whose one thread the example has too: oneDNN's workspaces grow with their number."""
    (folder / "net.py").write_text(
        f"import monet_like\nfrom zoo import shallow_resnet\n\ndef net():\n    return {convert}(shallow_resnet(3))\n"
    )
    command = ["solve", f"{folder}/net.py:net", str(batch), "120%", "inplace_multiway_newnode", "--quick"]
    made = folder / "imagenet.json"
    done = CliRunner().invoke(main, [*command, "--input-shape", "3,32,32", *options, "--out", str(made)])
    assert done.exit_code == 0, done.output
    return str(made)


@pytest.mark.slow
def test_imagenet_trains_as_without_a_schedule(
    tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """69 images in batches of 16: the last has five. Equal to the bit with no word that changes an order of sums."""
    monkeypatch.chdir(tmp_path)
    few_blocks(monkeypatch.setattr)
    command = runpy.run_path(f"{ROOT}/examples/imagenet.py")["main"]

    def trained(*options: str) -> list[float]:
        done = CliRunner().invoke(command, [str(image_folder), *SMALL, *options], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return printed_losses(done.stdout)

    wanted = trained("--epochs", "2")
    schedule = solve(tmp_path, 16)
    assert trained("--epochs", "2", "--solution_file", schedule) == wanted
    assert len(wanted) == 2 * 5
    assert trained("--resume", "checkpoint.pth.tar", "--epochs", "3")
    assert trained("--resume", "checkpoint.pth.tar", "-e") == []


@pytest.mark.slow
def test_two_processes_train(tmp_path: Path, image_folder: Path) -> None:
    """Every example for several processes, in one pair of them; ImageNet's as without a schedule, with
    SyncBatchNorm.
    """
    schedule = solve(tmp_path, 8, "--processes", "2", convert="monet_like.convert_sync_batchnorm")
    plain = ["imagenet.py", str(image_folder), *SMALL, "--epochs", "1", "--sync-bn"]
    runs = [
        ["dist_training.py", "--steps", "5", "--sync-bn", *QUICK],
        ["fsdp2.py", "--steps", "4"],
        ["lora_blocks.py", "--steps", "4"],
        ["pipeline.py", "--steps", "4"],
        ["tensor_parallel.py", "--steps", "4"],
        plain,
        [*plain, "--solution_file", schedule],
    ]
    printed = scripts_together(tmp_path, [(f"{ROOT}/examples/{name}", *words) for name, *words in runs], few_blocks)
    *trained, wanted, found = map(printed_losses, printed)
    for (name, *_), losses, steps in zip(runs, trained, (5, 4, 4, 4, 4), strict=False):
        assert len(losses) == steps and losses[-1] < losses[0], (name, losses)
    assert (tmp_path / "schedule.json").exists()
    assert found and found == wanted


def without_its_compiler() -> None:
    """As `few_blocks`; and DeepSpeed sends by gloo alone, or else it compiles kernels for minutes."""
    from deepspeed import ops

    few_blocks()
    ops.__compatible_ops__["deepspeed_shm_comm"] = False


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install deepspeed")
def test_two_processes_train_by_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    script = f"{ROOT}/examples/deepspeed_zero.py", "--steps", "4"
    (printed,) = scripts_together(tmp_path, [script], without_its_compiler)
    found = printed_losses(printed)
    assert len(found) == 4 and found[-1] < found[0]


def executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> list[Any]:
    """The cells of a notebook after a run in ``folder``, with other ``settings`` than its first cell's."""
    notebook = nbformat.read(ROOT / "examples" / name, as_version=4)
    first = next(number for number, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    assert all(name in notebook.cells[first].source for name in settings)
    lines = "\n".join(
        ["import brief", "brief.be_brief()", *(f"{name} = {value!r}" for name, value in settings.items())]
    )
    notebook.cells.insert(first + 1, nbformat.v4.new_code_cell(lines))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'helpers'}")
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
    bars = [output.data["text/plain"] for output in outputs if output.output_type == "display_data"]
    assert bars == [""] * 4  # each has ended, without a word about ipywidgets
    assert all("gradients equal" in line for line in lines)


@pytest.mark.slow
def test_the_walk_prints_what_the_manual_says(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MONET_LIKE_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", f"{ROOT}/examples/walk.py"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    shown = (ROOT / "docs" / "walk.md").read_text().partition("```text\n")[2].partition("```")[0]
    assert done.stdout == shown
