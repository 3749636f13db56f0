"""The versions of PyTorch that are tested are named in one place, and a newer one is warned of once."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from packaging.requirements import Requirement
from torch import nn

import monet_like
from monet_like import torch_versions
from monet_like.capture.lower.step import capture
from monet_like.torch_versions import TESTED, release, untested

ROOT = Path(__file__).resolve().parents[2]


def test_the_oldest_is_the_oldest_that_may_be_installed() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    (line,) = (line.strip().rstrip(",").strip('"') for line in lines if line.strip().startswith('"torch>='))
    allowed = Requirement(line).specifier
    oldest, newest = (".".join(map(str, found)) for found in (min(TESTED), max(TESTED)))
    assert f">={oldest}" in map(str, allowed) and allowed.contains(newest)


def test_release() -> None:
    assert torch.__version__.startswith(".".join(map(str, release())))


@pytest.mark.parametrize(
    ("version", "named"), [("2.12.1", ""), ("2.15.3+cu132", ""), ("2.16.0a0+gitabc", "2.16"), ("3.0.0", "3.0")]
)
def test_a_newer_one_is_warned_of_once(monkeypatch: pytest.MonkeyPatch, version: str, named: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    torch_versions.warn_if_untested.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        capture(nn.Linear(2, 2), (torch.ones(1, 2),))
        if hasattr(torch._inductor.config, "custom_partitioner_fn"):
            monet_like.compile_options("80%", measured=False)
        capture(nn.Linear(2, 2), (torch.ones(1, 2),))
    said = [
        str(one.message) for one in caught if "is newer than those that monet_like is tested with" in str(one.message)
    ]
    assert bool(named) == bool(untested()) and said == [untested()] * bool(named)
    if named:
        assert said[0].startswith(f"PyTorch {named} is newer than") and 'install "torch<2.16"' in said[0]
        assert all(str(minor) in said[0] for minor in ("2.11", "2.14", "2.15"))
    torch_versions.warn_if_untested.cache_clear()
