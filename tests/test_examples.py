"""The examples, run as their readers would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def losses(command: list[str], folder: Path) -> list[float]:
    """Run a command in ``folder`` and read the losses it prints."""
    environment = {**os.environ, "MONET_LIKE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return [float(found) for found in re.findall(r"^step \d+: loss (\d+\.\d+)$", done.stdout, re.MULTILINE)]


def test_training(tmp_path: Path) -> None:
    found = losses([sys.executable, f"{ROOT}/examples/training.py", "--steps", "6", "--size", "64"], tmp_path)
    assert len(found) == 6 and found[-1] < found[0]


def test_distributed_training_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = losses([*torchrun, f"{ROOT}/examples/dist_training.py", "--steps", "5", "--size", "64"], tmp_path)
    assert len(found) == 5 and found[-1] < found[0]
    assert (tmp_path / "schedule.pkl").exists()
