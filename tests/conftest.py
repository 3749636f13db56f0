"""Shared by all tests: fixed seeds, caches of their own; each operator of ours and its twin."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Several test processes share the cores: each takes its part, and a thread that waits does not hold one.
_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _PROCESSES)))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest  # noqa: E402
import torch  # noqa: E402

from monet_like import ops  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent / "helpers"))


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MONET_LIKE_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=["kernel", "twin"])
def impl(request: pytest.FixtureRequest) -> Callable[[str], Callable[..., Any]]:
    """The operator of that name: the compiled kernel or the plain-torch twin."""
    if request.param == "twin":
        return lambda name: ops.operators()[name].reference
    if not ops.available("cpu"):
        pytest.skip(ops.status())
    return lambda name: getattr(torch.ops.monet_like, name)
