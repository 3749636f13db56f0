"""Liger's kernels on a GPU, in a process whose programs have them. Skipped without one."""

from __future__ import annotations

import pytest
import torch
from liger_process import passed_there

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


def test_kernels_and_steps() -> None:
    assert "passed" in passed_there("tests/gpu/liger_kernels.py", interpreted=False)
