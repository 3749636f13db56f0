"""`monet-like doctor`: what it finds on this machine, and what it says on one where things are broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import torch
from click.testing import CliRunner

from monet_like import build, ops
from monet_like.cli import doctor
from monet_like.cli.doctor import EXPECTED, REQUIRED
from monet_like.cli.group import main
from monet_like.solvers.dialects import DIALECTS
from monet_like.solvers.interface import installed_solvers


def findings(text: str) -> dict[tuple[str, str], dict]:  # type: ignore[type-arg]
    return {(found["group"], found["name"]): found for found in json.loads(text)["findings"]}


def test_json_tells_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "plan.json").write_bytes(bytes(1234))
    monkeypatch.setenv("MONET_LIKE_CACHE", str(tmp_path / "cache"))
    result = CliRunner().invoke(main, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["ok"] is True
    found = findings(result.output)
    for package in (*REQUIRED, *EXPECTED):
        assert found["packages", package]["data"] == {"version": metadata.version(package)}
    here = {name for name in DIALECTS if found["solvers", name]["state"] == "ok"}
    assert here == set(installed_solvers()) >= {"HIGHS", "CBC"}
    assert found["kernels", "operators"]["text"] == ops.status()
    assert found["kernels", "operators"]["state"] == ("ok" if ops.available("cpu") else "absent")
    assert found["gpu", "cuda"]["state"] == ("ok" if torch.cuda.is_available() else "absent")
    assert ("gpu", "cuda:0") in found or not torch.cuda.is_available()
    memory = found["machine", "memory"]["data"]
    assert memory["total_bytes"] == psutil.virtual_memory().total > memory["available_bytes"] > 0
    assert found["files", "cache"]["data"] == {"path": str(tmp_path / "cache"), "bytes": 1234}


def test_what_is_required_and_broken_is_said(tmp_path: Path) -> None:
    """A torch that cannot load its libraries, a package too old, a cache that is a file: all are told at once."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: no such file\\nand more')")
    (tmp_path / "networkx.py").write_text("")
    (tmp_path / "networkx-2.0.dist-info").mkdir()
    (tmp_path / "networkx-2.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: networkx\nVersion: 2.0\n"
    )
    (tmp_path / "file").write_text("")
    root = str(Path(__file__).parents[2])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), root]),
        "MONET_LIKE_CACHE": str(tmp_path / "file" / "cache"),
    }
    command = [sys.executable, "-c", "from monet_like.cli import main; main()", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    found = findings(done.stdout)
    assert {name for (_, name), finding in found.items() if finding["state"] == "broken"} >= {
        "torch",
        "networkx",
        "cache",
    }
    assert found["packages", "torch"]["text"] == "ImportError: libcudart.so.13: no such file (for everything)"
    assert "pip install --force-reinstall 'torch" in found["packages", "torch"]["advice"]
    assert found["packages", "networkx"]["text"].startswith("2.0, but ")
    assert found["files", "cache"]["text"].endswith(f"{tmp_path / 'file'} cannot be written to")
    assert not any(group == "gpu" for group, _ in found)


def test_the_table_ends_with_what_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MONET_LIKE_CACHE", str(tmp_path / "file"))
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert result.output.endswith("broken: cache\n")


@pytest.mark.slow
def test_a_machine_that_only_trains_is_not_broken(tmp_path: Path) -> None:
    """No solver, no cvxpy, no torchvision: nothing is broken, and it is said what is not possible."""
    lacking = {"cvxpy", "highspy", "pulp", "gurobipy", "pyscipopt", "scipy", "torchvision"}
    code = (
        "from importlib.machinery import PathFinder as P; find = P.find_spec; "
        f"P.find_spec = lambda name, *rest: None if name in {lacking} else find(name, *rest); "
        "from monet_like.cli import main; main()"
    )
    environment = os.environ | {"MONET_LIKE_CACHE": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code, "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = findings(done.stdout)
    absent = {name for (group, name), finding in found.items() if group == "packages" and finding["state"] == "absent"}
    assert {"cvxpy", "scipy", "torchvision"} <= absent
    assert found["solvers", "any"]["text"] == "no solver is installed: plans by --strategy heuristic only"
    assert "pip install 'cvxpy" in found["packages", "cvxpy"]["advice"]


def test_required_is_what_the_package_depends_on() -> None:
    """But for the solvers, which are told apart."""
    declared = {re.match(r"[A-Za-z0-9_]+", line).group() for line in metadata.requires("monet_like") if ";" not in line}  # type: ignore[union-attr]
    assert set(REQUIRED) | set(EXPECTED) >= declared - {"highspy", "pulp"}


def test_a_part_that_is_compiled_for_another_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a wheel has kernels, which run in every torch, and an arena, which runs in one."""
    monkeypatch.setattr(build, "manifest", lambda: {"interface": "torch 2.11", "torch": "2.10.0"})
    (placement,) = (finding for finding in doctor._kernels() if finding.name == "memory placement")
    assert placement.state == "absent" and placement.advice == "python -m monet_like.build"
    assert placement.text == "not compiled for this torch: place_memory is refused"
