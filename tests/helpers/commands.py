"""Runs commands in this process, and the project's scripts as a user does, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from monet_like.cli.group import main

ROOT = Path(__file__).resolve().parents[2]


def run_command(*words: str, exit_code: int = 0) -> Result:
    """``monet-like`` with these words, on a wide terminal."""
    result = CliRunner().invoke(main, words, env={"COLUMNS": "160"})
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result


def call(folder: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / script), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
