"""The gallery's page shows the pictures that its script draws, each with the command that the script runs."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from monet_like.cli.group import main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MOST_BYTES = 1_000_000


@pytest.fixture
def gallery(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return runpy.run_path(str(DOCS / "gallery.py"))


@pytest.mark.slow
def test_the_page_has_the_commands_and_the_pictures(gallery: Any) -> None:
    page = (DOCS / "gallery.md").read_text()
    found = re.findall(r"!\[.*?\]\(images/gallery_(\w+)\.svg\)\n\n```bash\nmonet-like (.*)\n```", page)
    wanted = [(picture.name, picture.words) for picture in gallery["PICTURES"]]
    assert [(name, tuple(shlex.split(words))) for name, words in found] == wanted
    files = [DOCS / "images" / f"gallery_{name}.svg" for name, _ in wanted]
    assert sum(file.stat().st_size for file in files) < MOST_BYTES
    for file in files:
        text = file.read_text()
        assert "predicted for an" in text and "plain PyTorch: " in text and "schedule: " in text


NET = """import torch
from torch import nn


def make_model():
    layers = (layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)))
    return nn.Sequential(*layers)


def make_inputs(batch):
    return torch.randn(batch, 256)
"""


@pytest.mark.slow
def test_a_picture_is_drawn(gallery: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.py").write_text(NET)
    picture = gallery["Picture"]("net", "a net", f"{tmp_path}/net.py:make_model", 4096, "80%", "a100")
    names = gallery["draw_all"].__globals__
    monkeypatch.setitem(names, "PICTURES", (picture,))
    monkeypatch.setitem(names, "HERE", tmp_path)
    (tmp_path / "images").mkdir()
    gallery["draw_all"](tmp_path / "made")
    text = (tmp_path / "images" / "gallery_net.svg").read_text()
    assert "predicted for an A100" in text and "recomputed" in text
    assert {file.name for file in (tmp_path / "made").iterdir()} == {"net.json", "net.html"}


@pytest.mark.slow
def test_a_live_step_needs_the_card(tmp_path: Path) -> None:
    """A schedule for a GPU that is not here is drawn, and exported as JSON, but not run."""
    (tmp_path / "net.py").write_text(NET)
    model, file = f"{tmp_path}/net.py:make_model", f"{tmp_path}/net.json"
    words = ["--device", "cuda", "--profile", "roofline:a100", "--quick", "--out", file]
    assert CliRunner().invoke(main, ["solve", model, "4096", "80%", *words]).exit_code == 0
    for command in (["report", file, "--front", "off"], ["export", file, "--to", "json"]):
        done = CliRunner().invoke(main, [*command, "--model", model, "--device", "cuda"])
        assert done.exit_code == 0, done.output
    done = CliRunner().invoke(main, ["report", file, "--front", "off", "--live", "--model", model, "--device", "cuda"])
    assert done.exit_code == 2 and "device 'cuda' is not there" in done.output
