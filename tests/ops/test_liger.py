"""Liger's kernels and their twins: where they run, what stands in for them, and that both compute the same."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from liger_process import passed_there
from torch.nn.functional import rms_norm, silu

import monet_like.ops
from monet_like.errors import MonetError
from monet_like.ops import liger, runs_here
from monet_like.profile.settings import settings_of

monet_like.ops.load()
registered = torch.ops.monet_like
CPU = torch.device("cpu")


@pytest.mark.slow
def test_kernels_and_steps_under_the_interpreter() -> None:
    """In one process, since it takes seconds to start one that imports PyTorch and Triton."""
    assert "passed" in passed_there("tests/ops/liger_kernels.py", "tests/variants/liger_steps.py")


@pytest.fixture(name="stand_in")
def _stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on Python's path for packages of these names; versions and imports are looked up anew."""
    monkeypatch.setenv("MONET_LIKE_LIGER", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    liger.version.cache_clear()
    yield tmp_path
    liger.version.cache_clear()
    liger._liger.cache_clear()


def install(folder: Path, version: str, code: str = "") -> None:
    """Put a package called Liger, and one called Triton where that is missing, into a folder."""
    for name in ("liger_kernel", *(["triton"] if find_spec("triton") is None else [])):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "__init__.py").write_text(code)
    info = folder / f"liger_kernel-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: liger_kernel\nVersion: {version}\n")


def test_where_it_runs(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(stand_in, "0.8.9")
    assert liger.version() == "0.8.9"
    assert liger.runs_on("cuda") and not liger.runs_on("cpu")
    assert runs_here("monet_like.liger_swiglu.default", "cuda") and not runs_here(
        "monet_like.liger_swiglu.default", "cpu"
    )
    assert settings_of(torch.device("cuda", 0))["liger_kernel"] == "0.8.9" and "liger_kernel" not in settings_of(CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # somebody debugs kernels of their own
    assert not liger.runs_on("cpu")
    monkeypatch.setenv("MONET_LIKE_LIGER", "1")
    assert liger.runs_on("cpu") and liger.runs_on("cuda")
    monkeypatch.setenv("MONET_LIKE_LIGER", "0")
    assert not liger.runs_on("cuda") and "liger_kernel" not in settings_of(torch.device("cuda", 0))


@pytest.mark.parametrize("version", ["0.7.0", "0.9.0", "1.8.0"])
def test_other_versions_are_left_alone(stand_in: Path, version: str) -> None:
    install(stand_in, version)
    assert liger.version() == "" and not liger.runs_on("cuda")


def test_a_broken_installation_is_said(stand_in: Path) -> None:
    install(stand_in, "0.8.9", "raise ImportError('no such driver')")
    words = (
        r"liger-kernel 0.8.9 is installed, but importing it fails \(ImportError: no such driver\).*pip install "
        r"'monet_like\[liger\]'.*MONET_LIKE_LIGER=0"
    )
    with pytest.raises(MonetError, match=words):
        liger._liger()


@pytest.mark.parametrize(
    ("module", "kind", "words"),
    [
        ("triton.runtime.errors", RuntimeError, r"Triton cannot run Liger's kernel here \(OutOfResources: registers\)"),
        ("elsewhere", Exception, "^registers$"),
    ],
)
def test_tritons_errors_are_runtime_errors(
    monkeypatch: pytest.MonkeyPatch, module: str, kind: type[Exception], words: str
) -> None:
    """By which the profiler tells kernels that do not compile here."""
    error = type("OutOfResources", (Exception,), {"__module__": module})

    def forward(gate: torch.Tensor, up: torch.Tensor) -> None:
        raise error("registers")

    monkeypatch.setattr(liger, "_liger", lambda: SimpleNamespace(swiglu=SimpleNamespace(swiglu_forward=forward)))
    kernel = monet_like.ops.python_operators()["liger_swiglu"].kernel
    assert kernel is not None
    with pytest.raises(kind, match=words):
        kernel(torch.zeros(2, 3), torch.zeros(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounded", [False, True])
def test_twins_are_pytorchs_gradients_to_rounding(dtype: torch.dtype, rounded: bool) -> None:
    most = 2e-6 if dtype == torch.float32 else 2e-2
    x, gate, up, grad, residual = (torch.randn(3, 5, 37).to(dtype).requires_grad_() for _ in range(5))
    weight = torch.randn(37).to(dtype).requires_grad_()
    y, rstd = registered.liger_rms_norm(x, weight, 1e-6, rounded)
    expected = rms_norm(x, (37,), weight, 1e-6)
    with torch.no_grad():
        of_norm = registered.liger_rms_norm_backward(grad, x, weight, rstd, residual, rounded)
        over = grad.clone()
        in_place = registered.liger_rms_norm_backward_(over, x, weight, rstd, residual, rounded)
        of_gate = registered.liger_swiglu_backward(grad, gate, up)
        taken = gate.clone(), up.clone()
        registered.liger_swiglu_backward_(grad, *taken)
    of_x, of_weight = torch.autograd.grad(expected, (x, weight), grad)
    product = silu(gate) * up
    pairs: list[tuple[Any, Any]] = [(y, expected), (of_norm[0], of_x + residual), (of_norm[1], of_weight)]
    pairs += [(registered.liger_swiglu(gate, up), product)]
    pairs += zip(of_gate, torch.autograd.grad(product, (gate, up), grad), strict=True)
    for mine, theirs in pairs:
        assert mine.dtype == dtype
        assert (mine - theirs).abs().max() <= most * theirs.abs().max()
    assert torch.equal(over, of_norm[0]) and torch.equal(in_place[1], of_norm[1])
    assert all(torch.equal(a, b) for a, b in zip(taken, of_gate, strict=True))
