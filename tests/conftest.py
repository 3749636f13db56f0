"""Shared by all tests: fixed seeds, caches of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Several test processes share the cores: a thread that waits should not hold one.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MONET_LIKE_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
