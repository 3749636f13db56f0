"""Runs test files with Liger's kernels in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from monet_like.ops import liger

ROOT = Path(__file__).resolve().parents[2]


def passed_there(*paths: str, interpreted: bool = True) -> str:
    """Run the tests of some files; the summary that pytest prints. Skips where Liger or Triton is missing.

    Args:
        interpreted: on the CPU, by Triton's interpreter; else on the GPU.
    """
    if not liger.version():
        pytest.skip("liger-kernel 0.8 or Triton is not installed: pip install 'monet_like[liger]' (Linux alone)")
    words = [sys.executable, "-m", "pytest", "-n", "0", "--show-capture=no", "-p", "no:cacheprovider", *paths]
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpreted)), "MONET_LIKE_LIGER": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout
